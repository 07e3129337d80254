"""Sums of products that nothing else reads: over a mesh `graph.summed_once` makes one product of them.

As JAX adds dq Wq^T, dk Wk^T and dv Wv^T in the derivative of products that read one array, one after the other, maybe
with what else is added to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jax.extend import core

from coda_jax.epilogue.values import same_shape
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.units import Units

_ADDS = frozenset({"add", "add_any"})


def products_of_sums(units: Units, kept: Collection[Any]) -> list[list[int]]:
    """The numbers of the products that are terms of one sum, for each sum of several, in their order.

    Args:
      kept: variables that have to be values.
    """
    terms: dict[Any, list[int]] = defaultdict(list)
    for i, result in units.rows.results.items():
        if i in units.rows.dots and units.kinds[i] == "product":
            root = _sum_with(result, units, kept)
            if root is not None:
                terms[root].append(i)
    return [sorted(numbers) for numbers in terms.values() if len(numbers) > 1]


def _sum_with(x: Any, units: Units, kept: Collection[Any]) -> Any:
    """The last sum of those in which x is a term, each read by the next alone; None where there is none."""
    root = None
    while x not in kept and len(units.readers[x]) == 1 and (number := units.readers[x][0]) >= 0:
        equation = units.jaxpr.eqns[number]
        if is_sum(equation, units):
            root = equation.outvars[0]
        elif units.kinds[number] != "cast" or equation.primitive.name == "reshape":
            break
        (x,) = equation.outvars
    return root


def is_sum(equation: Equation, units: Units) -> bool:
    """True for a sum of two tiles of one shape in a map."""
    if equation.primitive.name not in _ADDS or units.kind_of(equation) != "map":
        return False
    a, b = equation.invars
    are_tiles = not any(isinstance(x, core.Literal) or not units.is_tile(x) for x in (a, b))
    return are_tiles and a is not b and same_shape(a.aval.shape, b.aval.shape)


def without_terms(
    equations: Sequence[Equation], inputs: Sequence[Any], gone: Collection[Any]
) -> tuple[list[Equation], list[Any], Mapping[Any, Any]]:
    """A map's equations and inputs without terms of sums that are zeros.

    Args:
      gone: the inputs that are zeros; casts and sums alone read them.

    Returns:
      Equations; inputs; for each variable that is another's, the other.
    """
    zeros, same, left = set(gone), dict[Any, Any](), list[Equation]()
    for equation in equations:
        read = [x if isinstance(x, core.Literal) else same.get(x, x) for x in equation.invars]
        terms = [x for x in read if isinstance(x, core.Literal) or x not in zeros]
        if len(terms) == len(read):
            left.append(equation if read == [*equation.invars] else equation.replace(invars=read))
        elif terms:
            same[equation.outvars[0]] = terms[0]
        else:
            zeros.add(equation.outvars[0])
    return left, [x for x in inputs if x not in gone], same
