"""Functions of each token's numbers, and which of them are summed over all tokens, as functions of arrays (tokens,)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers, is_view
from coda_jax.fusion.straight import applied
from coda_jax.graph.on_mesh import ELEMENTWISE, bind_on_mesh
from coda_jax.jaxprs.def_use import free_variables, variables
from coda_jax.jaxprs.evaluate import read, run


@dataclasses.dataclass(frozen=True)
class TokenFunction:
    """Elementwise functions of some numbers of each token.

    Attributes:
      equations: those that make them.
      others: the variables that are read beside the numbers: floats and bools, of all tokens or one for all.
    """

    equations: Sequence[Equation]
    others: Sequence[Any]

    def values(
        self, seeds: Sequence[Any], numbers: Sequence[jax.Array], others: Sequence[jax.Array]
    ) -> dict[Any, jax.Array]:
        """The values of all variables from arrays (tokens,): those of `seeds`, and of `others`.

        Others are float32; a bool is true where it is not 0.
        """
        values = {x: y.astype(x.aval.dtype) for x, y in zip(seeds, numbers, strict=True)}
        bind = bind_on_mesh(*numbers)
        for x, y in zip(self.others, others, strict=True):
            values[x] = y != 0 if x.aval.dtype == bool else y.astype(x.aval.dtype)
        for equation in self.equations:
            (out,) = equation.outvars
            if is_view(equation):
                values[out] = values[equation.invars[0]].astype(out.aval.dtype)
            else:
                inputs = [read(values, x) for x in equation.invars]
                (values[out],) = bind(equation.primitive, inputs, equation.params)
        return values


@dataclasses.dataclass(frozen=True)
class TokenSum(TokenFunction):
    """The sum over all tokens of an elementwise function of some numbers of each; or several sums, linearly combined.

    Attributes:
      result: the variable that is the sum, ().
      sums: those of which the result is made, each with the variable whose sum it is.
      combined: the equations that make the result of several sums.
    """

    result: Any = None
    sums: Sequence[tuple[Any, Any]] = ()
    combined: Sequence[Equation] = ()

    @property
    def arguments(self) -> list[Any]:
        """The variables that are read beside each token's numbers."""
        summed = {x for x, _ in self.sums}
        return [*self.others, *(x for x in free_variables(self.combined) if x not in summed)]

    def weights(self, values: dict[Any, Any]) -> list[jax.Array]:
        """The coefficients that the result has of each sum, () float32 each."""
        if not self.combined:
            return [jnp.ones((), jnp.float32)] * len(self.sums)
        weights = []
        for x, _ in self.sums:
            known = values | {y: jnp.asarray(float(x is y), y.aval.dtype) for y, _ in self.sums}
            run(self.combined, known, applied, ())
            weights.append(known[self.result].astype(jnp.float32))
        return weights

    def value(self, seeds: Sequence[Any]) -> Callable[..., jax.Array]:
        """The function of arrays (tokens,): each token's numbers, in the order of `seeds`, `weights`, and `others`."""

        def value(numbers: Sequence[jax.Array], weights: Sequence[jax.Array], others: Sequence[jax.Array]) -> jax.Array:
            values = self.values(seeds, numbers, others)
            summed = [values[x].astype(jnp.float32) for _, x in self.sums]
            if self.combined:
                summed = [weight * x for weight, x in zip(weights, summed, strict=True)]
            return functools.reduce(jnp.add, summed)

        return value


def token_sum(makers: Makers, seeds: Sequence[Any]) -> TokenSum | None:
    """The one sum of what is made of each token's numbers, or the one result of several; None if another reads it."""
    size, region, equations = seeds[0].aval.size, set(seeds), list[Equation]()
    behind, needed = makers.behind(seeds), makers.needed(seeds)
    others: dict[Any, None] = {}
    sums: list[Equation] = []
    for equation in makers.equations:
        if id(equation) not in needed or region.isdisjoint(variables(equation.invars)):
            continue
        if equation.primitive.name == "reduce_sum" and not equation.outvars[0].aval.shape:
            sums.append(equation)
            continue
        inputs = equation.invars[:1] if is_view(equation) else equation.invars
        beside = [x for x in variables(inputs) if x not in region]
        if not _is_of_tokens(equation, size) or not all(_is_beside(x, size) and x not in behind for x in beside):
            return None
        region.add(equation.outvars[0])
        equations.append(equation)
        others |= dict.fromkeys(beside)
    if not sums or not region.isdisjoint(makers.results):
        return None
    pairs = [(e.outvars[0], e.invars[0]) for e in sums]
    if len(sums) == 1:
        return TokenSum(equations, list(others), pairs[0][0], pairs)
    combination = _combination(makers, [x for x, _ in pairs], behind)
    return None if combination is None else TokenSum(equations, list(others), combination[0], pairs, combination[1])


