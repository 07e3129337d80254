"""Reverse mode over a graph: cotangents are values of the same kind, products and maps.

    y = a b               da = dy b^T, db = a^T dy      two products, written as the layouts of a and b have them
    y = f(x_1, ..., x_n)  dx_i of jax.vjp of f, or f's own pullback: a map of the inputs, of y, and of dy
    y = each row's x      1^T dy of each group's rows: a product
    y = a8 b8 / (s t)     the same of dy rounded to 8 bits, where a library's rule rounds a and b
    results of a call     jax.vjp of its function: a call of what that keeps, and of the results' cotangents
    several users         their cotangents' sum: a map

So a backward pass needs no rules of its own, and what runs a graph runs its derivative.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.epilogue import is_linear
from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.epilogue.values import same_shape
from coda_jax.graph import rounded
from coda_jax.graph.calls import Call, Result, pulled_back
from coda_jax.graph.constraint import Constraint
from coda_jax.graph.plan import program_beside
from coda_jax.graph.pullbacks import inner_product
from coda_jax.graph.summed_once import summed_once
from coda_jax.graph.values import (
    ForEachRow,
    Leaf,
    Map,
    Product,
    Transposed,
    Value,
    is_float,
    is_seen,
    make_map,
    reachable,
    transposed,
)
from coda_jax.jaxprs.def_use import DefUse

_COPIES = frozenset({"broadcast_in_dim", "reshape", "convert_element_type"})  # of zeros: zeros


def cotangents_of(
    outputs: Sequence[Value], cotangents: Sequence[Value | None], leaves: Sequence[Leaf]
) -> list[Value | None]:
    """The cotangents of these leaves.

    Args:
      outputs: of the graph.
      cotangents: those of the outputs; None is zeros.

    Returns:
      A value for each leaf, of its shape; None where it has none, or where that is zeros.
    """
    terms: dict[Value, list[Value]] = defaultdict(list)
    for output, cotangent in zip(outputs, cotangents, strict=True):
        if cotangent is not None:
            terms[output].append(cotangent)
    order = reachable(outputs)
    bodies: dict[Hashable, Any] = {}
    inner = _InnerProducts(order, outputs, bodies)
    varies: set[Value] = {leaf for leaf in leaves if leaf.has_cotangent}
    for value in order:
        if not varies.isdisjoint(_with_cotangents(value)):
            varies.add(value)
    for group in reversed(_together(order)):
        ys = [y for y in group if y in varies and is_float(y.dtype) and terms[y] and not isinstance(y, Leaf)]
        if ys:
            dys = [_total(summed_once(terms[y]), bodies) for y in ys]
            for y, dy in zip(ys, dys, strict=True):
                inner.cotangents[y] = dy
                _liken(dy, y)
            for x, dx in _input_cotangents(ys, dys, varies, inner):
                if x in varies and dx is not None:
                    terms[x].append(_as_wide(dx, x))
    totals = [
        _total(summed_once(terms[leaf]), bodies) if terms[leaf] and leaf.has_cotangent else None for leaf in leaves
    ]
    for leaf, total in zip(leaves, totals, strict=True):
        if total is not None:
            _constrain(total, leaf)
    return totals


def _constrain(dy: Value, y: Value) -> None:
    """Gives a cotangent, if it has none, the sharding of its value."""
    if dy.spec is None and (not isinstance(y.spec, Constraint) or same_shape(dy.shape, y.shape)):
        dy.spec = y.spec


def _as_wide(dx: Value, x: Value) -> Value:
    """A term of a cotangent, which may be beyond the range that its value may be beyond."""
    dx.is_wide |= x.is_wide and isinstance(dx, Map) and dx.cotangent_of is None
    return dx


def _liken(dy: Value, y: Value) -> None:
    """Gives a cotangent the sharding, the rows and the dtype in memory of its value: the first that it is of."""
    _constrain(dy, y)
    if isinstance(dy, Map) and dy.cotangent_of is None and same_shape(dy.shape, y.shape):
        dy.cotangent_of = y
        dy.made_of = y.made_of if dy.is_tile else dy.made_of
        dy.is_rounded = y.is_rounded and dy.is_tile
        dy.is_wide |= y.is_wide


def _with_cotangents(value: Value) -> Sequence[Value]:
    """The values that a value's cotangent goes to: its inputs, and the history of a product that rounds its factors."""
    scales = value.scales if isinstance(value, Product) else None
    return value.inputs if scales is None or scales.history is None else (*value.inputs, scales.history)


def _total(cotangents: Sequence[Value], bodies: dict[Hashable, Any]) -> Value:
    """Their sum, in the order in which they were found: that of the users from the last to the first."""
    if len(cotangents) == 1:
        return cotangents[0]

    def add(*xs: jax.Array) -> jax.Array:
        return functools.reduce(operator.add, xs)

    if not all(is_seen(x.dtype) for x in cotangents):  # of arguments and results of calls, which a map would round
        closed = jax.make_jaxpr(lambda *xs: [add(*xs)])(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cotangents))
        (result,) = Call("the sum of cotangents", closed, cotangents, (), [cotangents[0].shape]).results
        return result
    total: Value = make_map(add, *cotangents, derived="add", shared=(bodies, "add"))
    return total


