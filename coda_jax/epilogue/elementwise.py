"""The elementwise operations of epilogues: for each, the JAX function that evaluates it and its CUDA expression.

Values of dtype bfloat16 and float16 are held as float32 in registers and rounded after every operation that is not
exact in them; `apply` does the same with XLA.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import BOOL, DTYPES, FLOATS, INT32, NUMBERS, TABLE, is_rounded
from coda_jax.epilogue.rounding import round_to
from coda_jax.epilogue.saturate import saturate_p

_BITS = (INT32, BOOL)  # input dtypes of bitwise operations


@dataclass(frozen=True)
class Operation:
    """One elementwise operation.

    Attributes:
      apply: arrays of one shape, the attributes as keywords -> array.
      expression: texts of the inputs, their dtypes, the attributes -> CUDA expression.
      exact: the result needs no rounding when the inputs are 16-bit floats.
      dtypes: input dtypes it is defined for.
      instructions: about how many machine instructions it is in a kernel, for floats.
    """

    apply: Callable[..., jax.Array]
    expression: Callable[[list[str], list[str], dict[str, Any]], str]
    exact: bool = False
    dtypes: tuple[str, ...] = DTYPES
    instructions: int = 1


def _function(
    apply: Callable[..., jax.Array],
    name: str,
    *,
    exact: bool = False,
    dtypes: tuple[str, ...] = FLOATS,
    instructions: int = 1,
) -> Operation:
    return Operation(apply, lambda x, _, __: f"{name}({', '.join(x)})", exact, dtypes, instructions)


def _arithmetic(apply: Callable[..., jax.Array], symbol: str) -> Operation:
    """Integers are unsigned in between: they wrap, as XLA's do, where C++ has no overflow of signed ones."""
    neutral = "1u *" if symbol == "*" else "0u +"
    return _by_dtype(apply, floats=f"{{0}} {symbol} {{1}}", int32=f"static_cast<int>({neutral} {{0}} {symbol} {{1}})")


def _infix(apply: Callable[..., jax.Array], symbol: str, dtypes: tuple[str, ...]) -> Operation:
    return Operation(apply, lambda x, _, __: f"{x[0]} {symbol} {x[1]}", dtypes=dtypes)


def _by_dtype(apply: Callable[..., jax.Array], exact: bool = False, instructions: int = 1, **texts: str) -> Operation:
    """`texts`: a format string for each class of input, among floats, int32 and bool."""
    dtypes = tuple(d for d in DTYPES if ("floats" if d in FLOATS else d) in texts)

    def expression(x: list[str], of: list[str], _: dict[str, Any]) -> str:
        return texts["floats" if of[0] in FLOATS else of[0]].format(*x)

    return Operation(apply, expression, exact, dtypes, instructions)


def _convert(x: list[str], dtypes: list[str], attributes: dict[str, Any]) -> str:
    (value,), (source,), target = x, dtypes, attributes["dtype"]
    if target == source:
        return value
    if target == BOOL:
        return f"{value} != 0"
    if target == INT32:
        return f"coda::to_int({value})" if TABLE[source].is_float else f"static_cast<int>({value})"
    value = value if TABLE[source].is_float else f"static_cast<float>({value})"
    return value if source == BOOL else rounded(value, target)


def rounded(expression: str, dtype: str) -> str:
    """The CUDA expression, rounded where `dtype` is."""
    function = TABLE[dtype].rounding
    return f"{function}({expression})" if function else expression


def _select(x: list[str], dtypes: list[str], _: dict[str, Any]) -> str:
    which, *cases = x
    if dtypes[0] == BOOL:
        return f"{which} ? {cases[-1]} : {cases[0]}"
    return "".join(f"{which} == {i} ? {case} : " for i, case in enumerate(cases[:-1])) + cases[-1]


def _integer_power(x: list[str], dtypes: list[str], attributes: dict[str, Any]) -> str:
    power = f"coda::integer_power<{attributes['y']}>"
    return f"static_cast<int>({power}(0u + {x[0]}))" if dtypes[0] == INT32 else f"{power}({x[0]})"


