"""A function as one straight list of equations: calls are inlined, and equations keep the user's lines."""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core, source_info_util

from coda_jax.fusion.alike import own_params
from coda_jax.fusion.auto_axes import with_auto_axes_apart
from coda_jax.fusion.custom import CUSTOM_VJPS
from coda_jax.fusion.dots import Equation
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CALLS, callee, opened
from coda_jax.jaxprs.evaluate import needed_jaxpr, read, without_constants, without_dead_code
from coda_jax.jaxprs.inline import Body, Inliner
from coda_jax.jaxprs.source_lines import line_of as source_line_of
from coda_jax.jaxprs.splice import Splice

CHECKPOINTS, JITS = frozenset({"remat", "remat2", "checkpoint"}), frozenset({"jit", "pjit"})
_OPENED = CALLS - CHECKPOINTS
# They begin the names of calls of fused functions inside of others; JAX's derivatives and batches of calls keep names.
_INNER, _INNER_RULE = "coda_fused_", "coda_ruled_"
OPAQUE = "coda_opaque_"  # begins the name of a call that stays as it is
STACKED = "coda_stacked_"  # begins the name of a call of a loop, and of what moves its stacked arrays
# Equal ones are made once.
_SHARED = frozenset({"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "reduce_max"})


def _stacked(*arrays: Any, axis: int) -> list[Any]:
    return [lax.concatenate([lax.expand_dims(x, [axis]) for x in arrays], axis)]


def _unstacked(x: Any, *, axis: int) -> list[Any]:
    return [lax.squeeze(lax.slice_in_dim(x, i, i + 1, axis=axis), [axis]) for i in range(x.shape[axis])]


# Primitives of newer JAX, in those that all have.
_IN_OTHERS: dict[str, Callable[..., list[Any]]] = {"stack": _stacked, "unstack": _unstacked}


def straight(
    jaxpr: core.ClosedJaxpr,
    arrays: Sequence[Any],
    *,
    opens_inner: bool = True,
    stays: Callable[[Equation], bool] = lambda _: False,
) -> core.ClosedJaxpr:
    """The jaxpr at these arrays, with its calls inlined and without equations whose results nobody reads.

    Checkpoints, loops, branches and functions with derivatives of their own stay, and so do jitted functions that say
    how their arguments are sharded or donated. An equation has the line of the outermost call that it came from; one
    of a fused function that this one calls has its line there.

    Args:
      jaxpr: any.
      arrays: its arguments, or their types.
      opens_inner: whether calls of fused functions are inlined too.
      stays: which of these calls stay all the same.
    """
    jaxpr = jaxpr.replace(jaxpr=_with_calls(jaxpr.jaxpr))
    is_alike = [x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x) for x in arrays] == list(jaxpr.in_avals)
    if not is_alike:  # the types of all variables may be others

        def bound(equation: Equation, inputs: Sequence[Any], around: _Around) -> Sequence[Any]:
            outputs: Sequence[Any] = around.at(equation, bind, equation.primitive, inputs, equation.params)
            return outputs

        opening = _Opening(
            opens_inner, stays, bound, lambda equation, f, inputs, around: around.at(equation, f, *inputs)
        )
        inliner = Inliner(opening.applied, opening.entered)
        return needed_jaxpr(lambda *given: inliner.results(jaxpr.jaxpr, jaxpr.consts, given, _Around()), arrays)
    splice = Splice(jaxpr)
    opening = _Opening(
        opens_inner,
        stays,
        lambda equation, inputs, around: splice.take(equation, inputs, around.info(equation)),
        lambda equation, f, inputs, around: splice.trace(functools.partial(around.at, equation, f), inputs),
    )
    inliner = Inliner(opening.applied, opening.entered, literal=lambda x: x)
    return without_dead_code(splice.closed(inliner.results(jaxpr.jaxpr, jaxpr.consts, splice.inputs, _Around())))


class _Around(NamedTuple):
    """The calls around an equation: the one whose line it has, and the name stacks of calls of fused functions."""

    call: Equation | None = None
    scope: tuple[Any, ...] = ()

    def source(self, equation: Equation) -> Equation:
        return equation if self.call is None else self.call

    def at(self, equation: Equation, f: Callable[..., Any], *args: Any) -> Any:
        """f(*args), whose equations have the line and the name scope that an equation has here."""
        return at_line(self.source(equation), f, *args, scope=self.scope)

    def info(self, equation: Equation) -> Any:
        """The line and the name scope that an equation has here."""
        info = self.source(equation).source_info
        return info.replace(name_stack=functools.reduce(operator.add, [*self.scope, info.name_stack]))


class _Opening:
    """The work of `straight`.

    Args:
      opens_inner, stays: as there.
      make: the results of an equation that stays, of its inputs and the calls around it.
      trace: the results of a function in an equation's place, of the equation, the function and the rest as `make`.
    """

    def __init__(
        self,
        opens_inner: bool,
        stays: Callable[[Equation], bool],
        make: Callable[[Equation, Sequence[Any], _Around], Sequence[Any]],
        trace: Callable[[Equation, Callable[..., list[Any]], Sequence[Any], _Around], Sequence[Any]],
    ):
        self._opens_inner, self._stays, self._make, self._trace = opens_inner, stays, make, trace
        self._known: dict[Any, Any] = {}  # results of equations that are made once, with what they read
        self._transposes: dict[int, Any] = {}  # what they are of, their axes, and they themselves, by their ids

    def entered(self, equation: Equation, around: _Around) -> Body:
        """The body of a call that is inlined."""
        source = around.source(equation)
        if self._opens_inner and is_inner(equation) and not self._stays(equation):
            around = _Around(None, (*around.scope, source.source_info.name_stack))
        elif is_opened(equation):
            around = around._replace(call=source)
        else:
            return None
        jaxpr, consts = opened(callee(equation))
        return _with_calls(jaxpr), consts, around

    def applied(self, equation: Equation, inputs: list[Any], around: _Around) -> Sequence[Any]:
        """The results of an equation that stays."""
        name = equation.primitive.name
        if name in _IN_OTHERS:
            return self._trace(equation, functools.partial(_IN_OTHERS[name], **equation.params), inputs, around)
        if (same := self._same(equation, inputs)) is not None:
            return [same]
        key = (name, own_params(equation), tuple(map(_identity, inputs))) if name in _SHARED else None
        if key in self._known:
            return self._known[key][0]
        outputs = self._make(equation, inputs, around)
        if key is not None:
            self._known[key] = outputs, inputs
        if name == "transpose":
            self._transposes[id(outputs[0])] = inputs[0], equation.params["permutation"], outputs
        return outputs

    def _same(self, equation: Equation, inputs: Sequence[Any]) -> Any:
        """The array that an equation's result is, made before: that of a copy, or of a transpose of its transpose."""
        name, x = equation.primitive.name, next(iter(inputs), None)
        if name == "copy":
            return x
        if name != "transpose" or id(x) not in self._transposes:
            return None
        source, order, _ = self._transposes[id(x)]
        axes = [order[axis] for axis in equation.params["permutation"]]
        return source if axes == list(range(len(axes))) else None


def _with_calls(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The jaxpr, with calls in the place of what can be bound in another mesh context alone."""
    return with_auto_axes_apart(jaxpr, OPAQUE)


def _identity(x: Any) -> Hashable:
    return (id(x.val), x.aval) if isinstance(x, core.Literal) else id(x)


def at_line(equation: Equation, f: Callable[..., Any], *args: Any, scope: Sequence[Any] = ()) -> Any:
    """f(*args), whose equations have the line and the name scope of this equation, inside of the scopes around it."""
    info = equation.source_info
    names = functools.reduce(operator.add, [*scope, info.name_stack])
    with source_info_util.user_context(info.traceback, name_stack=names):
        return f(*args)


def applied(equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation, at its line."""
    results: Sequence[Any] = at_line(equation, bind, equation.primitive, inputs, equation.params)
    return results


def results_with(
    closed: core.ClosedJaxpr, arrays: Sequence[Any], own: Callable[[Equation, dict[Any, Any]], Sequence[Any] | None]
) -> list[Any]:
    """The results of a straight jaxpr at these arrays.

    Args:
      closed: the jaxpr.
      arrays: its arguments.
      own: an equation and the values of the variables before it -> its results; None for one that stays.
    """
    values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *arrays], strict=True))
    for equation in closed.jaxpr.eqns:
        outputs = own(equation, values)
        if outputs is None:
            outputs = applied(equation, [read(values, x) for x in equation.invars])
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(values, x) for x in closed.jaxpr.outvars]


