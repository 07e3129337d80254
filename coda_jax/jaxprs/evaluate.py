"""Evaluates a jaxpr with a given function for its equations, on arrays or other values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES, callee, opened
from coda_jax.jaxprs.inline import Body, Inliner

Apply = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]  # an equation and its inputs -> its results


def evaluate(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    apply: Apply,
    opens: Collection[str] = CALLS,
) -> list[Any]:
    """The results of a jaxpr, whose equations are applied in order; calls named in `opens` are inlined."""
    return _evaluation(apply, opens).results(jaxpr, consts, args)


def run(equations: Sequence[core.JaxprEqn], values: dict[Any, Any], apply: Apply, opens: Collection[str]) -> None:
    """Adds the results of equations to the values of variables."""
    _evaluation(apply, opens).run(equations, values)


def _evaluation(apply: Apply, opens: Collection[str]) -> Inliner:
    def enter(equation: core.JaxprEqn, _: Any) -> Body:
        return (*opened(callee(equation)), None) if equation.primitive.name in opens else None

    return Inliner(lambda equation, inputs, _: apply(equation, inputs), enter)


def bound(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """The results of an equation as JAX computes them."""
    return bind(equation.primitive, inputs, equation.params)


def inlined(closed: core.ClosedJaxpr, opens: Collection[str] = CALLS | CUSTOM_DERIVATIVES) -> core.ClosedJaxpr:
    """The jaxpr with calls of these names inlined."""
    return jax.make_jaxpr(lambda *xs: evaluate(closed.jaxpr, closed.consts, xs, bound, opens))(*closed.in_avals)


def opened_jaxpr(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[bool]]:
    """The jaxpr with all calls inlined, also those with custom derivatives, and without unused inputs; and which inputs
    it reads.
    """
    found = inlined(closed)
    jaxpr, is_read = partial_eval.dce_jaxpr(found.jaxpr, [True] * len(found.out_avals))
    return core.ClosedJaxpr(jaxpr, found.consts), is_read


def without_dead_code(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The jaxpr without equations whose results nobody reads; it keeps its arguments."""
    needed, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
    return core.ClosedJaxpr(needed, closed.consts)


def needed_jaxpr(function: Callable[..., Any], types: Sequence[Any]) -> core.ClosedJaxpr:
    """The jaxpr of a function at arrays of these types, without equations whose results nobody reads."""
    return without_dead_code(jax.make_jaxpr(function)(*types))


def without_constants(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The jaxpr with its constants as its first inputs."""
    jaxpr = closed.jaxpr
    if not closed.consts:
        return closed
    return core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), ())


def read(values: dict[Any, Any], v: Any) -> Any:
    """The value of a variable or of a literal."""
    return v.val if isinstance(v, core.Literal) else values[v]
