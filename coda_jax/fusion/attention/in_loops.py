"""Attention in a loop that JAX has differentiated: the forward loop holds it, and the backward loop its derivative.

The bodies are joined to one jaxpr, in which a site and its gradients are found as in any function that is
differentiated already, and parted again. What the second part reads of the first is stacked: q, k, v, the result and
the log-sum-exp in the place of probabilities.

    forward    carry, x -> carry, residuals              forward    carry, x -> carry, cut
    backward   carry, residuals -> carry, cotangents     backward   carry, x, cut -> carry, cotangents

Proof: a step of the backward loop has what the same step of the forward loop made, whatever is stacked of that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

from coda_jax.fusion.attention.masks_inside import may_hold_attention
from coda_jax.fusion.attention.rule import Attentions, with_attention
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.residuals import Pair, pairs_in, scanned
from coda_jax.fusion.straight import applied, at_line, results_with, straight
from coda_jax.jaxprs.calls import opened
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.evaluate import read, run
from coda_jax.jaxprs.walk import num_carried, num_constants


def with_attention_in_loops(
    closed: core.ClosedJaxpr, *, implementation: str
) -> tuple[core.ClosedJaxpr, list[tuple[Equation, str]]]:
    """A straight jaxpr whose loops have calls of `coda.attention` in the place of attention, and backward loops theirs.

    Args:
      closed: a straight jaxpr.
      implementation: as in `gemm`.

    Returns:
      The jaxpr, and the products that it lacks, each with the operator that it is part of.
    """
    pairs = [pair for pair in pairs_in(closed.jaxpr) if may_hold_attention(pair.forward)]
    found = [loops for pair in pairs if (loops := _Loops.of(pair, implementation)) is not None]
    if not found:
        return closed, []
    forward = {id(one.pair.forward): one for one in found}
    backward = {id(one.pair.backward): one for one in found}

    stacks: dict[int, Sequence[Any]] = {}

    def looped(equation: Equation, values: dict[Any, Any]) -> list[Any] | None:
        outputs: list[Any] | None = None
        if (one := forward.get(id(equation))) is not None:
            outputs, stacks[id(one)] = at_line(equation, one.run_forward, values)
        elif (one := backward.get(id(equation))) is not None:
            outputs = at_line(equation, one.run_backward, values, stacks[id(one)])
        return outputs

    def function(*arrays: Any) -> list[Any]:
        return results_with(closed, arrays, looped)

    made = straight(jax.make_jaxpr(function)(*closed.in_avals), closed.in_avals, opens_inner=False)
    return made, [one for loops in found for one in loops.attentions.taken]


@dataclasses.dataclass(frozen=True, eq=False)
class _Arguments:
    """The arguments of both bodies as those of one: what both are given of the same array is given once.

    Attributes:
      count: how many there are.
      forward: for each argument of the forward body its number.
      backward: for each of the backward body's; None for a residual.
    """

    count: int
    forward: Sequence[int]
    backward: Sequence[int | None]

    @classmethod
    def of(cls, pair: Pair) -> _Arguments:
        """The arguments of two loops; constants and slices of the same step are the same, what is carried is not."""
        numbers: dict[tuple[str, Any], int] = {}
        residuals = {i for arguments in pair.residuals.values() for i in arguments}

        def number(equation: Equation, i: int) -> int:
            x, consts = equation.invars[i], num_constants(equation)
            kind = "constant" if i < consts else "carry" if i < consts + num_carried(equation) else "slice"
            is_shared = kind != "carry" and not isinstance(x, core.Literal)
            return numbers.setdefault((kind, x) if is_shared else (kind, (id(equation), i)), len(numbers))

        forward = [number(pair.forward, i) for i in range(len(pair.forward.invars))]
        backward = [None if i in residuals else number(pair.backward, i) for i in range(len(pair.backward.invars))]
        return cls(len(numbers), forward, backward)


@dataclasses.dataclass(frozen=True, eq=False)
class _Loops:
    """Two loops as one function of both bodies' arguments that has been parted.

    Attributes:
      pair: the loops.
      arguments: of the function.
      joined: the function: the forward body's results but for residuals, then the backward body's.
      invariant: its loop-invariant equations, as masks are: both loops have them.
      early, late: others that depend on nothing that the backward loop alone is given, and the rest.
      stacked: the variables of the first part that the second one reads.
      attentions: what the function has in the place of attention.
    """

    pair: Pair
    arguments: _Arguments
    joined: core.ClosedJaxpr
    invariant: Sequence[Equation]
    early: Sequence[Equation]
    late: Sequence[Equation]
    stacked: Sequence[Any]
    attentions: Attentions

    @classmethod
    def of(cls, pair: Pair, implementation: str) -> _Loops | None:
        """The loops with attention and its derivative; None if these are not found."""
        arguments = _Arguments.of(pair)
        joined = _join_bodies(pair, arguments)
        known = dict(zip(joined.jaxpr.constvars, joined.consts, strict=True))
        made, attentions = with_attention(joined, known, implementation=implementation)
        if not attentions.taken:
            return None
        own, invars = set(arguments.forward), made.jaxpr.invars
        behind = {x for i, x in enumerate(invars) if i not in own}
        constants = {*made.jaxpr.constvars, *(invars[i] for i in arguments.forward[: num_constants(pair.forward)])}
        invariant, early, late = list[Equation](), list[Equation](), list[Equation]()
        every: Sequence[Equation] = made.jaxpr.eqns
        for equation in every:
            if constants.issuperset(variables(equation.invars)) and not equation.effects:
                invariant.append(equation)
                constants.update(equation.outvars)
            elif behind.isdisjoint(variables(equation.invars)):
                early.append(equation)
            else:
                late.append(equation)
                behind.update(equation.outvars)
        first = len(pair.others) + num_carried(pair.forward)
        read_behind = {x for equation in late for x in variables(equation.invars)}
        read_behind.update(variables(made.jaxpr.outvars[first:]))
        carry = range(num_constants(pair.forward), num_constants(pair.forward) + num_carried(pair.forward))
        of_steps = [*(invars[arguments.forward[i]] for i in carry)]
        of_steps += [x for equation in early for x in equation.outvars]
        stacked = [x for x in dict.fromkeys(of_steps) if x in read_behind]
        return cls(pair, arguments, made, invariant, early, late, stacked, attentions)

    def _given(self, numbers: Sequence[int | None], arrays: Sequence[Any]) -> dict[Any, Any]:
        """The values of the function's arguments with these numbers."""
        invars: Sequence[Any] = self.joined.jaxpr.invars
        return {invars[number]: x for number, x in zip(numbers, arrays, strict=True) if number is not None}

    def run_forward(self, values: dict[Any, Any]) -> tuple[list[Any], Sequence[Any]]:
        """The results of the forward loop, None for its residuals; and what is stacked in their place."""
        equation, jaxpr = self.pair.forward, self.joined.jaxpr
        carried, consts = num_carried(equation), num_constants(equation)
        inputs = [read(values, x) for x in equation.invars]
        constants = dict(zip(jaxpr.constvars, self.joined.consts, strict=True))

        def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            arrays = [*inputs[:consts], *carry, *xs]
            own = constants | self._given(self.arguments.forward, arrays)
            run([*self.invariant, *self.early], own, applied, ())
            outputs = [read(own, x) for x in jaxpr.outvars[: carried + len(self.pair.others)]]
            return outputs[:carried], (outputs[carried:], [own[x] for x in self.stacked])

        carry, (ys, stacks) = scanned(equation, step, inputs[consts:][:carried], inputs[consts + carried :])
        results: list[Any] = [*carry, *[None] * (len(equation.outvars) - carried)]
        for i, y in zip(self.pair.others, ys, strict=True):
            results[i] = y
        return results, stacks

    def run_backward(self, values: dict[Any, Any], stacks: Sequence[Any]) -> list[Any]:
        """The results of the backward loop."""
        equation, jaxpr = self.pair.backward, self.joined.jaxpr
        carried, consts = num_carried(equation), num_constants(equation)
        first = consts + carried
        of, of_consts = self.pair.forward, num_constants(self.pair.forward)
        of_first = of_consts + num_carried(of)
        inputs = [read(values, x) for x in equation.invars]
        own = [i for i in range(first, len(inputs)) if self.arguments.backward[i] is not None]
        needed = {x for one in self.late for x in variables(one.invars)} | set(variables(jaxpr.outvars))
        invars: Sequence[Any] = jaxpr.invars
        beside = [i for i in range(of_first, len(of.invars)) if invars[self.arguments.forward[i]] in needed]
        constants = dict(zip(jaxpr.constvars, self.joined.consts, strict=True))
        given = zip(self.arguments.forward[:of_consts], of.invars[:of_consts], strict=True)
        constants |= {invars[number]: read(values, x) for number, x in given}

        def step(carry: Sequence[Any], xs: Sequence[Sequence[Any]]) -> tuple[list[Any], list[Any]]:
            at_step = constants | dict(zip((invars[self.arguments.forward[i]] for i in beside), xs[1], strict=True))
            at_step |= zip(self.stacked, xs[2], strict=True)
            arrays = [*inputs[:consts], *carry]
            at_step |= self._given(self.arguments.backward[:first], arrays)
            at_step |= self._given([self.arguments.backward[i] for i in own], xs[0])
            run([*self.invariant, *self.late], at_step, applied, ())
            outputs = [read(at_step, x) for x in jaxpr.outvars[num_carried(of) + len(self.pair.others) :]]
            return outputs[:carried], outputs[carried:]

        stacked = [inputs[i] for i in own], [read(values, of.invars[i]) for i in beside], list(stacks)
        carry, ys = scanned(equation, step, inputs[consts:first], stacked)
        return [*carry, *ys]


def _join_bodies(pair: Pair, arguments: _Arguments) -> core.ClosedJaxpr:
    """Both bodies as one straight function of `arguments`."""
    forward, backward = (core.ClosedJaxpr(*opened(one.params["jaxpr"])) for one in (pair.forward, pair.backward))
    types: list[Any] = [None] * arguments.count
    for body, numbers in ((forward, arguments.forward), (backward, arguments.backward)):
        for number, aval in zip(numbers, body.in_avals, strict=True):
            if number is not None:
                types[number] = aval
    carried = num_carried(pair.forward)

    def function(*arrays: Any) -> list[Any]:
        made = core.jaxpr_as_fun(forward)(*(arrays[number] for number in arguments.forward))
        residuals = {i: made[number] for number, places in pair.residuals.items() for i in places}
        given = (residuals[i] if number is None else arrays[number] for i, number in enumerate(arguments.backward))
        behind = core.jaxpr_as_fun(backward)(*given)
        return [*made[:carried], *(made[i] for i in pair.others), *behind]

    return straight(jax.make_jaxpr(function)(*types), types)
