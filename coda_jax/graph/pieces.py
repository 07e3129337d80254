"""Tiles as pieces of their columns, in XLA's passes: a concatenation is not computed if only its pieces are read.

XLA makes one kernel of elementwise operations and a sum along rows, but not of a concatenation and the sum along it.
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

from coda_jax.graph import unflattened
from coda_jax.graph.on_mesh import ELEMENTWISE
from coda_jax.graph.unflattened import Unflattened
from coda_jax.jaxprs.bind import Bind
from coda_jax.jaxprs.calls import CALLS
from coda_jax.jaxprs.evaluate import evaluate
from coda_jax.primitives.mesh_types import with_same_sharding

Part = jax.Array | Unflattened


class Pieces:
    """A matrix (M, N) as pieces (M, N_i) that are concatenated to it; or a vector (N,) as pieces (N_i,)."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = list(parts)

    @property
    def widths(self) -> list[int]:
        return [x.shape[-1] for x in self.parts]

    def whole(self) -> Part:
        rows = next((x.rows for x in self.parts if isinstance(x, Unflattened)), None)
        if rows is None:
            return jnp.concatenate(with_same_sharding([unflattened.flat(x) for x in self.parts], -1), axis=-1)
        arrays = [x.array if isinstance(x, Unflattened) else x.reshape(*rows, x.shape[1]) for x in self.parts]
        return Unflattened(jnp.concatenate(with_same_sharding(arrays, -1), axis=-1), rows)


def whole(x: Any) -> Any:
    """x as one array: pieces are concatenated."""
    return x.whole() if isinstance(x, Pieces) else x


def as_type(x: Part | Pieces, dtype: Any) -> Part | Pieces:
    """x with elements of this dtype."""
    if isinstance(x, Pieces):
        return Pieces([_part_as_type(part, dtype) for part in x.parts])
    return _part_as_type(x, dtype)


def _part_as_type(x: Part, dtype: Any) -> Part:
    if isinstance(x, Unflattened):
        return Unflattened(x.array.astype(dtype), x.rows, x.halves)
    return x.astype(dtype)


def in_pieces(jaxpr: core.ClosedJaxpr, inputs: Sequence[Any], bind: Bind, opens: Collection[str] = CALLS) -> list[Any]:
    """The results of a map of arrays, `Unflattened` and `Pieces`, which may be these too; `opens` as in `evaluate`."""
    return evaluate(jaxpr.jaxpr, jaxpr.consts, inputs, functools.partial(_apply, bind), opens)


def _apply(bind: Bind, equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    if equation.primitive.name == "concatenate" and equation.params["dimension"] == 1 and len(_shape(inputs[0])) == 2:
        parts = (x.parts if isinstance(x, Pieces) else [x] for x in inputs)
        return [Pieces(list(itertools.chain(*parts)))]

    def apply(*operands: Any) -> Sequence[Any]:
        return unflattened.apply(equation, operands, bind)

    pieces = next((x for x in inputs if isinstance(x, Pieces)), None)
    results = None if pieces is None else _by_piece(equation, pieces, inputs, apply)
    return apply(*map(whole, inputs)) if results is None else results


def _by_piece(
    equation: core.JaxprEqn, pieces: Pieces, inputs: list[Any], apply: Callable[..., Sequence[Any]]
) -> Sequence[Any] | None:
    """The results piece by piece of `pieces`, one of the inputs; None where they depend on the entire matrix."""
    name, params = equation.primitive.name, equation.params
    widths, ends = pieces.widths, list(itertools.accumulate(pieces.widths))
    if name in ELEMENTWISE and all(_fits(x, widths) for x in inputs):
        results = [apply(*piece) for piece in zip(*(_split_columns(x, widths, ends) for x in inputs), strict=True)]
        return [Pieces([outputs[0] for outputs in results])]
    if name == "reduce_sum" and tuple(params["axes"]) == (1,):
        return [functools.reduce(_sum, (apply(x)[0] for x in pieces.parts))]
    if name == "reduce_sum" and tuple(params["axes"]) == (0,) and len(_shape(pieces)) == 2:
        return [Pieces([apply(x)[0] for x in pieces.parts])]
    if name == "reduce_max" and len(params["axes"]) == len(_shape(pieces)):
        return [functools.reduce(jnp.maximum, (apply(x)[0] for x in pieces.parts))]
    if name == "split" and params["axis"] == len(_shape(pieces)) - 1 and list(params["sizes"]) == widths:
        return pieces.parts
    if name == "slice" and (part := _slice_of(params, pieces, ends)) is not None:
        return [part]
    return None


def _shape(x: Any) -> tuple[Any, ...]:
    return (*x.parts[0].shape[:-1], sum(x.widths)) if isinstance(x, Pieces) else np.shape(x)


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
    *rows, _ = _shape(x)
    *first, start = params["start_indices"]
    *last, limit = params["limit_indices"]
    if params["strides"] is not None or any(first) or last != rows:
        return None
    columns = start, limit
    starts = [0, *ends[:-1]]
    return next((x.parts[i] for i, span in enumerate(zip(starts, ends, strict=True)) if span == columns), None)
