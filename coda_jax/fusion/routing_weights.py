"""Factors of rows behind a product of groups, as routing weights are, move in front of it.

    s (h W) = (s h) W                                         s one number a row, W the matrix of the row's group

The derivative of the second form keeps neither h W nor reads it: the gradient of s is a sum over the columns of h and
of dz W^T, which the product with W^T makes anyway, in its epilogue (SonicMoE, arXiv 2512.14080). In equations that JAX
has differentiated all that follows of it is rewritten together:

    y = h W, z = s y              z = (s h) W
    ds = sum of y dz              ds = sum of h (dz W^T)
    dh = (s dz) W^T               dh = s (dz W^T)
    dW = h^T (s dz)               dW = (s h)^T dz             the rows of each group
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.fusion.dots import PRODUCTS, RAGGED, Dot, Equation, dot_of, is_derivative, products_in
from coda_jax.fusion.makers import Makers, among
from coda_jax.fusion.rows import OF_ELEMENTS
from coda_jax.fusion.straight import at_line, results_with
from coda_jax.graph.row_axes import KEEPS_ROWS
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.evaluate import needed_jaxpr, read

_OF_ROWS = OF_ELEMENTS | KEEPS_ROWS.keys() | CUSTOM_DERIVATIVES


def with_weights_in_front(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A straight jaxpr in which factors of rows stand in front of products of groups, where an epilogue makes h."""
    if not any(e.primitive.name == RAGGED for e in closed.jaxpr.eqns):
        return closed
    found = list(_Weights(Makers(closed.jaxpr)).found())
    if not found:
        return closed
    own: dict[int, Callable[[dict[Any, Any]], Any]] = {}
    for one in found:
        own |= one.rules()

    def made(equation: Equation, values: dict[Any, Any]) -> Sequence[Any] | None:
        rule = own.get(id(equation))
        return None if rule is None else [at_line(equation, rule, values)]

    return needed_jaxpr(lambda *arrays: results_with(closed, arrays, made), closed.in_avals)


@dataclasses.dataclass(frozen=True, eq=False)
class _Weighted:
    """A product of groups whose rows are multiplied by numbers, and its derivative.

    Attributes:
      product: y = h W.
      dot: the same.
      factor: s, (M, 1).
      scaled: z = s y.
      cotangent: dz; None where the jaxpr has no derivative of it, as are the others.
      backward: dh = (s dz) W^T.
      sums: ds, the sum of y dz over columns.
      contractions: dW = h^T (s dz), or its transpose.
    """

    product: Equation
    dot: Dot
    factor: Any
    scaled: Equation
    cotangent: Any = None
    backward: Equation | None = None
    sums: Equation | None = None
    contractions: Sequence[Equation] = ()

    def rules(self) -> dict[int, Callable[[dict[Any, Any]], Any]]:
        """For the equations that are made in another way, by their ids, the result of the values before it."""
        rules: dict[int, Callable[[dict[Any, Any]], Any]] = {id(self.scaled): self._scaled_product}
        if self.backward is None or self.sums is None:
            return rules
        known: dict[int, tuple[Any, Any]] = {}  # dz W^T of each evaluation

        def pulled_back(values: dict[Any, Any]) -> Any:
            if id(values) not in known:
                known[id(values)] = values, self._pulled_back(values)
            return known[id(values)][1]

        rules[id(self.backward)] = functools.partial(self._backward, pulled_back)
        rules[id(self.sums)] = functools.partial(self._sums, pulled_back)
        return rules | {id(e): functools.partial(self._contraction, e) for e in self.contractions}

    def _weighted(self, values: dict[Any, Any], x: Any, dtype: Any) -> Any:
        """s x in float32, rounded to a dtype."""
        wide = jnp.asarray(x, FLOAT32) * jnp.asarray(read(values, self.factor), FLOAT32)
        return wide.astype(dtype)

    def _scaled_product(self, values: dict[Any, Any]) -> Any:
        h, w, groups = (read(values, x) for x in self.product.invars)
        dtype = self.scaled.outvars[0].aval.dtype
        own = self.product.outvars[0].aval.dtype
        params = self.product.params if dtype == own else {**self.product.params, "preferred_element_type": dtype}
        (z,) = bind(self.product.primitive, [self._weighted(values, h, h.dtype), w, groups], params)
        return z

    def _pulled_back(self, values: dict[Any, Any]) -> Any:
        assert self.backward is not None
        w, groups = read(values, self.dot.b), read(values, self.dot.groups)
        dz = jnp.asarray(read(values, self.cotangent), w.dtype)
        (dh,) = bind(self.backward.primitive, [dz, w, groups], self.backward.params)
        return dh

    def _backward(self, pulled_back: Callable[..., Any], values: dict[Any, Any]) -> Any:
        dh = pulled_back(values)
        return self._weighted(values, dh, dh.dtype)

    def _sums(self, pulled_back: Callable[..., Any], values: dict[Any, Any]) -> Any:
        assert self.sums is not None
        h, dh = (jnp.asarray(x, FLOAT32) for x in (read(values, self.dot.a), pulled_back(values)))
        return jnp.sum(h * dh, axis=1).astype(self.sums.outvars[0].aval.dtype)

    def _contraction(self, equation: Equation, values: dict[Any, Any]) -> Any:
        *factors, groups = equation.invars
        h = self._weighted(values, read(values, self.dot.a), self.dot.a.aval.dtype)
        dz = jnp.asarray(read(values, self.cotangent), h.dtype)
        given = [h if x is self.dot.a else dz for x in factors]
        (dw,) = bind(equation.primitive, [*given, read(values, groups)], equation.params)
        return dw


