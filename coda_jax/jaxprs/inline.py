"""Inlining: the one walk over the equations of a jaxpr in which those of calls stand in the calls' place.

What an equation is made into, which calls are opened, and what equations inside of a call know of it are arguments:

    jaxprs.evaluate     the values of results
    jaxprs.graph        operations on arrays, each with whether it is of a backward pass, or of attention
    epilogue.flatten    equations of numbered variables, each with the outermost call that it stands in, and its line
    fusion.straight     equations of another jaxpr, at the lines of outermost calls
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

# The jaxpr that a call opens, the values of its constants, and the context of its equations; None where it stays.
Body = tuple[core.Jaxpr, Sequence[Any], Any] | None


@dataclasses.dataclass(frozen=True)
class Inliner:
    """A walk with values, of any kind, for the variables.

    Attributes:
      apply: an equation, the values of its inputs, and its context -> the values of its results.
      enter: an equation and its context -> the body in its place; None for an equation that is applied.
      literal: a literal -> its value.
    """

    apply: Callable[[core.JaxprEqn, list[Any], Any], Sequence[Any]]
    enter: Callable[[core.JaxprEqn, Any], Body]
    literal: Callable[[core.Literal], Any] = operator.attrgetter("val")

    def results(self, jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], context: Any = None) -> list[Any]:
        """The values of a jaxpr's results, from those of its constants and arguments."""
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        self.run(jaxpr.eqns, values, context)
        return [self.literal(x) if isinstance(x, core.Literal) else values[x] for x in jaxpr.outvars]

    def run(self, equations: Sequence[core.JaxprEqn], values: dict[Any, Any], context: Any = None) -> None:
        """Adds the values of the equations' results to those of variables."""
        for equation in equations:
            inputs = [self.literal(x) if isinstance(x, core.Literal) else values[x] for x in equation.invars]
            body = self.enter(equation, context)
            outputs = self.apply(equation, inputs, context) if body is None else self._inside(body, inputs)
            values.update(zip(equation.outvars, outputs, strict=True))

    def _inside(self, body: tuple[core.Jaxpr, Sequence[Any], Any], inputs: list[Any]) -> list[Any]:
        jaxpr, consts, context = body
        return self.results(jaxpr, consts, inputs, context)
