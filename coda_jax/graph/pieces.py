"""Tiles as pieces of their columns, in XLA's passes: a concatenation is not computed if only its pieces are read.

XLA makes one kernel of elementwise operations and a sum along rows, but not of a concatenation and the sum along it.
The sum of arrays that are zeros but for some columns each, as the derivative of slices, is a concatenation too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from coda_jax.epilogue.values import same_size
from coda_jax.graph import unflattened
from coda_jax.graph.on_mesh import ELEMENTWISE
from coda_jax.graph.unflattened import Unflattened
from coda_jax.jaxprs.bind import Bind
from coda_jax.jaxprs.calls import CALLS
from coda_jax.jaxprs.evaluate import evaluate
from coda_jax.primitives.mesh_types import with_same_sharding

Part = jax.Array | Unflattened
_KEEPS_ZEROS = frozenset({"convert_element_type", "neg", "copy"})


class Pieces:
    """A matrix (M, N) as pieces (M, N_i) that are concatenated to it; or heads (M, H, Dh) as (M, H_i, Dh).

    Attributes:
      parts: the pieces; of a vector (N,) pieces (N_i,).
      zeros: for each whether it is zeros.
      has_heads: whether they are heads (M, H_i, Dh).
    """

    def __init__(self, parts: Sequence[Part], zeros: Sequence[bool] = (), *, has_heads: bool = False):
        self.parts = list(parts)
        self.zeros = list(zeros) or [False] * len(self.parts)
        self.has_heads = has_heads

    @property
    def widths(self) -> list[int]:
        """How many columns, or heads, each has."""
        return [x.shape[self._axis] for x in self.parts]

    @property
    def shape(self) -> tuple[Any, ...]:
        shape = list(self.parts[0].shape)
        shape[self._axis] = sum(self.widths)
        return tuple(shape)

    @property
    def _axis(self) -> int:
        return -2 if self.has_heads else -1

    def map(self, f: Callable[[Part], Part]) -> Pieces:
        """The pieces with f of each, which maps zeros to zeros."""
        return Pieces([f(x) for x in self.parts], self.zeros, has_heads=self.has_heads)

    def whole(self) -> Part:
        if len(self.parts) == 1:
            return self.parts[0]
        axis, rows = self._axis, next((x.rows for x in self.parts if isinstance(x, Unflattened)), None)
        if rows is None:
            return jnp.concatenate(with_same_sharding([unflattened.flat(x) for x in self.parts], axis), axis=axis)
        arrays = [x.array if isinstance(x, Unflattened) else x.reshape(*rows, *x.shape[1:]) for x in self.parts]
        return Unflattened(jnp.concatenate(with_same_sharding(arrays, axis), axis=axis), rows)


def whole(x: Any) -> Any:
    """x as one array: pieces are concatenated."""
    return x.whole() if isinstance(x, Pieces) else x


def as_type(x: Part | Pieces, dtype: Any) -> Part | Pieces:
    """x with elements of this dtype."""
    if isinstance(x, Pieces):
        return x.map(lambda part: _part_as_type(part, dtype))
    return _part_as_type(x, dtype)


def _part_as_type(x: Part, dtype: Any) -> Part:
    if isinstance(x, Unflattened):
        return Unflattened(x.array.astype(dtype), x.rows, x.halves)
    return x.astype(dtype)


def in_pieces(jaxpr: core.ClosedJaxpr, inputs: Sequence[Any], bind: Bind, opens: Collection[str] = CALLS) -> list[Any]:
    """The results of a map of arrays, `Unflattened` and `Pieces`, which may be these too; `opens` as in `evaluate`."""
    return evaluate(jaxpr.jaxpr, jaxpr.consts, inputs, functools.partial(_apply, bind), opens)


def _apply(bind: Bind, equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    def apply(*operands: Any) -> Sequence[Any]:
        return unflattened.apply(equation, operands, bind)

    if (made := _made_of_pieces(equation, inputs, apply)) is not None:
        return [made]
    pieces = next((x for x in inputs if isinstance(x, Pieces)), None)
    results = None if pieces is None else _by_piece(equation, pieces, inputs, apply)
    return apply(*map(whole, inputs)) if results is None else results


def _made_of_pieces(equation: core.JaxprEqn, inputs: list[Any], apply: Callable[..., Sequence[Any]]) -> Pieces | None:
    """The result of an equation that concatenates or pads columns or heads, or makes zeros; None of another."""
    out: Any = equation.outvars[0].aval
    name, params, rank = equation.primitive.name, equation.params, len(out.shape)
    if rank not in (2, 3):
        return None
    pieces = functools.partial(Pieces, has_heads=rank == 3)
    if name == "broadcast_in_dim" and _is_zero(equation.invars[0]):
        return pieces(apply(*inputs), [True])
    if name == "concatenate" and params["dimension"] == 1:
        each = [x if isinstance(x, Pieces) else pieces([x]) for x in inputs]
        return pieces([y for x in each for y in x.parts], [y for x in each for y in x.zeros])
    if name == "pad" and _is_zero(equation.invars[1]) and _pads_columns(params["padding_config"]):
        low, high, _ = params["padding_config"][1]
        x = inputs[0] if isinstance(inputs[0], Pieces) else pieces([inputs[0]])
        before, behind = ([_zeros_like(x.parts[0], count)] * bool(count) for count in (low, high))
        return pieces([*before, *x.parts, *behind], [*(True for _ in before), *x.zeros, *(True for _ in behind)])
    return None


def _pads_columns(padding: Sequence[tuple[int, int, int]]) -> bool:
    """Whether only the second axis is padded, at its ends."""
    low, high, between = padding[1]
    return min(low, high) >= 0 and not between and not any(any(one) for i, one in enumerate(padding) if i != 1)


def _zeros_like(x: Part, count: Any) -> Part:
    """Zeros of the shape of x but for so many columns or heads."""
    array, rows = (x.array, len(x.rows)) if isinstance(x, Unflattened) else (x, 1)
    zeros = jnp.zeros_like(array, shape=(*array.shape[:rows], count, *array.shape[rows + 1 :]))
    return Unflattened(zeros, x.rows) if isinstance(x, Unflattened) else zeros


def _flat(x: Part) -> Part:
    """Heads as a matrix."""
    if isinstance(x, Unflattened):
        return Unflattened(x.array.reshape(*x.rows, -1), x.rows)
    return x.reshape(x.shape[0], -1)


def _in_heads(x: Part, dim: int) -> Part:
    """A matrix as heads of so many columns."""
    if isinstance(x, Unflattened):
        return Unflattened(x.array.reshape(*x.rows, -1, dim), x.rows)
    return x.reshape(x.shape[0], -1, dim)


def _is_zero(variable: Any) -> bool:
    return isinstance(variable, core.Literal) and not np.any(variable.val)


def _by_piece(
    equation: core.JaxprEqn, pieces: Pieces, inputs: list[Any], apply: Callable[..., Sequence[Any]]
) -> Sequence[Any] | None:
    """The results piece by piece of `pieces`, one of the inputs; None where they depend on the entire matrix."""
    name = equation.primitive.name
    if name in ("add", "add_any") and all(isinstance(x, Pieces) and x.has_heads == pieces.has_heads for x in inputs):
        return _added(inputs[0], inputs[1], apply)
    if name in ("reshape", "broadcast_in_dim", "split", "slice"):
        return _viewed(equation, pieces)
    if pieces.has_heads:
        return None
    if name in ("reduce_sum", "reduce_max"):
        return _reduced(equation, pieces, apply)
    widths, ends = pieces.widths, list(itertools.accumulate(pieces.widths))
    if name in ELEMENTWISE and all(_fits(x, widths) for x in inputs):
        results = [apply(*piece) for piece in zip(*(_split_columns(x, widths, ends) for x in inputs), strict=True)]
        return [Pieces([outputs[0] for outputs in results], pieces.zeros if name in _KEEPS_ZEROS else ())]
    return None


def _viewed(equation: core.JaxprEqn, x: Pieces) -> Sequence[Any] | None:
    """Heads as a matrix, a vector as a row, or some of the columns; None for another view."""
    name, params = equation.primitive.name, equation.params
    if (shape := _of_one_row(equation, x)) is not None:
        return [Pieces([y.reshape(*shape[:-1], y.shape[-1]) for y in map(unflattened.flat, x.parts)])]
    if x.has_heads:
        return _of_heads(equation, x)
    if name == "reshape" and (dim := _head_of(params["new_sizes"], x)):
        return [Pieces([_in_heads(y, dim) for y in x.parts], x.zeros, has_heads=True)]
    if name == "split" and params["axis"] == len(x.shape) - 1 and list(params["sizes"]) == x.widths:
        return x.parts
    part = _slice_of(params, x, list(itertools.accumulate(x.widths))) if name == "slice" else None
    return None if part is None else [part]


def _of_heads(equation: core.JaxprEqn, x: Pieces) -> Sequence[Any] | None:
    """Heads as a matrix, or the pieces themselves; None for another view."""
    (rows, heads, width), name, params = x.shape, equation.primitive.name, equation.params
    if name == "reshape" and tuple(params["new_sizes"]) == (rows, heads * width):
        return [Pieces([_flat(y) for y in x.parts], x.zeros)]
    return x.parts if name == "split" and params["axis"] == 1 and list(params["sizes"]) == x.widths else None


def _head_of(sizes: Sequence[Any], x: Pieces) -> int:
    """Dh, where a matrix of pieces of whole heads has these sizes (M, H, Dh); else 0."""
    if len(sizes) != 3 or len(x.shape) != 2 or not all(isinstance(one, int) for one in (*sizes[1:], *x.widths)):
        return 0
    is_whole = sizes[2] > 0 and same_size(sizes[0], x.shape[0]) and not any(width % sizes[2] for width in x.widths)
    return int(sizes[2]) if is_whole else 0


def _reduced(equation: core.JaxprEqn, x: Pieces, apply: Callable[..., Sequence[Any]]) -> Sequence[Any] | None:
    """A sum along rows, or along columns, or a maximum of all; None for another reduction."""
    name, axes = equation.primitive.name, tuple(equation.params["axes"])
    if name == "reduce_sum" and axes == (1,):
        return [functools.reduce(_sum, (apply(y)[0] for y in x.parts))]
    if name == "reduce_sum" and axes == (0,) and len(x.shape) == 2:
        return [Pieces([apply(y)[0] for y in x.parts])]
    if name == "reduce_max" and len(axes) == len(x.shape):
        return [functools.reduce(jnp.maximum, (apply(y)[0] for y in x.parts))]
    return None


def _of_one_row(equation: core.JaxprEqn, x: Pieces) -> tuple[Any, ...] | None:
    """The shape of an equation's result that has the elements of x, a vector or a single row, and is one as well."""
    out: Any = equation.outvars[0].aval
    shape = tuple(out.shape)
    is_view = equation.primitive.name in ("reshape", "broadcast_in_dim")
    is_row = is_view and not x.has_heads and all(one == 1 for one in (*x.shape[:-1], *shape[:-1]))
    return shape if is_row and shape and same_size(shape[-1], x.shape[-1]) else None


