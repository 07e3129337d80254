"""Equations that JAX has traced with automatic mesh axes where those of the mesh in use are explicit.

A gather with an `out_sharding` is such: its operands are moved to automatic axes, and its result back. An equation of
these types can be bound again in its own mesh context alone, so that the equations are one call, which stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.sharding import AxisType

from coda_jax.fusion.dots import Equation
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.def_use import definitions, free_variables, variables
from coda_jax.jaxprs.evaluate import read


def with_auto_axes_apart(jaxpr: core.Jaxpr, name: str) -> core.Jaxpr:
    """A jaxpr in which equations of automatic axes, among those of explicit ones, are calls of this name."""
    axis_types = jax.sharding.get_abstract_mesh().axis_types
    if AxisType.Explicit not in axis_types:
        return jaxpr
    flags = [_has_auto_axes(equation, axis_types) for equation in jaxpr.eqns]
    if not any(flags):
        return jaxpr
    found: list[Equation] = []
    before: list[Equation] = []  # of automatic axes, up to here
    run: list[Equation] = []
    for i, equation in enumerate(jaxpr.eqns):
        if flags[i]:
            run.append(equation)
        if run and (not flags[i] or i + 1 == len(flags)):
            outputs = _read_of(run, jaxpr.eqns[i + flags[i] :], jaxpr.outvars)
            outputs = [x for x in outputs if not _is_of(x.aval, axis_types)]
            before += run
            if outputs:
                found.append(_call(_needed(before, outputs), outputs, name))
            run = []
        if not flags[i]:
            found.append(equation)
    return jaxpr.replace(eqns=found)


def _has_auto_axes(equation: Equation, axis_types: Sequence[AxisType]) -> bool:
    """True for an equation whose context, or what it reads, has automatic axes in the place of explicit ones."""
    context: Any = equation.ctx  # has no public name
    is_inside = _are_auto(context.cur_abstract_mesh, axis_types)
    return is_inside or any(_is_of(x.aval, axis_types) for x in variables(equation.invars))


def _is_of(aval: Any, axis_types: Sequence[AxisType]) -> bool:
    """True for the type of an array with automatic axes in the place of explicit ones."""
    sharding = getattr(aval, "sharding", None)
    return sharding is not None and _are_auto(sharding.mesh, axis_types)


def _are_auto(mesh: Any, axis_types: Sequence[AxisType]) -> bool:
    pairs = zip(mesh.axis_types, axis_types, strict=False)
    is_alike = len(mesh.axis_types) == len(axis_types)
    return is_alike and any(a is AxisType.Auto and b is AxisType.Explicit for a, b in pairs)


def _needed(equations: Sequence[Equation], outputs: Sequence[Any]) -> list[Equation]:
    """The equations of these that the outputs need; what a call before has made of automatic axes, it makes again."""
    wanted, found = set(outputs), list[Equation]()
    for equation in reversed(equations):
        if not wanted.isdisjoint(equation.outvars):
            found.append(equation)
            wanted.update(variables(equation.invars))
    return found[::-1]


def _read_of(equations: Sequence[Equation], later: Sequence[Equation], results: Sequence[Any]) -> list[Any]:
    """The variables that equations make and that later ones read, or that are results."""
    made = definitions(equations)
    return [x for x in dict.fromkeys([*free_variables(later), *variables(results)]) if x in made]


def _call(equations: Sequence[Equation], outputs: Sequence[Any], name: str) -> Equation:
    """The equation of a call of these equations."""
    inputs = free_variables(equations)

    def function(*arrays: Any) -> list[Any]:
        values = dict(zip(inputs, arrays, strict=True))
        for equation in equations:
            context: Any = equation.ctx
            with context.manager:
                made = bind(equation.primitive, [read(values, x) for x in equation.invars], equation.params)
            values.update(zip(equation.outvars, made, strict=True))
        return [values[x] for x in outputs]

    function.__name__ = name
    (call,) = jax.make_jaxpr(jax.jit(function))(*(x.aval for x in inputs)).eqns
    source = equations[-1].source_info
    return call.replace(invars=inputs, outvars=list(outputs), source_info=source)
