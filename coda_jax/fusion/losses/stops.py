"""Gradients are stopped behind what is made of logits, as an entropy that is reported, and not in front of it.

    f(stop_gradient(z)) = stop_gradient(f(z))

Losses then find what f makes of the logits where they look for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend import core

from coda_jax.fusion.dots import Equation, is_derivative
from coda_jax.fusion.losses.logits import exponentials_of
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.straight import applied, at_line
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.evaluate import needed_jaxpr, read


def with_stops_behind(closed: core.ClosedJaxpr, least: int) -> core.ClosedJaxpr:
    """A straight jaxpr whose logits of at least so many columns have their gradient stopped where it is mixed with one.

    A derivative stays: nothing is stopped in it.
    """
    if is_derivative(closed.jaxpr) or not any(e.primitive.name == "stop_gradient" for e in closed.jaxpr.eqns):
        return closed
    stops = _Stops(Makers(closed.jaxpr), least)
    if not stops.stopped:
        return closed
    return needed_jaxpr(lambda *arrays: stops.results(closed, arrays), closed.in_avals)


class _Stops:
    """The stopped variables of a jaxpr.

    Attributes:
      stopped: the variables that are made of logits whose gradient is stopped, and of nothing else with a gradient.
    """

    def __init__(self, makers: Makers, least: int):
        wide = set[Any]().union(*exponentials_of(makers, least).wide)
        self._first = {e.outvars[0] for e in makers.read_by(wide, "stop_gradient")}
        self.stopped = set(self._first)
        varied = {*makers.jaxpr.constvars, *makers.jaxpr.invars}
        for equation in makers.equations if self._first else ():
            inputs = variables(equation.invars)
            has_gradient = any(x in varied and is_float(x.aval.dtype) for x in inputs)
            if not self.stopped.isdisjoint(inputs) and not has_gradient and not equation.effects:
                self.stopped |= set(equation.outvars)
            elif has_gradient and equation.outvars[0] not in self._first:
                varied |= set(equation.outvars)

    def results(self, closed: core.ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
        """The results of the jaxpr at these arrays."""
        jaxpr = closed.jaxpr
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arrays], strict=True))
        held: dict[Any, Any] = {}

        def fixed(x: Any) -> Any:
            if isinstance(x, core.Literal) or x not in self.stopped:
                return read(values, x)
            if x not in held:
                held[x] = lax.stop_gradient(values[x])
            return held[x]

        def outputs_of(equation: Equation) -> Sequence[Any]:
            if equation.outvars and equation.outvars[0] in self._first:
                return [values[equation.invars[0]]]
            is_stopped = bool(equation.outvars) and equation.outvars[0] in self.stopped
            inputs = [read(values, x) if is_stopped else at_line(equation, fixed, x) for x in equation.invars]
            return applied(equation, inputs)

        for equation in jaxpr.eqns:
            values.update(zip(equation.outvars, outputs_of(equation), strict=True))
        return [fixed(x) for x in jaxpr.outvars]
