"""Attention in a graph: a call whose kernel makes maps of its result, y, as it stores it.

    y8 = saturate(s y),  y8^T,  max |y|        behind y = coda.attention(q, k, v): what a product in 8 bits reads

A map joins if it is of single elements of y and of scalars that are known before the call, as `attend.results` says of
its program, or a transpose of such a map in 8 bits. It sees y as it is stored, so that its values are those of a pass.
A pass makes the maps again of y where a policy of `jax.checkpoint` keeps that: attention does not run for them, and
nothing beside y is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval

from coda_jax.attend.primitive import CONTEXT_NAME, attend_with_results, forward_primitives
from coda_jax.attend.results import Results, unsupported
from coda_jax.attend.spec import AttentionSpec
from coda_jax.epilogue import Epilogue, trace
from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.epilogue.values import same_shape
from coda_jax.graph.calls import Call, Result, called_by
from coda_jax.graph.saved import as_equation, evaluated_again, is_literal, keeps
from coda_jax.graph.values import Map, Transposed, Value
from coda_jax.jaxprs.calls import CUSTOM_DERIVATIVES, callee, opened
from coda_jax.jaxprs.def_use import DefUse
from coda_jax.jaxprs.evaluate import bound, evaluate

_VIEWS = frozenset({"reshape", "name", "sharding_constraint"})  # of y, that keep its values and its order


class _Attention(NamedTuple):
    """The equation of a jaxpr that is `coda.attention`.

    Attributes:
      equation: whose results are y and the log-sum-exp, or y.
      spec: of the primitive in it.
      places: the numbers of the equation's inputs that are the primitive's.
      results: the numbers of the primitive's results that are the equation's.
    """

    equation: core.JaxprEqn
    spec: AttentionSpec
    places: tuple[int, ...]
    results: tuple[int, ...]


def is_attended(y: Value) -> bool:
    """True for a value that is the result of `coda.attention`, (B T, H Dv), which its kernel stores."""
    if not isinstance(y, Result) or y.differentiated is not None or y.call.is_on_mesh:
        return False
    found: bool = _once(y.call, ("attended", y.index), lambda: _attention_of(y.call.jaxpr, y) is not None)
    return found


def _once(call: Call, key: Any, make: Callable[[], Any]) -> Any:
    if key not in call.traces:
        call.traces[key] = make()
    return call.traces[key]


def _attention_of(closed: core.ClosedJaxpr, y: Result) -> _Attention | None:
    """The attention that one of a jaxpr's results is a view of."""
    jaxpr = closed.jaxpr
    def_use, out = DefUse(jaxpr), jaxpr.outvars[y.index]
    while (equation := def_use.maker(out)) is not None and equation.primitive.name in _VIEWS:
        out = equation.invars[0]
    if equation is None or out is not equation.outvars[0] or len(out.aval.shape) != 4:
        return None
    batch, rows, heads, width = out.aval.shape
    found = _attention_in(equation) if same_shape(y.shape, (batch * rows, heads * width)) else None
    return found if found is not None and found.spec.implementation != "xla" else None


def _attention_in(equation: core.JaxprEqn) -> _Attention | None:
    """An equation as attention; None of another."""
    if equation.primitive.name not in CUSTOM_DERIVATIVES:
        return None
    inner, constants = opened(callee(equation))
    if len(inner.eqns) != 1 or constants or inner.eqns[0].primitive not in forward_primitives:
        return None
    (one,) = inner.eqns
    numbers: dict[Any, int] = {variable: i for i, variable in enumerate(inner.invars)}
    made: dict[Any, int] = {variable: i for i, variable in enumerate(one.outvars)}
    results = tuple(made.get(x, -1) for x in inner.outvars)
    if results not in ((0,), (0, 1)) or not all(x in numbers for x in one.invars):
        return None
    return _Attention(equation, one.params["spec"], tuple(numbers[x] for x in one.invars), results)


def may_join(value: Value, program: Any) -> bool:
    """True if the kernel may make a map of y, whose program beside y this is, or None, or a transpose of such a map."""
    if isinstance(value, Transposed):
        return is_of_8_bits(value.dtype)
    if not isinstance(value, Map) or program is None:
        return False
    return unsupported(program, [np.dtype(FLOAT32)] * len(program.stores)) is None


class Beside(NamedTuple):
    """Maps of y as an epilogue.

    Attributes:
      y: the result that they are maps of.
      epilogue: a function of y (B T, H Dv), float32, and of the operands.
      operands: scalars.
      dtypes: of what the epilogue gives.
    """

    y: Result
    epilogue: Callable[..., Any]
    operands: Sequence[jax.Array]
    dtypes: Sequence[np.dtype[Any]]


