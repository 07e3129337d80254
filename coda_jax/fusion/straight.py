"""A function as one straight list of equations: calls are inlined, and equations keep the user's lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

from coda_jax.fusion.dots import Equation
from coda_jax.jaxprs.bind import bind
from coda_jax.jaxprs.calls import CALLS, callee, opened
from coda_jax.jaxprs.evaluate import read

CHECKPOINTS = frozenset({"remat", "remat2", "checkpoint"})
_OPENED = CALLS - CHECKPOINTS
# Equal ones are made once.
_SHARED = frozenset({"convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "reduce_max"})


def straight(jaxpr: core.ClosedJaxpr, arrays: Sequence[Any]) -> core.ClosedJaxpr:
    """The jaxpr at these arrays, with its calls inlined and without equations whose results nobody reads.

    Checkpoints, loops, branches and functions with derivatives of their own stay, and so do jitted functions that say
    how their arguments are sharded or donated. An equation has the line of the outermost call that it came from.
    """
    flat = jax.make_jaxpr(lambda *given: _results(jaxpr.jaxpr, jaxpr.consts, given, None, {}))(*arrays)
    needed, _ = partial_eval.dce_jaxpr(flat.jaxpr, [True] * len(flat.out_avals), instantiate=True)
    return core.ClosedJaxpr(needed, flat.consts)


def _results(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], call: Equation | None, known: dict[Any, Any]
) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for equation in jaxpr.eqns:
        inputs = [read(values, v) for v in equation.invars]
        source = equation if call is None else call
        if is_opened(equation):
            outputs: Sequence[Any] = _results(*opened(callee(equation)), inputs, source, known)
        elif equation.primitive.name in _SHARED:
            key = equation.primitive.name, str(equation.params), tuple(map(id, inputs))
            if key not in known:
                known[key] = at_line(source, bind, equation.primitive, inputs, equation.params), inputs
            outputs, _ = known[key]
        else:
            outputs = at_line(source, bind, equation.primitive, inputs, equation.params)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(values, v) for v in jaxpr.outvars]


def at_line(equation: Equation, f: Callable[..., Any], *args: Any) -> Any:
    """f(*args), whose equations have the line and the name scope of this equation."""
    info = equation.source_info
    with source_info_util.user_context(info.traceback, name_stack=info.name_stack):
        return f(*args)


def applied(equation: Equation, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation, at its line."""
    results: Sequence[Any] = at_line(equation, bind, equation.primitive, inputs, equation.params)
    return results


def is_opened(equation: Equation) -> bool:
    """True for a call that is inlined."""
    if equation.primitive.name not in _OPENED:
        return False
    shardings = [*equation.params.get("in_shardings", ()), *equation.params.get("out_shardings", ())]
    is_placed = any(isinstance(x, jax.sharding.Sharding) for x in shardings)
    return not is_placed and not any(equation.params.get("donated_invars", ()))


def line_of(equation: Equation) -> str:
    """The user's line: "train.py:12:4 (loss)"."""
    return str(source_info_util.summarize(equation.source_info)).rpartition("/")[2]
