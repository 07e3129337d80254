"""Logits as a loss reads them: the result of a product, and what is done to it that the loss head does too.

Columns behind the vocabulary are padding where they are set to a number that is far below all logits, -1e4 or less: its
exponential is 0 beside theirs, and it has no gradient. Then the head projects to the vocabulary alone.

The chunks shard x and w alike where the function says how logits are sharded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.fusion.dots import Dot, Equation, dot_of, dots_in, swaps_factors
from coda_jax.fusion.makers import Makers, among, asks_sharding, kept_columns
from coda_jax.graph.constraint import constraint_of
from coda_jax.jaxprs.def_use import variables
from coda_jax.primitives.mesh_types import explicit_cuts

_GREATEST_FILL = -1e4  # of padding
_OTHERS = frozenset({"dot_general", "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin", "gather"})


@dataclasses.dataclass(frozen=True)
class Logits:
    """A product's result with what is done to it.

    Attributes:
      arrays: the variables that are these logits, in several dtypes.
      dot: the product.
      product: its equation.
      vocabulary: the columns that are no padding.
      fill: the number that padding is set to; None where there is none.
      bias: the variable (V,), or (1, ..., V), that is added to each row; None where there is none.
      cap: c of c tanh(z / c), a number or a variable (); None where there is none.
      bounded: the variables that are its tanh.
      moved: the equations that took some of the rows, or gave these other axes; and the first that says how the logits
        are sharded.
    """

    arrays: frozenset[Any]
    dot: Dot
    product: Equation
    vocabulary: Any
    fill: float | None = None
    bias: Any = None
    cap: Any = None
    bounded: frozenset[Any] = frozenset()
    moved: tuple[Equation, ...] = ()

    @property
    def columns(self) -> Any:
        """The view of the arrays."""
        return next(iter(self.arrays)).aval.shape[-1]

    @property
    def rows(self) -> tuple[Any, ...]:
        """The shape of the tokens."""
        rows: tuple[Any, ...] = next(iter(self.arrays)).aval.shape[:-1]
        return rows

    @property
    def dtype(self) -> np.dtype:
        """The dtype that they are rounded to: the product's, but float32 where a bias is added to that."""
        rounded: np.dtype = self.product.outvars[0].aval.dtype
        return rounded if self.bias is None else np.dtype(np.float32)

    @property
    def arguments(self) -> list[Any]:
        """The variables that they are made of."""
        return variables(x for x in (self.dot.a, self.dot.b, self.bias, self.cap) if not isinstance(x, float | None))

    def factors(self, values: dict[Any, Any]) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
        """x (..., D) and w of a head that has these logits, and its options."""
        dot, x, w = self.dot, values[self.dot.a], values[self.dot.b]
        columns, summed = w.shape[0] if dot.transpose_b else w.shape[-1], [None] * (w.ndim - 1)
        if (asked := self._asked) is not None:
            last = len(asked.invars[0].aval.shape) - 1
            w = _constrained(w, asked, [last, *summed] if dot.transpose_b else [*summed, last])
        w = w.reshape(columns, -1) if dot.transpose_b else w.reshape(-1, columns)
        if self.vocabulary != columns:
            w = w[: self.vocabulary] if dot.transpose_b else w[:, : self.vocabulary]
        options: dict[str, Any] = {"transpose_w": dot.transpose_b}
        if self.bias is not None:
            options["bias"] = values[self.bias].reshape(-1)[: self.vocabulary]
        if self.cap is not None:
            options["soft_cap"] = self.cap if isinstance(self.cap, float) else values[self.cap].reshape(())
        return self._moved(x.reshape(*x.shape[: dot.rows_a], math.prod(x.shape[dot.rows_a :]))), w, options

    @property
    def _asked(self) -> Equation | None:
        """The equation that says how the logits are sharded."""
        return next(filter(asks_sharding, self.moved), None)

    def with_constraint(self, makers: Makers) -> Logits:
        """These logits with the first constraint of theirs, if they have none yet."""
        asked = (
            [] if self._asked else [e for e in makers.read_by(self.arrays, "sharding_constraint") if asks_sharding(e)]
        )
        return dataclasses.replace(self, moved=(*self.moved, *asked[:1]))

    def _moved(self, x: jax.Array) -> jax.Array:
        """The rows of x that the logits have; the last axes that these were given are left out."""
        moved = list(self.moved)
        while moved and moved[-1].primitive.name == "reshape":
            moved.pop()
        for equation in moved:
            params, (out,) = equation.params, equation.outvars
            if asks_sharding(equation):
                x = _constrained(x, equation, [*range(x.ndim - 1), None])
            elif equation.primitive.name == "reshape":
                x = x.reshape(*out.aval.shape[:-1], x.shape[-1])
            else:
                strides = params["strides"] and (*params["strides"][:-1], 1)
                x = lax.slice(
                    x, (*params["start_indices"][:-1], 0), (*params["limit_indices"][:-1], x.shape[-1]), strides
                )
        return x


