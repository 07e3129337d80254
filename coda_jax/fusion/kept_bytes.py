"""How many bytes a function keeps for its backward pass, beside its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.graph.calls import is_key
from coda_jax.graph.function import Graph
from coda_jax.graph.values import is_float
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
    return sum(math.prod(x.aval.shape) * (4 if is_key(x.aval) else np.dtype(x.aval.dtype).itemsize) for x in kept)


def _is_offloading(equation: core.JaxprEqn) -> bool:
    """True for an equation that moves an array into the host's memory, as the policy of a derivative does.

    JAX does not transpose it.
    """
    spaces = [x.aval.memory_space for x in equation.outvars if isinstance(x.aval, jax.core.ShapedArray)]
    return equation.primitive.name == "device_put" and jax.memory.Space.Host in spaces


def _zeros(x: Any) -> Any:
    is_varied = not is_key(x) and is_float(x.dtype)
    return jnp.zeros_like(x) if is_varied else np.zeros(x.shape, jax.dtypes.float0)
