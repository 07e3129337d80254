"""A jaxpr evaluated with other values than arrays, or otherwise than JAX does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.extend import core

from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CALLS, callee, opened

Apply = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]  # an equation's results, of its inputs


def evaluate(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    apply: Apply,
    opens: Collection[str] = CALLS,
) -> list[Any]:
    """The results of a jaxpr, its equations applied in their order; calls of these names are their own jaxprs."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    run(jaxpr.eqns, values, apply, opens)
    return [read(values, v) for v in jaxpr.outvars]


def run(equations: Sequence[core.JaxprEqn], values: dict[Any, Any], apply: Apply, opens: Collection[str]) -> None:
    """Adds to the values of variables those that equations give."""
    for equation in equations:
        inputs = [read(values, v) for v in equation.invars]
        if equation.primitive.name in opens:
            outputs: Sequence[Any] = evaluate(*opened(callee(equation)), inputs, apply, opens)
        else:
            outputs = apply(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))


def bound(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """The equation applied as JAX does."""
    return bind(equation.primitive, inputs, equation.params)


def read(values: dict[Any, Any], v: Any) -> Any:
    """The value of a variable or of a literal."""
    return v.val if isinstance(v, core.Literal) else values[v]
