"""Columns that are several axes, of which a function takes parts along the first, become one axis.

    (x W)[..., i, :] = (x W')[..., i F : (i + 1) F]     W (D, n, F), and W' the same as (D, n F)

So gate and up are parts of one product, or q, k and v, and are what they are where the function has W': columns of a
tile, and no heads of F columns, which an epilogue does not have where they are wider than a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.fusion.dots import Equation, is_dot
from coda_jax.fusion.straight import at_line, results_with
from coda_jax.graph.constraint import CONSTRAINTS, Constraint, constraint_of
from coda_jax.graph.on_mesh import ELEMENTWISE
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.def_use import DefUse, variables
from coda_jax.jaxprs.evaluate import needed_jaxpr, read
from coda_jax.primitives.mesh_types import explicit_axes
from coda_jax.tiles.choose import takes_heads

_CUTS = frozenset({"slice", "split", "pad", "concatenate"})
_OF_ELEMENTS = ELEMENTWISE | {"name"}


def with_flat_columns(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A straight jaxpr in which columns of several axes are one axis where a function takes parts of them.

    It holds for what products make, and for what they read, as in derivatives. Over explicit mesh axes, which shard
    each axis, all stays.
    """
    firsts = {} if explicit_axes(jax.sharding.get_abstract_mesh()) else _first_columns(DefUse(closed.jaxpr))
    if not firsts:
        return closed
    flat = _Flat(firsts)
    return needed_jaxpr(lambda *arrays: results_with(closed, arrays, flat), closed.in_avals)


def _first_columns(def_use: DefUse) -> dict[Any, int]:
    """For each variable whose columns become one axis the first axis of these."""
    equations: Sequence[Equation] = def_use.jaxpr.eqns
    found: dict[Any, int] = {}
    for equation in equations:
        cut, merged = _axis_cut(equation), _axis_merged(equation)
        axis = cut or merged
        if axis is None or (merged and not _is_beside_product(equation, def_use)):
            continue
        if any(x in found for x in (*variables(equation.invars), *equation.outvars)):
            continue
        shapes = [x.aval.shape for x in (*variables(equation.invars[:1]), *equation.outvars)]
        count, *sizes = max(shapes, key=lambda shape: (len(shape), shape[axis]))[axis:]
        if len(sizes) == 1 and count != 2 and (equation.primitive.name == "reshape" or takes_heads(sizes[0])):
            continue  # heads
        alike = _alike(equation, axis, def_use)
        if any(_are_of_products(x, axis, def_use) for x in alike):
            found |= dict.fromkeys(alike, axis)
    return found


def _axis_cut(equation: Equation) -> int | None:
    """The only axis along which an equation takes parts, or joins them, if it is neither the first nor the last."""
    if equation.primitive.name not in _CUTS or isinstance(equation.invars[0], core.Literal):
        return None
    x, y, params = equation.invars[0].aval, equation.outvars[0].aval, equation.params
    if not all(isinstance(size, int) for size in x.shape):
        return None
    if equation.primitive.name == "concatenate":
        axes = [params["dimension"]]
    elif equation.primitive.name == "pad":
        is_plain = all(low >= 0 and high >= 0 and not inner for low, high, inner in params["padding_config"])
        axes = [i for i, (low, high, _) in enumerate(params["padding_config"]) if low or high] if is_plain else []
    elif params.get("strides") is not None and set(params["strides"]) != {1}:
        return None
    else:
        axes = [i for i, pair in enumerate(zip(x.shape, y.shape, strict=True)) if pair[0] != pair[1]]
    return axes[0] if len(axes) == 1 and 0 < axes[0] < x.ndim - 1 else None


def _axis_merged(equation: Equation) -> int | None:
    """The first of the axes that a reshape makes one, or that it makes of one, if these are the last ones."""
    if equation.primitive.name != "reshape" or isinstance(equation.invars[0], core.Literal):
        return None
    few, many = sorted((equation.invars[0].aval.shape, equation.outvars[0].aval.shape), key=len)
    axis = len(few) - 1
    return axis if len(many) > len(few) > 1 and few[:axis] == many[:axis] else None


