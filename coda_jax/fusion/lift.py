"""A straight jaxpr as a graph: its units become values, each after those that it reads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32, has_narrow_range
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.fusion.alike import call_params, is_attention, own_params, structure
from coda_jax.fusion.defer import Deferred, deferred, saves_bytes
from coda_jax.fusion.dots import PRODUCTS, Dot, Equation, products_in
from coda_jax.fusion.merged import Merged
from coda_jax.fusion.nested import Nested
from coda_jax.fusion.remat import ARGUMENT, KeptName, Remat, is_cheap
from coda_jax.fusion.rows import MARKS
from coda_jax.fusion.straight import CHECKPOINTS
from coda_jax.fusion.sums_of_products import products_of_sums, without_terms
from coda_jax.fusion.units import CASTS, Unit, Units
from coda_jax.fusion.words import words_of_call, words_of_map
from coda_jax.graph import rounded
from coda_jax.graph import values as nodes
from coda_jax.graph.calls import Call, data_of, is_key, key_impl_of
from coda_jax.graph.constraint import CONSTRAINTS, constraint_of
from coda_jax.graph.function import Graph
from coda_jax.graph.kept import Answers
from coda_jax.graph.norm import scaled_backward
from coda_jax.graph.on_mesh import PVARY, typed
from coda_jax.graph.plan import has_rows
from coda_jax.graph.rounded import Recipe, Rounding
from coda_jax.graph.summed_once import alike, sum_of
from coda_jax.graph.values import Leaf, Product, Value, is_seen, make_map, transposed
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.graph import LOOPS
from coda_jax.jaxprs.walk import equations, inner_jaxprs
from coda_jax.operators.rounded_dot import RoundedFactors
from coda_jax.primitives.mesh_types import explicit_sharding, sizes_in_use, vary


@dataclasses.dataclass(frozen=True)
class Lifted:
    """A function as a graph.

    Attributes:
      graph: of the arguments that it reads.
      sources: for each of the graph's leaves the number of the argument that it is of.
      products: for each equation of `PRODUCTS` the product that it became, or why it became none.
      streams: the leaves with rows and columns both, as the products have them.
    """

    graph: Graph
    sources: Sequence[int]
    products: Sequence[tuple[Equation, Product | str]]
    streams: frozenset[Leaf]


class Lift:
    """The work of `lifted`.

    Args:
      jaxpr: a straight one; its constants are arguments.
      nested: how equations with jaxprs of their own are run.
      bodies: what maps that are alike have in common, by structure and types.
      is_exact: whether values are rounded where the jaxpr rounds them, and no norm is deferred.
      defers: whether norms are deferred through products; None: each where that saves bytes.
      remats: the policies of the checkpoints that hold it, the innermost first.
      fixed: which arguments have no derivative; default none.
    """

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        nested: Nested,
        bodies: dict[Hashable, Any],
        *,
        is_exact: bool,
        defers: bool | None,
        remats: Sequence[Remat] = (),
        fixed: Sequence[bool] = (),
    ):
        self.jaxpr, self.nested, self.is_exact, self._bodies = jaxpr, nested, is_exact, bodies
        self._kept = {remat: remat.kept(jaxpr) for remat in remats}  # the variables that policies keep
        borders = frozenset[Any]().union(*(remat.borders(jaxpr) for remat in remats))
        self.units = Units(jaxpr, is_exact=is_exact, kept=borders)
        self.rows, self.dtype = self.units.rows, self.units.dtype
        self.block_rows = self.rows.block_rows()
        self.merged = Merged(self.rows.counts, is_exact, self.rows.rules)
        self._zeros: set[Any] = set()  # results of products in whose place another has their sum
        if sizes_in_use() and not is_exact:
            for numbers in products_of_sums(self.units, borders):
                self.units.last_terms |= dict.fromkeys(numbers, numbers[-1])
        self.defers = False if is_exact or has_narrow_range(self.dtype) else defers
        self.values: dict[Any, Value] = {}
        self.leaves: dict[tuple[Any, tuple[Any, ...]], Leaf] = {}
        self.products: dict[int, Product] = {}
        self.arguments = {x: i for i, x in enumerate(jaxpr.invars)}
        self._fixed = set(itertools.compress(jaxpr.invars, fixed))
        types: list[Any] = [x.aval for x in jaxpr.invars]
        self._axes = frozenset[str]().union(*(x.manual_axis_type.varying for x in types))
        self._deferred: dict[Any, Deferred | None] = {}
        self._tables: dict[Any, Value] = {}
        self._floats: dict[Value, Value] = {}  # of masks
        self._transposed: dict[Any, Value] = {}
        self._scaled_weights: dict[Any, Value] = {}
        self._scales: dict[Any, Value | None] = {}  # of factors that several products with histories read
        self._answers: dict[Value, dict[Remat, Any]] = defaultdict(dict)  # of the policies
        self._call_answers: dict[Call, dict[Remat, Any]] = {}
        self._cheap_calls: set[Call] = set()
        self._kept_in_calls: set[Call] = set()
        self._made_of: dict[Any, list[Value]] = defaultdict(list)  # the values of maps, by constrained arrays in them

    def run(self) -> list[Value]:
        """The values of the results."""
        for unit in self.units.in_order():
            make = {"product": self._product, "map": self._map, "maximum": self._maximum, "call": self._call}
            make[unit.kind](unit)
        self._recover_products()
        outputs = [self.value(x) for x in self.jaxpr.outvars]
        self._mark()
        return outputs

    def _recover_products(self) -> None:
        """Derivatives read products of q, k and v as their parts, if heads of these have norms.

        q and k are in memory then as they are before their norms, and v as attention reads it; else all would be, and v
        twice. What a policy keeps is read as it is kept.
        """
        for i in () if self.is_exact else self.products:
            x = self.rows.results[i]
            parts = self.units.parts_with_norms(x)
            if parts and not any(x in kept for kept in self._kept.values()):
                missing = (y for y in parts if y not in self.values)
                made = {y: self._make_map(*self.units.inlined(y), y) for y in missing}
                values = [self.values[y] if y in self.values else made[y] for y in parts]
                self.values[x].recovered = self._shared("parts", _concatenated, *values, derived="parts")

    def _mark(self) -> None:
        """Gives names and constraints to the values that are these arrays, and then constraints to others.

        A constrained array that no value is, as it is inside of an epilogue, passes its constraint on to the product
        that it is made of, and to the arrays of its shape that are made of it, where these have none.
        """
        each = enumerate(self.jaxpr.eqns)
        marks = [e for i, e in each if self.units.kinds[i] == "map" and e.primitive.name in MARKS]
        for equation in marks:
            (x,), bare = equation.outvars, self.units.bare(equation.outvars[0])
            leaf = self.leaves.get((bare, self.shape(bare))) if bare in self.arguments else None
            value = self.values.get(x, self.values.get(bare, leaf))
            if value is not None and equation.primitive.name == "name":
                value.name = value.name or equation.params["name"]
            elif value is not None:
                if isinstance(value, Product) and value.spec is value.out_spec:  # it is constrained once it is summed
                    value.spec = None
                self._constrain(value, equation)
        for equation in (e for e in marks if e.primitive.name in CONSTRAINTS):
            (x,) = equation.outvars
            if x not in self.values:
                sources = (self.values.get(self.units.uncast(y)) for y in self.units.inlined(x)[1])
                for value in (*(y for y in sources if isinstance(y, Product)), *self._made_of[x]):
                    self._constrain(value, equation)

    def _constrain(self, value: Value, equation: Equation) -> None:
        """Gives a value an equation's constraint, if it has its elements, and no constraint of its own."""
        if value.spec is None and same_shape(value.shape, self.shape(equation.outvars[0])):
            value.spec = constraint_of(equation)

    @functools.cached_property
    def _without_products(self) -> dict[Remat, dict[Any, Any]]:
        """`Remat.without_products` of each policy."""
        return {remat: remat.without_products(self.jaxpr) for remat in self._kept}

    def answers(self) -> Answers | None:
        """The policies' answers about the values that they keep; None without policies."""
        for remat, kept in self._kept.items():
            for x, answer in kept.items():
                value = self.values.get(self.units.uncast(x))
                if value is not None:
                    self._answers[value][remat] = answer
            for i, product in self.products.items():
                if (answer := kept.get(self.rows.results[i])) is not None:
                    self._answers[product][remat] = answer
        if not self._kept:
            return None
        return Answers(
            self._answers,
            self._call_answers,
            self._kept_in_calls,
            self._cheap_calls,
            KeptName.of,
            names_outputs=not any(remat.has_effects for remat in self._kept),
            is_part=any(remat.is_part for remat in self._kept),
        )

    def streams(self) -> frozenset[Leaf]:
        """The leaves with rows and columns both, as many rows as the products."""
        rows = math.prod(self.block_rows)
        leaves = (leaf for (x, _), leaf in self.leaves.items() if self.units.is_tile(x))
        return frozenset(leaf for leaf in leaves if same_size(leaf.shape[0], rows))

    def value(self, x: Any) -> Value:
        """The value of a variable, in its own shape."""
        if isinstance(x, core.Literal):
            return self._constant(x)
        x = self.units.uncast(x)
        if x in self.values:
            return self.values[x]
        assert x in self.arguments, f"{x} is not made yet"
        return self._leaf(x, self.shape(x))

    def shape(self, x: Any) -> tuple[Any, ...]:
        """The shape of a variable's value: (M, N) with rows, (M, 1) if it has no columns; else of at most two axes."""
        sizes, count = _data_type(x).shape, self.rows.of(x)
        if count:
            return math.prod(sizes[:count]), math.prod(sizes[count:])
        return tuple(sizes) if len(sizes) < 3 else (sizes[0], math.prod(sizes[1:]))

    def _constant(self, x: Any) -> Value:
        def constant() -> jax.Array:
            return jnp.asarray(x.val, x.aval.dtype)

        if not is_seen(x.aval.dtype):
            closed = jax.make_jaxpr(lambda: [constant()])()
            (result,) = Call("a constant", closed, (), self.block_rows).results
            return result
        value: Value = make_map(constant, derived="constant")
        return value

    def _leaf(self, x: Any, shape: tuple[Any, ...]) -> Leaf:
        """An argument in this shape."""
        if (x, shape) not in self.leaves:
            has_rows = self._begins_with_block_rows(x) and shape[0] == math.prod(self.block_rows)
            dtype = np.dtype("uint32") if is_key(x.aval) else x.aval.dtype
            has_one_row = bool(self.rows.of(x)) and shape[:1] == (1,)
            self.leaves[x, shape] = Leaf(
                shape,
                dtype,
                has_cotangent=x not in self._fixed,
                has_rows=has_rows,
                has_halves=self._has_halves(x, shape),
                has_one_row=has_one_row,
            )
        return self.leaves[x, shape]

    def _has_halves(self, x: Any, shape: tuple[Any, ...]) -> bool:
        """True on a mesh for a weight (K, 2, F), as a matrix, of whose products either half is read alone."""
        sizes = x.aval.shape
        is_matrix = len(sizes) == 3 and same_size(sizes[1], 2) and same_shape(shape, (sizes[0], 2 * sizes[2]))
        if not is_matrix or self.rows.of(x) or jax.sharding.get_abstract_mesh().size < 2:
            return False
        dots = self.rows.dots.items()
        results = [self.rows.results[i] for i, dot in dots if self.units.uncast(dot.b) is x and not dot.transpose_b]
        return bool(results) and all(map(self.units.is_read_in_halves, results))

    def _has_main_rows(self, x: Any) -> bool:
        count = self.rows.of(x)
        return 0 < count == len(self.axes_of_rows) and same_shape(x.aval.shape[:count], self.axes_of_rows)

    @functools.cached_property
    def axes_of_rows(self) -> tuple[Any, ...]:
        """The axes that arrays have in the place of the rows; none where these are one axis, or one row."""
        is_one = len(self.block_rows) < 2 or all(same_size(size, 1) for size in self.block_rows)
        return () if is_one else self.block_rows

    def _begins_with_block_rows(self, x: Any) -> bool:
        count = len(self.axes_of_rows)
        return 1 < count < x.aval.ndim and same_shape(x.aval.shape[:count], self.axes_of_rows)

    def _viewed(self, x: Any, shape: tuple[Any, ...]) -> Value:
        """The value of a variable in another shape of as many elements."""
        x = self.units.uncast(x)
        value = self._leaf(x, shape) if x in self.arguments else self.value(x)
        if same_shape(value.shape, shape):
            return value
        return self._shared(("reshape", shape), lambda array: jnp.reshape(array, shape), value, derived="reshape")

    def _product(self, unit: Unit) -> None:
        dot, (out,) = self.rows.dots[unit.number], unit.results
        norm, b = self._deferred_factor(dot), self._second_factor(dot)
        if norm is None:
            a = self._viewed(dot.a, dot.matrix_a)
        else:
            a, b = self._computed(norm.base), self._scaled(norm, b, transpose_b=dot.transpose_b)
        rounding = self._rounding(self.jaxpr.eqns[unit.number], dot)
        value: Value
        if rounding is None:
            groups = None if dot.groups is None else self.value(dot.groups)
            value = product = Product(a, b, transpose_a=dot.transpose_a, transpose_b=dot.transpose_b, groups=groups)
            product.maps_zeros = groups is not None
        else:
            a, b = transposed(a) if dot.transpose_a else a, transposed(b) if dot.transpose_b else b
            product, value = rounded.product_and_result(a, b, rounding, self._bodies)
        product.spec_of_a = None if norm is None else norm.constraint
        product.spec = product.out_spec = _asked_spec(self.jaxpr.eqns[unit.number], out)
        product.source = self.jaxpr.eqns[unit.number].source_info.traceback
        if isinstance(b, nodes.Map) and b.source is None:  # a weight that is transposed or scaled for it
            b.source = product.source
        self.products[unit.number] = product
        if norm is not None:
            value = self._shared(
                "norm",
                jnp.multiply,
                value,
                self._row_factor(norm),
                pullback=scaled_backward,
                takes_inner=True,
                derived="norm",
            )
        if out.aval.dtype != self.dtype and not self._is_rounded(out):
            product.made_of = value.made_of = frozenset({np.dtype(out.aval.dtype)})
            product.is_wide = value.is_wide = has_narrow_range(self.dtype)
        if self.is_exact and out.aval.dtype != np.dtype(FLOAT32):
            value = make_map(functools.partial(_rounded, dtype=out.aval.dtype), value, derived="cast")
        self.values[out] = value
        if self.units.last_terms.get(unit.number) == unit.number:
            self._add_products(unit.number)

    def _add_products(self, last: int) -> None:
        """Makes one product of those that are terms of a sum, where they may be one."""
        numbers = [i for i, of in self.units.last_terms.items() if of == last]
        results = {self.values[x]: x for x in (self.rows.results[i] for i in numbers)}
        for products in alike(list(results)):
            total, (first, *others) = sum_of(products), (results[x] for x in products)
            self.values[first] = total
            self._zeros |= set(others)
            self.products |= {i: total for i in numbers if self.products[i] in products}

    def _rounding(self, equation: Equation, dot: Dot) -> Rounding | None:
        """How the factors of a product are rounded to 8 bits; None where they are not."""
        if "rounding" not in equation.params:
            return None
        own: RoundedFactors = equation.params["rounding"]
        own.check()
        own = own.swapped() if dot.a is not equation.invars[0] else own
        if own.given == ("history",):
            scale = self._scale_of_all(dot.a, own.recipe)
            return Rounding(own.recipe, self._history(equation), scales=(scale, None, None))
        others = {name: self.value(x) for name, x in zip(own.given, equation.invars[2:], strict=True)}
        scales = others.get("a"), others.get("b"), others.get("cotangent")
        return Rounding(own.recipe, scales=scales, is_cotangent=own.is_cotangent)

    def _history(self, equation: Equation) -> Value:
        """The history of a product, (2 H,)."""
        history = self._viewed(equation.invars[2], (math.prod(equation.invars[2].aval.shape),))
        if isinstance(history, Leaf):
            history.is_history = True
        return history

    def _scale_of_all(self, x: Any, recipe: Recipe) -> Value | None:
        """The one scale of a factor that several products read, each with a history; None where each has its own."""
        x = self.units.uncast(x)
        key = x, recipe
        if key not in self._scales:
            readers = [self.jaxpr.eqns[i] for i, dot in self.rows.dots.items() if self.units.uncast(dot.a) is x]
            known = [e for e in readers if (own := e.params.get("rounding")) and own.given == ("history",)]
            every = {e.invars[2]: e for e in known if e.params["rounding"].recipe == recipe}
            is_one = recipe.scaling == "delayed" and len(every) > 1 and not self.is_exact
            is_one = is_one and all(y in self.values or y in self.arguments for y in map(self.units.uncast, every))
            self._scales[key] = None
            if is_one:
                histories = [*map(self._history, every.values())]
                self._scales[key] = rounded.scale_of_all(histories, recipe, self._bodies)
        return self._scales[key]

    def _deferred_factor(self, dot: Dot) -> Deferred | None:
        """The norm that the first factor is, if products alone read it."""
        a = self.units.uncast(dot.a)
        if self.defers is False or dot.transpose_a or self.rows.of(a) != dot.rows_a:
            return None
        if a not in self._deferred:
            products = self._products_alone(a)
            is_tried = bool(products) and (self.defers or saves_bytes(products, self.units))
            self._deferred[a] = deferred(a, self.units) if is_tried else None
        return self._deferred[a]

    def _products_alone(self, a: Any) -> dict[int, Dot]:
        """The products that sum over a variable's columns, if these alone read it, directly or as a cast; else none."""
        found: dict[int, Dot] = {}
        open_ = [a]
        while open_:
            x = open_.pop()
            for j in self.units.readers[x]:
                kind = self.units.kind_of_reader(j)
                if kind == "cast":
                    open_ += self.jaxpr.eqns[j].outvars
                    continue
                if kind != "product" or j not in self.rows.dots or not self._may_read_deferred(j, x):
                    return {}
                found[j] = self.rows.dots[j]
        return found

    def _may_read_deferred(self, number: int, x: Any) -> bool:
        """True for a product that sums over x's columns, and rounds to 8 bits not exactly what it is given."""
        dot, rounding = self.rows.dots[number], self.jaxpr.eqns[number].params.get("rounding")
        return dot.a is x and not dot.transpose_a and dot.groups is None and (rounding is None or rounding.defers)

    def _second_factor(self, dot: Dot) -> Value:
        """The second factor as a matrix; a weight that is summed over axes in its middle is transposed first."""
        if dot.order_b is None:
            lead = dot.b.aval.shape[:1] if dot.has_matrices else ()
            return self._viewed(dot.b, (*lead, *dot.matrix_b))
        b = self.units.uncast(dot.b)
        key = b, dot.order_b
        if key not in self._transposed:

            def transposed(array: jax.Array) -> jax.Array:
                return jnp.transpose(array.reshape(b.aval.shape), dot.order_b).reshape(dot.matrix_b)

            shared = "transpose", b.aval.shape, dot.order_b, dot.matrix_b
            self._transposed[key] = self._shared(shared, transposed, self.value(b), derived="transpose")
        return self._transposed[key]

    def _scaled(self, norm: Deferred, w: Value, *, transpose_b: bool) -> Value:
        """The second factor with the columns' factors of the norm multiplied into what is summed over."""
        for x in norm.columns:
            column = self._viewed(x, (math.prod(x.aval.shape),))
            key = w, column, transpose_b
            if key not in self._scaled_weights:
                as_matrix = _as_row if transpose_b else _as_column
                scale = self._shared(as_matrix, as_matrix, column, derived="scale")
                self._scaled_weights[key] = self._shared("scaled", jnp.multiply, scale, w, derived="scale")
            w = self._scaled_weights[key]
        return w

    def _row_factor(self, norm: Deferred) -> Value:
        """The product of the rows' factors, (M, 1)."""
        if norm.value is None:
            factors = [self._computed(x) for x in norm.rows]
            powers = tuple(norm.powers)
            multiply = functools.partial(_powers, powers=powers, factor=norm.factor)
            is_one = powers == (1,) and norm.factor == 1.0
            key = "rstd", powers, norm.factor
            norm.value = factors[0] if is_one else self._shared(key, multiply, *factors, derived="rstd")
        return norm.value

    def _computed(self, x: Any) -> Value:
        """The value of a variable of a map, which may be computed inside of others."""
        x = self.units.uncast(x)
        if x not in self.values and x not in self.arguments:
            self.values[x] = self._make_map(*self.units.inlined(x), x)
        return self.value(x)

    def _maximum(self, unit: Unit) -> None:
        self.values[unit.results[0]] = rounded.amax_of(self.value(unit.inputs[0]), self._bodies)

    def _map(self, unit: Unit) -> None:
        (result,) = unit.results
        if self._is_of_no_use(result):
            return
        if (same := self._same_matrix(unit)) is not None:
            self.values[result] = same
            return
        if self._has_main_rows(result) and not any(has_rows(self.value(x)) for x in unit.inputs):
            self._call(unit)  # rows that are all alike: a map has the rows of its inputs
            return
        self.values[result] = self._make_map(unit.equations, unit.inputs, result)

    def _same_matrix(self, unit: Unit) -> Value | None:
        """The value that a map only reshapes to an array of the same matrix, as attention's heads to columns."""
        (result,), inputs = unit.results, unit.inputs
        if len(inputs) != 1 or {one.primitive.name for one in unit.equations} != {"reshape"}:
            return None
        x = self.units.uncast(inputs[0])
        is_same = x not in self.arguments and self.rows.of(x) and same_shape(self.shape(x), self.shape(result))
        return self.value(x) if is_same and x.aval.dtype == result.aval.dtype else None

    def _is_of_no_use(self, x: Any) -> bool:
        """True for a factor of products that read the norm deferred."""
        readers = [j for j in self.units.readers[x] if self.units.kind_of_reader(j) == "product"]
        return (
            bool(readers)
            and all(self._deferred_factor(self.rows.dots[j]) for j in readers)
            and bool(self._products_alone(x))
        )

    def _make_map(self, equations: Sequence[Equation], inputs: Sequence[Any], result: Any) -> Value:
        """One value of a map of these equations."""
        shape, merged, own = self.shape(result), self.merged, result
        if not self._zeros.isdisjoint(inputs):
            equations, inputs, same = without_terms(equations, inputs, self._zeros)
            own = same.get(result, result)
            if not equations:
                return self.value(own)
        first = next((x for x in inputs if self.rows.of(x)), result)
        sizes, count = first.aval.shape[: self.rows.of(first)], self.rows.of(first)
        rows = math.prod(sizes)
        tables = [count if self._is_read_as_table(x, equations, count) else 0 for x in inputs]
        masks = [x.aval.dtype == bool and self.units.is_tile(x) for x in inputs]
        values = [self._repeated(x, sizes) if flag else self.value(x) for x, flag in zip(inputs, tables, strict=True)]
        values = [self._as_floats(x) if flag else x for x, flag in zip(values, masks, strict=True)]

        def function(*arrays: jax.Array) -> jax.Array:
            seen = [array != 0 if flag else array for array, flag in zip(arrays, masks, strict=True)]
            each = zip(inputs, seen, tables, strict=True)
            known = {x: merged.seen(x, array, rows, table) for x, array, table in each}
            merged.walk.run(equations, known, rows)
            return merged.as_value(result, known[own], rows, shape)

        function.__name__ = words_of_map(equations, self._is_whole_tile, self._drawn)
        flags = dict(zip(inputs, zip(tables, masks, strict=True), strict=True))
        key = structure(equations, inputs, [own], lambda x: (self.rows.of(x), flags.get(x)), self._params_of)
        value = self._shared(key, function, *values, derived=function.__name__)
        if value not in values:
            value.source = equations[-1].source_info.traceback
        if isinstance(value, nodes.Map) and value.is_tile:
            self._store_as(value, result, is_new=value not in values)
        for equation in equations:
            if equation.primitive.name in CONSTRAINTS:
                self._made_of[equation.outvars[0]].append(value)
        return value

    def _store_as(self, value: nodes.Map, result: Any, *, is_new: bool) -> None:
        """Gives a tile the dtype that it has in memory."""
        if self._is_read_in_float32(result):
            value.made_of = frozenset({np.dtype(FLOAT32)})
        elif self._is_rounded(result):
            value.made_of = frozenset({self.dtype})
            value.is_rounded |= is_new
        elif has_narrow_range(self.dtype) and is_new:
            value.is_wide = True

    def _is_whole_tile(self, x: Any) -> bool:
        """True for a variable with rows and columns both, more than one row."""
        return self.units.is_tile(x) and not same_size(math.prod(x.aval.shape[: self.rows.of(x)]), 1)

    @functools.cached_property
    def _drawn(self) -> set[Any]:
        """The variables that are made of random bits, and of no product."""
        drawn, behind = set[Any](), set[Any]()
        for equation in self.jaxpr.eqns:
            inputs = variables(equation.invars)
            if equation.primitive.name in PRODUCTS or not behind.isdisjoint(inputs):
                behind |= set(equation.outvars)
            elif equation.primitive.name == "random_bits" or not drawn.isdisjoint(inputs):
                drawn |= set(equation.outvars)
        return drawn

    def _params_of(self, equation: Equation) -> Hashable:
        """The parameters of a map's equation, or its rule as text, whose functions are others in each layer."""
        rule = self.rows.rules.get(id(equation))
        return own_params(equation) if rule is None else rule.text

    def _shared(self, key: Hashable, f: Callable[..., jax.Array], *inputs: Value, **options: Any) -> Value:
        """A map of f, which is traced once for this key and these types; each time if the key is None."""
        shared = None if key is None else (self._bodies, key)
        value: Value = make_map(f, *inputs, shared=shared, **options)
        return value

    def _is_read_as_table(self, x: Any, equations: Sequence[Equation], count: int) -> bool:
        """True for an input that elementwise operations read beside rows, and that differs along some of their axes."""
        if not self.merged.is_table(x, count):
            return False
        same = {x}
        for equation in equations:
            if not same.isdisjoint(variables(equation.invars)):
                (out,) = equation.outvars[:1]
                if self.rows.of(out) and out.aval.ndim == x.aval.ndim:
                    return True
                if equation.primitive.name in CASTS:
                    same.add(out)
        return False

    def _as_floats(self, mask: Value) -> Value:
        """A mask as a tile that an epilogue reads: of a byte each where TMA takes such rows."""
        if mask not in self._floats:
            dtype = jnp.float8_e4m3fn if same_size(mask.shape[1] % 16, 0) else self.dtype
            rounded = functools.partial(_rounded, dtype=dtype)
            self._floats[mask] = self._shared(("mask", dtype), rounded, mask, derived="mask")
        return self._floats[mask]

    def _repeated(self, x: Any, sizes: Sequence[int]) -> Value:
        """A table as a value (M, N), or (S, N) where an epilogue repeats its rows: where it is one of heads."""
        count, rest, value = len(sizes), x.aval.shape[len(sizes) :], self.value(x)
        own = [size != 1 for size in x.aval.shape[:count]]
        is_of_heads = len(rest) > 1 and 1 in rest[:-1] and own == sorted(own)
        lead = tuple(x.aval.shape[:count] if is_of_heads else sizes)

        def repeat(array: jax.Array) -> jax.Array:
            table = jnp.broadcast_to(array.reshape(x.aval.shape), (*lead, *rest))
            return table.reshape(math.prod(lead), math.prod(rest))

        key = x, lead
        if key not in self._tables:
            shared = "table", lead, rest, x.aval.shape
            self._tables[key] = self._shared(shared, repeat, value, derived="table")
        return self._tables[key]

    def _is_read_in_float32(self, x: Any) -> bool:
        """True for float32 values that a call or the caller reads, where products are of another dtype."""
        if x.aval.dtype != np.dtype(FLOAT32) or self.dtype == np.dtype(FLOAT32):
            return False
        return any(self.units.kind_of_reader(j) in ("call", "result") for j in self.units.readers[x])

    def _is_rounded(self, x: Any) -> bool:
        """True for values that the function has in the products' dtype; they are no wider in memory."""
        equations: Sequence[Equation] = self.jaxpr.eqns
        casts = [equations[j] for j in self.units.readers[x] if self.units.kind_of_reader(j) == "cast"]
        is_cast_alone = bool(casts) and len(casts) == len(self.units.readers[x])
        dtypes = {cast.outvars[0].aval.dtype for cast in casts} if is_cast_alone else set()
        return x.aval.dtype == self.dtype or dtypes == {self.dtype}

    def _function(self, unit: Unit) -> Callable[..., list[jax.Array]]:
        """The equations of a call as a function."""
        equations, inputs, results, nested = unit.equations, unit.inputs, unit.results, self.nested

        def function(*arrays: jax.Array) -> list[jax.Array]:
            known = {
                x: jax.random.wrap_key_data(array, impl=key_impl_of(x.aval)) if is_key(x.aval) else array
                for x, array in zip(inputs, arrays, strict=True)
            }
            for equation in equations:
                read = [x.val if isinstance(x, core.Literal) else known[x] for x in equation.invars]
                if self._axes and not inner_jaxprs(equation):  # which vary over fewer axes in the function
                    read = vary(self._axes, *map(jnp.asarray, read))
                made = list(map(jnp.asarray, read)) if equation.primitive.name in PVARY else nested(equation, read)
                known.update(zip(equation.outvars, made, strict=True))
            return vary(self._axes, *(data_of(known[x]) for x in results))

        return function

    def _call(self, unit: Unit) -> None:
        equations, inputs, results, function = unit.equations, unit.inputs, unit.results, self._function(unit)
        answers = self._answers_in(equations)
        policy = next((remat for remat in answers[:1] if self._is_apart(unit, remat)), None)
        if policy is not None and not self._keeps_attention(unit, policy):
            function = jax.checkpoint(function, policy=policy, prevent_cse=False)
        closed, traces = self._shared_call(unit, function, policy)
        values = [self.value(x) for x in inputs]
        shapes = list(map(self.shape, results))
        call = Call(words_of_call(equations), closed, values, self.block_rows, shapes, traces)
        alike = [] if policy is None else [x for x in answers if self._keep_alike(x, policy, equations)]
        self._call_answers[call] = dict.fromkeys(alike, True)
        if answers and policy is None:
            self._kept_in_calls.add(call)
        if all(map(is_cheap, equations)):
            self._cheap_calls.add(call)
        for remat in answers if policy is not None else ():
            for x, value in zip(results, call.results, strict=True):
                if (answer := self._without_products[remat].get(x, ARGUMENT)) is not ARGUMENT:
                    self._answers[value][remat] = answer
        for x, value in zip(results, call.results, strict=True):
            value.has_rows = self._has_main_rows(x)
            self.values[x] = value

    def _shared_call(
        self, unit: Unit, f: Callable[..., list[jax.Array]], policy: Remat | None
    ) -> tuple[core.ClosedJaxpr, dict[Hashable, Any]]:
        """The jaxpr of a call's function, and the traces of its derivative: those of equal calls are the same."""
        types = tuple(map(self._type, unit.inputs))
        key = structure(unit.equations, unit.inputs, unit.results, lambda _: None, call_params)
        if key is None or None in map(call_params, unit.equations):
            return jax.make_jaxpr(f)(*types), {}
        key = "call", key, types, self._axes, policy
        if key not in self._bodies:
            self._bodies[key] = jax.make_jaxpr(f)(*types), {}
        closed, traces = self._bodies[key]
        return closed, traces

    def _is_apart(self, unit: Unit, remat: Remat) -> bool:
        """True for a call that is a checkpoint of this policy by itself, beside the one that holds it.

        JAX computes other calls again where their results are read again, with what their derivatives read. But here
        the product would be run again whose epilogue makes what the call reads of what the policy keeps.
        """
        inner = (e for equation in unit.equations for body in inner_jaxprs(equation) for e, _ in equations(body))
        if not any(e.primitive.name in LOOPS | CHECKPOINTS for e in (*unit.equations, *inner)):
            return True
        known, kept = self._without_products[remat], self._kept[remat]
        reads_maps = any(known.get(x, ARGUMENT) is not ARGUMENT and x not in kept for x in unit.inputs)
        return reads_maps and all(x in known for x in unit.results)

    def _keeps_attention(self, unit: Unit, remat: Remat) -> bool:
        """True for attention of which a policy keeps all that its derivative reads: q, k and v, and its own results."""
        kept = self._kept[remat]
        inputs = (x for e in unit.equations if is_attention(e) for x in variables(e.invars) if self.rows.of(x))
        return any(map(is_attention, unit.equations)) and all(x in kept for x in inputs)

    def _keep_alike(self, one: Remat, other: Remat, group: Sequence[Equation]) -> bool:
        """True for policies that keep the same of a call."""
        results = [x for e in group for x in e.outvars]
        bodies = [body for e in group for body in inner_jaxprs(e)]
        bodies += [body for outer in bodies for e, _ in equations(outer) for body in inner_jaxprs(e)]
        is_same = all((x in self._kept[one]) == (x in self._kept[other]) for x in results)
        return is_same and all(one.kept(body).keys() == other.kept(body).keys() for body in bodies)

    def _answers_in(self, group: Sequence[Equation]) -> list[Remat]:
        """The policies that keep something in a call; of attention its result, which has a name in its derivative."""
        bodies = [body for e in group for body in inner_jaxprs(e)]
        return [
            remat
            for remat in self._kept
            if any(remat.answer(e) is not None for e in group if not inner_jaxprs(e))
            or any(x is not None for body in bodies for x in remat.answers(body))
            or any(map(remat.keeps_attention, filter(is_attention, group)))
        ]

    def _type(self, x: Any) -> Any:
        """The type of a variable's array in a call, where all arrays vary over the same manual axes of a mesh."""
        if not self._axes:
            return _data_type(x)
        (aval,) = jax.make_jaxpr(functools.partial(vary, self._axes))(_data_type(x)).out_avals
        return aval


