"""What the check knows of a value: what indexes its axes, and its per-element form. Also the texts of refusals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# What indexes an axis. INDEX: the position along a one-dimensional iota whose axis in the tile is not known yet.
ROW = "row"
COLUMN = "column"
HALF = "half column"
INDEX = "index"
Tag = str | None

ALLOWED = (
    "Allowed in an epilogue: elementwise operations on acc and operands that broadcast against it, sums, maxima and "
    "minima along rows or columns and log-sum-exps along rows as outputs, two halves (jnp.split(x, 2, axis=1), "
    "jnp.concatenate back) of N or of 2N columns, row and column indices from iota."
)

HINTS = {
    "argmax": "Return the maximum; take the index outside the epilogue.",
    "argmin": "Return the minimum; take the index outside the epilogue.",
    "dot_general": "Make the product a coda.gemm of its own; write a product row by row as jnp.sum(x * y, axis=1).",
    "transpose": "Transpose the result outside the epilogue, or use transpose_a / transpose_b.",
    "gather": "Only the two halves acc[:, :N//2] and acc[:, N//2:] can be taken apart.",
    "scatter": "Only the two halves can be joined, jnp.concatenate([x, y], axis=1).",
    "dynamic_slice": "Only the two halves acc[:, :N//2] and acc[:, N//2:] can be taken apart, with static indices.",
    "slice": "Only the two halves acc[:, :N//2] and acc[:, N//2:] can be taken apart.",
    "split": "Only two halves, jnp.split(x, 2, axis=1), can be taken apart.",
    "concatenate": "Only two halves can be joined, along the last axis.",
    "pad": "Only a half of N can be padded to the whole.",
    "scan": "Unroll it with a Python loop.",
    "while": "Unroll it with a Python loop.",
    "cond": "Use jnp.where.",
    "random_bits": "Pass random numbers as an operand.",
    "threefry2x32": "Pass random numbers as an operand.",
    "axis_index": "Compute it outside the epilogue and close over it.",
    "psum": "Sum over devices outside the epilogue.",
    "reduce_prod": "Sum logarithms instead.",
}


class NotTileLocalError(ValueError):
    """An epilogue does what a tile of the product cannot do by itself; names the operation and its source line."""


class NeedsHalves(Exception):
    """Raised inside the analysis when f turns out to work on halves of N."""


class NeedsTwice(Exception):
    """Raised inside the analysis when f turns out to make tiles of 2N columns."""


class NotElementwise(Exception):
    """An equation that has no per-element form; the text says why."""


@dataclass(frozen=True)
class Local:
    """A value with a per-element form.

    Attributes:
      tags: one per array axis.
      nodes: one, or one for each way where an axis is tagged COLUMN and there are two ways.
      tile: it varies with both row and column, or comes from something that does.
    """

    tags: tuple[Tag, ...]
    nodes: tuple[int, ...]
    tile: bool


@dataclass(frozen=True)
class Finished:
    """A value that XLA computes after the kernel, from reductions or vectors; `why` says what it is, for messages."""

    why: str
    from_reduction: bool = False


@dataclass(frozen=True)
class Stacked:
    """Values stacked along a new first axis, as jnp.select does with its conditions before it finds the first true."""

    items: tuple[Local, ...]


Value = Local | Finished | Stacked


def same_size(a: Any, b: Any) -> bool:
    """Equality of dimensions; False for symbolic ones that cannot be compared."""
    if isinstance(a, int | np.integer) and isinstance(b, int | np.integer):
        return int(a) == int(b)
    return type(a) is type(b) and bool(a == b)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def is_tile(value: Value) -> bool:
    return any(map(is_tile, value.items)) if isinstance(value, Stacked) else isinstance(value, Local) and value.tile


class LiteralFloat(float):
    """A float32 constant, compared and printed by its bits, so that 0.0, -0.0 and NaN stay themselves."""

    def __repr__(self) -> str:
        return np.float32(self).tobytes()[::-1].hex()

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiteralFloat) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))
