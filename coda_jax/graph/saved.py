"""Policies of `jax.checkpoint`: how JAX's partial evaluation asks them, and makes equations again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import Recompute, checkpoint_name
from jax.extend import core


def keeps(saveable: Callable[..., Any], type_: Any, name: str) -> bool:
    """Whether a policy keeps an array of this type under this name."""
    answer = saveable(_name_p(), type_, name=name)
    return not (answer is False or isinstance(answer, type(Recompute)))


@functools.cache
def _name_p() -> Any:
    """JAX's primitive of names."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, "x"))(0.0).eqns[0].primitive


def is_literal(x: Any) -> bool:
    """True for a literal in the place of a variable."""
    return isinstance(x, core.Literal)


def evaluated_again(
    equation: Any, forward: Any, again: Any, instantiated: Sequence[bool]
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """An equation in a forward pass, or None, and what computes its results again, as partial evaluation takes them."""
    count = len(equation.outvars)
    is_there = {x: flag for x, flag in zip(equation.invars, instantiated, strict=True) if not is_literal(x)}
    residuals = [x for x in dict.fromkeys(x for x in again.invars if not is_literal(x)) if not is_there[x]]
    return forward, again, [forward is None] * count, [True] * count, residuals


def as_equation(function: Callable[..., Any], read: Sequence[Any], equation: Any) -> Any:
    """One equation with the results of another: the function, jitted, of these variables; None if it is not one."""
    closed = jax.make_jaxpr(jax.jit(function))(*(x.aval for x in read))
    if len(closed.eqns) != 1 or closed.consts or list(closed.eqns[0].outvars) != list(closed.jaxpr.outvars):
        return None
    places = dict[Any, Any](zip(closed.jaxpr.invars, read, strict=True))
    (call,) = closed.eqns
    return call.replace(
        invars=[places[x] for x in call.invars], outvars=equation.outvars, source_info=equation.source_info
    )