def _shifted(x: list[str], _: list[str], __: dict[str, Any]) -> str:
    """Zeros for 32 bits and more, as XLA has it."""
    value, bits = (f"static_cast<unsigned>({text})" for text in x)
    return f"{bits} < 32u ? static_cast<int>({value} >> {bits}) : 0"


def _horner(x: jax.Array, *coefficients: jax.Array) -> jax.Array:
    return functools.reduce(lambda total, c: total * x + c, reversed(coefficients))


def _horner_text(x: list[str], _: list[str], __: dict[str, Any]) -> str:
    value, *coefficients = x
    return functools.reduce(lambda total, c: f"({total}) * {value} + {c}", reversed(coefficients))


def _power(x: list[str], dtypes: list[str], _: dict[str, Any]) -> str:
    exponent = x[1] if dtypes[1] in FLOATS else f"static_cast<float>({x[1]})"
    return f"powf({x[0]}, {exponent})"


def _angle(x: jax.Array, y: jax.Array | None = None) -> jax.Array:
    return x if y is None else x * y


def _round(x: jax.Array, rounding_method: int) -> jax.Array:
    return lax.round(x, lax.RoundingMethod(rounding_method))


OPERATIONS: dict[str, Operation] = {
    "add": _arithmetic(lax.add, "+"),
    "add_any": _arithmetic(lax.add, "+"),
    "sub": _arithmetic(lax.sub, "-"),
    "mul": _arithmetic(lax.mul, "*"),
    "div": _by_dtype(lax.div, instructions=7, floats="{0} / {1}", int32="coda::divide({0}, {1})"),
    "rem": _by_dtype(lax.rem, instructions=63, floats="fmodf({0}, {1})", int32="coda::remainder({0}, {1})"),
    "neg": _by_dtype(lax.neg, exact=True, floats="-{0}", int32="static_cast<int>(0u - {0})"),
    "abs": _by_dtype(lax.abs, exact=True, floats="fabsf({0})", int32="coda::absolute({0})"),
    "sign": _function(lax.sign, "coda::sign", exact=True, dtypes=NUMBERS, instructions=4),
    "max": _by_dtype(
        lax.max, exact=True, floats="coda::maximum({0}, {1})", int32="coda::maximum({0}, {1})", bool="{0} | {1}"
    ),
    "min": _by_dtype(
        lax.min, exact=True, floats="coda::minimum({0}, {1})", int32="coda::minimum({0}, {1})", bool="{0} & {1}"
    ),
    "clamp": _function(lax.clamp, "coda::clamp", exact=True, dtypes=NUMBERS, instructions=2),
    "square": _by_dtype(lax.square, floats="{0} * {0}", int32="static_cast<int>(1u * {0} * {0})"),
    "one_minus_square": _by_dtype(
        lambda x: (1 + x) * (1 - x),
        floats="(1.0f + {0}) * (1.0f - {0})",
        int32="static_cast<int>((1u + {0}) * (1u - {0}))",
    ),
    "integer_pow": Operation(
        lambda x, y: lax.integer_pow(x, y),
        _integer_power,
        dtypes=NUMBERS,
    ),
    "pow": Operation(lax.pow, _power, dtypes=NUMBERS, instructions=87),
    "polynomial": Operation(_horner, _horner_text, dtypes=FLOATS),
    "sqrt": _function(lax.sqrt, "sqrtf", instructions=5),
    "rsqrt": _function(lax.rsqrt, "coda::rsqrt", instructions=5),
    "cbrt": _function(lax.cbrt, "cbrtf", instructions=16),
    "exp": _function(lax.exp, "expf", instructions=7),
    "exp2": _function(lax.exp2, "exp2f", instructions=5),
    "expm1": _function(lax.expm1, "expm1f", instructions=22),
    "log": _function(lax.log, "logf", instructions=26),
    "log2": _function(jnp.log2, "log2f", instructions=28),
    "log1p": _function(lax.log1p, "log1pf", instructions=29),
    "logistic": _function(lax.logistic, "coda::logistic", instructions=4),
    # The argument of sin and cos, see `simplify.angles`: x, or the product x * y, which the kernel does not round.
    "angle": _function(_angle, "coda::angle", exact=True, instructions=24),
    "sin": _function(lax.sin, "coda::sine", instructions=14),
    "cos": _function(lax.cos, "coda::cosine", instructions=14),
    "erf": _function(lax.erf, "erff", instructions=20),
    "erfc": _function(lax.erfc, "coda::erfc", instructions=17),
    "floor": _function(lax.floor, "floorf", exact=True),
    "ceil": _function(lax.ceil, "ceilf", exact=True),
    "round": Operation(
        _round,
        lambda x, _, a: f"{'roundf' if a['rounding_method'] == 0 else 'rintf'}({x[0]})",
        exact=True,
        dtypes=FLOATS,
    ),
    "is_finite": _function(lax.is_finite, "coda::is_finite"),
    "atan2": _function(lax.atan2, "atan2f", instructions=48),
    "eq": _infix(lax.eq, "==", DTYPES),
    "ne": _infix(lax.ne, "!=", DTYPES),
    "lt": _infix(lax.lt, "<", DTYPES),
    "le": _infix(lax.le, "<=", DTYPES),
    "gt": _infix(lax.gt, ">", DTYPES),
    "ge": _infix(lax.ge, ">=", DTYPES),
    "and": _infix(lax.bitwise_and, "&", _BITS),
    "or": _infix(lax.bitwise_or, "|", _BITS),
    "xor": _infix(lax.bitwise_xor, "^", _BITS),
    "not": _by_dtype(lax.bitwise_not, int32="~{0}", bool="!{0}"),
    "shift_right_logical": Operation(lax.shift_right_logical, _shifted, dtypes=(INT32,), instructions=2),
    "select_n": Operation(lax.select_n, _select, exact=True),
    "convert_element_type": Operation(
        lambda x, dtype: lax.convert_element_type(x, dtype), _convert, exact=True, dtypes=tuple(TABLE)
    ),
    "saturate": Operation(
        lambda x, dtype: saturate_p.bind(x, dtype=np.dtype(dtype)),
        lambda x, _, a: f"coda::saturate_to_{TABLE[a['dtype']].cuda}({x[0]})",
        exact=True,
        dtypes=FLOATS,
        instructions=2,
    ),
} | {
    name: _function(getattr(lax, name), name + "f", instructions=instructions)
    for name, instructions in {
        "tan": 85, "asin": 22, "acos": 23, "atan": 18, "sinh": 23, "cosh": 15, "tanh": 15, "asinh": 42, "acosh": 43,
        "atanh": 36,
    }.items()
}  # fmt: skip