def _is_beside_product(reshape: Equation, def_use: DefUse) -> bool:
    """True for a reshape of what a product makes, or to what one reads, on the side with more axes."""
    arrays = (*variables(reshape.invars[:1]), *reshape.outvars)
    many = max(arrays, key=lambda x: int(x.aval.ndim))
    numbers = [def_use.defs.get(many, -1), *def_use.uses.get(many, ())]
    return any(_is_dot(def_use.jaxpr.eqns[i]) for i in numbers if i >= 0)


def _alike(cut: Equation, axis: int, def_use: DefUse) -> set[Any]:
    """The variables with the columns of what a cut reads and makes: others made of them, or that they are made of."""
    found: set[Any] = set()
    open_ = [x for x in (*variables(cut.invars[:1]), *cut.outvars) if x.aval.ndim > axis + 1]
    while open_:
        x = open_.pop()
        if x in found:
            continue
        found.add(x)
        number = def_use.defs.get(x, -1)
        around = [def_use.jaxpr.eqns[i] for i in (number, *def_use.uses.get(x, ())) if i >= 0]
        for equation in around:
            if _axis_cut(equation) == axis:
                open_ += [y for y in (*variables(equation.invars), *equation.outvars) if y.aval.ndim > axis + 1]
            elif equation.primitive.name in _OF_ELEMENTS | CONSTRAINTS:
                open_ += [y for y in (*variables(equation.invars), *equation.outvars) if y.aval.shape == x.aval.shape]
    return found


def _are_of_products(x: Any, first: int, def_use: DefUse) -> bool:
    """True for a product's columns, or a factor that it sums over these, and what is one with such by a reshape."""
    number = def_use.defs.get(x, -1)
    maker: Any = def_use.jaxpr.eqns[number] if number >= 0 else None
    readers: list[Any] = [def_use.jaxpr.eqns[i] for i in def_use.uses.get(x, ()) if i >= 0]
    around = readers if maker is None else [maker, *readers]
    if any(_axis_merged(e) == first for e in around):
        return True
    if maker is not None and _is_dot(maker):
        return bool(maker.invars[0].aval.ndim - len(maker.params["dimension_numbers"][0][0]) == first)
    tails = [tuple(range(first, x.aval.ndim)), tuple(range(first))]
    return any(_is_dot(e) and tuple(_sums_over(e, x)) in tails for e in readers)


def _is_dot(equation: Equation) -> bool:
    return is_dot(equation) and equation.params["dimension_numbers"][1] == ((), ())


def _sums_over(dot: Equation, x: Any) -> Sequence[int]:
    """The axes of a factor that a product sums over."""
    axes: Sequence[int] = dot.params["dimension_numbers"][0][0 if dot.invars[0] is x else 1]
    return axes