def lifted(
    closed: core.ClosedJaxpr,
    name: str,
    nested: Nested,
    bodies: dict[Hashable, Any],
    *,
    is_exact: bool,
    defers: bool | None,
    implementation: str,
    remats: Sequence[Remat] = (),
    is_step: bool = False,
    fixed: Sequence[bool] = (),
) -> Lifted:
    """The graph of a straight jaxpr.

    Args:
      closed: its constants are no arguments of the graph's: there must be none.
      name: of the function.
      nested, bodies, is_exact, defers, remats, fixed: as in `Lift`.
      implementation: as in `gemm`.
      is_step: as in `Graph`.
    """
    lift = Lift(closed.jaxpr, nested, bodies, is_exact=is_exact, defers=defers, remats=remats, fixed=fixed)
    outputs = lift.run()
    dtypes = [np.dtype("uint32") if is_key(x) else x.dtype for x in closed.out_avals]
    leaves = list(lift.leaves.values())
    graph = Graph(
        name,
        leaves,
        outputs,
        lift.dtype,
        dtypes,
        lift.axes_of_rows,
        implementation,
        keeps_joins=False,
        answers=lift.answers(),
        is_step=is_step,
    )
    sources = [lift.arguments[x] for x, _ in lift.leaves]
    reasons = {i: _reason(dot, lift.dtype) for i, dot in lift.rows.dots.items()} | lift.rows.reasons
    products = [(equation, lift.products.get(i) or reasons[i]) for i, equation in products_in(closed.jaxpr).items()]
    return Lifted(graph, sources, products, lift.streams())