class _Weights:
    """Finds the products of groups whose rows are multiplied by numbers.

    Args:
      makers: of a straight jaxpr.
    """

    def __init__(self, makers: Makers):
        self._makers, self._is_derivative = makers, is_derivative(makers.jaxpr)
        self._dots = {id(e): dot for e in products_in(makers.jaxpr).values() if isinstance(dot := dot_of(e), Dot)}

    def found(self) -> Iterator[_Weighted]:
        for equation in self._makers.equations:
            dot = self._dots.get(id(equation))
            if equation.primitive.name == RAGGED and dot is not None and dot.has_matrices and self._is_made(dot.a):
                one = self._weighted(equation, dot)
                if one is not None:
                    yield one

    def _is_made(self, h: Any) -> bool:
        """True for the first factor of a product that is made of another one, row by row: an epilogue can scale it."""
        open_, seen = [h], set[Any]()
        while open_:
            x = open_.pop()
            maker = self._makers.maker(x)
            if maker is None or x in seen:
                continue
            seen.add(x)
            if maker.primitive.name in PRODUCTS:
                return True
            if maker.primitive.name in _OF_ROWS:
                open_ += variables(maker.invars)
        return False

    def _weighted(self, product: Equation, dot: Dot) -> _Weighted | None:
        readers = self._readers(product.outvars[0])
        if readers is None:
            return None
        scaled = [(e, s) for e, y in readers if (s := self._factor(e, y)) is not None]
        others = [e for e, _ in readers if not any(e is one for one, _ in scaled)]
        if len(scaled) != 1 or len(others) != self._is_derivative:
            return None
        ((multiply, factor),) = scaled
        one = _Weighted(product, dot, factor, multiply)
        return self._with_derivative(one, others[0]) if self._is_derivative else one

    def _readers(self, x: Any) -> list[tuple[Equation, Any]] | None:
        """The equations that read a variable, or what it is cast to, each with what it reads; None for a result."""
        found = self._casts(x)
        if not self._makers.results.isdisjoint(found):
            return None
        each = [(e, y) for y in found for e in self._makers.readers(y)]
        return [(e, y) for e, y in each if e.outvars[0] not in found]

    def _casts(self, x: Any) -> list[Any]:
        """A variable and what it is cast to, between floats."""
        found = [x]
        for y in found:
            casts = [e for e in self._makers.readers(y) if e.primitive.name == "convert_element_type"]
            found += [e.outvars[0] for e in casts if is_float(e.outvars[0].aval.dtype)]
        return found

    def _uncast(self, x: Any) -> Any:
        while (maker := self._makers.maker(x)) is not None and maker.primitive.name == "convert_element_type":
            if not variables(maker.invars) or not is_float(maker.invars[0].aval.dtype):
                break
            (x,) = maker.invars
        return x

    def _factor(self, equation: Equation, y: Any) -> Any:
        """The factor (M, 1) of rows by which an equation multiplies y; None for another one."""
        if equation.primitive.name != "mul":
            return None
        others = [x for x in equation.invars if x is not y]
        return self._of_rows(others[0], y.aval.shape) if len(others) == 1 else None

    def _of_rows(self, x: Any, shape: Sequence[Any]) -> Any:
        """The variable (M, 1) that an array beside one of this shape repeats along columns; None for another array."""
        x = self._uncast(x)
        if isinstance(x, core.Literal) or len(x.aval.shape) != 2 or not same_size(x.aval.shape[0], shape[0]):
            return None
        if same_size(x.aval.shape[1], 1):
            return None if same_size(shape[1], 1) else x
        maker = self._makers.maker(x)
        if maker is None or maker.primitive.name != "broadcast_in_dim" or isinstance(maker.invars[0], core.Literal):
            return None
        (source,), dimensions = maker.invars[:1], tuple(maker.params["broadcast_dimensions"])
        is_column = dimensions == (0, 1) and same_size(source.aval.shape[1], 1)
        return source if is_column and same_size(source.aval.shape[0], shape[0]) else None

    def _with_derivative(self, one: _Weighted, times: Equation) -> _Weighted | None:
        """The product with its derivative; `times` is y dz."""
        y = self._casts(one.product.outvars[0])
        others = [x for x in times.invars if not among(x, y)] if times.primitive.name == "mul" else []
        readers = self._readers(times.outvars[0]) if len(others) == 1 and times.primitive.name == "mul" else None
        if (
            not readers
            or len(readers) != 1
            or not variables(others)
            or not same_shape(others[0].aval.shape, y[0].aval.shape)
        ):
            return None
        sums, cotangent = readers[0][0], self._uncast(others[0])
        if sums.primitive.name != "reduce_sum" or tuple(sums.params["axes"]) != (1,):
            return None
        for multiply, x in self._readers(cotangent) or ():
            factor = self._factor(multiply, x)
            if factor is not None and self._makers.are_alike(factor, one.factor):
                whole = self._with_products(
                    dataclasses.replace(one, cotangent=cotangent, sums=sums), multiply.outvars[0]
                )
                if whole is not None:
                    return whole
        return None

    def _with_products(self, one: _Weighted, dy: Any) -> _Weighted | None:
        """The product with those that read s dz, if they are those of its derivative alone."""
        backward, contractions = list[Equation](), list[Equation]()
        for equation, x in self._readers(dy) or ():
            dot = self._dots.get(id(equation))
            if dot is None or dot.groups is not one.dot.groups:
                return None
            is_weights = dot.has_matrices and dot.b is one.dot.b and dot.transpose_b != one.dot.transpose_b
            if dot.a is x and is_weights:
                backward.append(equation)
            elif dot.transpose_a and {dot.a, dot.b} == {one.dot.a, x}:
                contractions.append(equation)
            else:
                return None
        if len(backward) != 1:
            return None
        return dataclasses.replace(one, backward=backward[0], contractions=contractions)
