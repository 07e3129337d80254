"""Hoisting: the values that a step of a loop computes from invariant arguments alone are made before the loop."""

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
    """Splits step(invariant, *args) into what depends on invariant alone, computed here, and the rest.

    A step of generation casts every weight to the compute dtype and multiplies the norms' scales into it, which reads
    and writes all weights where the products only read them. XLA moves such code before a loop on CPUs, not on GPUs.

    Args:
      step: traceable by JAX; traced once.
      invariant: a pytree of arrays.
      *args: pytrees of arrays or jax.ShapeDtypeStructs, as the rest will be called with.

    Returns:
      kept, rest: rest(kept, *args) = step(invariant, *args). Custom derivative rules inside of step are dropped.
    """
    closed, out_type = jax.make_jaxpr(step, return_shape=True)(invariant, *args)
    evaluated = functools.partial(evaluate, closed.jaxpr, closed.consts, apply=bound, opens=_OPENED)
    flat = jax.make_jaxpr(lambda *leaves: evaluated(leaves))(*closed.in_avals)
    known = jax.tree.leaves(invariant)
    inputs, given = flat.jaxpr.invars[: len(known)], flat.jaxpr.invars[len(known) :]

    constants: dict[Any, Any] = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    before, after, made = [], [], set(inputs)
    varying = set(given)
    for equation in flat.jaxpr.eqns:
        inputs_of = {v for v in equation.invars if not isinstance(v, core.Literal)}
        if equation.effects or inputs_of & varying:
            after.append(equation)
            varying.update(equation.outvars)
        else:
            before.append(equation)
            if inputs_of & made:
                made.update(equation.outvars)
            else:  # of constants alone: cheaper to make again than to keep
                after.append(equation)
    wanted = [v for equation in after for v in equation.invars] + list(flat.jaxpr.outvars)
    frontier = [v for v in dict.fromkeys(w for w in wanted if not isinstance(w, core.Literal)) if v in made]
    environment = {**constants, **dict(zip(inputs, known, strict=True))}
    run(before, environment, bound, _OPENED)

    def rest(kept: list[jax.Array], *args: Any) -> Any:
        environment = {
            **constants,
            **dict(zip(frontier, kept, strict=True)),
            **dict(zip(given, jax.tree.leaves(args), strict=True)),
        }
        run(after, environment, bound, _OPENED)
        outputs = [read(environment, v) for v in flat.jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(out_type), outputs)

    return [environment[v] for v in frontier], rest
