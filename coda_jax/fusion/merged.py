"""Equations that treat rows alone, evaluated on arrays whose rows are one axis."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.fusion.custom import CUSTOM_VJPS, tangents_jaxpr
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.rows import MARKS, OF_ELEMENTS, RowRule, sums_rows
from coda_jax.graph.on_mesh import PVARY
from coda_jax.graph.row_axes import RowAxes, with_rows
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES, callee, opened
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.evaluate import evaluate
from coda_jax.jaxprs.inline import Inliner


@dataclasses.dataclass(frozen=True)
class Merged:
    """How equations are evaluated.

    Attributes:
      counts: how many axes in front are rows, of the variables that have rows.
      is_exact: whether values are rounded to the dtypes of the equations; else floats stay float32.
      rules: of custom_vjp_calls, as in `Rows`.
      has_derivatives: whether what has a rule keeps it; else it is evaluated as its value, which nobody differentiates.
    """

    counts: Mapping[Any, int]
    is_exact: bool
    rules: Mapping[int, RowRule | None] = dataclasses.field(default_factory=dict)
    has_derivatives: bool = True

    def shape(self, x: Any, rows: Any) -> tuple[Any, ...]:
        """The shape of a variable's array: with so many rows as one axis, if it has rows."""
        count = self.counts.get(x, 0)
        return (rows, *x.aval.shape[count:]) if count else tuple(x.aval.shape)

    def results(self, equation: Equation, inputs: Sequence[Any], rows: Any) -> Sequence[jax.Array]:
        """The results of an equation, with one axis of so many rows, or of size 1 where all rows are the same."""
        name, params = equation.primitive.name, equation.params
        count = max(self.counts.get(x, 0) for x in (*equation.outvars, *variables(equation.invars)))
        if name == "custom_jvp_call":
            return self._custom(equation, self._beside(equation, inputs, count))
        if name in OF_ELEMENTS:
            return self._elementwise(equation, self._beside(equation, inputs, count))
        if name in CUSTOM_VJPS:
            return self._by_its_rule(equation, inputs, rows)
        if not count:
            return bind(equation.primitive, inputs, params)
        if name == "gather":
            return [_taken(inputs[0], inputs[1], params, equation.outvars[0].aval.shape[count:])]
        if sums_rows(equation, self.counts):
            axes = (*range(len(params["axes"]) - count + 1),)
            return [jnp.sum(self._with_rows(equation.invars[0], inputs[0], rows), axis=axes)]
        if name == "broadcast_in_dim" and not any(self.counts.get(x) for x in variables(equation.invars)):
            return [_broadcast_alike(inputs[0], params, count)]
        size = max((x.shape[0] for x in inputs if x.ndim), default=1)  # 1 where the rows of all are the same
        arrays = [x if x.ndim == 0 or x.shape[0] == size else jnp.broadcast_to(x, (size, *x.shape[1:])) for x in inputs]
        out = equation.outvars[0]
        params = with_rows(name, params, RowAxes(count, (size,)))
        if params is None and name == "broadcast_in_dim" and math.prod(out.aval.shape[:count]) == 1:
            return [arrays[0].reshape(self.shape(out, size))]  # more axes of size 1
        assert params is not None, f"{name} moves rows"
        if name == "reduce_sum":  # of 16 bits in float32
            return [jnp.sum(arrays[0], axis=params["axes"])]
        return bind(equation.primitive, arrays, params)

    @property
    def walk(self) -> Inliner:
        """The walk over equations whose context is the number of rows."""
        return Inliner(self.results, lambda equation, rows: None, self.read)

    def read(self, x: Any) -> Any:
        """A literal's value, in the dtype that its variable would have here."""
        value = jnp.asarray(x.val, x.aval.dtype)
        return value if self.is_exact or not is_float(value.dtype) else value.astype(FLOAT32)

    def is_table(self, x: Any, count: int) -> bool:
        """True for a variable without rows of its own that differs along some of `count` axes of rows."""
        if isinstance(x, core.Literal) or self.counts.get(x) or x.aval.ndim < count:
            return False
        return any(size != 1 for size in x.aval.shape[:count])

    def seen(self, x: Any, array: jax.Array, rows: Any, table: int = 0) -> jax.Array:
        """A value's array (M, N) as equations see the variable; a table of so many axes of rows has all rows."""
        if table:
            repeated = array if array.shape[0] == rows else jnp.tile(array, (rows // array.shape[0], 1))
            array = repeated.reshape(rows, *x.aval.shape[table:])
        else:
            array = jnp.reshape(array, self.shape(x, rows))
        return array.astype(x.aval.dtype) if self.is_exact else array

    def as_value(self, x: Any, array: jax.Array, rows: Any, shape: tuple[Any, ...]) -> jax.Array:
        """The array of a variable as its value has it; where the variable is of 8 bits, that is of float32."""
        array = array.astype(FLOAT32) if is_of_8_bits(x.aval.dtype) else array
        if self.counts.get(x) and array.shape[0] != rows:
            array = jnp.broadcast_to(array, (rows, *array.shape[1:]))
        return jnp.reshape(array, shape)

    def _beside(self, equation: Equation, inputs: Sequence[Any], count: int) -> list[Any]:
        """The arguments of an elementwise operation, each with one axis of rows or of no axes."""
        if not count:
            return list(inputs)
        arrays: list[Any] = []
        for x, array in zip(equation.invars, inputs, strict=True):
            is_alike = isinstance(x, core.Literal) or not (self.counts.get(x) or self.is_table(x, count))
            arrays.append(array.reshape(1, *array.shape[count:]) if is_alike and array.ndim else array)
        return arrays

    def _elementwise(self, equation: Equation, inputs: list[Any]) -> Sequence[jax.Array]:
        name, params = equation.primitive.name, equation.params
        if name == "copy" or name in MARKS or name in PVARY:
            return inputs
        if name == "convert_element_type":
            dtype, params = params["new_dtype"], {**params, "sharding": None}  # a map is traced without a mesh
            if self.is_exact or not is_float(dtype):
                return bind(equation.primitive, inputs, params)
            x, before = inputs[0], equation.invars[0].aval.dtype
            for one in (before, dtype):  # others round no value; one that has 8 bits in memory is another value here
                x = x.astype(one) if is_of_8_bits(one) else x
            return bind(equation.primitive, [x], {**params, "new_dtype": np.dtype(FLOAT32)})
        shape = jnp.broadcast_shapes(*(x.shape for x in inputs))
        scalars = {"select_n": (0,), "clamp": (0, 2)}.get(name, ())  # what may be a number beside arrays
        alike = [x if i in scalars and not x.ndim else jnp.broadcast_to(x, shape) for i, x in enumerate(inputs)]
        return bind(equation.primitive, alike, params)

    def _custom(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[jax.Array]:
        """A function with a derivative of its own, which is evaluated on arrays with one axis of rows too."""
        shape = jnp.broadcast_shapes(*(x.shape for x in inputs))
        inputs = [x if not x.ndim else jnp.broadcast_to(x, shape) for x in inputs]
        body = core.ClosedJaxpr(*opened(callee(equation)))
        is_differentiated = [is_float(x.aval.dtype) for x in equation.invars]
        evaluated = self._elementwise_function(body)

        function = jax.custom_jvp(evaluated)

        @function.defjvp
        def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
            given = [t for t, flag in zip(tangents, is_differentiated, strict=True) if flag]
            return function(*primals), self._elementwise_function(tangents_jaxpr(equation))(*primals, *given)

        results: Sequence[jax.Array] = function(*inputs)
        return results

    def _by_its_rule(self, equation: Equation, inputs: Sequence[Any], rows: Any) -> Sequence[jax.Array]:
        """A function with a rule, all of whose functions are evaluated on arrays with one axis of rows."""
        own = self.rules[id(equation)]
        assert own is not None
        within = functools.partial(Merged(own.counts, self.is_exact)._evaluated, rows=rows)
        rule, flags = own.rule, own.rule.is_differentiated

        each = zip(equation.invars, inputs, strict=True)
        given = [self._with_rows(x, jnp.asarray(array), rows) for x, array in each]
        if not self.has_derivatives:
            return within(own.value, given)
        function: Any = jax.custom_vjp(lambda *arrays: within(own.value, arrays))

        def forward(*arrays: jax.Array) -> tuple[Sequence[jax.Array], Any]:
            found, count = within(rule.forward, arrays), len(equation.outvars)
            return function(*arrays) if rule.is_recursive else found[:count], (found[count:], arrays)

        def backward(kept: Any, cotangents: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
            values, arrays = kept
            found = iter(within(rule.backward, [*values, *cotangents]))
            each = zip(arrays, flags, strict=True)
            return tuple(jnp.broadcast_to(next(found), x.shape).astype(x.dtype) if flag else None for x, flag in each)

        function.defvjp(forward, backward)
        results: Sequence[jax.Array] = function(*given)
        return results

    def _with_rows(self, x: Any, array: jax.Array, rows: Any) -> jax.Array:
        """A variable's array with all rows, if it has rows."""
        has_rows = not isinstance(x, core.Literal) and self.counts.get(x, 0)
        return jnp.broadcast_to(array, (rows, *array.shape[1:])) if has_rows else array

    def _evaluated(self, closed: core.ClosedJaxpr, arrays: Sequence[jax.Array], *, rows: Any) -> list[jax.Array]:
        """The results of a function that treats rows alone, and of one that sums over all of them."""
        found = self.walk.results(closed.jaxpr, (), arrays, rows)
        return [self._with_rows(x, array, rows) for x, array in zip(closed.jaxpr.outvars, found, strict=True)]

    def _elementwise_function(self, closed: core.ClosedJaxpr) -> Callable[..., list[jax.Array]]:
        """A function of elementwise operations for arrays of another shape than it was traced for."""

        def apply(equation: Equation, inputs: list[Any]) -> Sequence[Any]:
            name = equation.primitive.name
            arrays = [jnp.asarray(x) for x in inputs]
            if not self.is_exact:
                arrays = [x.astype(FLOAT32) if is_float(x.dtype) else x for x in arrays]
            if name == "broadcast_in_dim":
                return arrays  # of a number
            return self._elementwise(equation, arrays)

        return lambda *arrays: evaluate(closed.jaxpr, closed.consts, arrays, apply, CALLS | CUSTOM_DERIVATIVES)


def _broadcast_alike(x: jax.Array, params: Mapping[str, Any], count: int) -> jax.Array:
    """An array without rows, broadcast to one row."""
    dimensions = params["broadcast_dimensions"]
    kept = [i for i, axis in enumerate(dimensions) if axis >= count]
    x = x.reshape([x.shape[i] for i in kept])
    return lax.broadcast_in_dim(x, (1, *params["shape"][count:]), [dimensions[i] - count + 1 for i in kept])


def _taken(x: jax.Array, indices: jax.Array, params: Mapping[str, Any], shape: Sequence[Any]) -> jax.Array:
    """One element of each row of x (rows, V), (rows, *shape), as a gather with these parameters takes it."""
    numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
    alike = jnp.broadcast_to(indices.reshape(indices.shape[0], 1), (x.shape[0], 1))
    options = {"mode": params["mode"], "fill_value": params["fill_value"]}
    return lax.gather(x, alike, numbers, (1, 1), **options).reshape(x.shape[0], *shape)