def token_function(makers: Makers, seeds: Sequence[Any]) -> TokenFunction | None:
    """The results of a jaxpr as functions of each token's numbers; None if one is none."""
    size, region, equations = seeds[0].aval.size, set(seeds), list[Equation]()
    behind, others = makers.behind(seeds), dict[Any, None]()
    for equation in makers.equations:
        if behind.isdisjoint(variables(equation.invars)):
            continue
        if not _is_of_tokens(equation, size):
            return None
        region.add(equation.outvars[0])
        equations.append(equation)
        others |= dict.fromkeys(variables(equation.invars[:1] if is_view(equation) else equation.invars))
    others |= dict.fromkeys(variables(makers.jaxpr.outvars))
    beside = [x for x in others if x not in region]
    return TokenFunction(equations, beside) if all(_is_beside(x, size) for x in beside) else None


def _combination(makers: Makers, sums: Sequence[Any], behind: set[Any]) -> tuple[Any, list[Equation]] | None:
    """The first number that is linear in all sums and alone reads them, and the equations that make it."""
    made: dict[Any, tuple[set[Any], list[Equation]]] = {x: ({x}, []) for x in sums}  # of which sums, by which equations
    for equation in makers.equations:
        own = [x for x in variables(equation.invars) if x in made]
        beside = [x for x in variables(equation.invars) if x not in made]
        if not own or not _is_linear(equation, own) or any(x in behind or x.aval.size != 1 for x in beside):
            continue
        (out,) = equation.outvars
        every = {id(e): e for x in own for e in made[x][1]} | {id(equation): equation}
        made[out] = set().union(*(made[x][0] for x in own)), list(every.values())
        inside = {x for e in every.values() for x in variables(e.invars) if x in made}
        is_alone = all(id(e) in every for x in inside for e in makers.readers(x)) and inside.isdisjoint(makers.results)
        if made[out][0] == set(sums) and is_alone:
            return out, sorted(made[out][1], key=makers.number)
    return None


def _is_linear(equation: Equation, own: Sequence[Any]) -> bool:
    """True for a number () that is linear in those of its arguments."""
    name, inputs = equation.primitive.name, equation.invars
    out = equation.outvars[0].aval
    if len(equation.outvars) != 1 or out.shape or out.dtype.name not in FLOATS:
        return False
    if name in ("add", "sub"):
        return len(own) == 2 and not any(isinstance(x, core.Literal) for x in inputs)
    if name == "mul":
        return len(own) == 1 and sum(x is own[0] for x in inputs) == 1
    return name in ("neg", "convert_element_type", "copy") or (name == "div" and len(own) == 1 and inputs[0] in own)


def as_coefficients(others: Iterable[Any], values: dict[Any, Any], rows: Sequence[Any]) -> list[jax.Array]:
    """The values of `TokenSum.others` as float32 arrays, of these rows or ()."""
    arrays = (jnp.asarray(values[x], jnp.float32) for x in others)
    return [x.reshape(()) if x.size == 1 else x.reshape(rows) for x in arrays]


def _is_of_tokens(equation: Equation, size: Any) -> bool:
    """True for a float or bool of each token that is made of the token's own numbers."""
    (out, *more), name = equation.outvars, equation.primitive.name
    if more or out.aval.size != size or not (out.aval.dtype.name in FLOATS or out.aval.dtype == bool):
        return False
    if is_view(equation):
        return out.aval.size == equation.invars[0].aval.size
    return name in ELEMENTWISE and all(isinstance(x, core.Literal) or x.aval.size in (1, size) for x in equation.invars)


def _is_beside(x: Any, size: Any) -> bool:
    return (x.aval.dtype.name in FLOATS or x.aval.dtype == bool) and x.aval.size in (1, size)
