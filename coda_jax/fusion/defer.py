"""A norm that a product may read deferred: its rows' factor goes through the product.

    y = r x s, r of rows and s of columns:   y W = r (x (s W))

It is tried where products alone read y, and r is a reciprocal root: then r is no zero, by which the derivative divides,
and it waits for a sum over the row, so that y could be made in no epilogue. `graph.norm` has the derivative.

It pays where there are many rows. y is then never in memory: a pass forward, and two backward, each read and write as
much as y has. But s W is: a pass over W writes it in each direction, and the gradient of s reads W. And the derivative
reads the inner products of y W and its cotangent, which an epilogue makes only where a product makes the cotangent, not
attention. `saves_bytes` compares all this for each norm. Weights in float32 are cast in any case.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend import core

from coda_jax.fusion.dots import Dot, Equation
from coda_jax.fusion.units import Units
from coda_jax.graph.constraint import CONSTRAINTS, Constraint, constraint_of
from coda_jax.graph.values import Value, is_float

_VIEWS = CONSTRAINTS | {"broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy"}


@dataclasses.dataclass(eq=False)
class Deferred:
    """A value r x s.

    Attributes:
      base: x, a variable with rows.
      rows: the variables whose product is r, with one element for each row.
      powers: of each 1, or -1 where it divides.
      columns: the variables whose product is s.
      factor: a number that r is multiplied by.
      value: of r, (M, 1), once it is made.
      constraint: of r x s; None for none.
    """

    base: Any = None
    rows: list[Any] = dataclasses.field(default_factory=list)
    powers: list[int] = dataclasses.field(default_factory=list)
    columns: list[Any] = dataclasses.field(default_factory=list)
    factor: float = 1.0
    value: Value | None = None
    constraint: Constraint | None = None

    def times(self, other: Deferred) -> Deferred | None:
        """The product of both; None if both have a base."""
        if self.base is not None and other.base is not None:
            return None
        return Deferred(
            other.base if self.base is None else self.base,
            self.rows + other.rows,
            self.powers + other.powers,
            self.columns + other.columns,
            self.factor * other.factor,
        )

    def inverse(self) -> Deferred | None:
        """Its reciprocal, if it is one of rows and numbers."""
        if self.base is not None or self.columns or not self.factor:
            return None
        return Deferred(rows=self.rows, powers=[-power for power in self.powers], factor=1 / self.factor)


def saves_bytes(products: Mapping[int, Dot], units: Units) -> bool:
    """True if it moves less to defer the norm that these products, all that there are, read; also if it is unknown."""
    rows, width = next(iter(products.values())).matrix_a
    by_calls = sum(dot.columns for i, dot in products.items() if units.is_read_outside(units.rows.results[i]))
    saved = (3 * 2 * width - 2 * by_calls) * units.dtype.itemsize * rows
    weights = {units.uncast(dot.b): (dot.columns, units.jaxpr.eqns[i].params) for i, dot in products.items()}
    each = ((columns, w.aval.dtype, "rounding" in params) for w, (columns, params) in weights.items())
    moved = sum(width * columns * _bytes_of_scaling(own, units.dtype, flag) for columns, own, flag in each)
    try:
        return bool(saved >= moved)
    except jax.errors.InconclusiveDimensionOperation:  # of symbolic sizes
        return True


def _bytes_of_scaling(own: np.dtype[Any], dtype: np.dtype[Any], is_rounded: bool) -> int:
    """The bytes that scaling an element of a weight moves: forward, backward, and for the gradient of the scale.

    A weight that is cast or rounded to 8 bits is written in any case.
    """
    passes = 2 * (own.itemsize + dtype.itemsize) if own == dtype and not is_rounded else 0
    return passes + own.itemsize


def deferred(x: Any, units: Units) -> Deferred | None:
    """The variable x (rows..., D) as r x s; None if it is no such product."""
    count = units.rows.of(x)
    if x.aval.ndim != count + 1 or not is_float(x.aval.dtype):
        return None
    found = _Factors(units, count, x.aval.shape[-1]).of(x)
    if found is None or found.base is None or found.base is x or not found.rows:
        return None
    maker = units.maker(x, "map")
    if maker is not None and maker.primitive.name in CONSTRAINTS:
        found.constraint = constraint_of(maker)
    each = zip(found.rows, found.powers, strict=True)
    return found if all(_is_root(row, power, units) for row, power in each) else None


class _Factors:
    """The factors of variables (rows..., D)."""

    def __init__(self, units: Units, count: int, width: Any):
        self._units, self._count, self._width = units, count, width

    def of(self, x: Any) -> Deferred | None:
        if isinstance(x, core.Literal):
            return Deferred(factor=float(x.val)) if np.ndim(x.val) == 0 and is_float(np.result_type(x.val)) else None
        units = self._units
        x = units.uncast(x)
        if not units.rows.of(x):
            return self._column(x)
        if math.prod(x.aval.shape[self._count :]) == 1 and self._width != 1:
            return Deferred(rows=[_row(x, units)], powers=[1])
        equation = units.maker(x, "map")
        name = "" if equation is None else equation.primitive.name
        if equation is not None and name == "broadcast_in_dim":
            return self._broadcast(equation)
        if equation is not None and name in CONSTRAINTS:
            return self.of(equation.invars[0])
        if equation is not None and name in ("mul", "div"):
            left, right = map(self.of, equation.invars)
            right = right.inverse() if right is not None and name == "div" else right
            product = None if left is None or right is None else left.times(right)
            if product is not None:
                return product
        return Deferred(base=x) if x.aval.shape[-1] == self._width else None

    def _broadcast(self, equation: Equation) -> Deferred | None:
        (x,), dimensions = equation.invars, equation.params["broadcast_dimensions"]
        if isinstance(x, core.Literal) or self._units.rows.of(x):
            return self.of(x)
        is_last = tuple(dimensions[-1:]) == (equation.outvars[0].aval.ndim - 1,)
        return self._column(x) if is_last or not x.aval.ndim else None

    def _column(self, x: Any) -> Deferred | None:
        """A variable without rows that has an element for each column."""
        sizes = x.aval.shape
        is_column = bool(sizes) and sizes[-1] == self._width and math.prod(sizes[:-1]) == 1
        return Deferred(columns=[x]) if is_column and is_float(x.aval.dtype) else None


def _row(x: Any, units: Units) -> Any:
    """The variable that a vector of rows is a copy of."""
    while (equation := units.maker(x, "map", "cast")) is not None:
        if equation.primitive.name not in _VIEWS:
            break
        (source,) = equation.invars
        if isinstance(source, core.Literal) or units.rows.of(source) != units.rows.of(x):
            break
        x = source
    return x


def _is_root(x: Any, power: int, units: Units) -> bool:
    """True for a reciprocal root of something of the row."""
    maker = units.jaxpr.eqns[units.makers[x]].primitive.name if x in units.makers else ""
    return maker == ("rsqrt" if power > 0 else "sqrt")