class _Flat:
    """Evaluates equations.

    Args:
      firsts: for each variable whose columns become one axis the first axis of these.
    """

    def __init__(self, firsts: Mapping[Any, int]):
        self._firsts = firsts
        self._flat: dict[Any, jax.Array] = {}
        self._constraints: dict[Any, Constraint] = {}
        self._products: dict[Any, tuple[jax.Array, int]] = {}  # whose axes from this one on, as many, are one there

    def __call__(self, equation: Equation, values: dict[Any, Any]) -> Sequence[Any] | None:
        """The results of an equation; None where it stays."""
        arrays = (*variables(equation.invars), *equation.outvars)
        if all(x not in self._firsts and x not in self._products for x in arrays):
            return None
        results: Sequence[Any] | None = at_line(equation, self._results, equation, values)
        return results

    def _results(self, equation: Equation, values: dict[Any, Any]) -> Sequence[Any] | None:
        if any(x not in self._firsts for x in equation.outvars):
            return self._behind(equation, values)
        if equation.primitive.name in CONSTRAINTS:
            return self._constrained(equation, values)
        flat = self._of_columns(equation, values)
        if flat is None:
            return None
        self._flat |= dict(zip(equation.outvars, flat, strict=True))
        return [y.reshape(x.aval.shape) for x, y in zip(equation.outvars, flat, strict=True)]

    def _constrained(self, equation: Equation, values: dict[Any, Any]) -> Sequence[Any] | None:
        """A constrained array. It stays for who reads it with all its axes; its parts are constrained alike."""
        (x,), (y,) = equation.invars, equation.outvars
        constraint = constraint_of(equation).without_axis(self._firsts[y])
        if constraint is None or y.aval.ndim != self._firsts[y] + 2:
            return None
        self._flat[y], self._constraints[y] = self._read(x, values), constraint
        return bind(equation.primitive, [values[x]], equation.params)

    def _behind(self, equation: Equation, values: dict[Any, Any]) -> Sequence[Any] | None:
        """The result of a product, of a view, or of a transpose, of arrays whose columns are one axis."""
        if equation.primitive.name == "transpose" and equation.invars[0] in self._products:
            return self._transpose(equation)
        if equation.primitive.name in ("squeeze", "reshape"):
            (x,), (y,) = equation.invars, equation.outvars
            return [self._read(x, values).reshape(y.aval.shape)]
        if not _is_dot(equation):
            return None
        (out,) = equation.outvars
        y = self._product(equation, values)
        if y.ndim < out.aval.ndim:
            first = next(i for i, pair in enumerate(zip(y.shape, out.aval.shape, strict=False)) if pair[0] != pair[1])
            self._products[out] = y, first
        return [y.reshape(out.aval.shape)]

    def _transpose(self, equation: Equation) -> Sequence[jax.Array] | None:
        """The transpose of a product whose columns are one axis; None where it parts these."""
        x, order = equation.invars[0], list(equation.params["permutation"])
        y, first = self._products[x]
        count = x.aval.ndim - y.ndim + 1
        at = order.index(first)
        if order[at : at + count] != list(range(first, first + count)):
            return None
        kept = [axis for axis in order if not first < axis < first + count]
        axes = [axis if axis <= first else axis - count + 1 for axis in kept]
        return [y.transpose(axes).reshape(equation.outvars[0].aval.shape)]

    def _of_columns(self, equation: Equation, values: dict[Any, Any]) -> Sequence[jax.Array] | None:
        """The results of an equation with one axis of columns."""
        name, out = equation.primitive.name, equation.outvars[0]
        first = self._firsts[out]
        if _is_dot(equation):
            return [self._product(equation, values).reshape(self._shape(out))]
        if name in _CUTS and _axis_cut(equation) == first:
            if name == "concatenate":
                return [jnp.concatenate([self._read(x, values) for x in equation.invars], axis=first)]
            x = equation.invars[0]
            width = math.prod(out.aval.shape[first + 1 :])
            parts = _cut(equation, self._read(x, values), read(values, equation.invars[-1]), first, width)
            constraint = self._constraints.get(x) if out.aval.shape[first] == 1 else None
            return list(parts if constraint is None else map(constraint.traced, parts))
        if name in _OF_ELEMENTS:
            arrays = [self._read_alike(x, out, values) for x in equation.invars]
            if name == "name" and equation.invars[0] in self._constraints:
                self._constraints[out] = self._constraints[equation.invars[0]]
            return list(bind(equation.primitive, arrays, equation.params))
        if name in ("broadcast_in_dim", "reshape") and out.aval.size == equation.invars[0].aval.size:
            return [self._read(equation.invars[0], values).reshape(self._shape(out))]
        return None

    def _shape(self, x: Any) -> tuple[int, ...]:
        """The shape of a variable with one axis of columns."""
        first = self._firsts[x]
        return *x.aval.shape[:first], math.prod(x.aval.shape[first:])

    def _read(self, x: Any, values: dict[Any, Any]) -> jax.Array:
        """A variable's array; with one axis of columns where it has these."""
        if isinstance(x, core.Literal) or x not in self._firsts:
            return jnp.asarray(read(values, x))
        if x not in self._flat:
            self._flat[x] = values[x].reshape(self._shape(x))
        return self._flat[x]

    def _read_alike(self, x: Any, out: Any, values: dict[Any, Any]) -> Any:
        """A number, or an array with the columns of a result as one axis."""
        if isinstance(x, core.Literal) or not x.aval.shape:
            return read(values, x)
        if x in self._firsts and x.aval.shape == out.aval.shape:
            return self._read(x, values)
        return jnp.broadcast_to(values[x], out.aval.shape).reshape(self._shape(out))

    def _product(self, dot: Equation, values: dict[Any, Any]) -> jax.Array:
        """A product, with one axis for the columns of its factors and of its result."""
        sums, _ = dot.params["dimension_numbers"]
        arrays, axes = [], []
        for x, own, (start, end) in zip(dot.invars[:2], sums, self._merged_axes(dot), strict=True):
            shape = (*x.aval.shape[:start], math.prod(x.aval.shape[start:end]), *x.aval.shape[end:])
            is_flat = (start, end) == (self._firsts.get(x), x.aval.ndim)
            arrays.append(self._read(x, values) if is_flat else values[x].reshape(shape))
            axes.append(tuple(dict.fromkeys(min(i, start) if i < end else i - (end - start - 1) for i in own)))
        params = {**dot.params, "dimension_numbers": ((axes[0], axes[1]), ((), ()))}
        others = [read(values, x) for x in dot.invars[2:]]  # of how the factors are rounded
        product: jax.Array = bind(dot.primitive, [*arrays, *others], params)[0]
        return product

    def _merged_axes(self, dot: Equation) -> list[tuple[int, int]]:
        """For each factor the range of axes that become one: columns, and those that are summed with columns."""
        factors, (sums, _) = dot.invars[:2], dot.params["dimension_numbers"]
        merged = [(0, 1), (0, 1)]
        for i, x in enumerate(factors):
            if x not in self._firsts:
                continue
            tail = range(self._firsts[x], x.aval.ndim)
            met = [pair[1 - i] for pair in zip(*sums, strict=True) if pair[i] in tail]
            if met and not (len(met) == len(tail) and _are_consecutive(met)):
                return [(0, 1), (0, 1)]
            merged[i] = tail.start, tail.stop
            merged[1 - i] = (met[0], met[-1] + 1) if met else merged[1 - i]
        free = [axis for axis in range(factors[1].aval.ndim) if axis not in sums[1]]
        if merged == [(0, 1), (0, 1)] and dot.outvars[0] in self._firsts and _are_consecutive(free):
            merged[1] = free[0], free[-1] + 1
        return merged


def _are_consecutive(axes: Sequence[int]) -> bool:
    return list(axes) == list(range(axes[0], axes[0] + len(axes)))


def _cut(equation: Equation, x: jax.Array, value: Any, axis: int, width: int) -> Iterator[jax.Array]:
    """The results of a slice, a split or a pad along an axis whose elements are so many columns."""
    params = equation.params
    if equation.primitive.name == "pad":
        low, high, _ = params["padding_config"][axis]
        yield lax.pad(x, value, [(0, 0, 0)] * axis + [(low * width, high * width, 0)])
    elif equation.primitive.name == "split":
        ends = [sum(params["sizes"][: i + 1]) for i in range(len(params["sizes"]))]
        for size, end in zip(params["sizes"], ends, strict=True):
            yield lax.slice_in_dim(x, (end - size) * width, end * width, axis=axis)
    else:
        start, limit = params["start_indices"][axis], params["limit_indices"][axis]
        yield lax.slice_in_dim(x, start * width, limit * width, axis=axis)
