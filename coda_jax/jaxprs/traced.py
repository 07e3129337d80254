"""A function traced by JAX, with what it leaves in the variables of flax.nnx modules that it is given."""

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

    A step of flax.nnx changes a model and an optimizer in place. What such a function leaves in the variables of its
    arguments is among its results, as `nnx.jit` has it; the caller's own are left as they are. A function that is
    jitted, by JAX or by flax.nnx, is traced as what it is, with its static and its donated arguments.
    """
    if isinstance(function, type(jax.jit(int))):
        return cast(Any, function).trace(*args, **kwargs)
    nnx = sys.modules.get("flax.nnx")  # who has modules of it has imported it
    if nnx is None:
        return jax.jit(function).trace(*args, **kwargs)
    if type(function).__module__.startswith("flax.nnx.") and hasattr(function, "trace"):
        found = function.trace(*args, **kwargs)
        return getattr(found, "traced", found)
    structure: Any
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_node_or_state)
    is_node = [_is_node(leaf) for leaf in leaves]
    if not any(is_node):
        return jax.jit(function).trace(*args, **kwargs)
    graph, state = nnx.split([leaf for leaf, is_it in zip(leaves, is_node, strict=True) if is_it])

    @functools.wraps(function)
    def with_state(state: Any, others: Sequence[Any]) -> tuple[Any, Any]:
        nodes, rest = nnx.merge(graph, state), iter(others)
        given = iter(nodes)
        args, kwargs = structure.unflatten([next(given if is_it else rest) for is_it in is_node])
        results = jax.tree.leaves(function(*args, **kwargs))
        left = jax.tree.leaves(nnx.state(nodes))
        among = set(map(id, left))  # a model that is returned too
        return [x for x in results if id(x) not in among], left

    return jax.jit(with_state).trace(state, [x for x, is_it in zip(leaves, is_node, strict=True) if not is_it])


def asked_shardings(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The shardings that a function jitted by JAX asks for, which no type of its arguments has."""
    if not isinstance(function, type(jax.jit(int))):
        return []
    try:
        jaxpr = jax.make_jaxpr(function)(*args, **kwargs).jaxpr
    except TypeError:  # with static arguments
        return []
    leaves = jax.tree.leaves([equation.params for equation in jaxpr.eqns[:1]])
    return [x for x in leaves if isinstance(x, jax.sharding.Sharding)]


def needed(found: jax.stages.Traced) -> core.Jaxpr:
    """Its jaxpr, without the equations whose results nobody reads."""
    jaxpr = found.jaxpr.jaxpr
    jaxpr_of_results: core.Jaxpr = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]
    return jaxpr_of_results


def made_results(found: jax.stages.Traced) -> list[Any]:
    """Types of the results that are no arguments: JAX hands arguments on, and writes nothing."""
    jaxpr = found.jaxpr.jaxpr
    given = set(jaxpr.invars)
    types = zip(jax.tree.leaves(found.out_info), jaxpr.outvars, strict=True)
    return [type_ for type_, var in types if isinstance(var, core.Literal) or var not in given]


def _is_node(x: Any) -> bool:
    """Whether it is a module, an optimizer or a variable."""
    nnx: Any = sys.modules["flax.nnx"]
    return isinstance(x, nnx.Module | nnx.Pytree | nnx.Variable)


def _is_node_or_state(x: Any) -> bool:
    """A state's variables are those of a pure function, which returns what it makes."""
    nnx: Any = sys.modules["flax.nnx"]
    return _is_node(x) or isinstance(x, nnx.State)
