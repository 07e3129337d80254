"""A function without its roundings to 16 bits: its equations, with float32 in the place of bfloat16 and float16."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.fusion.custom import tangents_jaxpr
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.nested import shard_mapped
from coda_jax.fusion.straight import CHECKPOINTS, CUSTOM_VJPS, JITS
from coda_jax.graph.calls import is_key
from coda_jax.graph.on_mesh import PVARY
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.evaluate import evaluate
from coda_jax.jaxprs.walk import equations, inner_jaxprs

_NARROW = frozenset({np.dtype(jnp.bfloat16), np.dtype("float16")})
_MARKS = {"name", "reshard", "mesh_cast", "layout_constraint", *PVARY, "psum_invariant", "all_gather_invariant"}
_OF_BITS = {"bitcast_convert_type", "nextafter"}  # they mean the bits of the dtype that they have
# JAX's own, which mean the same in any dtype; all others may hold code that was made for the dtypes that they have.
_IN_ANY_DTYPE = {x.name for module in (lax, lax.linalg) for x in vars(module).values() if isinstance(x, core.Primitive)}
_IN_ANY_DTYPE = (_IN_ANY_DTYPE | _MARKS | CHECKPOINTS) - _OF_BITS


class InFloat32:
    """A jaxpr as a function of its arguments, in which floats of 16 bits are float32.

    Products in their place have the highest precision. Functions with derivatives of their own keep these, and bodies
    of loops, branches and checkpoints are in float32 too. What rounds by `lax.reduce_precision`, or to 8 bits, still
    does. Kernels, callbacks and what reads bits run in the dtypes that they have, between two casts. Prints are left
    out.

    Attributes:
      dtypes: the floats of 16 bits that the jaxpr computes in.
      narrow: the names of the primitives that still do, once the function is traced.
    """

    def __init__(self, closed: core.ClosedJaxpr):
        self._closed, self.narrow = closed, set[str]()
        found = (_dtypes(x) for x, _ in equations(closed.jaxpr))
        self.dtypes = frozenset[Any]().union(*found) & _NARROW

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results, for arrays as `widened` gives them."""
        return self._evaluated(self._closed, arrays)

    def widened(self, x: Any) -> Any:
        """An array as the function has it."""
        return _cast(x, self._wide(x.dtype))

    def _evaluated(self, jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        inner, consts = opened(jaxpr)
        results = evaluate(inner, list(map(self.widened, consts)), arrays, self._apply, opens=())
        return [self._given(x, v) for x, v in zip(results, inner.outvars, strict=True)]

    def _apply(self, equation: Equation, arrays: Sequence[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        inputs = [self._given(x, v) for x, v in zip(arrays, equation.invars, strict=True)]
        if equation.effects and not equation.outvars:
            return ()
        if not self._has_narrow(equation):
            return bind(equation.primitive, inputs, equation.params)
        if name in JITS:
            return self._evaluated(callee(equation), inputs)
        if name == "custom_jvp_call":
            return self._with_tangents(equation, inputs)
        if name in CUSTOM_VJPS:
            return self._with_cotangents(equation, inputs)
        if name == "shard_map":
            return shard_mapped(lambda body, _: self._function(body), equation, inputs)
        if name in _IN_ANY_DTYPE:
            results = bind(equation.primitive, inputs, self._params(equation))
        else:
            self.narrow.add(name)
            own = [_cast(x, v.aval.dtype) for x, v in zip(inputs, equation.invars, strict=True)]
            results = bind(equation.primitive, own, equation.params)
        return [_cast(x, self._wide(v.aval.dtype)) for x, v in zip(results, equation.outvars, strict=True)]

    def _function(self, jaxpr: Any) -> Callable[..., list[Any]]:
        return lambda *arrays: self._evaluated(jaxpr, arrays)

    def _params(self, equation: Equation) -> dict[str, Any]:
        """The parameters, with float32 in the place of 16 bits, in jaxprs too."""

        def wide(x: Any) -> Any:
            if isinstance(x, core.ClosedJaxpr):
                return self._jaxpr(x)
            if isinstance(x, core.Jaxpr):
                return self._jaxpr(core.ClosedJaxpr(x, ())).jaxpr
            return self._wide(x) if isinstance(x, np.dtype) else x

        params = {k: tuple(map(wide, x)) if k == "branches" else wide(x) for k, x in equation.params.items()}
        if "precision" in params and not self.dtypes.isdisjoint(_dtypes(equation)):
            params["precision"] = (lax.Precision.HIGHEST,) * 2
        return params

    def _jaxpr(self, closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
        return jax.make_jaxpr(self._function(closed))(*map(self._wide_type, closed.in_avals))

    def _with_tangents(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of a custom_jvp_call, with its rule, which is traced in its own dtypes first."""
        floats = [i for i, v in enumerate(equation.invars) if is_float(v.aval.dtype)]
        function = jax.custom_jvp(self._function(callee(equation)))

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            made = self._evaluated(tangents_jaxpr(equation), [*primals, *(tangents[i] for i in floats)])
            return function(*primals), made

        function.defjvp(rule)
        results: Sequence[Any] = function(*inputs)
        return results

    def _with_cotangents(self, equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of a custom_vjp_call, with its rules, which are traced in their own dtypes first."""
        types = [v.aval for v in equation.invars]
        floats = [i for i, x in enumerate(types) if not is_key(x) and is_float(x.dtype)]
        results = [v.aval for v in equation.outvars]
        function = jax.custom_vjp(self._function(callee(equation)))
        known: dict[str, Any] = {}

        def residuals(*arrays: Any) -> Any:
            def of_floats(*given: Any) -> Sequence[Any]:
                every = dict(enumerate(arrays)) | dict(zip(floats, given, strict=True))
                return list(bind(equation.primitive, list(every.values()), equation.params))

            outputs, pullback = jax.vjp(of_floats, *(arrays[i] for i in floats))
            kept, known["tree"] = jax.tree.flatten(pullback)
            return outputs, kept

        def forward(*arrays: Any) -> Any:
            closed = jax.make_jaxpr(residuals)(*types)
            made = self._evaluated(closed, arrays)
            known["types"] = closed.out_avals[len(results) :]
            return made[: len(results)], made[len(results) :]

        def backward(kept: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            def pulled(kept: Sequence[Any], given: Sequence[Any]) -> Any:
                return jax.tree.unflatten(known["tree"], kept)(list(given))

            closed = jax.make_jaxpr(pulled)(known["types"], [x.to_tangent_aval() for x in results])
            made = dict(zip(floats, self._evaluated(closed, [*kept, *cotangents]), strict=True))
            return tuple(made.get(i) for i in range(len(types)))

        function.defvjp(forward, backward)
        made: Sequence[Any] = function(*inputs)
        return made

    def _has_narrow(self, equation: Equation) -> bool:
        """True for an equation of floats of 16 bits, also in the jaxprs that it holds."""
        every = [equation, *(x for body in inner_jaxprs(equation) for x, _ in equations(body))]
        return any(not self.dtypes.isdisjoint(_dtypes(x)) for x in every)

    def _wide(self, dtype: Any) -> Any:
        return np.dtype(FLOAT32) if dtype in self.dtypes else dtype

    def _wide_type(self, aval: Any) -> Any:
        return aval.update(dtype=self._wide(aval.dtype)) if getattr(aval, "dtype", None) in self.dtypes else aval

    def _given(self, x: Any, v: Any) -> Any:
        """The array of an atom, or a literal's number."""
        aval: Any = v.aval
        return np.asarray(x, self._wide(aval.dtype)) if isinstance(v, core.Literal) else x


def _dtypes(equation: Equation) -> set[Any]:
    """The dtypes that an equation reads and makes."""
    types: Iterator[Any] = (v.aval for v in (*equation.invars, *equation.outvars))
    return {getattr(x, "dtype", None) for x in types}


def _cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)