def _added(x: Pieces, y: Pieces, apply: Callable[..., Sequence[Any]]) -> Sequence[Any] | None:
    """x + y piece by piece, where zeros are added to nothing; None where neither has the pieces of the other."""
    if not all(isinstance(width, int) for width in (*x.widths, *y.widths)):
        return None
    ends = sorted({*itertools.accumulate(x.widths), *itertools.accumulate(y.widths)})
    x, y = (_with_ends(one, ends) for one in (x, y))
    if x.widths != y.widths:
        return None
    parts = [
        b if is_a_zero else a if is_b_zero else apply(a, b)[0]
        for a, b, is_a_zero, is_b_zero in zip(x.parts, y.parts, x.zeros, y.zeros, strict=True)
    ]
    return [Pieces(parts, [a and b for a, b in zip(x.zeros, y.zeros, strict=True)], has_heads=x.has_heads)]


def _with_ends(x: Pieces, ends: Sequence[int]) -> Pieces:
    """x with zeros that end at all of these columns that they span; other pieces stay."""
    parts: list[Part] = []
    zeros: list[bool] = []
    each_end = itertools.accumulate(x.widths)
    for part, is_zero, width, end in zip(x.parts, x.zeros, x.widths, each_end, strict=True):
        start = end - width
        cuts = [start, *(one for one in ends if start < one < end and is_zero), end]
        each = [part] if len(cuts) == 2 else [_zeros_like(part, to - at) for at, to in itertools.pairwise(cuts)]
        parts += each
        zeros += [is_zero] * len(each)
    return Pieces(parts, zeros, has_heads=x.has_heads)


