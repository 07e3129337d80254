"""Products with their axes in another order, as einsum has them: the activation comes first, and a view behind."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.fusion.dots import Dot, Equation, dot_of, is_dot, transposed_factors
from coda_jax.fusion.rows import results_of_dots
from coda_jax.fusion.straight import at_line
from coda_jax.graph.on_mesh import ELEMENTWISE
from coda_jax.graph.row_axes import REDUCTIONS
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.def_use import DefUse, definitions, variables
from coda_jax.jaxprs.evaluate import evaluate, needed_jaxpr

# An array, the axes of it that are summed over, and where its other axes stand among these in the array.
_Factor = tuple[Any, Sequence[int], Sequence[int]]
_View = tuple[jax.Array, tuple[int, ...], jax.Array]  # an array, the order of its axes in its transpose, the transpose


def with_rows_first(closed: core.ClosedJaxpr, *, multiplies: bool = True) -> core.ClosedJaxpr:
    """A straight jaxpr whose products are those of matrices, where they are these but for the order of their axes.

    einsum may put a weight first, (K, N) before (M, K), and transpose the result (N, M) into the order that is asked
    for. Here the activation is first, and its result is transposed behind the slices, casts and elementwise operations
    that read it; not at all where these put its axes back. A factor that is made of products and transposed so that
    its rows come last, as in the derivative, is transposed so that they come first. What einsum has as a product with
    batch axes and is none of matrices, as a scale, "btd,d->btd", or its gradient, is a multiplication, and a sum. A
    factor that the function transposes, as in x @ w.T, is read as it lies.

    Args:
      closed: the jaxpr.
      multiplies: whether those that are none of matrices become multiplications; else they stay.
    """
    orders = _Orders(closed.jaxpr, multiplies=multiplies)
    if not (orders.is_reordered or orders.straightened):
        return closed
    return needed_jaxpr(lambda *xs: evaluate(closed.jaxpr, closed.consts, xs, orders, opens=()), closed.in_avals)


class _Orders:
    """Evaluates the equations of a jaxpr.

    Attributes:
      swapped: the products whose factors are exchanged, by the variable that they are.
      turned: the factors whose axes behind come first, and how many axes stand in front of these.
      multiplied: the number of the factor that has all axes, of each product that is a multiplication.
      straightened: the products of matrices, by the variables that they are, with factors that are transposed.
    """

    def __init__(self, jaxpr: core.Jaxpr, *, multiplies: bool):
        self.swapped: set[Any] = set()
        self.turned: dict[Any, int] = {}
        self.multiplied: dict[Any, int] = {}
        self.straightened: set[Any] = set()
        self._turned: dict[Any, jax.Array] = {}  # the arrays of these factors
        self._views: dict[int, _View] = {}  # by the transpose
        self._numbers: dict[int, tuple[Any, jax.Array]] = {}  # by the arrays that are one number everywhere
        self._transposes: dict[int, _View] = {}  # the function's own, which are no views
        self._others: dict[tuple[int, Sequence[int]], tuple[jax.Array, jax.Array]] = {}  # arrays, transposed
        def_use = DefUse(jaxpr)
        self._read = def_use.uses.keys()
        results, absorbed = results_of_dots(def_use)
        self._absorbed = definitions(jaxpr.eqns[i] for i in absorbed)
        self._read_swapped: set[Any] = set()  # the products of which such a transpose is a part
        self._needed: set[Any] = set()  # those of them without which the product is none of matrices
        made_of_products: set[Any] = set()
        transposes: set[Any] = set()
        for i, equation in enumerate(jaxpr.eqns):
            whole = _has_all_axes(equation) if multiplies and equation.primitive.name == "dot_general" else None
            if whole is not None:
                self.multiplied[equation.outvars[0]] = whole
            elif i in results and results[i] is equation.outvars[0]:
                self._note(equation, made_of_products, transposes)
            elif i in results:
                self._read_swapped |= set(equation.outvars)
                self._needed |= set() if isinstance(dot_of(equation), Dot) else {results[i]}
            if i in results or not made_of_products.isdisjoint(variables(equation.invars)):
                made_of_products |= set(equation.outvars)
            if equation.primitive.name == "transpose":
                transposes |= set(equation.outvars)
        orders = {e.outvars[0]: e.params["permutation"] for e in jaxpr.eqns if e.primitive.name == "transpose"}
        self._kept = {x for equation in jaxpr.eqns for x in self._read_transposed(equation, orders)}

    def _read_transposed(self, dot: Equation, orders: Mapping[Any, Sequence[int]]) -> Iterator[Any]:
        """The function's own transposes that a product cannot read as they lie: other products then read them too.

        Args:
          orders: of the axes of these transposes.
        """
        if not is_dot(dot) or orders.keys().isdisjoint(variables(dot.invars[:2])):
            return
        sums, _ = dot.params["dimension_numbers"]
        ranks = [x.aval.ndim for x in dot.invars[:2]]
        ways = []  # of each factor whether as it lies, and the axes summed over
        for x, own in zip(dot.invars[:2], sums, strict=True):
            order = None if isinstance(x, core.Literal) else orders.get(x)
            ways.append([*([] if order is None else [(True, [order[axis] for axis in own])]), (False, own)])

        possible = [
            pair
            for pair in itertools.product(*ways)
            if self._is_of_matrices(dot, [own for _, own in pair], ranks, as_it_lies=pair[0][0])
        ]
        yield from (
            x for i, x in enumerate(dot.invars[:2]) if len(ways[i]) > 1 and not any(pair[i][0] for pair in possible)
        )

    def _is_of_matrices(
        self, dot: Equation, sums: Sequence[Sequence[int]], ranks: Sequence[int], *, as_it_lies: bool
    ) -> bool:
        """Whether factors that are read so make a product of matrices, which has an epilogue if it is read.

        Args:
          as_it_lies: whether the first one is, of a transpose.
        """
        transposed = transposed_factors(sums, ranks)
        return transposed is not None and not (as_it_lies and transposed[0] and dot.outvars[0] in self._read)

    def _note(self, dot: Equation, made_of_products: set[Any], transposes: set[Any]) -> None:
        """Adds a product to those that change: one of a transposed factor, or none of matrices as it stands."""
        first = dot.invars[0]
        if isinstance(first, core.Literal) or dot.primitive.name != "dot_general":
            return
        if isinstance(dot_of(dot), Dot):
            own = transposes.intersection(variables(dot.invars[:2])) - self._absorbed
            self.straightened |= set(dot.outvars) if own else set()
            return
        if first not in made_of_products:
            self.swapped |= set(dot.outvars) if isinstance(dot_of(dot, is_swapped=True), Dot) else set()
            return
        (sums, _), (batch, _) = dot.params["dimension_numbers"]
        if first in transposes and not batch and sorted(sums) == list(range(len(sums))):
            self.turned[first] = len(sums)

    @property
    def is_reordered(self) -> bool:
        """Whether products have other orders, so that views come behind them: then each factor is read as it lies."""
        return bool(self.swapped or self.turned or self.multiplied)

    def __call__(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation, at its line."""
        results: Sequence[Any] = at_line(equation, self._results, equation, inputs)
        return results

    def _results(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        name, (out, *_) = equation.primitive.name, equation.outvars
        if is_dot(equation):
            return [self._product(equation, inputs)]
        if name == "transpose" and out in self.turned:
            order, count = equation.params["permutation"], self.turned[out]
            self._turned[out] = self._transposed(inputs[0], (*order[count:], *order[:count]))
        if name == "broadcast_in_dim" and not np.ndim(inputs[0]) and equation.params.get("sharding") is None:
            (result,) = bind(equation.primitive, inputs, equation.params)
            self._numbers[id(result)] = inputs[0], result
            return [result]
        results = self._behind(equation, inputs)
        if results is not None:
            return results
        if name == "transpose":
            return [self._own_transpose(equation, inputs[0])]
        return bind(equation.primitive, inputs, equation.params)

    def _product(self, equation: Equation, inputs: Sequence[Any]) -> jax.Array:
        """A dot_general, of the arrays that its factors are transposes of, where their axes lie well for it."""
        params = equation.params
        if equation.outvars[0] in self.multiplied:
            return self._multiplied(equation, inputs)
        sums, batch = params["dimension_numbers"]
        if batch[0]:
            (result,) = bind(equation.primitive, inputs, params)
            return result
        factors = self._factors(equation, inputs)
        is_swapped, precision = equation.outvars[0] in self.swapped, params["precision"]
        turn = -1 if is_swapped else 1
        arrays, sums, rests = (list(each)[::turn] for each in zip(*factors, strict=True))
        precision = precision[::turn] if isinstance(precision, tuple) else precision
        places = [list(rests[0]), [len(rests[0]) + axis for axis in rests[1]]]
        order = [axis for each in places[::turn] for axis in each]
        params = {**params, "dimension_numbers": (tuple(sums), batch), "precision": precision}
        if params.get("out_sharding") is not None:
            params["out_sharding"] = transposed_back(params["out_sharding"], order)
        if is_swapped and "rounding" in params:
            params["rounding"] = params["rounding"].swapped()
        (result,) = bind(equation.primitive, [*arrays, *inputs[2:]], params)
        return self._view(result, order)

    def _multiplied(self, equation: Equation, inputs: Sequence[Any]) -> jax.Array:
        """A dot_general as a multiplication, and a sum where it has one, in the order of the factor with all axes."""
        sums, batch = equation.params["dimension_numbers"]
        (out,), number = equation.outvars, self.multiplied[equation.outvars[0]]
        (x, order), (y, beside) = (self._source(inputs[i]) for i in (number, 1 - number))
        axes, summed = ([order[axis] for axis in each[number]] for each in (batch, sums))
        free = [axis for j, axis in enumerate(order) if j not in (*batch[number], *sums[number])]
        dtype = functools.reduce(jnp.promote_types, [x.dtype, y.dtype, jnp.float32 if summed else out.aval.dtype])
        of_y = [beside[axis] for axis in (*batch[1 - number], *sums[1 - number])]
        pairs = sorted(zip([*axes, *summed], of_y, strict=True))
        y = lax.transpose(y.astype(dtype), [axis for _, axis in pairs])
        result = x.astype(dtype) * lax.broadcast_in_dim(y, x.shape, [axis for axis, _ in pairs])
        result = jnp.sum(result, axis=tuple(summed)) if summed else result
        left = [axis for axis in range(x.ndim) if axis not in summed]
        return self._view(result.astype(out.aval.dtype), [left.index(axis) for axis in (*axes, *free)])

    def _source(self, array: jax.Array) -> tuple[jax.Array, Sequence[int]]:
        """The array that one is a transpose of, and the order of its axes; itself where it is none."""
        for known in (self._views, self._transposes):
            if id(array) in known:
                return known[id(array)][:2]
        return array, range(array.ndim)

    def _factors(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[_Factor]:
        """The factors of a product, as they lie where they are transposes and that is a product of matrices."""
        sums, _ = equation.params["dimension_numbers"]
        each = [self._ways(x, *one) for x, *one in zip(equation.invars[:2], inputs[:2], sums, strict=True)]
        lying = [ways[0] for ways in each]
        if self.is_reordered or not isinstance(dot_of(equation), Dot):
            return lying
        every = itertools.product(*each)
        return next((factors for factors in every if self._is_better(equation, inputs, factors)), lying)

    def _is_better(self, equation: Equation, inputs: Sequence[Any], factors: Sequence[_Factor]) -> bool:
        """Whether these factors make a product of matrices, and cost nothing elsewhere; true of those as they stand.

        A transpose of the function's own stays one where the result would have to be instead; where a product
        that is read would sum over rows, as that has no epilogue; and where it is a product of swapped factors itself.
        """
        (out,), (arrays, sums, rests) = equation.outvars, zip(*factors, strict=True)
        ranks = [np.ndim(x) for x in arrays]
        pairs = zip(inputs[:2], arrays, strict=True)
        of_a, of_b = (id(x) in self._transposes and x is not array for x, array in pairs)
        if not self._is_of_matrices(equation, sums, ranks, as_it_lies=of_a):
            return False
        if out in self._read_swapped and (of_a or of_b) and transposed_factors(sums[::-1], ranks[::-1]) is None:
            return False
        if any(flag and x in self._absorbed for x, flag in zip(equation.invars[:2], (of_a, of_b), strict=True)):
            return False
        return all(list(rest) == sorted(rest) for rest, flag in zip(rests, (of_a, of_b), strict=True) if flag)

    def _ways(self, x: Any, array: Any, sums: Sequence[int]) -> list[_Factor]:
        """A factor as it lies in the arrays that it is a transpose of, where it lies well, and then as it is."""
        found: list[_Factor] = []
        for base, order in self._sources(x, array):
            own = tuple(order[axis] for axis in sums)
            rest = [axis for j, axis in enumerate(order) if j not in sums]
            if sorted(own) in (list(range(len(own))), list(range(len(rest), base.ndim))):
                found.append((base, own, [sorted(rest).index(axis) for axis in rest]))
        return [*found, (array, tuple(sums), range(np.ndim(array) - len(sums)))]

    def _sources(self, x: Any, array: jax.Array) -> list[tuple[jax.Array, Sequence[int]]]:
        """The arrays that a factor is a transpose of, each with the order of its axes in it."""
        found: list[tuple[jax.Array, Sequence[int]]] = []
        stays = not (self.is_reordered or isinstance(x, core.Literal)) and x in self._kept
        for known in (self._views,) if stays else (self._views, self._transposes):
            if id(array) in known:
                found.append(known[id(array)][:2])
        if not isinstance(x, core.Literal) and x in self.turned:
            count, rank = self.turned[x], x.aval.ndim
            found.append((self._turned[x], [(axis - count) % rank for axis in range(rank)]))
        return found

    def _view(self, x: jax.Array, order: Sequence[int]) -> jax.Array:
        """An array with its axes in this order."""
        if list(order) == list(range(x.ndim)):
            return x
        view = lax.transpose(x, order)
        self._views[id(view)] = x, tuple(order), view
        return view

    def _own_transpose(self, equation: Equation, x: jax.Array) -> jax.Array:
        """A transpose of the function's; of another one that no product needs, one of what that is of."""
        base, order = x, tuple(range(x.ndim))
        if not (self.is_reordered or equation.invars[0] in self._needed):
            base, order, _ = self._transposes.get(id(x), (base, order, x))
        order = tuple(order[axis] for axis in equation.params["permutation"])
        if order == tuple(range(x.ndim)):
            return base
        result = lax.transpose(base, order)
        self._transposes[id(result)] = base, order, result
        return result

    def _transposed(self, x: jax.Array, permutation: Sequence[int]) -> jax.Array:
        """A transpose; of a view, one of what that is of."""
        base, order, _ = self._views.get(id(x), (x, tuple(range(x.ndim)), x))
        return self._view(base, [order[axis] for axis in permutation])

    def _behind(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[jax.Array] | None:
        """The results of an equation that reads views, as views; None where it is none that keeps their order."""
        views = [self._views.get(id(x)) for x in inputs]
        known = [view for view in views if view is not None]
        if not known or any(equation.params.get(key) is not None for key in ("sharding", "out_sharding")):
            return None
        results = self._of_one(equation, inputs[0], known[0])
        if results is not None:
            return results
        name, (x, order, _) = equation.primitive.name, known[0]
        if any(view[1] != order for view in known):
            return None
        if name == "concatenate" and len(known) == len(inputs):
            return [
                self._view(lax.concatenate([view[0] for view in known], order[equation.params["dimension"]]), order)
            ]
        if name not in ELEMENTWISE | {"name"}:
            return None
        arrays = [self._beside(one, view, x, _back(order)) for one, view in zip(inputs, views, strict=True)]
        return [self._view(one, order) for one in bind(equation.primitive, arrays, equation.params)]

    def _of_one(self, equation: Equation, array: jax.Array, view: _View) -> Sequence[jax.Array] | None:
        """The results of an equation that moves or reduces a view, as views; None for others."""
        name, params, (x, order, _) = equation.primitive.name, equation.params, view
        if name == "transpose":
            return [self._transposed(array, params["permutation"])]
        if name == "squeeze" or name in REDUCTIONS:
            key = "dimensions" if name == "squeeze" else "axes"
            gone = sorted(order[axis] for axis in params[key])
            left = [axis for axis in range(x.ndim) if axis not in gone]
            (result,) = bind(equation.primitive, [x], {**params, key: tuple(gone)})
            return [self._view(result, [left.index(axis) for axis in order if axis not in gone])]
        if name == "slice":
            every = params["start_indices"], params["limit_indices"], params["strides"] or (1,) * x.ndim
            starts, limits, strides = ([sizes[axis] for axis in _back(order)] for sizes in every)
            return [self._view(lax.slice(x, starts, limits, strides), order)]
        if name == "split":
            return [self._view(part, order) for part in lax.split(x, params["sizes"], axis=order[params["axis"]])]
        return None

    def _beside(self, one: Any, view: _View | None, x: jax.Array, back: Sequence[int]) -> Any:
        """An argument of an elementwise operation in the order of x."""
        if view is not None:
            return view[0]
        if not np.ndim(one):
            return one
        if id(one) in self._numbers:
            return lax.full([one.shape[axis] for axis in back], self._numbers[id(one)][0], one.dtype)
        key = id(one), tuple(back)
        if key not in self._others:
            base, order, _ = self._transposes.get(id(one), (one, tuple(range(x.ndim)), one))
            axes = [order[axis] for axis in back]
            self._others[key] = base if axes == sorted(axes) else lax.transpose(base, axes), one
        return self._others[key][0]


def _has_all_axes(dot: Equation) -> int | None:
    """The number of the factor that has all axes of a product that is none of matrices; else None.

    It sums over nothing and the other factor has batch axes alone, or none; or both have these and those summed over
    alone. A product of two vectors stays one of matrices.
    """
    sums, batch = dot.params["dimension_numbers"]
    types = [x.aval for x in dot.invars]
    if dot.params.get("out_sharding") is not None or any(isinstance(x, core.Literal) for x in dot.invars):
        return None
    is_of_matrices = not batch[0] and len(sums[0]) == 1
    if is_of_matrices or any(x.dtype.name not in FLOATS for x in types):
        return None
    free = [aval.ndim - len(one) - len(other) for aval, one, other in zip(types, sums, batch, strict=True)]
    is_multiplication = not any(free) if sums[0] else not all(free)
    return int(bool(free[1])) if is_multiplication else None


def _back(order: Sequence[int]) -> list[int]:
    """The places in a transpose of the axes of what it is of."""
    return [int(axis) for axis in np.argsort(order)]


def transposed_back(sharding: Any, order: Sequence[int]) -> Any:
    """The sharding of an array whose transpose has this one, and its axes in this order."""
    entries = [*sharding.spec, *[None] * (len(order) - len(sharding.spec))]
    return jax.sharding.NamedSharding(sharding.mesh, jax.P(*(entries[axis] for axis in _back(order))))