def attributes_of(name: str, params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The parameters of a JAX primitive that a node keeps."""
    match name:
        case "integer_pow":
            return (("y", int(params["y"])),)
        case "round":
            return (("rounding_method", int(params["rounding_method"])),)
        case "convert_element_type":
            return (("dtype", np.dtype(params["new_dtype"]).name),)
        case "saturate":
            return (("dtype", np.dtype(params["dtype"]).name),)
    return ()


def apply(name: str, inputs: list[jax.Array], attributes: dict[str, Any]) -> jax.Array:
    """Evaluates one operation on arrays of one shape with XLA. A result that 16 bits do not hold is rounded once."""
    operation = OPERATIONS[name]
    if name == "convert_element_type":
        (x,), dtype = inputs, np.dtype(attributes["dtype"])
        if is_rounded(dtype) and x.dtype != dtype:
            return round_to(lax.convert_element_type(x, jnp.float32), dtype)
    if operation.exact or not any(is_rounded(x.dtype) for x in inputs):
        return operation.apply(*inputs, **attributes)
    dtype = next(x.dtype for x in inputs if is_rounded(x.dtype))
    out = operation.apply(
        *(lax.convert_element_type(x, jnp.float32) if is_rounded(x.dtype) else x for x in inputs), **attributes
    )
    return round_to(out, dtype) if out.dtype == jnp.float32 else out
