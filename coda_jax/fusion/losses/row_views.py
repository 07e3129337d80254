"""Rows of what is made of logits, as log-probabilities of all tokens but the last, are made of these rows of logits.

    f(z)[:, :-1] = f(z[:, :-1])        where f treats each row alone

Slices and reshapes of rows move in front of f, so that losses find them where they are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend import core

from coda_jax.epilogue.values import same_shape
from coda_jax.fusion.dots import Equation, is_derivative
from coda_jax.fusion.losses.logits import exponentials_of
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.picks import is_over_last
from coda_jax.fusion.straight import at_line, results_with
from coda_jax.graph.on_mesh import ELEMENTWISE
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.evaluate import needed_jaxpr, read
from coda_jax.primitives.mesh_types import explicit_cuts

_OVER_COLUMNS = frozenset({"reduce_sum", "reduce_max", "argmax"})


def with_rows_in_front(closed: core.ClosedJaxpr, least: int) -> core.ClosedJaxpr:
    """A straight jaxpr whose rows of arrays behind exponentials of at least so many columns are taken before these.

    A derivative stays: what is put back into all rows there would stand behind.
    """
    views = None if is_derivative(closed.jaxpr) else _Views(Makers(closed.jaxpr), least)
    if views is None or not views.moved:
        return closed
    return needed_jaxpr(lambda *arrays: views.results(closed, arrays), closed.in_avals)


class _Views:
    """Evaluates a jaxpr.

    Attributes:
      moved: the variables that are rows of others, which move in front.
    """

    def __init__(self, makers: Makers, least: int):
        self._makers = makers
        self._known: dict[Any, Any] = {}
        self._values: dict[Any, Any] = {}
        self.moved: set[Any] = set()
        found = exponentials_of(makers, least)
        behind = makers.behind(found.arrays) if found.wide else set()
        for wide in found.wide:
            views = [e for e in makers.read_by(wide & behind, "slice", "reshape") if _is_of_rows(e)]
            self.moved |= {e.outvars[0] for e in views if e.outvars[0] in wide}

    def results(self, closed: core.ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
        """The results of the jaxpr at these arrays."""

        def viewed(equation: Equation, values: dict[Any, Any]) -> list[Any] | None:
            self._values = values
            return None if self.moved.isdisjoint(equation.outvars) else [self._viewed(equation.outvars[0], ())]

        return results_with(closed, arrays, viewed)

    def _viewed(self, x: Any, views: tuple[Equation, ...]) -> Any:
        """Rows of a variable: what one view after the other makes of it."""
        key = x, *map(id, views)
        if key not in self._known:
            maker = self._makers.maker(x)
            if maker is not None and x in self.moved:
                self._known[key] = self._viewed(maker.invars[0], (maker, *views))
            elif maker is not None and _treats_rows_alone(maker, views[0].invars[0].aval.shape[:-1]):
                self._known[key] = at_line(maker, self._made, maker, views)
            else:
                array = read(self._values, x)
                for view in views:
                    array = at_line(view, _view, view, array)
                self._known[key] = array
        return self._known[key]

    def _made(self, equation: Equation, views: tuple[Equation, ...]) -> Any:
        """These rows of an equation's result, of those of its arguments."""
        before, after = views[0].invars[0].aval.shape[:-1], views[-1].outvars[0].aval.shape[:-1]
        has_rows = [_has_rows(x, before) for x in equation.invars]
        inputs = [
            self._viewed(x, views) if flag else _alike(read(self._values, x), len(before), len(after))
            for x, flag in zip(equation.invars, has_rows, strict=True)
        ]
        (out,), params, name = equation.outvars, dict(equation.params), equation.primitive.name
        shape = (*after, *out.aval.shape[len(before) :])
        if name in ("reshape", "squeeze"):
            return inputs[0].reshape(shape)
        if name == "broadcast_in_dim":
            dimensions = [axis + len(after) - len(before) for axis in params["broadcast_dimensions"]]
            own = range(inputs[0].ndim) if has_rows[0] else dimensions
            return lax.broadcast_in_dim(inputs[0], shape, tuple(own))
        if "axes" in params:
            params["axes"] = (len(after),)
        (made,) = bind(equation.primitive, inputs, params)
        return made


def _view(view: Equation, x: Any) -> Any:
    """The rows of an array, with columns or without, that a view takes of one with columns."""
    before, after = (y.aval.shape[:-1] for y in (view.invars[0], view.outvars[0]))
    rest, params = x.shape[len(before) :], view.params
    if view.primitive.name == "reshape":
        return x.reshape(*after, *rest)
    strides = params["strides"] and (*params["strides"][:-1], *[1] * len(rest))
    return lax.slice(
        x, (*params["start_indices"][:-1], *[0] * len(rest)), (*params["limit_indices"][:-1], *rest), strides
    )


def _alike(x: Any, before: int, after: int) -> Any:
    """An array that is the same in all rows, beside arrays with so many axes of rows after as before."""
    rank = getattr(x, "ndim", 0)
    return x if before == after or rank <= before else x.reshape(*[1] * after, *x.shape[before:])


def _treats_rows_alone(equation: Equation, rows: Sequence[Any]) -> bool:
    """True for an equation whose result has these rows, each made of that of its arguments alone."""
    name, (out, *more) = equation.primitive.name, equation.outvars
    if more or not _has_rows(out, rows):
        return False
    if name in ELEMENTWISE:
        return all(_has_rows(x, rows) or _is_same_in_all(x, rows) for x in equation.invars)
    source = equation.invars[0]
    if name in _OVER_COLUMNS:
        return source.aval.ndim == len(rows) + 1 and _has_rows(source, rows) and is_over_last(equation)
    if name in ("reshape", "squeeze"):
        return _has_rows(source, rows) and len({*source.aval.shape[len(rows) :], *out.aval.shape[len(rows) :]}) == 1
    if name != "broadcast_in_dim" or equation.params.get("sharding") is not None:
        return False
    dimensions = tuple(equation.params["broadcast_dimensions"])
    if _has_rows(source, rows):
        return dimensions == tuple(range(source.aval.ndim))
    return all(axis >= len(rows) for axis in dimensions)


def _has_rows(x: Any, rows: Sequence[Any]) -> bool:
    """True for an array of these rows, maybe with columns."""
    shape = getattr(x.aval, "shape", ())
    return not isinstance(x, core.Literal) and len(shape) - len(rows) in (0, 1) and same_shape(shape[: len(rows)], rows)


def _is_same_in_all(x: Any, rows: Sequence[Any]) -> bool:
    """True for a number, and for columns that are the same in all rows."""
    shape = getattr(x.aval, "shape", ())
    return not shape or (len(shape) == len(rows) + 1 and all(size == 1 for size in shape[:-1]))


def _is_of_rows(view: Equation) -> bool:
    """True for a view of an array's rows with all columns."""
    (x, *more), (out,), params = variables(view.invars), view.outvars, view.params
    if more or x.aval.ndim < 2 or out.aval.ndim < 2 or any(explicit_cuts(x.aval)):
        return False
    if not same_shape(x.aval.shape[-1:], out.aval.shape[-1:]):
        return False
    return view.primitive.name == "slice" or params["dimensions"] is None
