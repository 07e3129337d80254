"""Policies of `jax.checkpoint`: how JAX's partial evaluation asks them, and makes equations again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import Recompute, checkpoint_name
from jax.extend import core

from coda_jax.epilogue.dtypes import is_of_8_bits


def named(x: jax.Array, name: str) -> jax.Array:
    """x with a name by which policies keep it; an x of 8 bits is kept as its bytes.

    JAX passes what a checkpoint keeps through `reduce_precision`, which makes inf of values of e4m3 from 256 on, and 0
    of those below 2^-6.
    """
    if not is_of_8_bits(x.dtype):
        found: jax.Array = checkpoint_name(x, name)
        return found
    as_bytes = checkpoint_name(lax.bitcast_convert_type(x, jnp.uint8), name)
    return lax.bitcast_convert_type(as_bytes, x.dtype)


def keeps(saveable: Callable[..., Any], type_: Any, name: str) -> bool:
    """Whether a policy keeps an array of this type under this name."""
    return is_kept(answer_about(saveable, type_, name))


def is_kept(answer: Any) -> bool:
    """Whether a policy that answers so keeps an array, on the device or in the host's memory."""
    return answer is not False and not isinstance(answer, type(Recompute))


def answer_about(saveable: Callable[..., Any], type_: Any, name: str) -> Any:
    """A policy's answer about an array of this type under this name."""
    return saveable(_name_p(), type_, name=name)


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
