"""Rows in no group, which products of groups of rows give zeros: the maps that are zeros there too, or read by nobody.

An epilogue of such a product stores zeros in these rows, whatever it computes. That is what a map makes of the product
if each of its terms has a factor that is 0 there. Infinities and NaN among the other factors do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from coda_jax.epilogue.values import same_size
from coda_jax.graph.on_mesh import ELEMENTWISE
from coda_jax.graph.values import Map, Product, Value, reachable
from coda_jax.jaxprs.def_use import variables

Groups = frozenset[Value]  # the sizes of groups, each (G,)

_OF_EACH = frozenset({"add", "add_any", "sub", "concatenate", "pad"})
_OF_FIRST = frozenset(
    {
        *("neg", "abs", "sign", "sin", "tan", "asin", "atan", "sinh", "tanh", "asinh", "atanh", "erf", "expm1"),
        *("log1p", "sqrt", "cbrt", "square", "floor", "ceil", "round", "div", "convert_element_type", "copy", "name"),
        *("reduce_precision", "reduce_sum", "reduce_max", "reduce_min", "reshape", "squeeze", "slice"),
        "broadcast_in_dim",
    }
)
_NOT_FINITE_AT_ZERO = {"rem", "log", "rsqrt", "pow", "integer_pow", "acos", "acosh", "atanh", "erf_inv", "digamma"}
_OF_ROWS = (ELEMENTWISE | _OF_EACH | _OF_FIRST) - _NOT_FINITE_AT_ZERO


class ZeroRows:
    """The groups outside of which the rows of values are zeros."""

    def __init__(self) -> None:
        self._groups: dict[Value, Groups] = {}

    def groups_of(self, value: Value) -> Groups:
        """The groups such that the value is zeros in rows in none of them."""
        open_ = [value]
        while open_:
            x = open_[-1]
            waits = [] if x in self._groups else [y for y in x.inputs if y not in self._groups]
            if not waits:
                if x not in self._groups:
                    self._groups[x] = self._found(x)
                open_.pop()
            open_ += waits
        return self._groups[value]

    def without(self, value: Map, x: Value) -> Groups:
        """The same for a map, whatever one of its inputs is."""
        return self._of_map(value, {**{y: self.groups_of(y) for y in value.inputs}, x: Groups()})

    def _found(self, value: Value) -> Groups:
        if isinstance(value, Product):
            return Groups({value.groups} if value.groups is not None and not value.transpose_a else ())
        return self._of_map(value, self._groups) if isinstance(value, Map) else Groups()

    def _of_map(self, value: Map, known: Mapping[Value, Groups]) -> Groups:
        groups = Groups().union(*(known[x] for x in value.inputs))
        return Groups(one for one in groups if _is_zero(value, tuple(one in known[x] for x in value.inputs)))


def unread_rows(ends: Sequence[Value]) -> Mapping[Value, Groups]:
    """For the values that others are made of, the groups outside of which nobody reads their rows.

    Products of groups do not read them, nor does a map that is zeros there whatever they are.

    Args:
      ends: the values whose arrays are read as a whole.
    """
    zeros, unread, order = ZeroRows(), dict.fromkeys(ends, Groups()), reachable(ends)
    if not any(isinstance(x, Product) and x.maps_zeros for x in order):
        return {}
    for value in reversed(order):
        for x in dict.fromkeys(value.inputs):
            found = _unread_by(value, x, unread.get(value, Groups()), zeros)
            unread[x] = unread[x] & found if x in unread else found
    return unread


def _unread_by(value: Value, x: Value, of_value: Groups, zeros: ZeroRows) -> Groups:
    """The groups outside of which a value reads no rows of x."""
    if isinstance(value, Product):
        others = [value.groups] if value.transpose_a else [value.b, value.groups]
        return Groups() if value.groups is None or x in others else Groups({value.groups})
    if not isinstance(value, Map) or not _same_rows(value, x):
        return Groups()
    flags = tuple(y is x for y in value.inputs)
    if not value.body.once(("rows", flags), lambda: _keeps_rows_of(value, flags)):
        return Groups()
    return of_value | zeros.without(value, x)


def _same_rows(value: Value, x: Value) -> bool:
    return bool(value.shape) and bool(x.shape) and same_size(value.shape[0], x.shape[0])


def _is_zero(value: Map, flags: Sequence[bool]) -> bool:
    """True for a map of each row that is zeros where the inputs with a flag are, whatever the others are."""
    (x, *_) = (x for x, flag in zip(value.inputs, flags, strict=True) if flag)
    return _same_rows(value, x) and bool(value.body.once(("zeros", *flags), lambda: _is_zero_of_zeros(value, flags)))


def _is_zero_of_zeros(value: Map, flags: Sequence[bool]) -> bool:
    equations, zeros, results = _opened(value, flags)
    numbers: dict[Any, Any] = {}  # of which arrays are full

    def number(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else numbers.get(x)

    def is_zero(x: Any) -> bool:
        return (not isinstance(x, core.Literal) and x in zeros) or (number(x) is not None and not np.any(number(x)))

    for equation in equations:
        name, inputs = equation.primitive.name, equation.invars
        if name in ("broadcast_in_dim", "convert_element_type") and number(inputs[0]) is not None:
            numbers[equation.outvars[0]] = number(inputs[0])
        elif _gives_zeros(equation, list(map(is_zero, inputs)), list(map(number, inputs))) and _keeps_rows(equation):
            zeros |= set(equation.outvars)
    return all(map(is_zero, results))


def _keeps_rows_of(value: Map, flags: Sequence[bool]) -> bool:
    """True for a map whose rows depend on the same rows of the inputs with a flag, and are finite where those are 0."""
    equations, behind, _ = _opened(value, flags)
    for equation in equations:
        if not behind.isdisjoint(variables(equation.invars)):
            name, divisors = equation.primitive.name, variables(equation.invars[1:])
            is_finite = name in _OF_ROWS and (name != "div" or behind.isdisjoint(divisors))
            if not is_finite or not _keeps_rows(equation):
                return False
            behind |= set(equation.outvars)
    return True


def _opened(value: Map, flags: Sequence[bool]) -> tuple[Sequence[Any], set[Any], Sequence[Any]]:
    """The equations of a map, its arguments with a flag, and its results."""
    closed, is_read = value.primal()
    own = {x for x, flag in zip(closed.jaxpr.invars, np.compress(is_read, flags), strict=True) if flag}
    return closed.jaxpr.eqns, own, closed.jaxpr.outvars


def _gives_zeros(equation: Any, flags: Sequence[bool], numbers: Sequence[Any]) -> bool:
    """True for an equation whose results are zeros where the arguments with a flag are."""
    name = equation.primitive.name
    rules: Mapping[str, Callable[[], bool]] = {
        "mul": lambda: any(flags),
        "select_n": lambda: all(flags[1:]),
        "integer_pow": lambda: flags[0] and equation.params["y"] > 0,
        "pow": lambda: flags[0] and numbers[1] is not None and bool(np.all(numbers[1] > 0)),
        "max": lambda: any(flags) and all(_are_no_more(flags, numbers)),
        "min": lambda: any(flags) and all(_are_no_less(flags, numbers)),
        "clamp": lambda: (
            flags[1] and all(_are_no_more(flags[:1], numbers)) and all(_are_no_less(flags[2:], numbers[2:]))
        ),
    }
    if name in rules:
        return rules[name]()
    return (name in _OF_FIRST and flags[0]) or (name in _OF_EACH and all(flags))


def _are_no_more(flags: Iterable[bool], numbers: Iterable[Any]) -> Iterable[bool]:
    """Whether arguments are 0, or numbers of at most that."""
    return (flag or (x is not None and bool(np.all(x <= 0))) for flag, x in zip(flags, numbers, strict=False))


def _are_no_less(flags: Iterable[bool], numbers: Iterable[Any]) -> Iterable[bool]:
    return (flag or (x is not None and bool(np.all(x >= 0))) for flag, x in zip(flags, numbers, strict=False))


def _keeps_rows(equation: Any) -> bool:
    """True for an equation whose first axis is that of its arguments with rows: none is moved, or summed over."""
    name, params = equation.primitive.name, equation.params
    shapes, (out,) = [x.aval.shape for x in equation.invars], equation.outvars
    if not any(shapes):
        return True
    if not out.aval.shape or not any(same_size(shape[0], out.aval.shape[0]) for shape in shapes if shape):
        return False
    if name.startswith("reduce_") and name != "reduce_precision":
        return 0 not in params["axes"]
    if name == "broadcast_in_dim":
        return tuple(params["broadcast_dimensions"][:1]) == (0,)
    if name == "concatenate":
        return bool(params["dimension"] != 0)
    return name != "pad" or tuple(params["padding_config"][0]) == (0, 0, 0)
