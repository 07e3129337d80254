"""The rows of a jaxpr's variables: axes in front that equations treat alone, so that they may become one axis.

A product gives its result the rows of its first factor. From there they are followed through all equations that treat
each row alone, forward and backward: the rows of a residual stream are those of the products that read it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from coda_jax.fusion.custom import Rule, has_elementwise_derivative, may_be_opened, opened_rule
from coda_jax.fusion.dots import Dot, Equation, begins, dot_of, products_in, swaps_factors
from coda_jax.fusion.picks import is_along_last
from coda_jax.graph.constraint import CONSTRAINTS, constraint_of, is_constraint
from coda_jax.graph.on_mesh import ELEMENTWISE, PVARY
from coda_jax.graph.row_axes import KEEPS_ROWS, VIEWS, RowAxes, with_rows
from coda_jax.graph.values import is_seen
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES, callee, opened
from coda_jax.jaxprs.def_use import DefUse, variables
from coda_jax.jaxprs.evaluate import inlined
from coda_jax.primitives.mesh_types import explicit_cuts

MARKS = CONSTRAINTS | {"name"}  # they say something of an array, and give it back
SHAPES = MARKS | VIEWS.keys() | {"copy"}
OF_ELEMENTS = ELEMENTWISE | PVARY | MARKS
_ALONE = OF_ELEMENTS | KEEPS_ROWS.keys() | CUSTOM_DERIVATIVES


@dataclasses.dataclass(frozen=True)
class RowRule:
    """A rule whose functions treat each row alone; the backward one may sum over all rows.

    Attributes:
      value: the results of the arguments, a straight jaxpr.
      rule: the other functions, which are straight too.
      counts: of the variables of all three, as in `Rows`.
    """

    value: core.ClosedJaxpr
    rule: Rule
    counts: Mapping[Any, int]

    @functools.cached_property
    def text(self) -> tuple[str, ...]:
        """The functions as text: two rules that have the same are alike."""
        return tuple(str(one) for one in (self.value, self.rule.forward, self.rule.backward, self.rule.is_recursive))


class Rows:
    """How many axes in front of each variable are rows.

    Attributes:
      counts: for the variables that have rows.
      dots: the products, by the equation's number.
      results: of the products, by the equation's number.
      absorbed: the equations that are part of a product: transposes of its result.
      reasons: why another equation of `PRODUCTS` is no product, by the equation's number.
      rules: of custom_vjp_calls by the equation's id; None where they do more than treat rows.

    Args:
      def_use: of a straight jaxpr.
      given: counts of some of its variables, where it becomes no graph.
    """

    def __init__(self, def_use: DefUse, given: Mapping[Any, int] | None = None):
        equations = self._equations = def_use.equations
        self.counts: dict[Any, int] = dict(given or {})
        self._alone = _ALONE if given is None else _ALONE | {"gather"}  # of no graph
        self.rules: dict[int, RowRule | None] = {}
        self._elementwise: dict[int, bool] = {}  # functions with a derivative of their own
        self.results, self.absorbed = results_of_dots(def_use)
        found = {i: dot_of(equations[i], is_swapped=x is not equations[i].outvars[0]) for i, x in self.results.items()}
        self.dots = {i: x for i, x in found.items() if isinstance(x, Dot)}
        self.reasons = {i: x for i, x in found.items() if isinstance(x, str)}
        size = -1
        while len(self.counts) > size:  # each round goes once forward and once backward
            size = len(self.counts)
            for i, equation in [*enumerate(equations), *reversed(list(enumerate(equations)))]:
                if i in self.dots:
                    self._follow_product(self.dots[i], self.results[i])
                elif i not in self.absorbed:
                    self._follow(equation)

    def of(self, x: Any) -> int:
        """How many of its axes in front are rows."""
        return 0 if isinstance(x, core.Literal) else self.counts.get(x, 0)

    def block_rows(self) -> tuple[int, ...]:
        """The rows with most of the products' operations."""
        flops: dict[tuple[int, ...], int] = {}
        for dot in self.dots.values():
            if not dot.transpose_a:
                rows = tuple(dot.a.aval.shape[: dot.rows_a])
                flops[rows] = flops.get(rows, 0) + dot.flops
        return max(flops, key=lambda rows: flops[rows], default=())

    def mesh_axes(self) -> set[str]:
        """The mesh axes by which constraints shard rows."""
        constraints = (e for e in self._equations if e.primitive.name in CONSTRAINTS)
        return set[str]().union(*(constraint_of(e).mesh_axes(self.of(e.outvars[0])) for e in constraints))

    def _follow_product(self, dot: Dot, result: Any) -> None:
        self.counts.setdefault(dot.a, dot.rows_a)
        if dot.transpose_a:
            self.counts.setdefault(dot.b, dot.rows_b)
        else:
            self.counts.setdefault(result, dot.rows_a)

    def _follow(self, equation: Equation) -> None:
        every = variables((*equation.invars, *equation.outvars))
        if equation.primitive.name not in CUSTOM_DERIVATIVES and all(x in self.counts for x in every):
            return
        counts = {self.of(x) for x in (*equation.invars, *equation.outvars)} - {0}
        if len(counts) != 1 or equation.primitive.name not in self._alone:
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
        if name not in self._alone or (name in CONSTRAINTS and not is_constraint(equation)):
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
        if name in CUSTOM_DERIVATIVES:
            return self._has_alone_derivative(equation, rows)
        if name == "gather":
            batched = len(params["dimension_numbers"].operand_batching_dims)
            return is_along_last(equation) and batched == count == equation.invars[0].aval.ndim - 1
        if name == "broadcast_in_dim" and _is_alike(shapes[0], params["broadcast_dimensions"], count):
            return True
        if not all(begins(shape, rows) for shape in (shapes[:1] if name == "pad" else shapes)):
            return False
        return with_rows(name, params, RowAxes(count, rows)) is not None

    def _has_alone_derivative(self, equation: Equation, rows: tuple[Any, ...]) -> bool:
        """True for a function with a derivative of its own, if both treat each row alone."""
        own = id(equation)
        if equation.primitive.name == "custom_jvp_call":
            if own not in self._elementwise:
                self._elementwise[own] = has_elementwise_derivative(equation)
            return self._elementwise[own] and all(_is_beside(x.aval.shape, rows) for x in equation.invars)
        if any(is_table(x, rows) for x in equation.invars):
            return False
        if own not in self.rules:
            self.rules[own] = _row_rule(equation, rows)
        return self.rules[own] is not None

    def treats_rows(self, equation: Equation, count: int) -> bool:
        """True for an equation of a rule that treats each row alone, or arrays without rows, or that sums all rows."""
        known, every = [x for x in (*equation.invars, *equation.outvars) if self.of(x)], equation.invars
        if equation.effects or equation.primitive.name == "name" or not all(is_seen(x.aval.dtype) for x in every):
            return False
        if not known:
            return equation.primitive.name in ELEMENTWISE | {"iota"} | SHAPES - MARKS
        if sums_rows(equation, self.counts):
            return True
        rows = rows_of(equation, count, self.counts)
        has_table = rows is not None and any(is_table(x, rows) and not self.of(x) for x in every)
        return not has_table and self.is_alone(equation, count)


