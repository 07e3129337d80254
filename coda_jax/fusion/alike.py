"""Equations that are alike: what equal layers have in common is traced once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from coda_jax.attend.primitive import FORMS
from coda_jax.fusion.custom import CUSTOM_VJPS
from coda_jax.fusion.dots import Equation
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.walk import inner_jaxprs


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


def call_params(equation: Equation) -> Hashable:
    """The parameters of an equation; None for one that holds functions, but for `coda.attention` and its derivative.

    The rules of these two are functions of their primitives' parameters.
    """
    bodies = inner_jaxprs(equation)
    if not bodies:
        return own_params(equation)
    equations = bodies[0].eqns
    if not is_attention(equation) or equations[0].params["spec"] != equations[0].params["spec"].plain:
        return None
    numbers = {x: i for i, x in enumerate((*bodies[0].invars, *equations[0].outvars))}
    places = tuple(numbers.get(x) for x in variables((*equations[0].invars, *bodies[0].outvars)))
    return equations[0].primitive, own_params(equations[0]), places


def is_attention(equation: Equation) -> bool:
    """True for a call of `coda.attention`, or of its derivative."""
    if equation.primitive.name not in CUSTOM_VJPS:
        return False
    equations = inner_jaxprs(equation)[0].eqns
    return len(equations) == 1 and equations[0].primitive in FORMS


def _literal(x: Any) -> Hashable:
    return np.asarray(x.val).tobytes(), x.aval.shape, x.aval.dtype, x.aval.weak_type