def is_opened(equation: Equation) -> bool:
    """True for a call that is inlined, and is none of a fused function, nor opaque, nor of a loop over moved arrays."""
    if equation.primitive.name not in _OPENED or is_inner(equation) or is_stacked(equation) or is_opaque(equation):
        return False
    shardings = [*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ())]
    is_placed = any(isinstance(x, jax.sharding.Sharding) for x in shardings)
    return not is_placed and not any(equation.params.get("donated_invars", ()))


def as_inner(name: str, closed: core.ClosedJaxpr, derived: Callable[..., Sequence[Any]] | None) -> Callable[..., Any]:
    """A fused function of this jaxpr, inside of another one, as a function of its constants and its arguments.

    It is a call that the function around opens. Where it stays a call, it is a function of its own.

    Args:
      name: of the function.
      closed: its equations.
      derived: what is differentiated in its place, where the function around holds derivatives of it; None: itself.
    """
    prefix = _INNER if derived is None else _INNER_RULE
    call = jitted(f"{prefix}{name}", lambda *arrays: core.jaxpr_as_fun(without_constants(closed))(*arrays))
    if derived is None:
        return call
    rule = jax.custom_vjp(lambda *arrays: call(*arrays))

    def forward(*arrays: Any) -> tuple[list[Any], Any]:
        return jax.vjp(lambda *xs: list(derived(*xs)), *arrays)

    rule.defvjp(forward, lambda pullback, cotangents: pullback(cotangents))
    return rule


