"""Studies behind the library: its tiles, energy, machine code, and the host code on a stand-in for the driver."""
