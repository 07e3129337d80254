"""Rotary position embedding of the heads of queries and keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.primitives.dtypes import check_floats


def rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x[i], x[i + Dh/2]) of every head: [a, b] -> [a cos - b sin, b cos + a sin].

    The convention of Hugging Face's Llama. Computed in float32, rounded once.

    Args:
      x: (..., T, H, Dh).
      cos, sin: (..., T, Dh / 2) float32.

    Raises:
      TypeError: an array that is not bfloat16, float16 or float32.
      ValueError: tables of another shape, as those that have each angle twice, or an odd Dh.
    """
    check_floats("rotary", x=x, cos=cos, sin=sin)
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ValueError(f"rotary: x has shape {x.shape}; it must be (..., T, H, Dh), whose Dh is even")
    check_tables("rotary", x.shape[:-2], x.shape[-1], cos, sin)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (jnp.expand_dims(y[..., None, :], range(x.ndim - y.ndim - 1)) for y in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def check_tables(operator: str, rows: tuple[Any, ...], head_dim: int, cos: jax.Array, sin: jax.Array) -> None:
    """Raises ValueError if tables do not have an angle for each pair of a head, or do not fit these rows (..., T)."""
    half = head_dim // 2
    for name, table in (("cos", cos), ("sin", sin)):
        try:
            lead = jnp.broadcast_shapes(rows, table.shape[:-1])
        except ValueError:
            lead = None
        if table.ndim == 0 or table.shape[-1] != half or lead is None:
            is_doubled = table.ndim > 0 and table.shape[-1] == head_dim
            raise ValueError(
                f"{operator}: {name} has shape {table.shape}; beside rows {rows} and heads of {head_dim} it must be "
                f"(T, {half}) or (..., T, {half}), an angle for each pair"
                + (f". A table of Hugging Face's has each twice: give {name}[..., :{half}]" if is_doubled else "")
            )