def _together(order: Sequence[Value]) -> list[list[Value]]:
    """The values, grouped by call or function: all users of a group's values come after all of them."""
    groups: dict[Any, list[Value]] = {}
    for value in order:
        together = value.call if isinstance(value, Result) else value.origin if isinstance(value, Map) else value
        groups.setdefault(together, []).append(value)
    return list(groups.values())


def _input_cotangents(
    ys: Sequence[Value], dys: Sequence[Value], varies: set[Value], inner: _InnerProducts
) -> Iterable[tuple[Value, Value | None]]:
    """The inputs of one product, transpose, function or call, with their cotangents."""
    match ys[0]:
        case Result(call=call):
            flags = tuple(x in varies and is_float(x.dtype) for x in call.inputs)
            indices = [y.index for y in ys if isinstance(y, Result)]
            input_cotangents = pulled_back(call, dict(zip(indices, dys, strict=True)), flags) if any(flags) else []
            return zip(call.inputs, input_cotangents, strict=False)
        case Product() as y:
            (dy,) = dys
            if y.scales is not None:
                return rounded.cotangents(y, dy, inner.bodies)
            if is_of_8_bits(y.a.dtype):
                return zip((y.a, y.b), _cotangents_in_8_bits(y, dy), strict=True)
            each = (zip(pair, _product_cotangents(y, dy, *pair), strict=True) for pair in y.pairs)
            return list(itertools.chain(*each))
        case Transposed(inputs=(x,)):
            return [(x, transposed(dys[0]))]
        case ForEachRow(inputs=(x, _)):
            return [(x, _sums_of_groups(dys[0], ys[0].groups))]
        case Map(pullback=None):
            return _map_cotangents([y for y in ys if isinstance(y, Map)], dys, varies)
        case Map() as y:
            beside = [inner.along_rows(y)] if y.takes_inner else []
            return zip(y.inputs, _without_zeros(_by_its_pullback(y, dys[0], beside)), strict=True)
    raise TypeError(f"no derivative of {type(ys[0]).__name__}")


def _cotangents_in_8_bits(y: Product, dy: Value) -> tuple[Value, Value]:
    if not is_of_8_bits(dy.dtype):
        raise TypeError(
            f"product of {y.a.dtype} and {y.b.dtype}: its cotangent is {dy.dtype}; a map of the product, whose "
            "pullback rounds to 8 bits, has to give it"
        )
    return rounded.factor_cotangents(y, dy)


def _product_cotangents(y: Product, dy: Value, a: Value, b: Value) -> tuple[Value, Value]:
    """The cotangents of one pair of factors."""
    a, b = recovered(a), recovered(b)

    def product(*factors: Value, **options: Any) -> Product:
        made = Product(*factors, groups=y.groups, **options)
        made.maps_zeros = y.maps_zeros
        return made

    if y.transpose_a:
        da = product(b, dy, transpose_a=y.transpose_b, transpose_b=True, like=a)
    else:
        da = product(dy, b, transpose_b=not y.transpose_b, like=a)
    da.spec = y.spec_of_a
    if y.transpose_b:
        return da, product(dy, a, transpose_a=True, transpose_b=y.transpose_a, like=b)
    db = product(a, dy, transpose_a=not y.transpose_a, like=b)
    db.spec_of_a = y.spec_of_a
    return da, db


def _sums_of_groups(dy: Value, groups: Value) -> Value:
    """The sums of dy (M, N) over the rows of each group, (G, N): one row of the product of ones with them.

    Not a scatter with additions: the sums have one order. A kernel wants rows of 16 bytes, hence 8 columns of ones.
    """
    ones: Value = make_map(lambda: jnp.ones((dy.shape[0], 8), FLOAT32), derived="ones")
    product = Product(ones, dy, transpose_a=True, groups=groups)
    product.is_wide = True
    sums: Value = make_map(lambda sums: sums[:, 0], product, derived="sums of groups")
    return sums


def recovered(x: Value) -> Value:
    """The value that a backward pass reads in the place of x."""
    return x if x.recovered is None else x.recovered


def _map_cotangents(
    ys: Sequence[Map], dys: Sequence[Value], varies: set[Value]
) -> Iterable[tuple[Value, Value | None]]:
    """The cotangents of one function's inputs, of all its results together, which were made in their order."""
    body, inputs = ys[0].origin.with_results([y.index for y in ys])
    differentiated = tuple(x in varies and is_float(x.dtype) for x in inputs)
    input_cotangents = make_map(
        functools.partial(_pulled_back, body.jaxpr, differentiated),
        *map(recovered, inputs),
        *dys,
        derived=f"{ys[0].origin.name} backward",
        shared=(body.derived, ("cotangents", differentiated)),
    )
    return zip(itertools.compress(inputs, differentiated), _without_zeros(input_cotangents), strict=True)


