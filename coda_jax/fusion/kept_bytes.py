"""How many bytes a function keeps for its backward pass, beside its arguments."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.fusion.alike import own_params
from coda_jax.fusion.custom import CUSTOM_VJPS
from coda_jax.fusion.dots import PRODUCTS
from coda_jax.graph.calls import is_key
from coda_jax.graph.function import Graph
from coda_jax.graph.on_mesh import typed
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.walk import equations


def kept_by_graph(graph: Graph) -> int:
    """The bytes that the derivative of a graph keeps, for all leaves; in a checkpoint those that policies keep."""
    derivative = graph.derivative()
    kept = derivative.kept if graph.answers is None else derivative.named
    return sum(math.prod(x.shape) * x.stored_as(graph.dtype).itemsize for x in kept)


def kept_by_jax(closed: core.ClosedJaxpr, arrays: Sequence[Any], policy: Callable[..., Any] | None = None) -> float:
    """The bytes that jax.vjp of a function keeps at these arrays; infinite for one that has no derivative.

    Args:
      policy: of the checkpoint that the function is in; None for none.
    """
    is_differentiated = [not is_key(x) and is_float(x.dtype) for x in closed.in_avals]

    whole: Callable[..., list[jax.Array]] = core.jaxpr_as_fun(closed)
    whole = whole if policy is None else jax.checkpoint(whole, policy=policy)
    has_transpose = not any(e.primitive.name == "while" or _is_offloading(e) for e, _ in equations(closed.jaxpr))

    def residuals(*arrays: jax.Array) -> list[jax.Array]:
        def function(floats: list[jax.Array]) -> list[jax.Array]:
            given = iter(floats)
            return whole(*(next(given) if flag else x for x, flag in zip(arrays, is_differentiated, strict=True)))

        floats = [x for x, flag in zip(arrays, is_differentiated, strict=True) if flag]
        outputs, pullback = jax.vjp(function, floats)
        if not has_transpose:  # it may have tangents alone, which JAX says here
            pullback([_zeros(x) for x in outputs])
        return jax.tree.leaves(pullback)

    try:
        jaxpr = jax.make_jaxpr(residuals)(*arrays).jaxpr
    except Exception:  # a rule of the user's may raise anything
        return float("inf")
    arguments = set(jaxpr.invars)
    kept: set[Any] = {x for x in jaxpr.outvars if not isinstance(x, core.Literal)} - arguments
    return sum(_bytes(x.aval) for x in kept)


# Their results have tangents, and not JAX's symbol of zeros, wherever an argument has one.
_SMOOTH = PRODUCTS | frozenset(
    {
        *(
            "add",
            "add_any",
            "sub",
            "neg",
            "mul",
            "div",
            "max",
            "min",
            "select_n",
            "square",
            "integer_pow",
        ),
        *("exp", "exp2", "log", "log1p", "tanh", "logistic", "erf", "rsqrt", "sqrt", "sin", "cos", "reduce_sum"),
        *("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "split", "concatenate"),
        *("convert_element_type", "copy", "name"),
    }
)


def surely_kept_by_jax(jaxpr: core.Jaxpr) -> Any:
    """Bytes that jax.vjp of a straight jaxpr keeps at least; equations that are alike are differentiated once.

    It counts what equations of `_SMOOTH` keep, between arguments and results that these and `jax.custom_vjp`s connect.
    """
    every: Sequence[Any] = jaxpr.eqns
    varied: set[Any] = {x for x in jaxpr.invars if has_tangent(x)}
    linear = []  # in JAX's derivative, and so are all that they read
    for equation in every:
        flags = tuple(has_tangent(x) and x in varied for x in equation.invars)
        is_rule = equation.primitive.name in CUSTOM_VJPS
        if (is_rule or equation.primitive.name in _SMOOTH) and any(flags) and all(map(has_tangent, equation.outvars)):
            varied.update(equation.outvars)
            linear.append((equation, flags, is_rule))
    read, arguments = set(variables(jaxpr.outvars)), set(jaxpr.invars)
    arrays, own = set[Any](), 0
    for equation, flags, is_rule in reversed(linear):
        if not read.isdisjoint(equation.outvars):
            read.update(itertools.compress(equation.invars, flags))
            if is_rule:  # which keeps what its author asks for
                continue
            types = tuple(typed(x.aval) for x in equation.invars)
            try:
                kept, more = _kept_by_equation(equation.primitive, own_params(equation), types, flags)
            except TypeError:  # a parameter has no hash
                continue
            atoms = [*equation.invars, *equation.outvars]
            arrays.update(variables(atoms[i] for i in kept))
            own += more
    return own + sum(_bytes(x.aval) for x in arrays - arguments)


@functools.lru_cache(maxsize=4096)
def _kept_by_equation(
    primitive: core.Primitive, params: Sequence[tuple[str, Any]], types: Sequence[Any], flags: Sequence[bool]
) -> tuple[tuple[int, ...], Any]:
    """The atoms of an equation that its derivative by these arguments keeps, by number; the bytes of other arrays."""

    def function(*arrays: jax.Array) -> tuple[Sequence[Any], list[jax.Array]]:
        def of_varied(*varied: jax.Array) -> Sequence[Any]:
            given = iter(varied)
            inputs = [next(given) if flag else x for x, flag in zip(arrays, flags, strict=True)]
            return bind(primitive, inputs, dict(params))

        outputs, pullback = jax.vjp(of_varied, *itertools.compress(arrays, flags))
        return outputs, jax.tree.leaves(pullback)

    closed, (outputs, _) = jax.make_jaxpr(function, return_shape=True)(*types)
    known = {x: i for i, x in enumerate([*closed.jaxpr.invars, *closed.jaxpr.outvars[: len(outputs)]])}
    found = dict.fromkeys(variables(closed.jaxpr.outvars[len(outputs) :]))
    own = sum(_bytes(x.aval) for x in found if x not in known)
    return tuple(known[x] for x in found if x in known), own


def has_tangent(x: Any) -> bool:
    """True for a variable of floats."""
    return not isinstance(x, core.Literal) and not is_key(x.aval) and is_float(x.aval.dtype)


def _bytes(aval: Any) -> Any:
    return math.prod(aval.shape) * (4 if is_key(aval) else np.dtype(aval.dtype).itemsize)


def _is_offloading(equation: core.JaxprEqn) -> bool:
    """True for an equation that moves an array into the host's memory, as the policy of a derivative does.

    JAX does not transpose it.
    """
    spaces = [x.aval.memory_space for x in equation.outvars if isinstance(x.aval, jax.core.ShapedArray)]
    return equation.primitive.name == "device_put" and jax.memory.Space.Host in spaces


def _zeros(x: Any) -> Any:
    is_varied = not is_key(x) and is_float(x.dtype)
    return jnp.zeros_like(x) if is_varied else np.zeros(x.shape, jax.dtypes.float0)
