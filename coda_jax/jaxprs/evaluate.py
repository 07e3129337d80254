"""Evaluates a jaxpr with a given function for its equations, on arrays or other values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES, callee, opened

Apply = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]  # an equation and its inputs -> its results


def evaluate(
    jaxpr: core.Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    apply: Apply,
    opens: Collection[str] = CALLS,
) -> list[Any]:
    """The results of a jaxpr, whose equations are applied in order; calls named in `opens` are inlined."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    run(jaxpr.eqns, values, apply, opens)
    return [read(values, v) for v in jaxpr.outvars]


def run(equations: Sequence[core.JaxprEqn], values: dict[Any, Any], apply: Apply, opens: Collection[str]) -> None:
    """Adds the results of equations to the values of variables."""
    for equation in equations:
        inputs = [read(values, v) for v in equation.invars]
        if equation.primitive.name in opens:
            outputs: Sequence[Any] = evaluate(*opened(callee(equation)), inputs, apply, opens)
        else:
            outputs = apply(equation, inputs)
        values.update(zip(equation.outvars, outputs, strict=True))


def bound(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
    """The results of an equation as JAX computes them."""
    return bind(equation.primitive, inputs, equation.params)


def opened_jaxpr(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[bool]]:
    """The jaxpr with all calls inlined, also those with custom derivatives, and without unused inputs; and which inputs
    it reads.
    """
    opens = CALLS | CUSTOM_DERIVATIVES
    inlined = jax.make_jaxpr(lambda *args: evaluate(closed.jaxpr, closed.consts, args, bound, opens))(
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.in_avals)
    )
    jaxpr, is_read = partial_eval.dce_jaxpr(inlined.jaxpr, [True] * len(inlined.out_avals))
    return core.ClosedJaxpr(jaxpr, inlined.consts), is_read


def needed_jaxpr(function: Callable[..., Any], types: Sequence[Any]) -> core.ClosedJaxpr:
    """The jaxpr of a function at arrays of these types, without equations whose results nobody reads."""
    made = jax.make_jaxpr(function)(*types)
    needed, _ = partial_eval.dce_jaxpr(made.jaxpr, [True] * len(made.out_avals), instantiate=True)
    return core.ClosedJaxpr(needed, made.consts)


def without_constants(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The jaxpr with its constants as its first inputs."""
    jaxpr = closed.jaxpr
    if not closed.consts:
        return closed
    return core.ClosedJaxpr(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]), ())


def read(values: dict[Any, Any], v: Any) -> Any:
    """The value of a variable or of a literal."""
    return v.val if isinstance(v, core.Literal) else values[v]
