"""The kind of device for which a tool gives times, and its memory."""

from __future__ import annotations

from coda_jax.tiles import arch
from coda_jax.tiles.constants import CONSTANTS

DEFAULT_DEVICE = arch.of(None).default_device  # where none is named or attached
# Estimated temporaries are within this factor of XLA's in the steps of record.
NEAR = 1.15
_FRACTION = 0.75  # of a GPU's memory, which JAX allocates by default


def gib_of_chip(device: str | None) -> int | None:
    """The device's memory; None if it is not known."""
    chip = arch.chip_of(device) if device else None
    return chip and chip.gib


def fits(gib: float, chip_gib: int | None, *, is_estimate: bool = True) -> bool | None:
    """Whether a chip has so much memory; None if its memory is not known, or an estimate is near it."""
    if chip_gib is None or (is_estimate and chip_gib / NEAR < gib < chip_gib * NEAR):
        return None
    return gib <= chip_gib


def fraction_note(gib: float, chip_gib: int | None) -> str:
    """The note that a JAX setting must be changed to use so much memory; "" if it need not be."""
    if chip_gib is None or gib <= _FRACTION * chip_gib:
        return ""
    return (
        f"JAX takes {100 * _FRACTION:.0f} % of a GPU's memory, {_FRACTION * chip_gib:.0f} GiB, unless the environment "
        "variable XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise"
    )


def device_named(name: str) -> str:
    """The kind of device with this name, or with this in its name.

    Raises:
      ValueError: there are several such kinds, or none.
    """
    matching = [device for device in CONSTANTS if name in device]
    if len(matching) != 1:
        raise ValueError(f"device={name!r}; it must be, or be a part of, one of {', '.join(map(repr, CONSTANTS))}")
    return matching[0]
