"""The rows of a jaxpr's variables: axes in front that equations treat alone, so that they may become one axis.

A product gives its result the rows of its first factor. From there they are followed through all equations that treat
each row alone, forward and backward: the rows of a residual stream are those of the products that read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from coda_jax.fusion.custom import has_elementwise_derivative
from coda_jax.fusion.dots import Dot, Equation, begins, dot_of, dots_in, swaps_factors, variables
from coda_jax.graph.constraint import CONSTRAINTS, is_constraint
from coda_jax.graph.on_mesh import ELEMENTWISE, PVARY

MARKS = CONSTRAINTS | {"name"}  # they say something of an array, and give it back
SHAPES = MARKS | {"broadcast_in_dim", "reshape", "squeeze", "slice", "split", "transpose", "copy"}
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})
OF_ELEMENTS = ELEMENTWISE | PVARY | MARKS
_ALONE = OF_ELEMENTS | SHAPES | REDUCTIONS | {"concatenate", "pad", "iota", "custom_jvp_call"}


class Rows:
    """How many axes in front of each variable are rows.

    Attributes:
      counts: for the variables that have rows.
      dots: the products, by the equation's number.
      results: of the products, by the equation's number.
      absorbed: the equations that are part of a product: transposes of its result.
      reasons: why another dot_general is no product, by the equation's number.
    """

    def __init__(self, jaxpr: core.Jaxpr):
        self.counts: dict[Any, int] = {}
        self._elementwise: dict[int, bool] = {}  # functions with a derivative of their own
        self.results, self.absorbed = results_of_dots(jaxpr)
        found = {
            i: dot_of(jaxpr.eqns[i], is_swapped=x is not jaxpr.eqns[i].outvars[0]) for i, x in self.results.items()
        }
        self.dots = {i: x for i, x in found.items() if isinstance(x, Dot)}
        self.reasons = {i: x for i, x in found.items() if isinstance(x, str)}
        size = -1
        while len(self.counts) > size:  # each round goes once forward and once backward
            size = len(self.counts)
            for i, equation in [*enumerate(jaxpr.eqns), *reversed(list(enumerate(jaxpr.eqns)))]:
                if i in self.dots:
                    self._follow_product(self.dots[i], self.results[i])
                elif i not in self.absorbed:
                    self._follow(equation)

    def of(self, x: Any) -> int:
        """How many of its axes in front are rows."""
        return 0 if isinstance(x, core.Literal) else self.counts.get(x, 0)

    def main(self) -> tuple[int, ...]:
        """The rows with most of the products' operations."""
        flops: dict[tuple[int, ...], int] = {}
        for dot in self.dots.values():
            if not dot.transpose_a:
                rows = tuple(dot.a.aval.shape[: dot.rows_a])
                flops[rows] = flops.get(rows, 0) + dot.flops
        return max(flops, key=lambda rows: flops[rows], default=())

    def _follow_product(self, dot: Dot, result: Any) -> None:
        self.counts.setdefault(dot.a, dot.rows_a)
        if dot.transpose_a:
            self.counts.setdefault(dot.b, dot.rows_b)
        else:
            self.counts.setdefault(result, dot.rows_a)

    def _follow(self, equation: Equation) -> None:
        counts = {self.of(x) for x in (*equation.invars, *equation.outvars)} - {0}
        if len(counts) != 1 or equation.primitive.name not in _ALONE:
            return
        (count,) = counts
        if self.is_alone(equation, count):
            rows = rows_of(equation, count, self.counts)
            for x in variables(equation.invars):
                if _carries(equation, x, rows):
                    self.counts.setdefault(x, count)
            for x in equation.outvars:
                self.counts.setdefault(x, count)

    def is_alone(self, equation: Equation, count: int) -> bool:
        """True for an equation whose results have these rows, and each row of them depends on that row alone."""
        name, params = equation.primitive.name, equation.params
        if name not in _ALONE or (name in CONSTRAINTS and not is_constraint(equation)):
            return False
        rows = rows_of(equation, count, self.counts)
        if rows is None or not all(begins(x.aval.shape, rows) for x in equation.outvars):
            return False
        known = [x for x in (*equation.invars, *equation.outvars) if self.of(x)]
        if any(self.of(x) != count or not begins(x.aval.shape, rows) for x in known):  # others' rows may be fewer
            return False
        shapes = [x.aval.shape for x in equation.invars]
        if name in OF_ELEMENTS:
            return all(_is_beside(shape, rows) for shape in shapes)
        if name == "custom_jvp_call":
            return all(_is_beside(shape, rows) for shape in shapes) and self._is_elementwise(equation)
        if name == "iota":
            return bool(params["dimension"] >= count)
        if name == "broadcast_in_dim":
            return _broadcasts_alone(shapes[0], params["broadcast_dimensions"], rows)
        if not all(begins(shape, rows) for shape in (shapes[:1] if name == "pad" else shapes)):
            return False
        return _moves_no_row(name, params, count)

    def _is_elementwise(self, equation: Equation) -> bool:
        if id(equation) not in self._elementwise:
            self._elementwise[id(equation)] = has_elementwise_derivative(equation)
        return self._elementwise[id(equation)]


