"""Residuals of loops that JAX has differentiated: the backward loop computes most of them again.

JAX stacks all that the derivative of a step reads: of silu(gate) * up six arrays. In the backward loop elementwise
operations are a part of epilogues, so that it computes these from as few bytes as it can: from gate and up. Which
arrays of a step are stacked is a minimum cut between what is not computed again, as products, sums and what the loop
carries, and what the backward loop reads. Arguments of the forward loop cost nothing: they are there.

    forward    carry, x -> carry, residuals             forward    carry, x -> carry, cut
    backward   carry, residuals -> carry, cotangents    backward   carry, x, cut -> carry, cotangents

Proof: the backward loop's steps have the residuals' values, from the same equations of the same arrays.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from coda_jax.fusion.dots import Equation
from coda_jax.fusion.rows import SHAPES
from coda_jax.fusion.straight import applied, at_line, results_with, straight
from coda_jax.graph.calls import is_key
from coda_jax.graph.constraint import CONSTRAINTS, is_constraint
from coda_jax.graph.on_mesh import ELEMENTWISE
from coda_jax.graph.row_axes import JOINS
from coda_jax.jaxprs.calls import opened
from coda_jax.jaxprs.def_use import DefUse, variables
from coda_jax.jaxprs.evaluate import read, run
from coda_jax.jaxprs.walk import num_carried, num_constants

_COMPUTED_AGAIN = (ELEMENTWISE | SHAPES | JOINS.keys()) - CONSTRAINTS


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """A loop and its backward loop.

    Attributes:
      forward, backward: the equations.
      residuals: by number, the results of the forward body that are residuals, which nothing else reads, and the
        backward loop's arguments that each is.
    """

    forward: Equation
    backward: Equation
    residuals: Mapping[int, Sequence[int]]

    @property
    def others(self) -> list[int]:
        """The numbers of the forward loop's stacked results that are no residuals."""
        return [i for i in range(num_carried(self.forward), len(self.forward.outvars)) if i not in self.residuals]


@dataclasses.dataclass(frozen=True, eq=False)
class _Loops:
    """A loop and its backward loop with what is stacked between them.

    Attributes:
      pair: the loops.
      body: of the forward loop, a straight one.
      stacked: the variables of the body that are stacked in the place of residuals.
      again: the equations that compute the residuals of these.
    """

    pair: Pair
    body: core.ClosedJaxpr
    stacked: Sequence[Any]
    again: Sequence[Equation]


def with_fewer_residuals(closed: core.ClosedJaxpr, arrays: Sequence[Any]) -> core.ClosedJaxpr:
    """A straight jaxpr at these arrays, with loops that stack fewer bytes for their backward loops."""
    found = [loops for pair in pairs_in(closed.jaxpr) if (loops := _with_cut(pair)) is not None]
    if not found:
        return closed
    forward = {id(one.pair.forward): one for one in found}
    backward = {id(one.pair.backward): one for one in found}

    stacks: dict[int, Sequence[Any]] = {}

    def looped(equation: Equation, values: dict[Any, Any]) -> list[Any] | None:
        inputs, own = [read(values, x) for x in equation.invars], id(equation)
        outputs: list[Any] | None = None
        if own in forward:
            outputs, stacks[own] = at_line(equation, _forward, forward[own], inputs)
        elif own in backward:
            pair = backward[own].pair
            of = [read(values, x) for x in pair.forward.invars]
            outputs = at_line(equation, _backward, backward[own], inputs, of, stacks[id(pair.forward)])
        return outputs

    return jax.make_jaxpr(lambda *given: results_with(closed, given, looped))(*arrays)


def pairs_in(jaxpr: core.Jaxpr) -> Iterator[Pair]:
    """The loops of a straight jaxpr with their backward loops, each in one pair."""
    scans: list[Equation] = [equation for equation in jaxpr.eqns if equation.primitive.name == "scan"]
    if len(scans) < 2:
        return
    def_use = DefUse(jaxpr)
    used: set[int] = set()  # of a loop's derivatives of higher order each is in one pair
    for forward in scans:
        reader = {x: def_use.only_reader(x) for x in forward.outvars[num_carried(forward) :]}
        for backward in scans:
            own = [x for x, equation in reader.items() if equation is backward]
            if not own or not _are_steps_in_turn(forward, backward) or {id(forward), id(backward)} & used:
                continue
            if residuals := _residuals(forward, backward, own):
                used |= {id(forward), id(backward)}
                yield Pair(forward, backward, residuals)


