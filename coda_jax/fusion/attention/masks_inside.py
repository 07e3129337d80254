"""Masks are made where attention reads them: in loops, checkpoints and fused functions, of the small arrays outside.

A model often makes a mask once, in front of its layers. In a body it is an array of all pairs, of which nothing is
known; made there of positions and ids it is recognised, and so is a bias of a table's entries by position, as T5's. XLA
moves it out of a loop again where it stays an array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.residuals import pairs_in
from coda_jax.fusion.straight import CHECKPOINTS, applied, at_line, called_as, is_call, straight
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.def_use import free_variables, variables
from coda_jax.jaxprs.evaluate import evaluate, read, run, without_constants
from coda_jax.jaxprs.walk import equations, inner_jaxprs, num_carried, num_constants

_SMALLER = 16  # times: the arrays outside of which a mask is made again
_MOST_EQUATIONS = 64  # that make one
_VIEWS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "transpose", "copy", "convert_element_type"})
_CHEAP = _VIEWS | {
    *["eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "select_n", "iota"],
    *["add", "sub", "mul", "neg", "abs", "max", "min"],
}
_OF_INDICES = {"log", "div", "rem", "sign", "floor", "ceil", "clamp"}  # in what indices are made by


@dataclasses.dataclass(frozen=True)
class _Made:
    """The equations that make an array of smaller ones, in order."""

    equations: Sequence[Equation]

    def value(self, x: Any, values: Mapping[Any, Any]) -> Any:
        """The array, of the values of all variables."""
        own = dict(values)
        run(self.equations, own, applied, ())
        return own[x]

    @property
    def leaves(self) -> list[Any]:
        """The variables that it is made of."""
        return free_variables(self.equations)


def with_masks_inside(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A straight jaxpr whose bodies with a softmax make large arrays of smaller ones themselves.

    They are of loops, checkpoints and calls of fused functions. So do the backward loops of such loops.
    """
    holding: list[Equation] = [e for e in closed.jaxpr.eqns if may_hold_attention(e)]
    if not holding:
        return closed
    holding += [pair.backward for pair in pairs_in(closed.jaxpr) if may_hold_attention(pair.forward)]
    makers = Makers(closed.jaxpr)
    moved = {id(equation): found for equation in holding if (found := _moved(equation, makers))}
    if not moved:
        return closed

    calls: dict[Any, Callable[..., Any]] = {}  # of fused functions, by their bodies and what is moved into them

    def inside(equation: Equation) -> Callable[..., Any]:
        if equation.primitive.name == "scan":
            return _scan
        return functools.partial(_call, calls) if is_call(equation) else _checkpoint

    def function(*arrays: Any) -> list[Any]:
        values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *arrays], strict=True))
        every: Sequence[Equation] = closed.jaxpr.eqns
        for equation in every:
            inputs = [read(values, x) for x in equation.invars]
            if id(equation) in moved:
                outputs = at_line(equation, inside(equation), equation, inputs, moved[id(equation)], values)
            else:
                outputs = applied(equation, inputs)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(values, x) for x in closed.jaxpr.outvars]

    return straight(jax.make_jaxpr(function)(*closed.in_avals), closed.in_avals, opens_inner=False)


def may_hold_attention(equation: Equation) -> bool:
    """True for a loop, a checkpoint or a call of a fused function that may hold attention.

    It has an exponential and two products of batches, or cuDNN's attention.
    """
    if equation.primitive.name not in CHECKPOINTS | {"scan"} and not is_call(equation):
        return False
    every = [e for jaxpr in inner_jaxprs(equation) for e, _ in equations(jaxpr)]
    names = {e.primitive.name for e in every}
    batched = [e for e in every if e.primitive.name == "dot_general" and e.params["dimension_numbers"][1][0]]
    return ("exp" in names and len(batched) > 1) or any(name.startswith("dot_product_attention") for name in names)


def _moved(equation: Equation, makers: Makers) -> dict[int, _Made]:
    """By number, the arguments that are made inside; of a loop those that it does not slice."""
    count = num_constants(equation) if equation.primitive.name == "scan" else len(equation.invars)
    every = ((i, _made(x, makers)) for i, x in enumerate(equation.invars[:count]) if not isinstance(x, core.Literal))
    return {i: made for i, made in every if made is not None}