def _row_rule(equation: Equation, rows: tuple[Any, ...]) -> RowRule | None:
    """The rule of a custom_vjp_call whose arguments have these rows where they begin with them; None for another."""
    counts = dict[Any, int]()
    types: list[Any] = [x.aval for x in equation.invars]
    results, flags = [True] * len(equation.outvars), [begins(x.shape, rows) for x in types]
    counted = functools.partial(_counted, counts, len(rows))
    if not may_be_opened(equation) or any(any(explicit_cuts(x)) for x in types):
        return None
    value = inlined(core.ClosedJaxpr(*opened(callee(equation))))
    rule = opened_rule(equation) if counted(value, flags, results) == results else None
    kept = None if rule is None else counted(rule.forward, flags, results)
    if rule is None or kept is None or kept[: len(results)] != results:
        return None
    own = [flag for flag, is_differentiated in zip(flags, rule.is_differentiated, strict=True) if is_differentiated]
    found = counted(rule.backward, [*kept[len(results) :], *results], own)
    return RowRule(value, rule, counts) if found == own else None


def _counted(
    counts: dict[Any, int], count: int, closed: core.ClosedJaxpr, flags: Sequence[bool], of_results: Sequence[bool]
) -> list[bool] | None:
    """Flags of the results that have rows; None for a function that does not treat these alone.

    Args:
      counts: receives those of its variables.
      count: axes of rows.
      closed: the function.
      flags: which arguments have rows.
      of_results: which of the first results have rows; these may be the same in all.
    """
    jaxpr = closed.jaxpr
    given = [x for x, flag in zip(jaxpr.invars, flags, strict=True) if flag]
    given += variables(itertools.compress(jaxpr.outvars, of_results))
    found = Rows(DefUse(jaxpr), dict.fromkeys(given, count))
    if closed.consts or not all(found.treats_rows(e, count) for e in jaxpr.eqns):
        return None
    counts.update(found.counts)
    return [bool(found.of(x)) for x in jaxpr.outvars]


def is_table(x: Any, rows: Sequence[Any]) -> bool:
    """True for a variable that differs along axes of rows, but has not all of them."""
    shape = x.aval.shape
    return len(shape) >= len(rows) and not begins(shape, rows) and any(size != 1 for size in shape[: len(rows)])


def results_of_dots(def_use: DefUse) -> tuple[dict[int, Any], set[int]]:
    """The result of each product, by number, and the numbers of the transposes that are part of one."""
    results, absorbed = {}, set()
    for i, equation in products_in(def_use.jaxpr).items():
        (results[i],) = equation.outvars
        reader = def_use.only_reader(results[i])
        is_part = reader is not None and reader.primitive.name == "transpose" and swaps_factors(reader, equation)
        if is_part and isinstance(dot_of(equation, is_swapped=True), Dot):
            (results[i],) = reader.outvars
            absorbed.add(def_use.number(reader))
    return results, absorbed


def rows_of(equation: Equation, count: int, counts: Mapping[Any, int]) -> tuple[int, ...] | None:
    """The sizes of the rows that an equation's variables have; None if no variable has as many axes."""
    known = [x for x in variables((*equation.outvars, *equation.invars)) if counts.get(x) == count]
    return next((tuple(x.aval.shape[:count]) for x in known), None)


def sums_rows(equation: Equation, counts: Mapping[Any, int]) -> bool:
    """True for a sum over the rows of its argument, and over axes right behind these, as heads, but not all axes."""
    if equation.primitive.name != "reduce_sum" or isinstance(equation.invars[0], core.Literal):
        return False
    count, axes = counts.get(equation.invars[0], 0), tuple(equation.params["axes"])
    return 0 < count <= len(axes) < equation.invars[0].aval.ndim and axes == (*range(len(axes)),)


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


def _is_alike(shape: Sequence[Any], dimensions: Sequence[int], count: int) -> bool:
    """True if what is broadcast is the same for all rows."""
    return all(axis >= count or size == 1 for axis, size in zip(dimensions, shape, strict=True))
