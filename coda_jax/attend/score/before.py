"""The part of a score function that is not local and reads its arrays alone: XLA computes it before the call.

So a score may take a slice of a table or a sum over an operand's axis. What it takes of the scores is not moved, nor is
a gather of another entry for each pair: only its table is made before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from coda_jax.attend.score.elements import PAIR, demands, is_local
from coda_jax.attend.score.gathers import Places, has_pairs
from coda_jax.epilogue.flatten import Atom, Constants, Equation, Flat, flatten
from coda_jax.epilogue.values import NotElementwise
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES, callee


@dataclasses.dataclass(frozen=True)
class Before:
    """Equations that are computed before the call, and their results that the score reads."""

    equations: tuple[Equation, ...]
    results: tuple[int, ...]


def split(flat: Flat) -> tuple[Before, Flat]:
    """The part of a function that is computed before the call, and the rest. Variable 0 is the scores."""
    makers = {out: equation for equation in flat.equations for out in equation.outputs}
    of_pairs, tables = _of_pairs(flat)
    moved = _moved(flat, makers, of_pairs, tables & makers.keys())
    # By operations that are not local, and tables.
    made = {out for out in moved if out in tables or not (out in of_pairs or _is_local(makers[out]))}
    rest = [equation for equation in flat.equations if made.isdisjoint(equation.outputs)]
    read = {x for equation in rest for x in equation.inputs} | {*flat.outputs}
    before = tuple(equation for equation in flat.equations if not moved.isdisjoint(equation.outputs))
    results = tuple(out for equation in before for out in equation.outputs if out in made and out in read)
    return Before(before if results else (), results), dataclasses.replace(flat, equations=rest)


def _of_pairs(flat: Flat) -> tuple[set[int], set[int]]:
    """The results of gathers of another entry for each pair, and of what joins their indices; and their tables."""
    wanted: dict[int, set[Places]] = {x: {PAIR} for x in flat.outputs if isinstance(x, int)}
    found: set[int] = set()
    tables: set[int] = set()
    for equation in reversed(flat.equations):
        for places in sorted((one for out in equation.outputs for one in wanted.get(out, ())), key=str):
            shapes = [flat.aval(x).shape for x in equation.inputs]
            try:
                if equation.name in CUSTOM_DERIVATIVES:
                    at = zip(equation.inputs, (places if len(x) == len(places) else () for x in shapes), strict=True)
                    demanded = list(at)
                else:
                    demanded = demands(flat, equation, places)
                if equation.name == "gather" and not has_pairs(equation, shapes, places):
                    continue
            except NotElementwise:
                continue
            if equation.name in ("gather", "concatenate"):
                found.update(equation.outputs)
            if equation.name == "gather" and isinstance(table := equation.inputs[0], int):
                tables.add(table)
            for x, one in demanded:
                if isinstance(x, int):
                    wanted.setdefault(x, set()).add(one)
    return found, tables


def _moved(flat: Flat, makers: Mapping[int, Equation], of_pairs: set[int], tables: set[int]) -> set[int]:
    """The variables that are made before: tables, what equations make that are not local, and what these read.

    An equation that reads the scores is not made before.
    """
    of_scores = {0}
    for equation in flat.equations:
        if not of_scores.isdisjoint(equation.inputs) or not equation.outputs:
            of_scores.update(equation.outputs)
    moved: set[int] = set(tables - of_scores)
    for equation in reversed(flat.equations):
        is_moved = not moved.isdisjoint(equation.outputs)
        stays = not of_pairs.isdisjoint(equation.outputs) or _is_local(equation)
        if of_scores.isdisjoint(equation.outputs) and (is_moved or not stays):
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
