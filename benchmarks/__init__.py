"""Benchmarks of the fused products against XLA; `python -m benchmarks` prints the tables and writes the CSV."""
