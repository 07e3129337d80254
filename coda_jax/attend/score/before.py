"""The part of a score function that is not local and reads its arrays alone: XLA computes it before the call.

So a score may take a slice of a table or a sum over an operand's axis. What it takes of the scores is not moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from coda_jax.attend.score.elements import is_local
from coda_jax.epilogue.flatten import Atom, Constants, Equation, Flat, flatten
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES, callee


@dataclasses.dataclass(frozen=True)
class Before:
    """Equations that are computed before the call, and their results that the score reads."""

    equations: tuple[Equation, ...]
    results: tuple[int, ...]


def split(flat: Flat) -> tuple[Before, Flat]:
    """The part of a function that is computed before the call, and the rest. Variable 0 is the scores."""
    makers = {out: equation for equation in flat.equations for out in equation.outputs}
    moved = _moved(flat, makers)
    made = {out for out in moved if not _is_local(makers[out])}  # by operations that are not local
    rest = [equation for equation in flat.equations if made.isdisjoint(equation.outputs)]
    read = {x for equation in rest for x in equation.inputs} | {*flat.outputs}
    before = tuple(equation for equation in flat.equations if not moved.isdisjoint(equation.outputs))
    results = tuple(out for equation in before for out in equation.outputs if out in made and out in read)
    return Before(before if results else (), results), dataclasses.replace(flat, equations=rest)


def _moved(flat: Flat, makers: Mapping[int, Equation]) -> set[int]:
    """The variables that equations make which are not local and read no scores, or that such an equation reads."""
    of_scores = {0}
    for equation in flat.equations:
        if not of_scores.isdisjoint(equation.inputs) or not equation.outputs:
            of_scores.update(equation.outputs)
    moved: set[int] = set()
    for equation in reversed(flat.equations):
        is_moved = not moved.isdisjoint(equation.outputs)
        if of_scores.isdisjoint(equation.outputs) and (is_moved or not _is_local(equation)):
            moved.update(equation.outputs)
            moved.update(x for x in equation.inputs if isinstance(x, int) and x in makers)
    return moved


def _is_local(equation: Equation) -> bool:
    if equation.name not in CUSTOM_DERIVATIVES:
        return is_local(equation.name)
    body = flatten(callee(equation), Constants(), inline_custom_derivatives=True)
    return all(map(_is_local, body.equations))


def inlined(flat: Flat) -> Flat:
    """The same with the bodies of functions that have derivatives of their own."""
    new = dataclasses.replace(flat, avals=list(flat.avals), equations=[])
    known: dict[int, Atom] = {}

    def read(atoms: Sequence[Atom]) -> tuple[Atom, ...]:
        return tuple(known.get(x, x) if isinstance(x, int) else x for x in atoms)

    for equation in flat.equations:
        inputs = read(equation.inputs)
        if equation.name not in CUSTOM_DERIVATIVES:
            new.equations.append(dataclasses.replace(equation, inputs=inputs))
            continue
        body = flatten(callee(equation), Constants(), inline_custom_derivatives=True)
        own: dict[int, Atom] = dict(enumerate(inputs))
        for one in body.equations:
            variables = tuple(new.new(body.avals[out]) for out in one.outputs)
            of_body = tuple(own[x] if isinstance(x, int) else x for x in one.inputs)
            own.update(zip(one.outputs, variables, strict=True))
            new.equations.append(
                dataclasses.replace(one, inputs=of_body, outputs=variables, source_info=equation.source_info)
            )
        results = (own[x] if isinstance(x, int) else x for x in body.outputs)
        known.update(zip(equation.outputs, results, strict=True))
    new.outputs = read(flat.outputs)
    return new