def _reason(dot: Dot, dtype: Any) -> str:
    """Why a product of matrices is none of the graph's."""
    if dot.a.aval.dtype != dtype:
        return f"its factors are {dot.a.aval.dtype}, others' {dtype}"
    if dot.has_matrices:
        return "the matrices of its groups have rows too"
    return "its second factor, which has rows too, would be transposed"


def _asked_spec(dot: Equation, result: Any) -> jax.P | None:
    """The sharding of a product over explicit mesh axes, if its equation says it, as it must where it sums over one."""
    sharding = None if dot.params.get("out_sharding") is None else explicit_sharding(result.aval)
    return None if sharding is None else sharding.spec


def _data_type(x: Any) -> Any:
    """The type of a variable's array; of keys, that of their data."""
    if is_key(x.aval):
        # By a function of its own: JAX keeps something of each trace for as long as the function lives.
        return jax.eval_shape(lambda key: jax.random.key_data(key), jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype))
    return typed(x.aval)


def _concatenated(*parts: jax.Array) -> jax.Array:
    return jnp.concatenate(parts, axis=1)


def _as_column(x: jax.Array) -> jax.Array:
    return x[:, None]


def _as_row(x: jax.Array) -> jax.Array:
    return x[None, :]


def _rounded(x: jax.Array, *, dtype: Any) -> jax.Array:
    return x.astype(dtype)


def _powers(*factors: jax.Array, powers: Sequence[int], factor: float) -> jax.Array:
    """The product of factors, each multiplied (1) or divided by (-1)."""
    total = jnp.float32(factor)
    for x, power in zip(factors, powers, strict=True):
        total = total * x if power > 0 else total / x
    return jnp.asarray(total)
