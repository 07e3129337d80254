"""Functions with a derivative of their own, by `jax.custom_jvp`, as equations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from coda_jax.fusion.dots import Equation
from coda_jax.graph.on_mesh import ELEMENTWISE, PVARY
from coda_jax.graph.values import is_float, is_seen
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import callee, opened


def tangents_jaxpr(equation: Equation) -> core.ClosedJaxpr:
    """The tangents of a custom_jvp_call's results, from its arguments, and the tangents of those that are floats."""
    types = [x.aval for x in equation.invars]  # with its axes of a mesh
    floats = [x for x in types if is_float(x.dtype)]

    def tangents(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        given = iter(tangents)
        every = [next(given) if is_float(x.dtype) else np.zeros(x.shape, jax.dtypes.float0) for x in primals]
        return jax.jvp(lambda *xs: bind(equation.primitive, xs, equation.params), primals, every)[1]

    return jax.make_jaxpr(tangents)(types, floats)


def is_elementwise(jaxpr: Any) -> bool:
    """True for a function of elementwise operations alone, of dtypes that maps see."""
    equations: list[Equation] = opened(jaxpr)[0].eqns
    for equation in equations:
        name = equation.primitive.name
        if not all(is_seen(x.aval.dtype) for x in (*equation.invars, *equation.outvars)):
            return False
        if name in ELEMENTWISE or name in PVARY or (name == "broadcast_in_dim" and not equation.invars[0].aval.shape):
            continue
        if name not in ("jit", "pjit", "custom_jvp_call") or not is_elementwise(callee(equation)):
            return False
    return True


def has_elementwise_derivative(equation: Equation) -> bool:
    """True for a custom_jvp_call that is elementwise, and its tangents; a batch of `vmap` may transpose these."""
    return is_elementwise(callee(equation)) and is_elementwise(tangents_jaxpr(equation))