def _are_steps_in_turn(forward: Equation, backward: Equation) -> bool:
    """True if the second loop goes through the first one's steps from the last to the first."""
    a, b = forward.params, backward.params
    return a["length"] == b["length"] and a["reverse"] != b["reverse"] and not (forward.effects or backward.effects)


def _with_cut(pair: Pair) -> _Loops | None:
    """Both loops with what is stacked; None if that is no less."""
    forward = pair.forward
    closed = core.ClosedJaxpr(*opened(forward.params["jaxpr"]))
    body = straight(closed, closed.in_avals)
    if not _has_known_sizes(body.jaxpr):
        return None
    wanted = list(dict.fromkeys(variables(body.jaxpr.outvars[i] for i in pair.residuals)))
    carried = body.jaxpr.invars[num_constants(forward) :][: num_carried(forward)]
    given = [*body.jaxpr.constvars, *(x for x in body.jaxpr.invars if x not in carried)]
    makers = {x: e for e in body.jaxpr.eqns if _is_computed_again(e) for x in e.outvars}
    stacked = cut(wanted, makers, given)
    if sum(map(_bytes, stacked)) >= sum(map(_bytes, wanted)):
        return None
    return _Loops(pair, body, stacked, _between(stacked, wanted, makers, body.jaxpr))


def _is_computed_again(equation: Equation) -> bool:
    return equation.primitive.name in _COMPUTED_AGAIN or is_constraint(equation)


def _residuals(forward: Equation, backward: Equation, own: Sequence[Any]) -> dict[int, list[int]]:
    """`Pair.residuals` of these results of the forward loop: those that the backward loop reads step by step."""
    first = num_constants(backward) + num_carried(backward)
    arguments: dict[Any, list[int]] = collections.defaultdict(list)
    for i, x in enumerate(backward.invars):
        if not isinstance(x, core.Literal):
            arguments[x].append(i)
    numbers = {x: i for i, x in enumerate(forward.outvars)}
    return {numbers[x]: arguments[x] for x in own if min(arguments[x]) >= first}


def _has_known_sizes(jaxpr: core.Jaxpr) -> bool:
    made: list[Any] = [x.aval for equation in jaxpr.eqns for x in equation.outvars]
    return all(isinstance(size, int) for aval in made for size in aval.shape)


def _between(
    stacked: Sequence[Any], wanted: Sequence[Any], makers: Mapping[Any, Equation], jaxpr: core.Jaxpr
) -> list[Equation]:
    """The equations that make what is wanted of what is stacked."""
    found, open_ = set[int](), [x for x in wanted if x not in stacked]
    while open_:
        equation = makers.get(open_.pop())
        if equation is not None and id(equation) not in found:
            found.add(id(equation))
            open_ += [x for x in variables(equation.invars) if x not in stacked]
    return [equation for equation in jaxpr.eqns if id(equation) in found]


def cut(wanted: Sequence[Any], makers: Mapping[Any, Equation], given: Sequence[Any]) -> list[Any]:
    """The variables with fewest bytes from which those that are wanted can be made, the last of several such sets.

    Args:
      makers: the equations that may be computed again, by their results, in order.
      given: variables that cost nothing.
    """
    free = set(given)
    for x, equation in makers.items():
        if free.issuperset(variables(equation.invars)):
            free.add(x)
    room: dict[Any, dict[Any, float]] = collections.defaultdict(dict)  # of the edges of a network with one flow

    def add(x: Any, y: Any, size: float) -> None:
        room[x][y] = room[x].get(y, 0.0) + size
        room[y].setdefault(x, 0.0)

    seen = dict.fromkeys(x for x in wanted if x not in free)  # in an order that is the same in each process
    open_ = list(seen)
    while open_:
        x = open_.pop()
        add((x, "in"), (x, "out"), _bytes(x))
        if x not in makers:
            add("source", (x, "in"), math.inf)
            continue
        for y in (y for y in variables(makers[x].invars) if y not in free):
            add((y, "out"), (x, "in"), math.inf)
            if y not in seen:
                seen[y] = None
                open_.append(y)
    for x in (x for x in wanted if x not in free):
        add((x, "out"), "sink", math.inf)
    while (path := _path(room, "source", "sink")) is not None:
        flow = min(room[x][y] for x, y in path)
        for x, y in path:
            room[x][y] -= flow
            room[y][x] += flow
    behind: set[Any] = {"sink"}
    ends: list[Any] = ["sink"]
    while ends:
        y = ends.pop()
        new = {x for x in room[y] if room[x][y] > 0} - behind
        behind |= new
        ends += new
    return [x for x in seen if (x, "out") in behind and (x, "in") not in behind]