def _constrained(x: jax.Array, asked: Equation, axes: Sequence[int | None]) -> jax.Array:
    """x, sharded as an equation asks of an array that has these axes of x's; None for axes that it has not."""
    constraint = constraint_of(asked).of_axes(axes)
    return x if constraint is None else constraint(x)


def result_of(makers: Makers, product: Equation) -> tuple[Any, Dot | str]:
    """The result of a dot_general, or its transpose where that alone reads it, with the product that it is."""
    (z,) = product.outvars
    if "rounding" in product.params:  # an operator's product rounds nothing
        return z, "its factors are rounded to 8 bits"
    readers = makers.readers(z)
    if len(readers) == 1 and readers[0].primitive.name == "transpose" and swaps_factors(readers[0], product):
        swapped = dot_of(product, is_swapped=True)
        if isinstance(swapped, Dot) and z not in makers.jaxpr.outvars:
            return readers[0].outvars[0], swapped
    return z, dot_of(product)


def made_of(makers: Makers, z: Any) -> set[Any]:
    """The arrays with the columns of a product's result, or most of them, that are made of it and of no sum over it."""
    found, open_, columns = {z}, [z], z.aval.shape[-1]
    while open_:
        for equation in makers.readers(open_.pop()):
            for x in equation.outvars if equation.primitive.name not in _OTHERS else ():
                size = x.aval.shape[-1] if x.aval.shape else 0
                if x not in found and isinstance(size, int) and size <= columns < 2 * size:
                    found.add(x)
                    open_.append(x)
    return found


@dataclasses.dataclass(frozen=True)
class Exponentials:
    """The exponentials of products' results of many columns.

    Attributes:
      arrays: the exponentials.
      exponents: the arrays with columns that they are made of by no other product, and they themselves.
      wide: for each of these products what is `made_of` its result.
    """

    arrays: set[Any]
    exponents: set[Any]
    wide: Sequence[set[Any]]


def exponentials_of(makers: Makers, least: int) -> Exponentials:
    """The exponentials of results of products of at least so many columns."""
    every = (x for e in makers.equations if e.primitive.name == "exp" for x in e.outvars)
    arrays = {x for x in every if _has_columns(x, least)}
    products = dots_in(makers.jaxpr).values() if arrays else ()
    results = dict.fromkeys(result_of(makers, product)[0] for product in products)
    exponents, open_ = set(arrays), [*arrays]
    while open_:
        x = open_.pop()
        maker = None if x in results else makers.maker(x)
        new = {y for y in variables(maker.invars) if _has_columns(y, least)} if maker is not None else set()
        open_ += new - exponents
        exponents |= new
    return Exponentials(arrays, exponents, [made_of(makers, z) for z in results if z in exponents])


def _has_columns(x: Any, least: int) -> bool:
    """True for floats with at least so many columns."""
    size = x.aval.shape[-1] if x.aval.ndim > 1 else 0
    return isinstance(size, int) and size >= least and x.aval.dtype.name in FLOATS


def logits_of(makers: Makers, product: Equation, z: Any, dot: Dot) -> Iterator[Logits]:
    """The result z of a product, and what becomes of it step by step, each after what it is made of."""
    open_ = [Logits(frozenset(makers.casts(z)), dot, product, z.aval.shape[-1])]
    while open_:
        logits = open_.pop(0).with_constraint(makers)
        yield logits
        open_ += _steps(makers, logits)


def _steps(makers: Makers, logits: Logits) -> Iterator[Logits]:
    """The logits after one step more."""
    yield from _of_rows(makers, logits)
    if logits.fill is None:
        yield from _padded(makers, logits)
        if logits.cap is None:
            yield from _capped(makers, logits)
            if logits.bias is None:
                yield from _with_bias(makers, logits)