def results_of_dots(jaxpr: core.Jaxpr) -> tuple[dict[int, Any], set[int]]:
    """The result of each dot_general, by number, and the numbers of the transposes that are part of one."""
    readers: dict[Any, list[int]] = {}
    for i, equation in enumerate(jaxpr.eqns):
        for x in variables(equation.invars):
            readers.setdefault(x, []).append(i)
    returned, results, absorbed = set(map(id, jaxpr.outvars)), {}, set()
    for i, equation in dots_in(jaxpr).items():
        (results[i],) = equation.outvars
        users = readers.get(results[i], [])
        if len(users) == 1 and id(results[i]) not in returned and jaxpr.eqns[users[0]].primitive.name == "transpose":
            reader = jaxpr.eqns[users[0]]
            if swaps_factors(reader, equation) and isinstance(dot_of(equation, is_swapped=True), Dot):
                (results[i],) = reader.outvars
                absorbed.add(users[0])
    return results, absorbed


def rows_of(equation: Equation, count: int, counts: Mapping[Any, int]) -> tuple[int, ...] | None:
    """The sizes of the rows that an equation's variables have; None if no variable has as many axes."""
    known = [x for x in variables((*equation.outvars, *equation.invars)) if counts.get(x) == count]
    return next((tuple(x.aval.shape[:count]) for x in known), None)


def sums_rows(equation: Equation, counts: Mapping[Any, int]) -> bool:
    """True for a sum over exactly the rows of its argument."""
    if equation.primitive.name != "reduce_sum" or isinstance(equation.invars[0], core.Literal):
        return False
    count = counts.get(equation.invars[0], 0)
    return bool(count) and equation.invars[0].aval.ndim > count and tuple(equation.params["axes"]) == (*range(count),)


def _carries(equation: Equation, x: Any, rows: Sequence[int] | None) -> bool:
    """True for an argument of an equation that is alone, if it has the rows."""
    if rows is None or not begins(x.aval.shape, rows):
        return False
    if equation.primitive.name == "broadcast_in_dim":
        return tuple(equation.params["broadcast_dimensions"][: len(rows)]) == (*range(len(rows)),)
    return x.aval.ndim > 0


def _is_beside(shape: Sequence[Any], rows: Sequence[int]) -> bool:
    """True for an argument of an elementwise operation: each axis of rows has its size, or 1 for the same in all."""
    return not shape or all(size in (1, own) for size, own in zip(shape[: len(rows)], rows, strict=True))


def _broadcasts_alone(shape: Sequence[Any], dimensions: Sequence[int], rows: Sequence[int]) -> bool:
    """True if the argument has the rows in their places, or is the same for all of them."""
    count = len(rows)
    if tuple(dimensions[:count]) == (*range(count),) and begins(shape, rows):
        return True
    return all(axis >= count or size == 1 for axis, size in zip(dimensions, shape, strict=True))


def _moves_no_row(name: str, params: Mapping[str, Any], count: int) -> bool:
    """True if an operation on an array that begins with the rows leaves them in their places."""
    front = tuple(range(count))
    if name == "transpose":
        return tuple(params["permutation"][:count]) == front
    if name in REDUCTIONS:
        return min(params["axes"], default=0) >= count
    if name == "squeeze":
        return min(params["dimensions"], default=count) >= count
    if name == "slice":
        strides = params["strides"] or (1,) * len(params["start_indices"])
        return not any(params["start_indices"][:count]) and all(stride == 1 for stride in strides[:count])
    if name == "split":
        return bool(params["axis"] >= count)
    if name == "concatenate":
        return bool(params["dimension"] >= count)
    if name == "pad":
        return not any(any(one) for one in params["padding_config"][:count])
    return True
