"""Calls of cuDNN's attention, `jax.nn.dot_product_attention(..., implementation="cudnn")`, as attention written out.

A mask or a bias that cuDNN takes is an array of all pairs; where it is recognised as documents, a window or a function,
`coda.attention` skips what it hides. A call whose attention is not recognised stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from coda_jax.fusion.custom import CUSTOM_VJPS
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.straight import applied, at_line, straight
from coda_jax.jaxprs.calls import callee, opened
from coda_jax.jaxprs.evaluate import read
from coda_jax.jaxprs.walk import equations

_FORWARD, _BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
_SCOPE = "coda_cudnn_"  # begins the names of scopes, each of which has one call
_ARRAYS = 10  # of a call: query, key, value, bias, lengths of queries and of keys, four of packed and paged arrays
_KEPT = 3  # behind the arrays of a backward pass: statistics, the result, the result's cotangent


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of cuDNN's attention.

    Attributes:
      equation: in the jaxpr.
      arrays: what it reads.
      result, statistics: its variables; the second is None where there is no backward pass.
      params: of cuDNN's primitive.
      backward: the equation of its backward pass, if the jaxpr has it.
    """

    equation: Equation
    arrays: Sequence[Any]
    result: Any
    statistics: Any
    params: Mapping[str, Any]
    backward: Equation | None = None

    @property
    def has_bias(self) -> bool:
        return bool(self.params["variadic_args"][0])

    @property
    def read(self) -> list[Any]:
        """The variables that written out attention reads: query, key, value, the bias, and lengths."""
        of_padding = self.arrays[4:6] if self._mask_name.startswith("PADDING") else ()
        return [*self.arrays[:3], *self.arrays[3 : 3 + self.has_bias], *of_padding]

    @property
    def _mask_name(self) -> str:
        return str(self.params["mask_type"].name)

    @property
    def is_known(self) -> bool:
        """Whether `written_out` computes the same."""
        params = self.params
        is_packed = any(x.aval.size for x in (*self.arrays[6:_ARRAYS], *self.arrays[_ARRAYS:]))
        is_windowed = params.get("sliding_window_length") is not None and "CAUSAL" not in self._mask_name
        is_other = params["dropout_rate"] or params.get("score_mod") is not None or self._mask_name == "ALIBI"
        return not (is_packed or is_windowed or is_other)

    def written_out(self, query: jax.Array, key: jax.Array, value: jax.Array, *others: jax.Array) -> jax.Array:
        """The same in plain JAX; what a mask hides has cuDNN's number."""
        is_of_heads = self.params["layout"] == 1  # (B, N, T, H), else (B, T, N, H)
        query, key, value = (x.swapaxes(1, 2) if is_of_heads else x for x in (query, key, value))
        (batch, rows, heads, width), (_, keys, key_heads, _) = query.shape, key.shape
        of_groups = query.reshape(batch, rows, key_heads, heads // key_heads, width)
        s = jnp.einsum("btkgd,bskd->bkgts", of_groups, key, preferred_element_type=jnp.float32)
        s = s.reshape(batch, heads, rows, keys) * self.params["scale"]
        s = s + others[0].astype(s.dtype) if self.has_bias else s
        row, column = jnp.arange(rows)[:, None], jnp.arange(keys)
        mask = None
        if "CAUSAL" in self._mask_name:
            mask = row >= column
            if (window := self.params.get("sliding_window_length")) is not None:
                mask = mask & (row - column < window)
        seen = None
        if self._mask_name.startswith("PADDING"):
            of_rows, of_keys = (x[:, None, None, None] for x in others[-2:])
            seen = row < of_rows
            padding = seen & (column < of_keys)
            mask = padding if mask is None else mask & padding
        s = s if mask is None else jnp.where(mask, s, jnp.finfo(s.dtype).min / 2)
        p = jax.nn.softmax(s, axis=-1).astype(value.dtype)
        y = jnp.einsum("bkgts,bskv->btkgv", p.reshape(batch, key_heads, -1, rows, keys), value)
        y = y.reshape(batch, rows, heads, -1)
        y = y if seen is None else y * seen.swapaxes(1, 2).astype(y.dtype)
        return y.swapaxes(1, 2) if is_of_heads else y


def has_calls(jaxpr: core.Jaxpr) -> bool:
    """Whether a jaxpr, or one in it, calls cuDNN's attention."""
    return any(equation.primitive.name == _FORWARD for equation, _ in equations(jaxpr))


def calls_in(jaxpr: core.Jaxpr) -> list[Call]:
    """The calls of cuDNN's attention that can be written out, in order."""
    candidates: list[Equation] = [e for e in jaxpr.eqns if e.primitive.name in CUSTOM_VJPS | {_FORWARD}]
    if not candidates:
        return []
    found, makers = list[Call](), Makers(jaxpr)
    backward = {e.invars[_ARRAYS]: e for e in makers.equations if e.primitive.name == _BACKWARD}
    for equation in candidates:
        one = _undifferentiated(equation)
        if equation.primitive.name == _FORWARD:
            result, *statistics = equation.outvars
            kept = statistics[0] if statistics else None
            one = Call(equation, equation.invars, result, kept, equation.params, backward.get(kept))
        if one is not None and one.is_known and _is_alone(one, makers):
            found.append(one)
    return found


def _undifferentiated(equation: Equation) -> Call | None:
    """The call that a function with cuDNN's derivative is."""
    if equation.primitive.name not in CUSTOM_VJPS:
        return None
    inner = opened(callee(equation))[0]
    if len(inner.eqns) != 1 or inner.eqns[0].primitive.name != _FORWARD or len(equation.outvars) != 1:
        return None
    (own,) = inner.eqns
    outer: dict[Any, Any] = dict(zip(inner.invars, equation.invars, strict=True))
    if any(x not in outer for x in own.invars) or list(inner.outvars) != own.outvars[:1]:
        return None
    return Call(equation, [outer[x] for x in own.invars], equation.outvars[0], None, own.params)


def _is_alone(one: Call, makers: Makers) -> bool:
    """Whether its statistics are read by its backward pass alone."""
    if one.statistics is None:
        return True
    others = [e for e in makers.readers(one.statistics) if e is not one.backward]
    return not others and all(x is not one.statistics for x in makers.jaxpr.outvars)


def with_calls_written_out(
    closed: core.ClosedJaxpr, calls: Sequence[Call], left: Collection[int] = ()
) -> core.ClosedJaxpr:
    """The jaxpr with these calls written out, but for those of some numbers."""
    forward = {one.equation.outvars[0]: i for i, one in enumerate(calls) if i not in left}
    backward = {one.backward.outvars[0]: i for i, one in enumerate(calls) if i not in left and one.backward is not None}

    def function(*arrays: Any) -> list[Any]:
        values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *arrays], strict=True))
        pullbacks: dict[int, Any] = {}
        every: Sequence[Equation] = closed.jaxpr.eqns
        for equation in every:
            first = equation.outvars[0] if equation.outvars else None
            if first in forward:
                number = forward[first]
                one = calls[number]
                given = [read(values, x) for x in one.read]
                values[one.result], pullbacks[number] = at_line(equation, _evaluated, one, number, given)
            elif first in backward:
                pullback = _in_scope(backward[first], pullbacks[backward[first]])
                cotangents = at_line(equation, pullback, read(values, equation.invars[_ARRAYS + _KEPT - 1]))
                values.update(zip(equation.outvars, cotangents, strict=False))
            else:
                inputs = [read(values, x) for x in equation.invars]
                values.update(zip(equation.outvars, applied(equation, inputs), strict=True))
        return [read(values, x) for x in closed.jaxpr.outvars]

    return straight(jax.make_jaxpr(function)(*closed.in_avals), closed.in_avals, opens_inner=False)


def _evaluated(one: Call, number: int, arrays: Sequence[jax.Array]) -> tuple[jax.Array, Any]:
    """The result, and the pullback to the query, key, value and the bias where the jaxpr has a backward pass."""
    written_out = _in_scope(number, one.written_out)
    if one.backward is None:
        return written_out(*arrays), None
    count = 3 + one.has_bias
    return jax.vjp(lambda *xs: written_out(*xs, *arrays[count:]), *arrays[:count])


def _in_scope(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose equations `number_of` then knows."""

    def named(*arrays: Any) -> Any:
        with jax.named_scope(f"{_SCOPE}{number}"):
            return function(*arrays)

    return named


def number_of(equation: Equation) -> int | None:
    """The number of the call that an equation was written out of; None of others."""
    for name in str(equation.source_info.name_stack).replace("(", "/").replace(")", "/").split("/"):
        if name.startswith(_SCOPE):
            return int(name.removeprefix(_SCOPE))
    return None
