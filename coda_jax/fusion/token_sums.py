"""Sums over tokens: which function of each token's numbers is summed, as a function of arrays (tokens,)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.fusion.dots import Equation, variables
from coda_jax.fusion.makers import Makers, is_view
from coda_jax.graph.on_mesh import ELEMENTWISE, bind_on_mesh
from coda_jax.jaxprs.evaluate import read


@dataclasses.dataclass(frozen=True)
class TokenSum:
    """The sum over all tokens of an elementwise function of some numbers of each.

    Attributes:
      result: the variable that is the sum, ().
      summed: the variable whose sum it is.
      equations: those that make it of each token's numbers.
      others: what they read beside these: floats and bools, of all tokens or one for all.
    """

    result: Any
    summed: Any
    equations: Sequence[Equation]
    others: Sequence[Any]

    def value(self, seeds: Sequence[Any]) -> Callable[..., jax.Array]:
        """The function of arrays (tokens,): the numbers of each token, in the order of `seeds`, and `others`.

        Others are float32; a bool is true where it is not 0.
        """

        def value(numbers: Sequence[jax.Array], others: Sequence[jax.Array]) -> jax.Array:
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
            result: jax.Array = values[self.summed].astype(jnp.float32)
            return result

        return value


def token_sum(makers: Makers, seeds: Sequence[Any]) -> TokenSum | None:
    """The one sum that reads what is made of each token's numbers; None if something else reads these."""
    size, region, equations = seeds[0].aval.size, set(seeds), list[Equation]()
    behind, results = makers.behind(seeds), set(variables(makers.jaxpr.outvars))
    others: dict[Any, None] = {}
    sums: list[Equation] = []
    for equation in makers.equations:
        if region.isdisjoint(variables(equation.invars)):
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
    if len(sums) != 1 or not region.isdisjoint(results):
        return None
    return TokenSum(sums[0].outvars[0], sums[0].invars[0], equations, list(others))


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
