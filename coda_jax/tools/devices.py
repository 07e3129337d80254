"""For which kind of device a tool tells times."""

from __future__ import annotations

from coda_jax.tiles.constants import CONSTANTS

DEFAULT_DEVICE = "NVIDIA H200"  # where none is named or attached
# A chip's memory by the beginning of JAX's device kind: that of its data sheet, taken as GiB.
_GIB_OF_CHIP = {"NVIDIA H200": 141, "NVIDIA H100": 80}
# Estimated temporaries are within this factor of XLA's in the steps of record.
NEAR = 1.15
_FRACTION = 0.75  # of a GPU's memory, which JAX takes by default


def gib_of_chip(device: str | None) -> int | None:
    """The device's memory; None where it is not known."""
    return next((gib for name, gib in _GIB_OF_CHIP.items() if device and device.startswith(name)), None)


def fits(gib: float, chip_gib: int | None, *, is_estimate: bool = True) -> bool | None:
    """Whether a chip has so much memory; None where its memory is not known, and where an estimate is near it."""
    if chip_gib is None or (is_estimate and chip_gib / NEAR < gib < chip_gib * NEAR):
        return None
    return gib <= chip_gib


def fraction_note(gib: float, chip_gib: int | None) -> str:
    """The note on what has to be set where so much memory is needed; "" where nothing has to be."""
    if chip_gib is None or gib <= _FRACTION * chip_gib:
        return ""
    return (
        f"JAX takes {100 * _FRACTION:.0f} % of a GPU's memory, {_FRACTION * chip_gib:.0f} GiB, unless the environment "
        "variable XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
    )


def device_named(name: str) -> str:
    """The kind of device that is called so, or has this in its name.

    Raises:
      ValueError: there are several, or there is none.
    """
    found = [device for device in CONSTANTS if name in device]
    if len(found) != 1:
        raise ValueError(f"device={name!r}; it must be, or be a part of, one of {', '.join(map(repr, CONSTANTS))}")
    return found[0]
