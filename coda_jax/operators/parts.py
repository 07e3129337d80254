"""Arguments that are one array, or several that are pieces of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from coda_jax.primitives.derivative import Parts


def parts_of(x: Parts) -> tuple[jax.Array, ...]:
    """The pieces that x is concatenated from; one array is its only piece."""
    pieces: tuple[jax.Array, ...] = tuple(x) if isinstance(x, Sequence) else (x,)
    return pieces


def one_or_parts(arrays: Sequence[Any]) -> Any:
    """Undoes `parts_of`: one array itself, several as a tuple."""
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def ends_of(pieces: Sequence[Any]) -> list[int]:
    """The column at which each piece but the last ends, as `jnp.split` reads it."""
    return [sum(x.shape[-1] for x in pieces[: i + 1]) for i in range(len(pieces) - 1)]
