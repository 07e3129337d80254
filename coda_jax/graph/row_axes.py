"""The table of operations that keep rows: on arrays whose rows are other axes, each is itself with other parameters.

Rows are axes in front that an operation treats alone. Products and maps have them as one axis, users and XLA's passes
as several; the table is read in both directions:

    (B, T, N) -> (M, N)     `fusion.rows`, `fusion.merged`
    (M, N) -> (B, T, N)     `graph.unflattened`

Operations of single elements need no parameters: `ELEMENTWISE`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class RowAxes:
    """The axes of rows of an equation's arrays, and those in their place.

    Attributes:
      count: how many axes in front of the equation's arrays are rows.
      sizes: the sizes of the axes in their place.
    """

    count: int
    sizes: tuple[Any, ...]

    def axis(self, axis: int) -> int:
        """The place of an axis that is none of rows."""
        return axis - self.count + len(self.sizes)

    def axes(self, axes: Sequence[int]) -> tuple[int, ...] | None:
        """The places of axes that begin with those of rows; None for others."""
        if tuple(axes[: self.count]) != tuple(range(self.count)):
            return None
        return (*range(len(self.sizes)), *map(self.axis, axes[self.count :]))

    def shape(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of an array that begins with the rows."""
        return (*self.sizes, *shape[self.count :])


_Rule = Callable[[_Params, RowAxes], dict[str, Any] | None]  # the parameters that change; None where rows move


def _along(name: str) -> _Rule:
    """An operation along the axis, or the axes, that this parameter names."""

    def rule(params: _Params, to: RowAxes) -> dict[str, Any] | None:
        axes = params[name]
        if isinstance(axes, Sequence):
            return {name: tuple(map(to.axis, axes))} if min(axes, default=to.count) >= to.count else None
        return {name: to.axis(axes)} if axes >= to.count else None

    return rule


def _each(name: str, of_rows: Any) -> _Rule:
    """An operation with a parameter for each axis, which is this for one that the operation leaves as it is."""

    def rule(params: _Params, to: RowAxes) -> dict[str, Any] | None:
        is_kept = all(one == of_rows for one in params[name][: to.count])
        return {name: (*(of_rows for _ in to.sizes), *params[name][to.count :])} if is_kept else None

    return rule


def _broadcast(params: _Params, to: RowAxes) -> dict[str, Any] | None:
    axes = to.axes(params["broadcast_dimensions"])
    return None if axes is None else {"shape": to.shape(params["shape"]), "broadcast_dimensions": axes}


def _iota(params: _Params, to: RowAxes) -> dict[str, Any] | None:
    along = _along("dimension")(params, to)
    return None if along is None else {"shape": to.shape(params["shape"]), **along}


def _reshape(params: _Params, to: RowAxes) -> dict[str, Any] | None:
    return {"new_sizes": to.shape(params["new_sizes"])} if params["dimensions"] is None else None


def _slice(params: _Params, to: RowAxes) -> dict[str, Any] | None:
    starts = _each("start_indices", 0)(params, to)
    strides = _each("strides", 1)(params, to) if params["strides"] else {}
    if starts is None or strides is None:
        return None
    return {**starts, **strides, "limit_indices": to.shape(params["limit_indices"])}


def _transpose(params: _Params, to: RowAxes) -> dict[str, Any] | None:
    axes = to.axes(params["permutation"])
    return None if axes is None else {"permutation": axes}


# The result has the elements of the argument alone.
VIEWS: dict[str, _Rule] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "slice": _slice,
    "split": _along("axis"),
    "squeeze": _along("dimensions"),
    "tile": _each("reps", 1),
    "transpose": _transpose,
}
# The result has the elements of several arguments, or of none.
JOINS: dict[str, _Rule] = {
    "concatenate": _along("dimension"),
    "iota": _iota,
    "pad": _each("padding_config", (0, 0, 0)),
}
# An element of the result is made of many of its row.
REDUCTIONS: dict[str, _Rule] = {
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod"), _along("axes")),
    **dict.fromkeys(("reduce_and", "reduce_or", "argmax", "argmin"), _along("axes")),
}
KEEPS_ROWS: dict[str, _Rule] = VIEWS | JOINS | REDUCTIONS


def with_rows(name: str, params: _Params, to: RowAxes) -> dict[str, Any] | None:
    """The parameters of an operation of `KEEPS_ROWS` on arrays with other axes of rows; None where it moves rows.

    The result has no sharding over explicit axes: the arrays are those of a function that is traced without a mesh.

    Args:
      name: the primitive's.
      params: the equation's, whose arrays and results begin with the rows.
      to: the axes.
    """
    changed = KEEPS_ROWS[name](params, to)
    unsharded = dict.fromkeys(params.keys() & {"sharding", "out_sharding"})
    return None if changed is None else {**params, **unsharded, **changed}