def _path(room: Mapping[Any, Mapping[Any, float]], start: Any, end: Any) -> list[tuple[Any, Any]] | None:
    """The shortest path along edges with room; None if there is none."""
    before: dict[Any, Any] = {start: None}
    open_ = collections.deque([start])
    while open_ and end not in before:
        x = open_.popleft()
        for y, size in room.get(x, {}).items():
            if size > 0 and y not in before:
                before[y] = x
                open_.append(y)
    if end not in before:
        return None
    path, y = [], end
    while before[y] is not None:
        path.append((before[y], y))
        y = before[y]
    return path


def _bytes(x: Any) -> int:
    return math.prod(x.aval.shape) * (8 if is_key(x.aval) else x.aval.dtype.itemsize)


def _forward(loops: _Loops, inputs: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    """The results of the loop, None for its residuals; and what is stacked in their place."""
    body, forward, others = loops.body, loops.pair.forward, loops.pair.others
    carried, consts = num_carried(forward), num_constants(forward)

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        arguments = [*body.consts, *inputs[:consts], *carry, *xs]
        values = dict(zip([*body.jaxpr.constvars, *body.jaxpr.invars], arguments, strict=True))
        run(body.jaxpr.eqns, values, applied, ())
        outputs = [read(values, x) for x in body.jaxpr.outvars]
        return outputs[:carried], ([outputs[i] for i in others], [values[x] for x in loops.stacked])

    carry, (ys, stacks) = scanned(forward, step, inputs[consts:][:carried], list(inputs[consts + carried :]))
    results: list[Any] = [*carry, *[None] * (len(forward.outvars) - carried)]
    for i, y in zip(others, ys, strict=True):
        results[i] = y
    return results, stacks


def _backward(loops: _Loops, inputs: Sequence[Any], of: Sequence[Any], stacks: Sequence[Any]) -> list[Any]:
    """The results of the backward loop; `of` are the arguments of the forward loop."""
    equation, body = loops.pair.backward, loops.body
    carried, consts = num_carried(equation), num_constants(equation)
    first = consts + carried
    made = {i: body.jaxpr.outvars[number] for number, arguments in loops.pair.residuals.items() for i in arguments}
    own = [i for i in range(first, len(inputs)) if i not in made]
    unstacked = num_constants(loops.pair.forward)
    needed = set(variables(x for e in loops.again for x in e.invars)) | set(variables(made.values()))
    known = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
    known |= zip(body.jaxpr.invars[:unstacked], of[:unstacked], strict=True)
    beside = [i for i, x in enumerate(body.jaxpr.invars) if x in needed and x not in known and x not in loops.stacked]
    derivative = core.ClosedJaxpr(*opened(equation.params["jaxpr"]))

    def step(carry: Sequence[Any], xs: tuple[Sequence[Any], ...]) -> tuple[list[Any], list[Any]]:
        values = known | dict(zip([body.jaxpr.invars[i] for i in beside], xs[1], strict=True))
        values |= zip(loops.stacked, xs[2], strict=True)
        run(loops.again, values, applied, ())
        arguments = [*inputs[:consts], *carry, *[None] * (len(inputs) - first)]
        for i, x in (*zip(own, xs[0], strict=True), *((i, read(values, x)) for i, x in made.items())):
            arguments[i] = x
        outputs = core.jaxpr_as_fun(derivative)(*arguments)
        return outputs[:carried], outputs[carried:]

    stacked = [inputs[i] for i in own], [of[i] for i in beside], list(stacks)
    carry, ys = scanned(equation, step, inputs[consts:first], stacked)
    return [*carry, *ys]


def scanned(equation: Equation, step: Any, carry: Sequence[Any], xs: Any) -> Any:
    """`lax.scan` of a step in the place of a loop's own."""
    params = equation.params
    return lax.scan(step, list(carry), xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