def _made(x: Any, makers: Makers) -> _Made | None:
    """How a variable is made of smaller ones, cheaply; None of another."""
    if x.aval.ndim < 2 or not isinstance(x.aval.size, int) or makers.maker(x) is None:
        return None
    needed, open_, leaves = dict[int, Equation](), [x], set[Any]()
    while open_:
        y = open_.pop()
        equation = makers.maker(y)
        is_gather = equation is not None and equation.primitive.name == "gather"
        indices = _of_positions(equation, makers) if is_gather else None
        is_cheap = equation is not None and (equation.primitive.name in _CHEAP or indices is not None)
        # Two views of ids are the same ids, and what is made of nothing, as positions, is known inside.
        is_view = equation is not None and equation.primitive.name in _VIEWS
        is_known = is_view or (is_cheap and equation is not None and not variables(equation.invars))
        if not is_known and y.aval.size * (_SMALLER**2 if is_cheap else _SMALLER) <= x.aval.size:
            leaves.add(y)
        elif equation is None or not is_cheap or len(needed) >= _MOST_EQUATIONS:
            return None
        elif makers.number(equation) not in needed:
            needed[makers.number(equation)] = equation
            needed |= indices or {}
            open_ += variables(equation.invars if indices is None else equation.invars[:1])
    if sum(y.aval.size for y in leaves) * _SMALLER > x.aval.size:
        return None
    return _Made([needed[number] for number in sorted(needed)])


def _of_positions(gather: Equation, makers: Makers) -> dict[int, Equation] | None:
    """The equations that make the indices of a gather of positions alone, as T5's buckets; None of other indices."""
    found, open_ = dict[int, Equation](), variables(gather.invars[1:])
    while open_:
        maker = makers.maker(open_.pop())
        if maker is None or maker.primitive.name not in _CHEAP | _OF_INDICES or len(found) >= _MOST_EQUATIONS:
            return None
        if makers.number(maker) not in found:
            found[makers.number(maker)] = maker
            open_ += variables(maker.invars)
    return found


def _scan(equation: Equation, inputs: Sequence[Any], moved: Mapping[int, _Made], values: Mapping[Any, Any]) -> Any:
    params, consts, carried = equation.params, num_constants(equation), num_carried(equation)
    body, body_consts = opened(params["jaxpr"])

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        arguments = [*inputs[:consts], *carry, *xs]
        for i, made in moved.items():
            arguments[i] = made.value(equation.invars[i], values)
        outputs = evaluate(body, body_consts, arguments, applied, ())
        return outputs[:carried], outputs[carried:]

    end = consts + carried
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, list(inputs[consts:end]), list(inputs[end:]), **options)
    return [*carry, *ys]


@dataclasses.dataclass(frozen=True, eq=False)
class _Inside:
    """A call or a checkpoint, some of whose arguments are made inside.

    Attributes:
      leaves: the variables that these are made of: arguments behind those that stay.
      stay: the numbers of the arguments that stay.
    """

    equation: Equation
    moved: Mapping[int, _Made]

    @property
    def leaves(self) -> list[Any]:
        return list(dict.fromkeys(x for made in self.moved.values() for x in made.leaves))

    @property
    def stay(self) -> list[int]:
        return [i for i in range(len(self.equation.invars)) if i not in self.moved]

    def __call__(self, *arrays: Any) -> list[Any]:
        body, body_consts = opened(callee(self.equation))
        given = dict(zip(self.leaves, arrays[len(self.stay) :], strict=True))
        arguments: list[Any] = [None] * len(self.equation.invars)
        for i, x in zip(self.stay, arrays, strict=False):
            arguments[i] = x
        for i, made in self.moved.items():
            arguments[i] = made.value(self.equation.invars[i], given)
        return evaluate(body, body_consts, arguments, applied, ())

    def arrays(self, inputs: Sequence[Any], values: Mapping[Any, Any]) -> list[Any]:
        """Its arguments."""
        return [*(inputs[i] for i in self.stay), *(values[x] for x in self.leaves)]


def _call(
    calls: dict[Any, Callable[..., Any]],
    equation: Equation,
    inputs: Sequence[Any],
    moved: Mapping[int, _Made],
    values: Mapping[Any, Any],
) -> Any:
    """The results of a call; equal calls of the same masks are of one function."""
    inside = _Inside(equation, moved)
    key = id(callee(equation)), tuple((i, equation.invars[i]) for i in moved)
    if key not in calls:
        calls[key] = called_as(equation, inside)
    return calls[key](*inside.arrays(inputs, values))


def _checkpoint(
    equation: Equation, inputs: Sequence[Any], moved: Mapping[int, _Made], values: Mapping[Any, Any]
) -> Any:
    function, inner = _Inside(equation, moved), callee(equation)
    arrays = function.arrays(inputs, values)
    closed = jax.make_jaxpr(function)(*map(jax.typeof, arrays))
    whole = without_constants(closed)
    given = whole if isinstance(inner, core.ClosedJaxpr) else whole.jaxpr
    return bind(equation.primitive, [*closed.consts, *arrays], {**equation.params, "jaxpr": given})
