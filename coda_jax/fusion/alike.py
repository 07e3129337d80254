"""Equations that are alike: what equal layers have in common is traced once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from coda_jax.fusion.dots import Equation


def structure(
    equations: Sequence[Equation],
    inputs: Sequence[Any],
    results: Sequence[Any],
    property_of: Callable[[Any], Hashable],
    params_of: Callable[[Equation], Hashable],
) -> Hashable:
    """A key that is equal for equations that compute the same of arrays of the same types.

    Args:
      equations: in order.
      inputs: the variables that they read and do not make.
      results: the variables that are asked for.
      property_of: what else variables must have in common.
      params_of: what equations must have in common beside their primitives, as `own_params`.

    Returns:
      The key; None if a parameter of an equation cannot be compared.
    """
    numbers: dict[Any, int] = {}

    def atom(x: Any) -> Hashable:
        return _literal(x) if isinstance(x, core.Literal) else numbers[x]

    def added(x: Any) -> Hashable:
        numbers[x] = len(numbers)
        return x.aval.shape, x.aval.dtype, x.aval.weak_type, property_of(x)

    key: list[Hashable] = [tuple(map(added, inputs))]
    for equation in equations:
        read = tuple(map(atom, equation.invars))
        key.append((equation.primitive, params_of(equation), read, tuple(map(added, equation.outvars))))
    key.append(tuple(map(atom, results)))
    try:
        hash(tuple(key))
    except TypeError:
        return None
    return tuple(key)


def own_params(equation: Equation) -> Hashable:
    """The parameters of an equation, in order."""
    return tuple(sorted(equation.params.items(), key=operator.itemgetter(0)))


def _literal(x: Any) -> Hashable:
    return np.asarray(x.val).tobytes(), x.aval.shape, x.aval.dtype, x.aval.weak_type
