"""A jaxpr that is put together: of equations of another, which are taken as they are, and of functions that are traced.

To bind the primitive of each equation again, as `jax.make_jaxpr` of an interpreter does, takes thirty times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util

from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES
from coda_jax.jaxprs.def_use import variables


class Splice:
    """A new jaxpr, as far as it is made. Its values are variables of it, literals, and constant arrays.

    Attributes:
      inputs: its arguments.
      values: those of the other jaxpr's variables.
    """

    def __init__(self, like: core.ClosedJaxpr):
        """The begin of a jaxpr in the place of this one, whose arguments it has."""
        self._like = like
        self.inputs: list[Any] = [core.Var(x) for x in like.in_avals]
        self.values = dict(zip([*like.jaxpr.constvars, *like.jaxpr.invars], [*like.consts, *self.inputs], strict=True))
        self._equations: list[core.JaxprEqn] = []
        self._constants: dict[Any, Any] = {}  # arrays by their variables
        self._known: dict[int, tuple[Any, Any]] = {}  # constants, by their ids, and what they are in the jaxpr

    def take(self, equation: core.JaxprEqn, inputs: Sequence[Any], source_info: Any = None) -> list[Any]:
        """The results of an equation at these values, whose types are those of its own inputs."""
        atoms, outputs = list(map(self._atom, inputs)), [core.Var(x.aval) for x in equation.outvars]
        if equation.primitive.name == "convert_element_type" and isinstance(atoms[0], core.Literal):
            number = jax.make_jaxpr(lambda: bind(equation.primitive, [atoms[0].val], equation.params))().jaxpr
            if isinstance(number.outvars[0], core.Literal):  # JAX evaluates the cast of a number
                return list(number.outvars)
        if equation.primitive.name in CUSTOM_DERIVATIVES and equation.params.get("num_consts"):
            # Its first inputs are constants to JAX, which may not depend on what is differentiated. Bound again, it
            # has none: their cotangents are zeros then.
            info = equation.source_info if source_info is None else source_info
            with source_info_util.user_context(info.traceback, name_stack=info.name_stack):
                return self.trace(lambda *arrays: bind(equation.primitive, arrays, equation.params), inputs)
        effects = _effects_at(equation, atoms) if equation.effects else None
        made = equation.replace(invars=atoms, outvars=outputs, effects=effects, source_info=source_info)
        self._equations.append(made)
        return outputs

    def trace(self, function: Callable[..., Sequence[Any]], inputs: Sequence[Any]) -> list[Any]:
        """The results of a function of arrays at these values."""
        closed = jax.make_jaxpr(function)(*(self._atom(x).aval for x in inputs))
        jaxpr = closed.jaxpr
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True))
        for equation in jaxpr.eqns:
            outputs = self.take(equation, [_read(values, x) for x in equation.invars])
            values.update(zip(equation.outvars, outputs, strict=True))
        return [_read(values, x) for x in jaxpr.outvars]

    def keep(self, equation: core.JaxprEqn) -> None:
        """Takes an equation of the other jaxpr; those of its results that have a value keep it."""
        outputs = self.take(equation, [_read(self.values, x) for x in equation.invars])
        self.values.update((x, y) for x, y in zip(equation.outvars, outputs, strict=True) if x not in self.values)

    def put(
        self,
        function: Callable[..., Sequence[Any]],
        reads: Iterable[Any],
        makes: Sequence[Any],
        more: Sequence[Any] = (),
    ) -> list[Any]:
        """Gives variables of the other jaxpr their values.

        Args:
          function: gives these, of the arrays of the variables that it reads, by variable, and more.
          reads, makes: variables; literals among those that are read have no value.
          more: values of this jaxpr.

        Returns:
          The other results of the function, as values of this jaxpr.
        """
        read = list(dict.fromkeys(variables(reads)))

        def of_arrays(*arrays: Any) -> Sequence[Any]:
            return function(dict(zip(read, arrays, strict=False)), *arrays[len(read) :])

        outputs = self.trace(of_arrays, [*(self.values[x] for x in read), *more])
        self.values.update(zip(makes, outputs, strict=False))
        return outputs[len(makes) :]

    def rewritten(self) -> core.ClosedJaxpr:
        """The jaxpr of the other one's results."""
        return self.closed([_read(self.values, x) for x in self._like.jaxpr.outvars])

    def closed(self, outputs: Sequence[Any]) -> core.ClosedJaxpr:
        """The jaxpr of these results."""
        outvars = list(map(self._atom, outputs))
        inputs = {*self._constants, *self.inputs}
        effects = {x for e in self._equations for x in e.effects if getattr(x, "input", None) in (None, *inputs)}
        jaxpr = self._like.jaxpr.replace(
            constvars=list(self._constants), invars=self.inputs, outvars=outvars, eqns=self._equations, effects=effects
        )
        return core.ClosedJaxpr(jaxpr, list(self._constants.values()))

    def _atom(self, x: Any) -> Any:
        """A value as a variable or a literal."""
        if isinstance(x, core.Var | core.Literal):
            return x
        if id(x) not in self._known:
            closed = jax.make_jaxpr(lambda: x)()  # a number is a literal to JAX, an array a variable
            self._constants.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
            self._known[id(x)] = x, closed.jaxpr.outvars[0]
        return self._known[id(x)][1]


def _effects_at(equation: core.JaxprEqn, atoms: Sequence[Any]) -> set[Any]:
    """The effects of an equation on other inputs: some are of one of these, as writing to it is."""
    inputs = {x: atom for x, atom in zip(equation.invars, atoms, strict=True) if not isinstance(x, core.Literal)}
    effects: Iterable[Any] = equation.effects
    return {x.replace(inputs[x.input]) if getattr(x, "input", None) in inputs else x for x in effects}


def _read(values: dict[Any, Any], x: Any) -> Any:
    """The value of a variable; a literal is its own."""
    return x if isinstance(x, core.Literal) else values[x]