def _capped(makers: Makers, logits: Logits) -> Iterator[Logits]:
    """Logits between two numbers."""
    for scaled in makers.read_by(logits.arrays, "div", "mul"):
        inverse = _factor(makers, scaled, logits.arrays)
        for tanh in makers.read_by(makers.casts(scaled.outvars[0]), "tanh") if inverse is not None else ():
            bounded = makers.casts(tanh.outvars[0])
            for product in makers.read_by(bounded, "mul"):
                cap = _factor(makers, product, bounded)
                if cap is not None and _are_inverse(scaled, inverse, cap) and _is_same_shape(product, logits):
                    arrays = frozenset(makers.casts(product.outvars[0]))
                    yield dataclasses.replace(logits, arrays=arrays, cap=cap, bounded=frozenset(bounded))


def _factor(makers: Makers, equation: Equation, arrays: Collection[Any]) -> Any:
    """The number or the variable () that one of the arrays is multiplied with, or divided by; None if it is neither."""
    left, right = equation.invars
    if among(right, arrays) and equation.primitive.name == "mul":
        left, right = right, left
    factor = makers.scalar(right) if among(left, arrays) else None
    is_float = isinstance(factor, float) or (factor is not None and factor.aval.dtype.name in FLOATS)
    return factor if is_float else None


def _are_inverse(scaled: Equation, factor: Any, cap: Any) -> bool:
    """True if logits are divided by the cap, or multiplied with its inverse."""
    if not isinstance(cap, float):
        return scaled.primitive.name == "div" and factor is cap
    if not isinstance(factor, float) or not 0 < cap < math.inf:
        return False
    return factor == cap if scaled.primitive.name == "div" else abs(factor * cap - 1) < 1e-6


def _of_rows(makers: Makers, logits: Logits) -> Iterator[Logits]:
    """Some rows of logits, as all tokens but the last, and their first columns; or the rows on other axes."""
    for equation in makers.read_by(logits.arrays, "slice", "reshape"):
        (out,), params = equation.outvars, equation.params
        own = dataclasses.replace(logits, arrays=frozenset(makers.casts(out)), moved=(*logits.moved, equation))
        if equation.primitive.name == "reshape":
            if any(explicit_cuts(equation.invars[0].aval)):
                continue  # the labels could not be given the axes of x
            if params["dimensions"] is None and out.aval.ndim > 1 and same_size(out.aval.shape[-1], logits.columns):
                yield own
            continue
        is_first = params["start_indices"][-1] == 0 and not (params["strides"] and params["strides"][-1] != 1)
        if is_first and same_size(out.aval.shape[-1], logits.columns):
            yield own
        elif is_first and logits.fill is None:
            yield dataclasses.replace(own, vocabulary=out.aval.shape[-1])


def _with_bias(makers: Makers, logits: Logits) -> Iterator[Logits]:
    """Logits with an array added to each row."""
    for total in makers.read_by(logits.arrays, "add"):
        others = [x for x in variables(total.invars) if x not in logits.arrays]
        bias = makers.row(others[0]) if len(others) == 1 else None
        if bias is not None and bias.aval.dtype.name in FLOATS and _is_same_shape(total, logits):
            yield dataclasses.replace(logits, arrays=frozenset(makers.casts(total.outvars[0])), bias=bias)


def _is_same_shape(equation: Equation, logits: Logits) -> bool:
    """True for a float with the shape of the logits."""
    out = equation.outvars[0].aval
    return out.dtype.name in FLOATS and same_shape(out.shape, (*logits.rows, logits.columns))


def _padded(makers: Makers, logits: Logits) -> Iterator[Logits]:
    """Logits whose columns behind a vocabulary are set to a number."""
    for select in makers.read_by(logits.arrays, "select_n"):
        mask, *cases = select.invars
        kept = kept_columns(makers, mask) if len(cases) == 2 else None
        if kept is None or not among(cases[kept[1]], logits.arrays):
            continue
        fill = makers.constant(cases[not kept[1]])
        if fill is not None and fill <= _GREATEST_FILL and 0 < kept[0] <= logits.vocabulary:
            arrays = frozenset(makers.casts(select.outvars[0]))
            yield dataclasses.replace(logits, arrays=arrays, vocabulary=kept[0], fill=fill)