class _InnerProducts:
    """Inner products of values with their cotangents, along rows.

    For a function y = A x of each row, <x, dx> = <x, A^T dy> = <y, dy>. So where linear functions alone read a value,
    its inner products are the sum of their results', and neither the value nor its cotangent has to be computed.

    Attributes:
      cotangents: of the values that have been reached.
      bodies: the table of bodies of the derivative.
    """

    def __init__(self, order: Sequence[Value], outputs: Sequence[Value], bodies: dict[Hashable, Any]):
        self.cotangents: dict[Value, Value] = {}
        self.bodies = bodies
        self._outputs, self._users = frozenset(outputs), defaultdict[Value, list[Value]](list)
        for value in order:
            for x in dict.fromkeys(value.inputs):
                self._users[x].append(value)

    def along_rows(self, x: Value) -> Value:
        """sum_j x[:, j] dx[:, j], (M, 1)."""
        dx, users = self.cotangents[x], self._users[x]
        if x not in self._outputs and users and all(_is_linear(y, x) for y in users):
            terms = [self.along_rows(y) for y in users if y in self.cotangents]
            if terms:
                return _total(terms, self.bodies)
        shared = self.bodies, "inner product"
        inner: Value = make_map(inner_product, recovered(x), dx, derived="inner product", shared=shared)
        return inner


def _is_linear(y: Value, x: Value) -> bool:
    """True for a map of each row that is linear in x, its only input of that shape."""
    if not isinstance(y, Map) or y.pullback is not None or not y.is_tile:
        return False
    alike = [other for other in y.inputs if same_shape(other.shape, x.shape)]
    program = program_beside(y, x.shape)
    return alike == [x] and program is not None and is_linear(program)


def _by_its_pullback(y: Map, dy: Value, beside: Sequence[Value]) -> list[Value | None]:
    pullback = y.pullback
    assert pullback is not None

    def pulled_back(*arrays: jax.Array) -> list[jax.Array | None]:
        found, name = pullback(*arrays), y.origin.name
        if not isinstance(found, tuple | list) or len(found) != len(y.inputs):
            gives = f"{len(found)} cotangents" if isinstance(found, tuple | list) else f"a {type(found).__name__}"
            raise TypeError(
                f"pullback of map '{name}': gives {gives}; it must give a cotangent for each of {len(y.inputs)} inputs"
            )
        for i, (x, primal) in enumerate(zip(found, y.inputs, strict=True)):
            if x is not None and not same_shape(jnp.shape(x), primal.shape):
                raise TypeError(
                    f"pullback of map '{name}': cotangent {i} has shape {jnp.shape(x)}; its input has {primal.shape}"
                )
        return list(found)

    input_cotangents: list[Value | None] = make_map(
        pulled_back,
        *map(recovered, (y, *y.inputs)),
        dy,
        *beside,
        derived=f"{y.origin.name} backward",
        shared=(y.body.derived, "cotangents"),
    )
    return input_cotangents


def _pulled_back(jaxpr: core.ClosedJaxpr, differentiated: Sequence[bool], *arrays: jax.Array) -> list[Any]:
    """The cotangents of the differentiated inputs, from all inputs and the results' cotangents."""
    inputs, cotangents = arrays[: len(differentiated)], arrays[len(differentiated) :]
    for out in jaxpr.out_avals:
        if is_of_8_bits(out.dtype):
            raise TypeError(
                f"map: its result is {out.dtype}; state a pullback, since JAX has no derivative of what rounds to 8 "
                "bits"
            )

    def partial_function(*varied: jax.Array) -> list[jax.Array]:
        remaining = iter(varied)
        return core.jaxpr_as_fun(jaxpr)(*(next(remaining) if flag else x for flag, x in each))

    each = list(zip(differentiated, inputs, strict=True))
    outputs, pullback = jax.vjp(partial_function, *itertools.compress(inputs, differentiated))
    return list(pullback([dy.astype(out.dtype) for dy, out in zip(cotangents, outputs, strict=True)]))


def _without_zeros(cotangents: Sequence[Value | None]) -> list[Value | None]:
    return [None if x is None or _is_zero(x) else x for x in cotangents]


def _is_zero(value: Value) -> bool:
    """True if it is zeros whatever its inputs: JAX's cotangent of an input that the result does not depend on."""
    if not isinstance(value, Map) or value.inputs:
        return False
    (out,), makers = value.jaxpr.jaxpr.outvars, DefUse(value.jaxpr.jaxpr)
    while (maker := makers.maker(out)) is not None and maker.primitive.name in _COPIES:
        out = maker.invars[0]
    return isinstance(out, core.Literal) and not np.any(out.val)
