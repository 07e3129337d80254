"""Equations that call a function whose jaxpr they hold: that jaxpr's equations may replace them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "call", "remat", "remat2", "checkpoint", "composite"})
CUSTOM_DERIVATIVES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


def callee(equation: Any) -> Any:
    """The jaxpr of a call's equation, closed or open."""
    return callee_in(equation.params)


def callee_in(params: Mapping[str, Any]) -> Any:
    """The jaxpr among the parameters of a call's equation."""
    return next(params[key] for key in ("call_jaxpr", "jaxpr", "fun_jaxpr") if key in params)


def opened(jaxpr: Any) -> tuple[core.Jaxpr, Sequence[Any]]:
    """An open jaxpr and its constants, from an open or a closed one, before and after JAX merged the two types."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
