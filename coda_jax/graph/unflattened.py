"""Maps of matrices, applied to arrays that have several axes in the place of rows, or of columns.

A map is traced for matrices (M, N). To make a matrix of an array (B, T, N) would cost its sharding over a mesh, where
that cuts both B and T. So XLA's passes apply each operation to the axes that the array has. An operation that has no
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

from coda_jax.epilogue.elementwise import OPERATIONS
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.jaxprs.bind import Bind

ELEMENTWISE = frozenset(OPERATIONS) | {"convert_element_type", "copy", "add_any", "stop_gradient", "reduce_precision"}
_REDUCTIONS = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"}
)


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
        return self.array.reshape(self.shape)


def flat(x: Any) -> Any:
    """The matrix that it is; another array as it is."""
    return x.flat() if isinstance(x, Unflattened) else x


def apply(equation: core.JaxprEqn, inputs: Sequence[Any], bind: Bind) -> Sequence[Any]:
    """The results of an equation of matrices, `Unflattened` where its inputs are and the operation keeps the rows."""
    found = [x for x in inputs if isinstance(x, Unflattened)]
    if found and all(x.rows == found[0].rows for x in found):
        made = _unflattened(equation, inputs, found, bind)
        if made is not None:
            return made
    return bind(equation.primitive, [flat(x) for x in inputs], equation.params)


def _unflattened(
    equation: core.JaxprEqn, inputs: Sequence[Any], found: Sequence[Unflattened], bind: Bind
) -> Sequence[Any] | None:
    """The results, or None where there is no rule."""
    out: Any = equation.outvars[0].aval
    name, shape = equation.primitive.name, tuple(out.shape)
    rows, has_halves = found[0].rows, any(x.halves for x in found)
    size = math.prod(rows)

    def bound(arrays: Sequence[Any], **params: Any) -> list[jax.Array]:
        return list(bind(equation.primitive, arrays, equation.params | params))

    if name in ELEMENTWISE:
        like = _Axes(rows, next((x.array.shape[-2:] for x in found if x.halves), None))
        made = bound([like.of(x) for x in inputs])
        return [Unflattened(x, rows, has_halves) for x in made]
    if name in _REDUCTIONS:
        return _reduced(equation, found[0], bound)
    if has_halves or name not in _BY_AXIS:
        return None
    keeps_rows = bool(shape) and same_size(shape[0], size) and all(same_size(x.shape[0], size) for x in found)
    params = _BY_AXIS[name](equation.params, _Shift(rows)) if keeps_rows else None
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
        """An array that is no `Unflattened` too, with these axes."""
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
    """Along rows, columns or both; an argument of the maximum along what is one axis."""
    axes, count = tuple(equation.params["axes"]), len(x.rows)
    taken = [*range(count)] if 0 in axes else []
    for axis in axes:
        if axis:
            taken += range(count, count + 2) if x.halves else [axis - 1 + count]
    if equation.primitive.name.startswith("arg") and len(taken) > 1:
        return None
    made = bound([x.array], axes=tuple(taken))
    if 0 in axes:
        return [of.reshape(-1) if x.halves and of.ndim else of for of in made]
    return [Unflattened(of, x.rows) for of in made]


@dataclasses.dataclass(frozen=True)
class _Shift:
    """The positions of the axes of matrices, when M is several axes."""

    rows: tuple[Any, ...]

    @property
    def added(self) -> int:
        return len(self.rows) - 1

    def axis(self, axis: int) -> int | None:
        return axis + self.added if axis else None

    def sizes(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        return (*self.rows, *shape[1:])


def _broadcast(params: dict[str, Any], to: _Shift) -> dict[str, Any] | None:
    dimensions = params["broadcast_dimensions"]
    if not dimensions or dimensions[0] != 0:
        return None
    kept = (*range(to.added + 1), *(d + to.added for d in dimensions[1:]))
    return {"shape": to.sizes(params["shape"]), "broadcast_dimensions": kept}


def _reshape(params: dict[str, Any], to: _Shift) -> dict[str, Any] | None:
    return {"new_sizes": to.sizes(params["new_sizes"])} if params["dimensions"] is None else None


def _along(name: str) -> Callable[[dict[str, Any], _Shift], dict[str, Any] | None]:
    def rule(params: dict[str, Any], to: _Shift) -> dict[str, Any] | None:
        axis = to.axis(params[name])
        return None if axis is None else {name: axis}

    return rule


def _slice(params: dict[str, Any], to: _Shift) -> dict[str, Any] | None:
    starts, ends, strides = params["start_indices"], params["limit_indices"], params["strides"]
    has_all_rows = starts[0] == 0 and same_size(ends[0], math.prod(to.rows))
    if not has_all_rows or (strides and strides[0] != 1):
        return None
    return {
        "start_indices": (*(0 for _ in to.rows), *starts[1:]),
        "limit_indices": to.sizes(ends),
        "strides": None if strides is None else (*(1 for _ in to.rows), *strides[1:]),
    }


def _squeeze(params: dict[str, Any], to: _Shift) -> dict[str, Any] | None:
    return {"dimensions": tuple(d + to.added for d in params["dimensions"])} if 0 not in params["dimensions"] else None


_BY_AXIS: dict[str, Callable[[dict[str, Any], _Shift], dict[str, Any] | None]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "reshape": _reshape,
    "slice": _slice,
    "split": _along("axis"),
    "squeeze": _squeeze,
}
