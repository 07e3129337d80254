"""Checks of the arguments of `generate` and of its results."""

from __future__ import annotations

import contextlib
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coda_jax.extend import explicit_sharding

NO_TOKEN = -1  # of a row whose logits give no token


def static_arguments(
    max_new_tokens: Any, top_k: Any, eos_token: int | Sequence[int] | None
) -> tuple[int, int | None, tuple[int, ...]]:
    """max_new_tokens, top_k and the end tokens, which a program is compiled for.

    Raises:
      ValueError: one that is no integer, is traced, or is out of its range.
    """
    count = _static_integer("max_new_tokens", max_new_tokens)
    if count < 1:
        raise ValueError(f"{max_new_tokens=} must be an integer, at least 1")
    most = None if top_k is None else _static_integer("top_k", top_k)
    if most is not None and most < 1:
        raise ValueError(f"{top_k=} must be at least 1")
    _check_known("eos_token", eos_token)
    ends = np.asarray(() if eos_token is None else eos_token)
    if ends.ndim > 1 or (ends.size and not np.issubdtype(ends.dtype, np.integer)):
        raise ValueError(f"{eos_token=} must be an integer or a sequence of integers")
    end_tokens = tuple(map(int, ends.ravel()))
    limits = np.iinfo(np.int32)
    if not all(limits.min <= token <= limits.max for token in end_tokens):
        raise ValueError(f"{eos_token=} must fit int32, as the tokens do")
    return count, most, end_tokens


def _check_known(name: str, value: Any) -> None:
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
        raise ValueError(
            f"{name} is traced: the program is compiled for its value. Give a Python integer; inside jit name the "
            "argument that it comes from in static_argnames"
        )


def _static_integer(name: str, value: Any) -> int:
    _check_known(name, value)
    if not isinstance(value, bool | np.bool_):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    is_whole = isinstance(value, float | np.floating) and value == np.floor(value)
    remedy = f": give {int(value)}" if is_whole and np.isfinite(value) else ""
    raise ValueError(f"{name}={value!r} must be an integer, at least 1{remedy}")


def check_arguments(tokens: jax.Array, lengths: Any, temperature: Any, top_p: Any, key: Any) -> None:
    """Raises ValueError for arrays of other types or shapes, and for values that are known and out of their range."""
    if tokens.ndim != 2 or tokens.size == 0 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"prompts are integers (B, T), at least one of each; got {tokens.dtype}{tokens.shape}")
    sharding = explicit_sharding(tokens) if isinstance(tokens, jax.core.Tracer) else None
    if sharding is not None and any(axis is not None for axis in sharding.spec):
        raise ValueError(f"prompts are sharded, {sharding.spec}, over explicit mesh axes: call it inside nnx.shard_map")
    if lengths is not None:
        if lengths.shape != tokens.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ValueError(f"lengths are integers ({tokens.shape[0]},) here, got {lengths.dtype}{lengths.shape}")
        if not isinstance(lengths, jax.core.Tracer):  # the values of traced ones are not known
            values = np.asarray(lengths)
            if values.min() < 1 or values.max() > tokens.shape[1]:
                raise ValueError(f"lengths must be 1 to {tokens.shape[1]}, got {values.tolist()}")
    _check_number("temperature", temperature)
    is_known = not isinstance(temperature, jax.core.Tracer)
    if is_known and not 0 <= temperature < float("inf"):
        raise ValueError(f"{temperature=} must be 0 or a positive number")
    if not is_known or temperature > 0:
        _check_key(key, f"{temperature=}" if is_known else "a traced temperature, which may be above 0,")
    if top_p is not None:
        _check_number("top_p", top_p)
        if not isinstance(top_p, jax.core.Tracer) and not 0 < top_p <= 1:
            raise ValueError(f"{top_p=} must be above 0 and at most 1")


def _check_number(name: str, value: Any) -> None:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
        fits, described = is_real and value.shape == (), f"{value.dtype}{value.shape}"
    else:
        fits, described = isinstance(value, numbers.Real), repr(value)
    if not fits:
        raise ValueError(f"{name} is {described}; it must be one number, or an array () of one")


def _check_key(key: Any, sampling: str) -> None:
    if key is None:
        raise ValueError(f"sampling at {sampling} needs a key: give key=jax.random.key(0), of a seed of your own")
    dtype = key.dtype if isinstance(key, jax.Array | np.ndarray | np.generic | nnx.Variable) else None
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    is_raw = dtype == np.uint32 and key.ndim == 1  # of jax.random.PRNGKey
    if is_raw or (is_typed and key.shape == ()):
        return
    if isinstance(key, int | np.integer):
        raise ValueError(f"key={key!r} is a seed: give key=jax.random.key({key})")
    described = type(key).__name__ if dtype is None else f"{dtype}{key.shape}"
    raise ValueError(
        f"key is {described}; it must be one key of jax.random, as jax.random.key(0) or one of jax.random.split"
    )


def check_tokens(tokens: jax.Array) -> None:
    """Raises ValueError where a row has no next token, if it is known: outside of jit, on devices of this process."""
    if isinstance(tokens, jax.core.Tracer) or not tokens.is_fully_addressable:
        return
    rows = np.flatnonzero((np.asarray(tokens) == NO_TOKEN).any(axis=1))
    if rows.size:
        listed = ", ".join(map(str, rows[:8])) + (", ..." if rows.size > 8 else "")
        raise ValueError(
            f"the logits of row {listed} are NaN, or none is above -inf: there is no next token. Look for NaN and inf "
            "among the parameters, jax.tree.map(lambda x: jnp.isfinite(x).all(), nnx.state(model)); in float16 "
            "activations overflow beyond 65504: compute in bfloat16"
        )
