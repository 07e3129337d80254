"""Constraints of weights: what is constrained before anything reads it is, for a graph, an argument of that sharding.

    f(w) = g(constrain(w))        the function constrains the argument, and g, which becomes a graph, does not

A weight stays a leaf of the graph, and its gradient is constrained as JAX transposes constraints. Within the graph the
constraint would be a call, from which products read a matrix: devices would gather a weight (D, 2, F) whose F a mesh
shards. Where a mesh axis that shards rows shards a weight too, as FSDP's does, devices gather it for its products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from coda_jax.fusion.dots import Equation
from coda_jax.fusion.rows import Rows
from coda_jax.graph.constraint import constraint_of
from coda_jax.jaxprs.def_use import DefUse


def with_constraints_in_front(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[tuple[int, Equation]]]:
    """A straight jaxpr without the constraints of its arguments that have no rows, and these, by the argument's number.

    Constraints over explicit mesh axes, which change types, stay.
    """
    found: list[tuple[int, Equation]] = []
    while own := _of_arguments(closed.jaxpr):
        jaxpr, taken = closed.jaxpr, {id(e) for _, e in own}
        arguments = list(jaxpr.invars)
        for number, equation in own:
            (arguments[number],) = equation.outvars
        rest = [e for e in jaxpr.eqns if id(e) not in taken]
        closed = core.ClosedJaxpr(jaxpr.replace(invars=arguments, eqns=rest), closed.consts)
        found += own
    return closed, found


def constrained_arguments(arrays: Sequence[Any], constraints: Sequence[tuple[int, Equation]]) -> list[Any]:
    """The arguments of the function, as the jaxpr without these constraints takes them."""
    given = list(arrays)
    for number, equation in constraints:
        given[number] = constraint_of(equation)(given[number])
    return given


def gathered_arguments(jaxpr: core.Jaxpr, constraints: Sequence[tuple[int, Equation]]) -> frozenset[int]:
    """The numbers of the constrained arguments that are sharded by a mesh axis by which the jaxpr shards rows."""
    if not constraints:
        return frozenset()
    row_axes = Rows(DefUse(jaxpr)).mesh_axes()
    return frozenset(number for number, e in constraints if row_axes & constraint_of(e).mesh_axes())


def _of_arguments(jaxpr: core.Jaxpr) -> list[tuple[int, Equation]]:
    """The constraints of arguments that nothing else reads."""
    if not any(e.primitive.name == "sharding_constraint" for e in jaxpr.eqns):
        return []
    def_use, found = DefUse(jaxpr), list[tuple[int, Equation]]()
    rows = Rows(def_use)
    for number, x in enumerate(jaxpr.invars):
        readers = def_use.uses.get(x, ())
        if len(readers) == 1 and x not in def_use.results and not rows.of(x):
            equation: Equation = jaxpr.eqns[readers[0]]
            if equation.primitive.name == "sharding_constraint":
                found.append((number, equation))
    return found
