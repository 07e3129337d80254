"""Values in the analysis: what indexes each axis, and the nodes for one element. Also the texts of refusals."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coda_jax.epilogue.halves import Halves

# The tags say what indexes an axis. A reshape of columns to heads turns COLUMN into HEAD and CHANNEL. INDEX is the
# position along a one-dimensional iota whose axis in the tile is not known yet.
ROW = "row"
COLUMN = "column"
HALF = "half column"
HEAD = "head"
CHANNEL = "column of a head"
HALF_CHANNEL = "half column of a head"
SIDE = "side of a pair"  # of neighbouring columns
TABLE_ROW = "row of a repeated table"  # until jnp.tile repeats it
INDEX = "index"
Tag = str | None
COLUMNS = frozenset({COLUMN, HALF, HEAD, CHANNEL, HALF_CHANNEL, SIDE})
BY_SLICES = frozenset({COLUMN, HALF, HEAD})  # axes along which slices of the columns differ
BOTH_HALVES = frozenset({COLUMN, CHANNEL, SIDE})  # axes along which an array spans both halves

ALLOWED = (
    "Allowed in an epilogue: elementwise operations on acc and operands that broadcast against it, sums, maxima and "
    "minima along rows or columns, the maximum of all and log-sum-exps along rows as outputs, two halves "
    "(jnp.split(x, 2, axis=1), jnp.concatenate back) of N or of 2N columns, or of each head (acc.reshape(M, H, Dh)), "
    "or its even and odd columns (x[..., 0::2], jnp.stack back), reductions of each head that are used beside it, "
    "slices of the columns as outputs of their own, transposed outputs (x.T), floats of 8 bits as what is stored, "
    "row and column indices from iota."
)

# By the operation's name, or by that of JAX's function that holds it.
HINTS = {
    "argmax": "Return the maximum; take the index outside the epilogue.",
    "argmin": "Return the minimum; take the index outside the epilogue.",
    **dict.fromkeys(
        ("_var", "_std"),
        # The library does not rewrite it so: that is another function, which cancels.
        "A variance needs the finished mean before its sum. Return jnp.mean(x, 1) and jnp.mean(x * x, 1), whose "
        "mean_of_squares - mean**2 is exact enough where the mean is not much larger than the deviation, or take "
        "jnp.var of the product's result.",
    ),
    "dot_general": "Make the product a coda.gemm of its own; write a product row by row as jnp.sum(x * y, axis=1).",
    "transpose": "Rows and columns of a result may be exchanged, x.T; exchange others outside the epilogue.",
    "gather": "Only halves and slices of the columns can be taken, with constant indices.",
    "scatter": "Only the two halves can be joined, jnp.concatenate([x, y], axis=1).",
    "dynamic_slice": "Halves and slices of the columns are taken with static indices.",
    "slice": "Only columns can be taken apart: in halves, or in slices that are outputs of their own.",
    "split": "Only columns can be taken apart: in halves, or in slices that are outputs of their own.",
    "concatenate": "Only two halves can be joined, along the last axis; return slices of the columns one by one.",
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


def with_article(kind: str) -> str:
    """ "an epilogue", "a score"."""
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


class NotTileLocalError(ValueError):
    """An epilogue does what a tile of the product cannot do by itself; names the operation and its source line."""


@dataclass(frozen=True)
class Layout:
    """How a program divides its columns.

    Attributes:
      halves: which columns it combines.
      slices: the columns are split into outputs of their own.
      one_head: all columns are one head, to which f reshapes them by an axis of size 1.
      tables_first: with one head, an operand (M, N) is a table of the head, not a tile.
    """

    halves: Halves = field(default=Halves())
    slices: bool = False
    one_head: bool = False
    tables_first: bool = False


class NeedsLayout(Exception):
    """Raised inside the analysis when f divides its columns in another way than its layout says."""

    def __init__(self, layout: Layout):
        self.layout = layout


class NotElementwise(Exception):
    """An equation that cannot be computed for one element alone; the text says why."""


class UnknownOperation(NotElementwise):
    """An operation that epilogues do not support: the message says which they do."""

    def __init__(self, kind: str = "epilogue") -> None:
        what = "a tile of the product" if kind == "epilogue" else "a pair of a query and a key"
        super().__init__(f"is not local to {what}, or not an operation that {kind}s know")


@dataclass(frozen=True)
class Local:
    """A value that is computed for one element alone.

    Attributes:
      tags: one for each array axis.
      nodes: one, or one for each half if an axis is in BOTH_HALVES.
      tile: it varies with both row and column, or is computed from a value that does.
      slice: first and end of its columns, if it has not all of them.
      ordered: the tag of the axis that is in contraction order, if one is.
    """

    tags: tuple[Tag, ...]
    nodes: tuple[int, ...]
    tile: bool
    slice: tuple[int, int] | None = None
    ordered: Tag = None

    @property
    def transposed(self) -> bool:
        """True if it is a tile whose columns come before its rows."""
        return self.tile and ROW in self.tags and not COLUMNS.isdisjoint(self.tags[: self.tags.index(ROW)])


@dataclass(frozen=True)
class Finished:
    """A value that XLA computes after the kernel, from reductions or vectors; `why` describes it, for messages."""

    why: str
    from_reduction: bool = False


@dataclass(frozen=True)
class Stacked:
    """Values stacked along a new first axis, as jnp.select stacks its conditions to find the first true one."""

    items: tuple[Local, ...]


Value = Local | Finished | Stacked


def same_size(a: Any, b: Any) -> bool:
    """Equality of dimensions; False for symbolic ones that cannot be compared."""
    if type(a) is type(b) is int:
        return bool(a == b)
    if isinstance(a, int | np.integer) and isinstance(b, int | np.integer):
        return int(a) == int(b)
    return type(a) is type(b) and bool(a == b)


def same_shape(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(map(same_size, a, b))


def is_tile(value: Value) -> bool:
    return any(map(is_tile, value.items)) if isinstance(value, Stacked) else isinstance(value, Local) and value.tile


def order_of(tags: tuple[Tag, ...], inputs: Sequence[Local]) -> Tag:
    """`Local.ordered` of a value made from `inputs`. All inputs that vary along an ordered axis must be ordered."""
    orders = {value.ordered for value in inputs if value.ordered is not None}
    for ordered in orders:
        axis = tags.index(ordered)
        along = [value for value in inputs if len(value.tags) == len(tags) and value.tags[axis] is not None]
        if any(value.ordered != ordered for value in along):
            raise NotElementwise("combines elements in contraction order with others in their own order; order it last")
    return orders.pop() if orders else None


def check_moved(operation: str, inputs: Sequence[Local]) -> None:
    """Refuses operations on the axes of a transposed tile, or of one in contraction order."""
    if operation in ("transpose", "contraction_order"):
        return
    if any(value.ordered is not None for value in inputs):
        raise NotElementwise("is of an array in contraction order; order the result last")
    if any(value.transposed for value in inputs) and not operation.startswith("reduce_"):
        raise NotElementwise("is of a transposed array; transpose the result last")


class LiteralFloat(float):
    """A float32 constant, compared and printed by its bits, so that 0.0, -0.0 and NaN stay themselves."""

    def __repr__(self) -> str:
        return np.float32(self).tobytes()[::-1].hex()

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LiteralFloat) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))
