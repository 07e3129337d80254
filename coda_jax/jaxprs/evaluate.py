"""A jaxpr evaluated with other values than arrays, or otherwise than JAX does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES, callee, opened

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


def opened_jaxpr(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[bool]]:
    """A jaxpr whose calls, also those with derivatives of their own, are equations; of the inputs that it reads."""
    opens = CALLS | CUSTOM_DERIVATIVES
    whole = jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args, bound, opens))(
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.in_avals)
    )
    jaxpr, is_read = partial_eval.dce_jaxpr(whole.jaxpr, [True] * len(whole.out_avals))
    return core.ClosedJaxpr(jaxpr, whole.consts), is_read


def read(values: dict[Any, Any], v: Any) -> Any:
    """The value of a variable or of a literal."""
    return v.val if isinstance(v, core.Literal) else values[v]
