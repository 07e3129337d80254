"""How arrays depend on the largest logits: what is made of them must not, but for shifts that cancel.

With the largest logits any number d larger, an array of logits less these is d smaller, a shift of degree -1, and its
exponentials are exp(-d) times as large, a scale of degree -1. Degrees add up as d does, to 0 for what does not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend import core

from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import VIEWS, Makers
from coda_jax.jaxprs.def_use import variables

_Degree = tuple[str, int]
_FIXED: _Degree = ("shift", 0)
_ADDS, _COMPARES = frozenset({"add", "add_any", "sub"}), frozenset({"gt", "ge", "lt", "le", "eq", "ne"})


def is_free_of(makers: Makers, largest: Sequence[Any]) -> bool:
    """True if no result, and no array of another kind than those above, depends on these variables."""
    degrees = dict.fromkeys(largest, ("shift", 1))
    for equation in makers.equations if largest else ():
        inputs = [_FIXED if isinstance(x, core.Literal) else degrees.get(x, _FIXED) for x in equation.invars]
        if all(x == _FIXED for x in inputs) or equation.outvars[0] in degrees:
            continue
        degree = _degree(makers, equation, inputs) if len(equation.outvars) == 1 else None
        if degree is None:
            return False
        if degree[1] != 0:
            degrees[equation.outvars[0]] = degree
    return degrees.keys().isdisjoint(variables(makers.jaxpr.outvars))


def _degree(makers: Makers, equation: Equation, degrees: Sequence[_Degree]) -> _Degree | None:
    """The degree of an equation's result from those of its arguments; None if it has none."""
    name, (kind, degree) = equation.primitive.name, degrees[0]
    if name in VIEWS or name == "stop_gradient":
        return degrees[0]
    if name == "neg":
        return (kind, -degree) if kind == "shift" else degrees[0]
    if name == "exp":
        return ("scale", degree) if kind == "shift" else None
    if name == "max":  # as JAX has it of the largest logit, which it begins with the least number
        return degrees[1] if makers.constant(equation.invars[0]) == -math.inf else None
    if name == "is_finite":
        return _FIXED
    if name == "select_n":
        return _selected(makers, equation, degrees)
    if name in _ADDS and all(kind == "shift" for kind, _ in degrees):
        return "shift", degree + (-1 if name == "sub" else 1) * degrees[1][1]
    return _of_scales(makers, equation, degrees)


def _of_scales(makers: Makers, equation: Equation, degrees: Sequence[_Degree]) -> _Degree | None:
    """The degree of what is made of scales."""
    name, inputs = equation.primitive.name, equation.invars
    if not all(one == _FIXED or one[0] == "scale" for one in degrees):
        return None
    if name in ("mul", "div"):
        return "scale", degrees[0][1] + (1 if name == "mul" else -1) * degrees[1][1]
    if name == "log":
        return "shift", degrees[0][1]
    if name in ("abs", "reduce_sum"):
        return degrees[0]
    if name == "integer_pow":
        return "scale", degrees[0][1] * int(equation.params["y"])
    if name == "sign":
        return _FIXED
    others = [one for x, one in zip(inputs, degrees, strict=True) if makers.constant(x) != 0.0]
    if name in _COMPARES and len(others) == 1:
        return _FIXED  # compared with 0
    is_alike = name in _ADDS and bool(others) and all(one == others[0] for one in others)
    return others[0] if is_alike else None


def _selected(makers: Makers, equation: Equation, degrees: Sequence[_Degree]) -> _Degree | None:
    """The degree of two arrays of one degree, of which one may be 0: a shift's only where it is not finite."""
    mask, *cases = equation.invars
    others = [one for x, one in zip(cases, degrees[1:], strict=True) if makers.constant(x) != 0.0]
    if degrees[0] != _FIXED or not others or any(one != others[0] for one in others):
        return None
    finite = makers.maker(mask)
    is_shift_or_zero = len(others) < len(cases) and others[0][0] == "shift"
    return None if is_shift_or_zero and (finite is None or finite.primitive.name != "is_finite") else others[0]
