"""Maps of matrices, applied to arrays whose rows, or columns, are several axes.

A map is traced for matrices (M, N). An array (B, T, N) that is reshaped to a matrix would lose its sharding over a mesh
that shards both B and T. So XLA's passes apply each operation to the axes that the array has. An operation that has no
rule here is applied to matrices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.graph.on_mesh import ELEMENTWISE, reshaped_as
from coda_jax.graph.row_axes import KEEPS_ROWS, REDUCTIONS, RowAxes, with_rows
from coda_jax.jaxprs.bind import Bind


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["rows", "halves"])
@dataclasses.dataclass(frozen=True)
class Unflattened:
    """An array (M, ...) or (M, N) with all its axes.

    Attributes:
      array: (*rows, ...), or with halves (*rows, 2, N / 2).
      rows: the sizes of the axes that M is.
      halves: whether N is two axes.
    """

    array: jax.Array
    rows: tuple[Any, ...]
    halves: bool = False

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of the matrix."""
        columns = self.array.shape[len(self.rows) :]
        return (math.prod(self.rows), *((math.prod(columns),) if self.halves else columns))

    def flat(self) -> jax.Array:
        """The matrix."""
        return reshaped_as(self.array, self.shape)


def flat(x: Any) -> Any:
    """x as a matrix; an array unchanged."""
    return x.flat() if isinstance(x, Unflattened) else x


def apply(equation: core.JaxprEqn, inputs: Sequence[Any], bind: Bind) -> Sequence[Any]:
    """The results of an equation of matrices, `Unflattened` where its inputs are and the operation keeps the rows."""
    unflattened_inputs = [x for x in inputs if isinstance(x, Unflattened)]
    if unflattened_inputs and all(x.rows == unflattened_inputs[0].rows for x in unflattened_inputs):
        results = _unflattened(equation, inputs, unflattened_inputs, bind)
        if results is not None:
            return results
    return bind(equation.primitive, [flat(x) for x in inputs], equation.params)


def _unflattened(
    equation: core.JaxprEqn, inputs: Sequence[Any], unflattened_inputs: Sequence[Unflattened], bind: Bind
) -> Sequence[Any] | None:
    """The results, or None where there is no rule."""
    out: Any = equation.outvars[0].aval
    name, shape = equation.primitive.name, tuple(out.shape)
    rows, has_halves = unflattened_inputs[0].rows, any(x.halves for x in unflattened_inputs)
    size = math.prod(rows)

    def bound(arrays: Sequence[Any], **params: Any) -> list[jax.Array]:
        return list(bind(equation.primitive, arrays, equation.params | params))

    if name in ELEMENTWISE:
        like = _Axes(rows, next((x.array.shape[-2:] for x in unflattened_inputs if x.halves), None))
        results = bound([like.of(x) for x in inputs])
        return [Unflattened(x, rows, has_halves) for x in results]
    if name in REDUCTIONS:
        return _reduced(equation, unflattened_inputs[0], bound)
    if has_halves or name not in KEEPS_ROWS:
        return None
    keeps_rows = (
        bool(shape) and same_size(shape[0], size) and all(same_size(x.shape[0], size) for x in unflattened_inputs)
    )
    params = with_rows(name, equation.params, RowAxes(1, rows)) if keeps_rows else None
    if params is None:
        return None
    like = _Axes(rows, None)
    return [Unflattened(x, rows) for x in bound([like.of(x) for x in inputs], **params)]


@dataclasses.dataclass(frozen=True)
class _Axes:
    """The axes that arrays of so many rows have, and columns that are `halves`, (2, N / 2)."""

    rows: tuple[Any, ...]
    halves: tuple[Any, ...] | None

    def of(self, x: Any) -> Any:
        """x, an array or `Unflattened`, as an array with these axes."""
        own = np.shape(x)
        if not own:
            return x
        lead = self.rows if same_size(own[0], math.prod(self.rows)) else (1,) * len(self.rows)
        if not same_size(math.prod(lead), own[0]):
            return flat(x)
        rest = own[1:]
        if self.halves is not None:
            if len(own) == 2 and same_size(own[1], math.prod(self.halves)):
                rest = self.halves
            elif len(own) == 2:
                rest = (1, 1)
        array = x.array if isinstance(x, Unflattened) else x
        return array if same_shape(np.shape(array), (*lead, *rest)) else jnp.reshape(flat(x), (*lead, *rest))


def _reduced(equation: core.JaxprEqn, x: Unflattened, bound: Callable[..., list[jax.Array]]) -> Sequence[Any] | None:
    """A reduction along rows, columns or both; argmax and argmin only along a single axis."""
    axes, count = tuple(equation.params["axes"]), len(x.rows)
    reduced_axes = [*range(count)] if 0 in axes else []
    for axis in axes:
        if axis:
            reduced_axes += range(count, count + 2) if x.halves else [axis - 1 + count]
    if equation.primitive.name.startswith("arg") and len(reduced_axes) > 1:
        return None
    results = bound([x.array], axes=tuple(reduced_axes))
    if 0 in axes:
        return [y.reshape(-1) if x.halves and y.ndim else y for y in results]
    return [Unflattened(y, x.rows) for y in results]
