"""Tracing a function by JAX, with the final values of the variables of flax.nnx modules among its results."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.extend import core
from jax.interpreters import partial_eval


def traced(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> jax.stages.Traced:
    """function(*args, **kwargs), traced as `jax.jit` does.

    A step of flax.nnx changes a model and an optimizer in place. The final values of its arguments' variables are among
    its results, as in `nnx.jit`; the caller's own variables do not change. A function that is already jitted, by JAX or
    by flax.nnx, keeps its static and donated arguments.
    """
    if isinstance(function, type(jax.jit(int))):
        return cast(Any, function).trace(*args, **kwargs)
    nnx = sys.modules.get("flax.nnx")  # a caller with its modules has imported it
    if nnx is None:
        return jax.jit(function).trace(*args, **kwargs)
    if type(function).__module__.startswith("flax.nnx.") and hasattr(function, "trace"):
        trace = function.trace(*args, **kwargs)
        return getattr(trace, "traced", trace)
    structure: Any
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_node_or_state)
    is_node = [_is_node(leaf) for leaf in leaves]
    if not any(is_node):
        return jax.jit(function).trace(*args, **kwargs)
    graph, state = nnx.split([leaf for leaf, is_it in zip(leaves, is_node, strict=True) if is_it])

    @functools.wraps(function)
    def with_state(state: Any, others: Sequence[Any]) -> tuple[Any, Any]:
        nodes, rest = nnx.merge(graph, state), iter(others)
        nodes_left = iter(nodes)
        args, kwargs = structure.unflatten([next(nodes_left if is_it else rest) for is_it in is_node])
        results = jax.tree.leaves(function(*args, **kwargs))
        left = jax.tree.leaves(nnx.state(nodes))
        among = set(map(id, left))  # a model may also be returned
        return [x for x in results if id(x) not in among], left

    return jax.jit(with_state).trace(state, [x for x, is_it in zip(leaves, is_node, strict=True) if not is_it])


def asked_shardings(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The shardings that a function jitted by JAX was given, which are in no type of its arguments."""
    if not isinstance(function, type(jax.jit(int))):
        return []
    try:
        jaxpr = jax.make_jaxpr(function)(*args, **kwargs).jaxpr
    except TypeError:  # the function has static arguments
        return []
    leaves = jax.tree.leaves([equation.params for equation in jaxpr.eqns[:1]])
    return [x for x in leaves if isinstance(x, jax.sharding.Sharding)]


def needed(trace: jax.stages.Traced) -> core.Jaxpr:
    """The jaxpr of a trace, without equations whose results nobody reads."""
    jaxpr = trace.jaxpr.jaxpr
    jaxpr_of_results: core.Jaxpr = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return jaxpr_of_results


def made_results(trace: jax.stages.Traced) -> list[Any]:
    """Types of the results that are not arguments. JAX returns arguments without writing them."""
    jaxpr = trace.jaxpr.jaxpr
    arguments = set(jaxpr.invars)
    types = zip(jax.tree.leaves(trace.out_info), jaxpr.outvars, strict=True)
    return [type_ for type_, var in types if isinstance(var, core.Literal) or var not in arguments]


def _is_node(x: Any) -> bool:
    """Whether it is a module, an optimizer or a variable."""
    nnx: Any = sys.modules["flax.nnx"]
    return isinstance(x, nnx.Module | nnx.Pytree | nnx.Variable)


def _is_node_or_state(x: Any) -> bool:
    """Whether it is a node, or a state: variables of a state are an ordinary pytree, which the function returns."""
    nnx: Any = sys.modules["flax.nnx"]
    return _is_node(x) or isinstance(x, nnx.State)
