"""The figures of a chip's data sheet."""

from __future__ import annotations

from typing import NamedTuple


class Chip(NamedTuple):
    """The figures of the data sheet: TFLOP/s of dense bfloat16, and TB/s of memory."""

    tflops: float
    tbytes: float

    def tflops_of(self, element_bytes: int) -> float:
        """The TFLOP/s for factors of so many bytes an element: twice as many for 1 byte, 1978.8 on an H100 or H200."""
        return 2 * self.tflops if element_bytes == 1 else self.tflops


CHIPS = {  # by the beginning of JAX's device kind
    "NVIDIA H200": Chip(989.4, 4.8),
    "NVIDIA H100 80GB HBM3": Chip(989.4, 3.35),
    "NVIDIA H100 PCIe": Chip(756.0, 2.0),
}


# The share of the data sheet's TB/s that XLA's elementwise passes over large arrays reach: 3.3 of 4.8 on an H200.
COPIED = 0.69


def chip_of(device: str) -> Chip | None:
    """The chip of a device of this kind; None if it is not known."""
    return next((chip for name, chip in CHIPS.items() if device.startswith(name)), None)
