"""The products of a function, found in its jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval


def equations_of(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[list[tuple[core.JaxprEqn, int]], int]:
    """All equations of function(*args, **kwargs) and how often each is executed; how many devices XLA runs it on.

    Equations whose results nobody reads are none of them, as the gradients of frozen weights: jit drops them too.
    """
    jaxpr = jax.jit(function).trace(*args, **kwargs).jaxpr.jaxpr
    found = list(_equations(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0], 1))
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves((args, kwargs))]
    shardings += [leaf for equation, _ in found for leaf in jax.tree.leaves(equation.params)]
    sizes = [sharding.num_devices for sharding in shardings if isinstance(sharding, jax.sharding.Sharding)]
    return found, max(1, jax.sharding.get_abstract_mesh().size, *sizes)


def _equations(jaxpr: core.Jaxpr, times: int) -> Iterator[tuple[core.JaxprEqn, int]]:
    """All equations, those of nested jaxprs too, and how often each is executed."""
    for equation in jaxpr.eqns:
        yield equation, times
        inner_times = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)):
            if isinstance(inner, core.ClosedJaxpr):
                yield from _equations(inner.jaxpr, inner_times)
            elif isinstance(inner, core.Jaxpr):
                yield from _equations(inner, inner_times)
