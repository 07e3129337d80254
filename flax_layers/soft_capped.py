"""Attention whose scores are capped by a tanh, by XLA, a block of queries at a time."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_MOST_BYTES = 256 << 20  # of a block's scores, float32


def soft_capped_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    soft_cap: float,
    scale: float,
    is_causal: bool,
    mask: jax.Array | None = None,
    bias: jax.Array | None = None,
    local_window_size: tuple[int, int] | None = None,
) -> jax.Array:
    """softmax(soft_cap tanh(scale q k^T / soft_cap) + bias) v over the keys that every query may see.

    From Gemma 2 (arXiv 2408.00118). No array of all scores exists: those of a block of queries take 256 MiB at most,
    and the backward pass recomputes them. A window's queries read the keys of their window alone.

    Args:
      q: (B, T, H, Dh).
      k, v: (B, S, Hkv, Dh).
      soft_cap, scale: numbers.
      is_causal: whether query i sees keys up to i; then S is T.
      mask: bool, broadcastable to (B, H, T, S), or None.
      bias: float, broadcastable to (B, H, T, S), or None.
      local_window_size: (w, 0): query i sees keys from i - w on; with is_causal.

    Returns:
      (B, T, H, Dh) of q's dtype. Scores and softmax are float32.
    """
    batch, length, heads, _ = q.shape
    count, row_bytes = k.shape[1], 4 * heads * k.shape[1]
    attend = functools.partial(
        _block, soft_cap=soft_cap, scale=scale, is_causal=is_causal, window=local_window_size and local_window_size[0]
    )
    if not all(isinstance(x, int) for x in (batch, length, count)):  # symbolic, in an export
        return attend(jnp.int32(0), q, k, v, mask, bias)
    size = max(min(_MOST_BYTES // max(batch * row_bytes, 1), length), 1)
    if size == length:
        return attend(jnp.int32(0), q, k, v, mask, bias)
    blocks = -(-length // size)
    size = -(-length // blocks)
    padded = jnp.pad(q, ((0, 0), (0, blocks * size - length), (0, 0), (0, 0)))
    query_blocks = jnp.moveaxis(padded.reshape(batch, blocks, size, *q.shape[2:]), 1, 0)

    def rows_of(x: jax.Array | None, start: jax.Array) -> jax.Array | None:
        """The block's rows of a mask or bias; after the last query the last row again, whose results are dropped."""
        if x is None or x.ndim < 2 or x.shape[-2] == 1:
            return x
        return jnp.take(x, start + jnp.arange(size), axis=-2, mode="clip")

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        start, rows = block
        return attend(start, rows, k, v, rows_of(mask, start), rows_of(bias, start))

    results = lax.map(one, (jnp.arange(blocks, dtype=jnp.int32) * size, query_blocks))
    return jnp.moveaxis(results, 0, 1).reshape(batch, blocks * size, *q.shape[2:])[:, :length]


def _block(
    start: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Any,
    bias: Any,
    *,
    soft_cap: float,
    scale: float,
    is_causal: bool,
    window: int | None,
) -> jax.Array:
    """Attention of the queries from `start` on."""
    batch, length, heads, dim = q.shape
    first: Any = 0
    size: Any = k.shape[1]
    if window is not None and isinstance(size, int) and length + window < size:
        size = length + window
        first = jnp.clip(start - window, 0, k.shape[1] - size)
        k, v = (lax.dynamic_slice_in_dim(x, first, size, axis=1) for x in (k, v))
        mask, bias = (_columns(x, first, size) for x in (mask, bias))
    groups = k.shape[2]
    grouped = q.reshape(batch, length, groups, heads // groups, dim)
    # coda_jax's tools recognise products of attention by the names of these einsums.
    scores = jnp.einsum("btngh,bsnh->bngts", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, length, size)
    scores = soft_cap * jnp.tanh(scores * (scale / soft_cap))
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if is_causal:
        ages = (start + jnp.arange(length))[:, None] - (first + jnp.arange(size))
        seen = ages >= 0 if window is None else (ages >= 0) & (ages <= window)
        mask = seen if mask is None else mask & seen
    if mask is not None:
        scores = jnp.where(mask, scores, -0.7 * jnp.finfo(jnp.float32).max)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(batch, groups, heads // groups, length, size)
    return jnp.einsum("bngts,bsnh->btngh", weights, v).reshape(q.shape).astype(q.dtype)


def _columns(x: jax.Array | None, first: Any, size: int) -> jax.Array | None:
    if x is None or x.shape[-1] == 1:
        return x
    return lax.dynamic_slice_in_dim(x, first, size, axis=-1)
