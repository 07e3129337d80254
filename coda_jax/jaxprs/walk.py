"""The equations of a function, with those in loops and nested calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from coda_jax.jaxprs.traced import asked_shardings, needed, traced

_FALLBACK = "coda_fallback"

State = TypeVar("State")


def with_fallback(is_needed: jax.Array, fallback: Callable[[], State], result: State) -> State:
    """The result, or fallback() if it is needed. Counts of executions assume that the fallback never runs.

    Args:
      is_needed: () bool or integer. The program waits for it on the host.
      fallback: returns a state like the result, which it overwrites.
      result: arrays.
    """

    def again(is_needed: jax.Array, result: State) -> State:
        return lax.fori_loop(0, is_needed.astype(jnp.int32), lambda _, __: fallback(), result)

    again.__name__ = _FALLBACK
    return jax.jit(again)(is_needed, result)


def jaxpr_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> core.Jaxpr:
    """The jaxpr of function(*args, **kwargs).

    It lacks equations whose results nobody reads, such as the gradients of frozen weights: jit drops them, too.
    """
    return needed(traced(function, args, kwargs))


def equations_of(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[list[tuple[core.JaxprEqn, int]], int]:
    """All equations of function(*args, **kwargs), with the number of executions; and the number of XLA's devices."""
    asked = asked_shardings(function, args, kwargs)
    return equations_in(jaxpr_of(function, *args, **kwargs), (args, kwargs, asked))


def equations_in(jaxpr: core.Jaxpr, arguments: Any) -> tuple[list[tuple[core.JaxprEqn, int]], int]:
    """`equations_of` for a jaxpr with these arguments."""
    every = list(equations(jaxpr))
    shardings = [getattr(x, "sharding", x) for x in jax.tree.leaves(arguments)]
    shardings += [leaf for equation, _ in every for leaf in jax.tree.leaves(equation.params)]
    sizes = [sharding.num_devices for sharding in shardings if isinstance(sharding, jax.sharding.Sharding)]
    return every, max(1, jax.sharding.get_abstract_mesh().size, *sizes)


def inner_jaxprs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """The jaxprs among an equation's parameters: the body of a loop, the branches of a cond, a jitted function."""
    inner = [x for x in jax.tree.leaves(equation.params) if isinstance(x, core.Jaxpr | core.ClosedJaxpr)]
    return [x.jaxpr if isinstance(x, core.ClosedJaxpr) else x for x in inner]


def executions(equation: core.JaxprEqn) -> int:
    """The number of executions of an equation's inside: a scan's steps, none for `with_fallback`, else one."""
    if equation.params.get("name") == _FALLBACK:
        return 0
    return int(equation.params.get("length", 1)) if equation.primitive.name == "scan" else 1


def num_carried(scan: core.JaxprEqn) -> int:
    """The number of a scan's results that it carries from step to step. The others are stacked."""
    (body,) = inner_jaxprs(scan)
    pairs = zip(scan.outvars, body.outvars, strict=True)
    return sum(getattr(outer.aval, "ndim", 0) == getattr(inner.aval, "ndim", 0) for outer, inner in pairs)


def num_constants(scan: core.JaxprEqn) -> int:
    """The number of a scan's arguments that each step reads entirely; they come first."""
    (body,) = inner_jaxprs(scan)
    pairs = zip(scan.invars, body.invars, strict=True)
    unstacked = sum(getattr(outer.aval, "ndim", 0) == getattr(inner.aval, "ndim", 0) for outer, inner in pairs)
    return unstacked - num_carried(scan)


def equations(jaxpr: core.Jaxpr, times: int = 1) -> Iterator[tuple[core.JaxprEqn, int]]:
    """All equations, with those of nested jaxprs, and how often each is executed."""
    for equation in jaxpr.eqns:
        yield equation, times
        if inside := times * executions(equation):
            for inner in inner_jaxprs(equation):
                yield from equations(inner, inside)
