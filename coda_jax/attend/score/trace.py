"""Traces a user's score function and its derivative, and takes apart the arrays that it reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.attend.score.before import Before, inlined, split
from coda_jax.attend.score.distances import by_distance
from coda_jax.attend.score.elements import ENTRIES, PAIR, Access, ScoreElements, Source
from coda_jax.attend.score.facts import decided, facts
from coda_jax.attend.score.linear import factors
from coda_jax.attend.score.program import Score, Table
from coda_jax.epilogue.dtypes import FLOATS, OPERANDS, listed
from coda_jax.epilogue.flatten import Constants, Flat, flatten, keep_used_constants, run
from coda_jax.epilogue.user_code import default_types, make_jaxpr
from coda_jax.epilogue.values import NotElementwise, NotTileLocalError, same_shape

_DTYPES = ("float64", *(name for name in OPERANDS if not name.startswith("float8")))  # float64 is XLA's alone


def trace(
    f: Callable[..., Any], operands: Sequence[Any], shape: tuple[Any, ...]
) -> tuple[Score, tuple[jax.Array, ...]]:
    """The score function f(s, *operands), checked, and the arrays that it reads.

    Args:
      f: a JAX function of arrays, local to a pair of a query and a key.
      operands: arrays; floating ones are float32 in f.
      shape: of s and of the result, (B, H, T, S).

    Returns:
      The function, and its arrays as the primitives take them: (1 or B, 1 or H, 1 or T, 1 or S), and tables
      (1 or B, 1 or H, 1, entries). One that f reads at two places, such as ids of queries and of keys, is there twice.

    Raises:
      NotTileLocalError: f is not local, or asks for the value of an array.
      ValueError: an operand that is no array of a known dtype, or a result of another shape or dtype.
    """
    named = f.func if isinstance(f, partial) else f
    name = getattr(named, "__name__", type(named).__name__).strip("<>")
    operands = [_checked(x, label) for x, label in zip(operands, _labels(f, len(operands)), strict=True)]
    seen = [_as_seen(x) for x in operands]

    def called(*arguments: Any) -> Any:
        return f(*arguments)

    called.__name__, called.__wrapped__ = name, f  # type: ignore[attr-defined]  # whose line JAX's messages then give
    s = jax.ShapeDtypeStruct(shape, jnp.float32)
    jaxpr = make_jaxpr(called, [s, *seen], name, "score")
    _check_result(jaxpr, name, shape)
    with default_types():
        constants = Constants()
        flat = flatten(jaxpr, constants, inline_custom_derivatives=False)
        captured = keep_used_constants((flat,), constants)
        _check_captured(captured, name)
        before, rest = split(flat)
        explicit = range(1, 1 + len(operands))
        variables = [*explicit, *(flat.constants[i] for i in range(len(captured)))]
        computed = _computed(before, dict(zip(variables, [*operands, *captured], strict=True)), flat)
        arrays = [*operands, *captured, *computed]
        kinds = ["operand"] * len(variables) + ["computed"] * len(computed)
        variables += before.results
        sources = {x: Source(kind, i) for i, (x, kind) in enumerate(zip(variables, kinds, strict=True))}
        elements = ScoreElements(inlined(rest), {0: Source("scores"), **sources}, name)
        value = elements.convert(elements.element(elements.flat.outputs[0]), "float32")
        types = [s, *seen, *map(_type_of, arrays[len(operands) :])]
        score = _with_slopes(elements, value, rest, variables, types)
        read = [_as_read(arrays, access, shape) for access in elements.accesses]
    return by_distance(score, read, shape)


def _labels(f: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(f).parameters.values())[1:]
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [f"operand '{positional[i] if i < len(positional) else i}'" for i in range(count)]


def _checked(x: Any, label: str) -> jax.Array:
    """An operand as an array of a dtype that kernels know, or float64."""
    x = jnp.asarray(x)
    if not isinstance(x.dtype, np.dtype):
        raise ValueError(f"attention: the score's {label} has dtype {x.dtype}; pass random numbers, not keys")
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32)
    if x.dtype.name not in _DTYPES:
        raise ValueError(f"attention: the score's {label} has dtype {x.dtype}; it must be {listed(_DTYPES)}")
    return x


def _check_captured(captured: Sequence[Any], name: str) -> None:
    for x in captured:
        if np.dtype(x.dtype).name not in _DTYPES[1:]:
            raise NotTileLocalError(
                f"score '{name}': it closes over an array {tuple(x.shape)} of dtype {x.dtype}; these are "
                f"{listed(_DTYPES[1:])}. Convert it with astype, or pass it as an operand."
            )


def _as_seen(x: jax.Array) -> jax.ShapeDtypeStruct:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(x.shape, jnp.float32 if is_float else x.dtype)


def _type_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _check_result(jaxpr: Any, name: str, shape: tuple[Any, ...]) -> None:
    outputs = jaxpr.out_avals
    if len(outputs) != 1 or not same_shape(outputs[0].shape, shape) or outputs[0].dtype.name not in FLOATS:
        found = ", ".join(x.str_short() for x in outputs)
        raise ValueError(
            f"attention: the score '{name}' returns {found}; it must be one floating array {shape}, as s is"
        )


def _computed(before: Before, values: dict[int, Any], flat: Flat) -> list[jax.Array]:
    """The arrays that are computed before the call, from those that the function gets."""
    as_seen = {x: lax.convert_element_type(jnp.asarray(array), flat.avals[x].dtype) for x, array in values.items()}
    return list(map(jnp.asarray, run(before.equations, as_seen, before.results)))


def _with_slopes(
    elements: ScoreElements, value: int, rest: Flat, variables: Sequence[int], types: Sequence[Any]
) -> Score:
    """The score, with its derivatives by s and by the arrays that it reads.

    Args:
      elements: those of the value.
      rest: the function's equations, with calls of functions that have derivatives of their own.
      variables: those of its arrays.
      types: of s and of the arrays.
    """
    slopes, why_not = {-1: elements.literal(0, "float32")}, None
    known = facts(elements.nodes, value)
    try:
        found = _tangent(elements, rest, variables, types)
        # The derivative may be any number where a key is hidden: its probability is 0.
        slopes |= {index: decided(elements, node, known) for index, node in found.items()}
    except (NotElementwise, NotTileLocalError, TypeError) as error:
        why_not = str(error)
    shown = decided(elements, value, known)
    # The derivative may read an array at places at which the value does not.
    read = [np.int32 if x.source.kind == "position" else types[1 + x.source.number].dtype for x in elements.accesses]
    score = Score(
        elements.name,
        tuple(np.dtype(dtype).name for dtype in read),
        tuple(elements.nodes),
        value,
        shown,
        slopes[-1],
        tuple(sorted((index, node) for index, node in slopes.items() if index >= 0)),
        why_not,
        tuple(Table(i, x.entry, x.fills) for i, x in enumerate(elements.accesses) if x.entry is not None),
    )
    return score.simplified()


def _tangent(elements: ScoreElements, rest: Flat, variables: Sequence[int], types: Sequence[Any]) -> dict[int, int]:
    """For -1, the scores, and the number of each access the node of the derivative by it."""
    places = [i for i, x in enumerate(types) if jnp.issubdtype(x.dtype, jnp.floating)]

    def tangent(*given: Any) -> Any:
        primals, tangents = list(given[: len(types)]), given[len(types) :]

        def function(*differentiated: Any) -> Any:
            values = dict(zip((0, *variables), primals, strict=True))
            values |= {(0, *variables)[i]: x for i, x in zip(places, differentiated, strict=True)}
            return run(rest.equations, values, rest.outputs)[0]

        return jax.jvp(function, [primals[i] for i in places], list(tangents))[1]

    jaxpr = jax.make_jaxpr(tangent)(*types, *(types[i] for i in places))
    constants = Constants()
    of_tangent = flatten(jaxpr, constants, inline_custom_derivatives=True)
    if constants.arrays:
        raise NotElementwise("its derivative reads further arrays")
    sources = dict(enumerate(elements.sources[x] for x in (0, *variables)))
    sources |= {len(types) + i: sources[at]._replace(is_tangent=True) for i, at in enumerate(places)}
    elements.flat, elements.sources = of_tangent, sources
    return factors(elements, elements.element(of_tangent.outputs[0]))


def _as_read(arrays: Sequence[jax.Array], access: Access, shape: tuple[Any, ...]) -> jax.Array:
    """The array of an access, (1 or B, 1 or H, 1 or T, 1 or S) or (1 or B, 1 or H, 1, entries)."""
    source, places = access.source, [3 if place == ENTRIES else place for place in access.places]
    if source.kind == "position":
        x = jnp.arange(shape[source.number], dtype=jnp.int32)
    else:
        x = jnp.asarray(arrays[source.number])
    x = lax.squeeze(x, [axis for axis, place in enumerate(places) if place is None])
    axes = [place for place in places if place is not None]
    x = lax.transpose(x, sorted(range(len(axes)), key=lambda i: axes[i]))
    return lax.expand_dims(x, [axis for axis in range(len(PAIR)) if axis not in axes])