def is_inner(equation: Equation) -> bool:
    """True for a call of a fused function."""
    if equation.primitive.name not in CUSTOM_VJPS:
        return _is_named(equation, _INNER)
    equations = opened(callee(equation))[0].eqns
    return len(equations) == 1 and _is_named(equations[0], _INNER_RULE)  # others' rules are not of their equations


def is_call(equation: Equation) -> bool:
    """True for a call of a fused function without a rule of its own."""
    return _is_named(equation, _INNER)


def called_as(equation: Equation, function: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """Another function, called as the fused function is that an equation calls; it is traced once."""
    return inner_call(name_of_inner(equation), function)


def inner_call(name: str, function: Callable[..., Sequence[Any]]) -> Callable[..., Any]:
    """A function, called as a fused function without a rule of its own is; it is traced once."""
    return jitted(f"{_INNER}{name}", lambda *arrays: list(function(*arrays)))


def jitted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function under `jax.jit`, by this name, which the call's equation has."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = name
    return jax.jit(call)


def name_of_inner(equation: Equation) -> str:
    """The name of a fused function that is called."""
    return str(equation.params["name"]).removeprefix(_INNER)


def repeated(jaxpr: core.Jaxpr) -> frozenset[int]:
    """The ids of the jaxprs of fused functions that a jaxpr calls more than once, as equal layers are."""
    counts = collections.Counter[int]()

    def count(jaxpr: core.Jaxpr) -> None:
        for equation in jaxpr.eqns:
            body = callee(equation) if is_inner(equation) or is_opened(equation) else None
            if body is not None and is_call(equation):
                counts[id(body)] += 1
            if body is not None and counts[id(body)] < 2:
                count(opened(body)[0])

    count(jaxpr)
    return frozenset(body for body, number in counts.items() if number > 1)


def is_stacked(equation: Equation) -> bool:
    """True for a call of a loop, and of what moves its stacked arrays."""
    return _is_named(equation, STACKED)


def is_opaque(equation: Equation) -> bool:
    """True for a call of which nothing is fused."""
    return _is_named(equation, OPAQUE)


def name_of_opaque(equation: Equation) -> str:
    """The name of a function of which nothing is fused; empty for equations that are no function of the user's."""
    return str(equation.params["name"]).removeprefix(OPAQUE)


def is_jitted(jaxpr: core.Jaxpr) -> bool:
    """True for a function that is one call of a jitted one."""
    equations: list[Equation] = jaxpr.eqns
    return len(equations) == 1 and equations[0].primitive.name in JITS and not is_inner(equations[0])


def _is_named(equation: Equation, name: str) -> bool:
    return equation.primitive.name in JITS and str(equation.params["name"]).startswith(name)


def line_of(equation: Equation) -> str:
    """The user's line: "train.py:12 (loss)"; empty where JAX knows none."""
    return source_line_of(equation, with_function=True) or ""
