"""For which kind of device a tool tells times."""

from __future__ import annotations

from coda_jax.tiles.constants import CONSTANTS

DEFAULT_DEVICE = "NVIDIA H200"  # where none is named or attached
# A chip's memory by the beginning of JAX's device kind: that of its data sheet, taken as GiB.
_GIB_OF_CHIP = {"NVIDIA H200": 141, "NVIDIA H100": 80}


def gib_of_chip(device: str | None) -> int | None:
    """The device's memory; None where it is not known."""
    return next((gib for name, gib in _GIB_OF_CHIP.items() if device and device.startswith(name)), None)


def device_named(name: str) -> str:
    """The kind of device that is called so, or has this in its name.

    Raises:
      ValueError: there are several, or there is none.
    """
    found = [device for device in CONSTANTS if name in device]
    if len(found) != 1:
        raise ValueError(f"device={name!r}; it must be, or be a part of, one of {', '.join(map(repr, CONSTANTS))}")
    return found[0]
