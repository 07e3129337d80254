"""Tracing a function by JAX, with the final values of the variables of flax.nnx modules among its results."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval


def traced(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, static_numbers: bool = False
) -> jax.stages.Traced:
    """function(*args, **kwargs), traced as `jax.jit` does.

    A step of flax.nnx changes a model and an optimizer in place. The final values of its arguments' variables are among
    its results, as in `nnx.jit`; the caller's own variables do not change. A function that is already jitted, by JAX or
    by flax.nnx, keeps its static and donated arguments. What is no array, and no number, stays what it is, and so do
    numbers in modules of Equinox, as under `equinox.filter_jit`.

    Args:
      static_numbers: whether all of Python's numbers stay what they are.
    """
    if isinstance(function, type(jax.jit(int))):
        return cast(Any, function).trace(*args, **kwargs)
    nnx = sys.modules.get("flax.nnx")  # a caller with its modules has imported it
    if nnx is not None and type(function).__module__.startswith("flax.nnx.") and hasattr(function, "trace"):
        trace = function.trace(*args, **kwargs)
        return getattr(trace, "traced", trace)
    given, arrays = of_arrays(function, args, kwargs, static_numbers=static_numbers)
    if given is not function:
        results = functools.wraps(function)(lambda xs: list(filter(_is_traceable, jax.tree.leaves(given(xs)))))
        return traced(results, arrays, {})
    if nnx is None:
        return jax.jit(function).trace(*args, **kwargs)
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


def of_arrays(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, static_numbers: bool = False
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A function of what is traced among arguments, and that as its arguments; the function itself if all are.

    Args:
      static_numbers: as in `traced`.
    """
    module = getattr(sys.modules.get("equinox"), "Module", ())
    given = tuple(args), dict(kwargs)
    leaves, tree = jax.tree.flatten(given, is_leaf=_is_nnx_node)
    in_modules: list[bool] = []  # of each leaf
    for x in jax.tree.leaves(given, is_leaf=lambda x: isinstance(x, module) or _is_nnx_node(x)):
        in_modules += [True] * len(jax.tree.leaves(x)) if isinstance(x, module) else [False]
    is_static = [
        not _is_traceable(x) or (isinstance(x, int | float | complex) and (static_numbers or flag))
        for x, flag in zip(leaves, in_modules, strict=True)
    ]
    if not any(is_static):
        return function, (*args,)

    @functools.wraps(function)
    def of_traced(traced_leaves: Sequence[Any]) -> Any:
        rest = iter(traced_leaves)
        args, kwargs = jax.tree.unflatten(
            tree, [x if flag else next(rest) for x, flag in zip(leaves, is_static, strict=True)]
        )
        return function(*args, **kwargs)

    return of_traced, ([x for x, flag in zip(leaves, is_static, strict=True) if not flag],)


def _is_traceable(x: Any) -> bool:
    """True for arrays, their types, Python's numbers and nodes of flax.nnx."""
    is_array = hasattr(x, "shape") and hasattr(x, "dtype")
    return is_array or isinstance(x, int | float | complex | np.generic) or _is_nnx_node(x)


def _is_nnx_node(x: Any) -> bool:
    return "flax.nnx" in sys.modules and _is_node(x)


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