def called_beside(
    results: Sequence[Result], arrays: Sequence[jax.Array], beside: Beside
) -> tuple[dict[Result, jax.Array], list[jax.Array]] | None:
    """The arrays of these results of one call, as `called` gives them, and those of the maps beside y.

    None where the kernel cannot make these maps.
    """
    y, call = beside.y, beside.y.call
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in beside.operands]
    traced, _ = trace(beside.epilogue, jax.ShapeDtypeStruct(y.shape, FLOAT32), types)
    dtypes = tuple(beside.dtypes[store.output] for store in traced.program.stores)
    if unsupported(traced.program, dtypes) is not None:
        return None
    outputs: list[jax.Array] = []
    of_y: list[jax.Array] = []  # y, and y under the name by which policies keep it

    def evaluated(closed: core.ClosedJaxpr, inputs: Sequence[jax.Array]) -> list[Any]:
        attention = _attention_of(closed, y)
        assert attention is not None, "a call's derivative runs what the call runs"
        read = [closed.jaxpr.outvars[x.index] for x in results]
        made = Results(traced.program, dtypes, keeps_y=_is_read(closed.jaxpr, attention.equation, read))

        def apply(equation: core.JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
            if equation is attention.equation:
                arguments = [inputs[place] for place in attention.places]
                found, others = attend_with_results(
                    arguments, beside.operands, traced, spec=attention.spec, results=made
                )
                of_y.append(found[0])
                outputs.extend(x.astype(dtype) for x, dtype in zip(others, beside.dtypes, strict=True))
                return [found[i] for i in attention.results]
            found = list(bound(equation, inputs))
            if (
                equation.primitive.name == "name"
                and equation.params["name"] == CONTEXT_NAME
                and of_y
                and inputs[0] is of_y[0]
            ):
                of_y.append(found[0])
            return found

        return evaluate(closed.jaxpr, closed.consts, inputs, apply, opens=())

    found = called_by(evaluated, call, results, arrays)
    if len(of_y) == 1:
        return found, outputs
    again = _Again(traced, tuple(beside.dtypes))
    return found, _beside_p.bind(*outputs, of_y[1], *beside.operands, again=again)


def _is_read(jaxpr: core.Jaxpr, attention: core.JaxprEqn, read: Sequence[Any]) -> bool:
    """Whether any of these variables depends on y."""
    of_y = {attention.outvars[0]}
    for equation in jaxpr.eqns:
        if any(x in of_y for x in equation.invars if not is_literal(x)):
            of_y.update(equation.outvars)
    return any(x in of_y for x in read if not is_literal(x))


# ---- under jax.checkpoint

_beside_p = core.Primitive("coda_beside_attention")  # changes nothing


@dataclasses.dataclass(frozen=True, eq=False)
class _Again:
    """The maps beside y as a function of y and of the scalars."""

    epilogue: Epilogue
    dtypes: tuple[np.dtype[Any], ...]

    def __call__(self, y: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        batch, rows, heads, width = y.shape
        acc = y.astype(FLOAT32).reshape(batch * rows, heads * width)
        made = zip(self.epilogue.call(acc, *operands), self.dtypes, strict=True)
        return [x.astype(dtype) for x, dtype in made]


def _made(*arrays: Any, again: _Again) -> list[Any]:
    return list(arrays[: len(again.dtypes)])


def _partly_evaluated(
    saveable: Callable[..., Any], unknown: Sequence[bool], there: Sequence[bool], equation: Any
) -> Any:
    """The equation, and what makes its results again: of y where a policy keeps y, else of what attention makes."""
    forward, again = None, equation
    if not any(unknown):
        forward, of = equation, equation.params["again"]
        y, *operands = equation.invars[len(of.dtypes) :]
        if keeps(saveable, y.aval, CONTEXT_NAME):
            again = as_equation(of, [y, *operands], equation) or equation
    return evaluated_again(equation, forward, again, there)


def _batched(arrays: Sequence[jax.Array], dims: Sequence[int | None], *, again: _Again) -> tuple[list[Any], list[Any]]:
    return _made(*arrays, again=again), _made(*dims, again=again)


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Any], *, again: _Again) -> tuple[list[Any], list[Any]]:
    return _beside_p.bind(*primals, again=again), _made(*tangents, again=again)


_beside_p.multiple_results = True
_beside_p.def_impl(_made)
_beside_p.def_abstract_eval(_made)
mlir.register_lowering(_beside_p, lambda _, *arrays, again: _made(*arrays, again=again))
ad.primitive_jvps[_beside_p] = _jvp
batching.primitive_batchers[_beside_p] = _batched
partial_eval.partial_eval_jaxpr_custom_rules[_beside_p] = _partly_evaluated
