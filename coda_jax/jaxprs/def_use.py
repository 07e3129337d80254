"""Definitions and uses: which equation of a jaxpr makes a variable, and which equations read it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend import core


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The atoms that are no literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


def definitions(equations: Iterable[Any]) -> set[Any]:
    """The variables that equations make."""
    return {x for equation in equations for x in equation.outvars}


def free_variables(equations: Sequence[Any]) -> list[Any]:
    """The variables that equations read and do not make, each once, in the order in which they are read."""
    made = definitions(equations)
    return [x for x in dict.fromkeys(variables(x for e in equations for x in e.invars)) if x not in made]


class DefUse:
    """The equations of a jaxpr by the variables that they make and read.

    Attributes:
      jaxpr: the jaxpr.
      equations: its own, without those in loops and calls.
      defs: the number of the equation that makes a variable.
    """

    def __init__(self, jaxpr: core.Jaxpr):
        self.jaxpr = jaxpr
        self.equations: Sequence[Any] = jaxpr.eqns
        self.defs: dict[Any, int] = {x: i for i, equation in enumerate(self.equations) for x in equation.outvars}

    @functools.cached_property
    def uses(self) -> dict[Any, list[int]]:
        """The numbers of the equations that read a variable, in order, each once."""
        uses: dict[Any, list[int]] = {}
        for i, equation in enumerate(self.equations):
            for x in dict.fromkeys(variables(equation.invars)):
                uses.setdefault(x, []).append(i)
        return uses

    @functools.cached_property
    def results(self) -> frozenset[Any]:
        """The variables that the jaxpr returns."""
        return frozenset(variables(self.jaxpr.outvars))

    @functools.cached_property
    def _numbers(self) -> dict[int, int]:
        return {id(equation): i for i, equation in enumerate(self.equations)}

    def number(self, equation: Any) -> int:
        """The place of an equation among all."""
        return self._numbers[id(equation)]

    def maker(self, x: Any) -> Any:
        """The equation that makes a variable; None for an argument or a literal."""
        number = None if isinstance(x, core.Literal) else self.defs.get(x)
        return None if number is None else self.equations[number]

    def readers(self, x: Any) -> list[Any]:
        """The equations that read a variable, each once."""
        return [self.equations[i] for i in self.uses.get(x, ())]

    def only_reader(self, x: Any) -> Any:
        """The equation that alone reads a variable; None where several do, or the jaxpr returns it."""
        uses = self.uses.get(x, ())
        return self.equations[uses[0]] if len(uses) == 1 and x not in self.results else None

    def read_by(self, arrays: Iterable[Any], *names: str) -> list[Any]:
        """The equations of these names that read one of the variables, each once, in order."""
        every = sorted({i for x in arrays for i in self.uses.get(x, ())})
        return [self.equations[i] for i in every if self.equations[i].primitive.name in names]

    def behind(self, seeds: Iterable[Any]) -> set[Any]:
        """The variables that depend on some, and these."""
        found = set(seeds)
        for equation in self.equations:
            if not found.isdisjoint(variables(equation.invars)):
                found |= set(equation.outvars)
        return found

    def in_front_of(self, names: Collection[str], stops: Collection[str]) -> set[Any]:
        """The variables that reach an equation of some names through equations that are none of `stops`."""
        found = set[Any]()
        for equation in reversed(self.equations):
            name = equation.primitive.name
            if name in names or (name not in stops and not found.isdisjoint(equation.outvars)):
                found.update(variables(equation.invars))
        return found

    def is_needed(self, x: Any, known: Collection[Any], also: Collection[Any] = ()) -> bool:
        """Whether a variable's equation is among the `needed` ones, without a walk over all."""
        ends, seen, open_ = (self.results | {*also}).difference(known), set(known), [x]
        while open_:
            x = open_.pop()
            if x in ends:
                return True
            if x in seen:
                continue
            seen.add(x)
            for equation in self.readers(x):
                if equation.effects:
                    return True
                open_ += equation.outvars
        return False

    def needed(self, known: Iterable[Any], also: Iterable[Any] = ()) -> set[int]:
        """The ids of the equations that are needed where some variables are known, and others are results too."""
        seen, found, open_ = set(known), set[int](), [e for e in self.equations if e.effects]
        ends = [*variables(self.jaxpr.outvars), *also]
        while open_ or ends:
            if open_:
                equation = open_.pop()
                if id(equation) not in found:
                    found.add(id(equation))
                    ends += variables(equation.invars)
            elif (x := ends.pop()) not in seen:
                seen.add(x)
                open_ += [e for e in [self.maker(x)] if e is not None]
        return found
