"""Tiles in pieces of their columns, in XLA's passes: a concatenation is not made if only its parts are read.

XLA makes one kernel of elementwise operations and a sum along rows, but not of a concatenation and the sum along it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.epilogue.elementwise import OPERATIONS
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.evaluate import evaluate

_ELEMENTWISE = frozenset(OPERATIONS) | {"convert_element_type", "copy", "add_any"}


class Pieces:
    """A matrix (M, N) as several (M, N_i), side by side."""

    def __init__(self, parts: Sequence[jax.Array]):
        self.parts = list(parts)

    @property
    def widths(self) -> list[int]:
        return [x.shape[1] for x in self.parts]

    def whole(self) -> jax.Array:
        return jnp.concatenate(self.parts, axis=1)

    def map(self, f: Callable[[jax.Array], jax.Array]) -> Pieces:
        return Pieces([f(x) for x in self.parts])


def whole(x: Any) -> Any:
    """An array; of pieces the matrix that they are."""
    return x.whole() if isinstance(x, Pieces) else x


def in_pieces(jaxpr: core.ClosedJaxpr, inputs: Sequence[Any]) -> Any:
    """The one result of a map of arrays and of `Pieces`: an array, or `Pieces`."""
    (out,) = evaluate(jaxpr.jaxpr, jaxpr.consts, inputs, _apply)
    return out


def _apply(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name == "concatenate" and params["dimension"] == 1 and _rank(inputs[0]) == 2:
        parts = (x.parts if isinstance(x, Pieces) else [x] for x in inputs)
        return [Pieces(list(itertools.chain(*parts)))]
    found = next((x for x in inputs if isinstance(x, Pieces)), None)
    if found is not None:
        widths = found.widths
        ends = list(itertools.accumulate(widths))
        if name in _ELEMENTWISE and all(_fits(x, widths) for x in inputs):
            each = zip(*(_apart(x, widths, ends) for x in inputs), strict=True)
            made = [bind(equation.primitive, list(of), params) for of in each]
            return [Pieces([outputs[0] for outputs in made])]
        if name == "reduce_sum" and tuple(params["axes"]) == (1,):
            sums = [bind(equation.primitive, [x], params)[0] for x in found.parts]
            return [sum(sums[1:], sums[0])]
        if name == "split" and params["axis"] == 1 and list(params["sizes"]) == widths:
            return found.parts
        if name == "slice" and (part := _slice_of(params, found, ends)) is not None:
            return [part]
    return bind(equation.primitive, [whole(x) for x in inputs], params)


def _rank(x: Any) -> int:
    return 2 if isinstance(x, Pieces) else jnp.ndim(x)


def _fits(x: Any, widths: list[int]) -> bool:
    return x.widths == widths if isinstance(x, Pieces) else jnp.ndim(x) in (0, 2)


def _apart(x: Any, widths: list[int], ends: list[int]) -> Sequence[Any]:
    if isinstance(x, Pieces):
        return x.parts
    if jnp.ndim(x) == 0 or x.shape[1] == 1:
        return [x] * len(widths)
    return [lax.slice_in_dim(x, end - width, end, axis=1) for width, end in zip(widths, ends, strict=True)]


def _slice_of(params: Any, x: Pieces, ends: list[int]) -> jax.Array | None:
    """The piece that a slice of all rows and of these columns is; None where it is none."""
    rows = x.parts[0].shape[0]
    if params["strides"] is not None or params["start_indices"][0] != 0 or params["limit_indices"][0] != rows:
        return None
    columns = params["start_indices"][1], params["limit_indices"][1]
    starts = [0, *ends[:-1]]
    return next((x.parts[i] for i, of in enumerate(zip(starts, ends, strict=True)) if of == columns), None)
