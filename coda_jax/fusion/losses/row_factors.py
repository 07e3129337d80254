"""Factors that are the same along a vocabulary stand behind the sums over it and the picks along it.

    sum_v r a[v] h[v] = r sum_v a[v] h[v]        sum_tv a[t, v] = sum_t sum_v a[t, v]        (r - a)[y] = -(a - r)[y]

Here r is a number of each token, as a mask, and h a one-hot array. Losses are looked for behind this: what they read of
log-probabilities are then sums over the vocabulary alone, and picks of the log-probabilities themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.fusion.dots import Equation
from coda_jax.fusion.losses.logits import exponentials_of
from coda_jax.fusion.makers import Makers, among
from coda_jax.fusion.picks import is_along_last, one_hot
from coda_jax.fusion.straight import at_line, results_with
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.evaluate import needed_jaxpr, read
from coda_jax.primitives.mesh_types import explicit_cuts


def with_factors_behind(closed: core.ClosedJaxpr, least: int) -> core.ClosedJaxpr:
    """A straight jaxpr whose sums and picks along at least so many columns have factors of rows behind them."""
    rewritten = _Rewritten(Makers(closed.jaxpr), least)
    if not rewritten.products:
        return closed
    return needed_jaxpr(lambda *arrays: rewritten.results(closed, arrays), closed.in_avals)


@dataclasses.dataclass(frozen=True)
class _Row:
    """A factor of each row of an array (..., V).

    Attributes:
      source: the variable whose elements it is.
      dimensions: the axes of the rows that the source has, without a last one of 1.
      dtype: of the factor.
      kind: "mul", "div", or "select" for one that is multiplied with, divided by, or a mask of what is not 0.
      keeps: the value that a mask has there.
    """

    source: Any
    dimensions: tuple[int, ...]
    dtype: Any
    kind: str = "mul"
    keeps: bool = True

    def value(self, values: dict[Any, Any], rows: Sequence[Any]) -> jax.Array:
        """The factor of each row."""
        x = values[self.source]
        x = lax.squeeze(x, [x.ndim - 1]) if x.ndim > len(self.dimensions) else x
        x = x if x.shape == tuple(rows) else lax.broadcast_in_dim(x, rows, self.dimensions)
        return x.astype(self.dtype)

    def applied(self, x: jax.Array, values: dict[Any, Any]) -> jax.Array:
        """An array of rows with the factor."""
        factor = self.value(values, x.shape)
        if self.kind == "select":
            cases = [lax.full_like(x, 0), x]
            return lax.select_n(factor, *(cases if self.keeps else cases[::-1]))
        return x * factor.astype(x.dtype) if self.kind == "mul" else x / factor.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class _Product:
    """An array (..., V) as the product of a number, of factors of rows, and of arrays.

    Attributes:
      arrays: the variables; for r - a the equation, of which a - r is meant.
    """

    number: float = 1.0
    rows: tuple[_Row, ...] = ()
    arrays: tuple[Any, ...] = ()

    def times(self, other: _Product) -> _Product:
        return _Product(self.number * other.number, self.rows + other.rows, self.arrays + other.arrays)

    @property
    def is_changed(self) -> bool:
        """Whether it is another one than that of its arrays."""
        return self.number != 1.0 or bool(self.rows) or not all(isinstance(x, core.Var) for x in self.arrays)


class _Rewritten:
    """The sums and the picks of a jaxpr that have factors of rows.

    Attributes:
      products: what each of them, by the variable that it is, reads.
    """

    def __init__(self, makers: Makers, least: int):
        self._makers = makers
        self.products: dict[Any, _Product] = {}
        found = exponentials_of(makers, least)
        self._exponents = found.exponents  # they stay: logits may be scaled, as by a cap
        wide = set[Any]().union(*found.wide)
        for equation in makers.read_by(wide, "reduce_sum", "gather"):
            if among(equation.invars[0], wide):
                product = self._product(equation.invars[0])
                if self._is_moved(equation, product):
                    self.products[equation.outvars[0]] = product

    def _is_moved(self, equation: Equation, product: _Product) -> bool:
        """True for a sum, or a pick, of one array that is made of logits, maybe with a one-hot one, whose factors move.

        No factor of rows stands behind a number that is filled in for labels outside of the columns.
        """
        operand, last = equation.invars[0].aval, equation.invars[0].aval.ndim - 1
        hot = [x for x in product.arrays if isinstance(x, core.Var) and one_hot(self._makers, x) is not None]
        if len(product.arrays) != 1 + len(hot) or len(hot) > 1 or any(explicit_cuts(operand)):
            return False
        if equation.primitive.name == "gather":
            mode = str(getattr(equation.params["mode"], "name", equation.params["mode"]))
            is_filled = mode == "FILL_OR_DROP" and equation.params["fill_value"] is not None
            is_whole = product.is_changed and product.number != 0.0 and not (is_filled and product.rows)
            return is_whole and not hot and is_along_last(equation)
        axes = equation.params["axes"]
        return last in axes and (product.is_changed or len(axes) > 1)

    def _product(self, x: Any) -> _Product:
        """The variable as a product."""
        maker = self._makers.maker(x)
        if maker is None or x in self._exponents or one_hot(self._makers, x) is not None:
            return _Product(arrays=(x,))
        name, inputs = maker.primitive.name, maker.invars
        if name == "neg":
            return self._product(inputs[0]).times(_Product(-1.0))
        if name == "convert_element_type" and is_float(inputs[0].aval.dtype):
            return self._product(inputs[0])
        if name in ("mul", "div"):
            return self._multiplied(x, inputs, name)
        if name == "select_n" and len(inputs) == 3:
            return self._selected(x, inputs)
        if name == "sub" and self._row(inputs[0]) is not None and self._is_whole(inputs[1], x):
            return _Product(-1.0, (), (maker,))
        return _Product(arrays=(x,))

    def _multiplied(self, x: Any, inputs: Sequence[Any], kind: str) -> _Product:
        """The product, or the quotient, of two."""
        factors = [self._row(y, kind if i else "mul") for i, y in enumerate(inputs)]
        arrays = [y for y, row in zip(inputs, factors, strict=True) if row is None]
        if not all(self._is_whole(y, x) for y in arrays) or (kind == "div" and factors[1] is None) or not arrays:
            return _Product(arrays=(x,))
        rows = [row for row in factors if row is not None]  # behind those of the arrays
        product = functools.reduce(_Product.times, [*map(self._product, arrays), *rows])
        return product if math.isfinite(product.number) else _Product(arrays=(x,))

    def _selected(self, x: Any, inputs: Sequence[Any]) -> _Product:
        """An array where a mask of rows says so, and 0 elsewhere."""
        mask, *cases = inputs
        found = self._row(mask, "select")
        zeros = [self._makers.constant(case) == 0.0 for case in cases]
        if found is None or not found.rows or sum(zeros) != 1 or not self._is_whole(cases[zeros.index(False)], x):
            return _Product(arrays=(x,))
        keeps = not zeros[1]
        rows = tuple(dataclasses.replace(row, keeps=keeps) for row in found.rows)
        return self._product(cases[int(keeps)]).times(_Product(rows=rows))

    @staticmethod
    def _is_whole(x: Any, whole: Any) -> bool:
        """True for a variable with all rows and columns of another one."""
        return not isinstance(x, core.Literal) and x.aval.shape == whole.aval.shape

    def _row(self, x: Any, kind: str = "mul") -> _Product | None:
        """A factor that is the same in all columns; None for another array."""
        number = self._makers.constant(x) if kind != "select" else None
        if number is not None:
            return _Product(number if kind == "mul" else 1 / number if number else math.inf)
        if isinstance(x, core.Literal) or not x.aval.shape:
            return None if isinstance(x, core.Literal) else _Product(rows=(_Row(x, (), x.aval.dtype, kind),))
        dtype, dimensions = x.aval.dtype, tuple(range(x.aval.ndim))
        last = x.aval.ndim - 1
        while x.aval.shape and dimensions[-1] == last and x.aval.shape[-1] != 1:
            maker = self._makers.maker(x)
            name = "" if maker is None else maker.primitive.name
            if maker is None or name not in ("broadcast_in_dim", "convert_element_type"):
                return None
            x = maker.invars[0]
            if isinstance(x, core.Literal):
                return None
            if name == "broadcast_in_dim":
                dimensions = tuple(dimensions[axis] for axis in maker.params["broadcast_dimensions"])
        dimensions = dimensions[:-1] if dimensions[-1:] == (last,) else dimensions
        return _Product(rows=(_Row(x, dimensions, dtype, kind),))

    def results(self, closed: core.ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
        """The results of the jaxpr at these arrays."""

        def made(equation: Equation, values: dict[Any, Any]) -> list[jax.Array] | None:
            product = self.products.get(next(iter(equation.outvars), None))
            return None if product is None else at_line(equation, self._made, equation, product, values)

        return results_with(closed, arrays, made)

    def _made(self, equation: Equation, product: _Product, values: dict[Any, Any]) -> list[jax.Array]:
        """The result of a sum or a pick."""
        operand, (out,), params = equation.invars[0].aval, equation.outvars, equation.params
        wide = _array(product.arrays[0], values).astype(operand.dtype)
        for one in product.arrays[1:]:
            wide = wide * _array(one, values).astype(operand.dtype)
        if equation.primitive.name == "gather":
            fill = params["fill_value"]
            params = params | {"fill_value": fill if fill is None else fill / product.number}
            (made,) = bind(equation.primitive, [wide, read(values, equation.invars[1])], params)
            made = made.reshape(operand.shape[:-1])
        else:
            made = jnp.sum(wide, axis=-1)
        for row in product.rows:
            made = row.applied(made, values)
        made = -made if product.number == -1.0 else made if product.number == 1.0 else made * product.number
        if equation.primitive.name == "reduce_sum":
            made = jnp.sum(made, axis=tuple(axis for axis in params["axes"] if axis != operand.ndim - 1))
        made = made if made.shape == out.aval.shape else made.reshape(out.aval.shape)
        return [made.astype(out.aval.dtype)]


def _array(x: Any, values: dict[Any, Any]) -> jax.Array:
    """The value of one of a product's arrays."""
    if isinstance(x, core.Var):
        made: jax.Array = values[x]
        return made
    row, wide = (read(values, y) for y in x.invars)
    (made,) = bind(x.primitive, [wide, row], x.params)
    return made
