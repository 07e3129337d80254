"""Hoisting: values that a step of a loop computes from invariant arguments alone are computed before the loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES
from coda_jax.jaxprs.evaluate import bound, evaluate, read, run

_OPENED = CALLS | CUSTOM_DERIVATIVES


def hoist(step: Callable[..., Any], invariant: Any, *args: Any) -> tuple[list[jax.Array], Callable[..., Any]]:
    """Splits step(invariant, *args) into values that depend on invariant alone, computed here, and the rest.

    A step of generation casts every weight to the compute dtype and multiplies the norms' scales into it. That reads
    and writes all weights, while the products only read them. XLA hoists such code out of a loop on CPUs, not on GPUs.

    Args:
      step: traceable by JAX; traced once.
      invariant: a pytree of arrays.
      *args: pytrees of arrays or jax.ShapeDtypeStructs, of the types with which the rest will be called.

    Returns:
      kept, rest: rest(kept, *args) = step(invariant, *args). Custom derivative rules inside of step are dropped.
    """
    closed, out_type = jax.make_jaxpr(step, return_shape=True)(invariant, *args)
    evaluated = functools.partial(evaluate, closed.jaxpr, closed.consts, apply=bound, opens=_OPENED)
    flat = jax.make_jaxpr(lambda *leaves: evaluated(leaves))(*closed.in_avals)
    known = jax.tree.leaves(invariant)
    inputs, arguments = flat.jaxpr.invars[: len(known)], flat.jaxpr.invars[len(known) :]

    constants: dict[Any, Any] = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    before, after, computed = [], [], set(inputs)
    varying = set(arguments)
    for equation in flat.jaxpr.eqns:
        inputs_of = {v for v in equation.invars if not isinstance(v, core.Literal)}
        if equation.effects or inputs_of & varying:
            after.append(equation)
            varying.update(equation.outvars)
        else:
            before.append(equation)
            if inputs_of & computed:
                computed.update(equation.outvars)
            else:  # from constants alone: cheaper to compute again than to keep
                after.append(equation)
    read_after = [v for equation in after for v in equation.invars] + list(flat.jaxpr.outvars)
    frontier = [v for v in dict.fromkeys(w for w in read_after if not isinstance(w, core.Literal)) if v in computed]
    environment = {**constants, **dict(zip(inputs, known, strict=True))}
    run(before, environment, bound, _OPENED)

    def rest(kept: list[jax.Array], *args: Any) -> Any:
        environment = {
            **constants,
            **dict(zip(frontier, kept, strict=True)),
            **dict(zip(arguments, jax.tree.leaves(args), strict=True)),
        }
        run(after, environment, bound, _OPENED)
        outputs = [read(environment, v) for v in flat.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(out_type), outputs)

    return [environment[v] for v in frontier], rest