def _fits(x: Any, widths: list[int]) -> bool:
    return x.widths == widths if isinstance(x, Pieces) else len(np.shape(x)) in (0, 2)


def _split_columns(x: Any, widths: list[int], ends: list[int]) -> Sequence[Any]:
    if isinstance(x, Pieces):
        return x.parts
    if not np.shape(x) or x.shape[1] == 1:
        return [x] * len(widths)

    def columns(start: int, end: int) -> Any:
        if isinstance(x, Unflattened) and not x.halves:
            return Unflattened(lax.slice_in_dim(x.array, start, end, axis=-1), x.rows)
        return lax.slice_in_dim(unflattened.flat(x), start, end, axis=1)

    return [columns(end - width, end) for width, end in zip(widths, ends, strict=True)]


def _sum(x: Part, y: Part) -> Part:
    if isinstance(x, Unflattened) and isinstance(y, Unflattened):
        return Unflattened(x.array + y.array, x.rows)
    total: jax.Array = unflattened.flat(x) + unflattened.flat(y)
    return total


def _slice_of(params: Any, x: Pieces, ends: list[int]) -> Part | None:
    """The piece that is this slice of the columns, of all rows; None if the slice is no piece."""
    *rows, _ = x.shape
    *first, start = params["start_indices"]
    *last, limit = params["limit_indices"]
    if params["strides"] is not None or any(first) or last != rows:
        return None
    columns = start, limit
    starts = [0, *ends[:-1]]
    return next((x.parts[i] for i, span in enumerate(zip(starts, ends, strict=True)) if span == columns), None)
