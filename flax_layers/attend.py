"""Softmax attention with its masks: causal, sliding window, segments, and the slots of a cache."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from flax_layers.decoding.kv_cache import KVCache
from flax_layers.remat import CONTEXT, named

Implementation = Literal["xla", "cudnn"]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    is_causal: bool = True,
    sliding_window: int | None = None,
    segment_ids: jax.Array | None = None,
    mask: jax.Array | None = None,
    cache: KVCache | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, KVCache | None]:
    """softmax(q k^T / sqrt(Dh)) v over the keys that every query may see; by `jax.nn.dot_product_attention`.

    Query i sees key j where all of these hold: j <= i (is_causal); i - sliding_window < j; equal segment_ids; mask.

    A window is an argument of cuDNN's kernel. Segments are a dense mask, (B, 1, T, T), for they are nothing else in
    JAX's interface to it; a window beside a dense mask goes into that mask, since cuDNN before 9.10.2 takes no both.

    Args:
      q: (B, T, H, Dh) or (T, H, Dh).
      k, v: (B, T, Hkv, Dh) or (T, Hkv, Dh).
      is_causal, sliding_window, segment_ids, mask: as in Attention.
      cache: earlier keys and values, to which k and v are appended. Over a cache that is not empty, attention is XLA's
        with a mask: its queries are few and it is bound by reading the cache.
      implementation: as in Attention.

    Returns:
      (B, T, H, Dh) or (T, H, Dh), and the longer cache.

    Raises:
      ValueError: segment_ids or mask of another shape, a window without is_causal, or a cache beside a mask, segments
        or attention that is not causal.
    """
    if sliding_window is not None and not is_causal:
        raise ValueError(f"{sliding_window=} reaches back from a causal query: is_causal must be True")
    if segment_ids is not None and segment_ids.shape != q.shape[:-2]:
        raise ValueError(f"segment_ids has shape {segment_ids.shape}; for queries {q.shape} it must be {q.shape[:-2]}")
    if mask is not None:
        seen_by = (*q.shape[:-3], q.shape[-2], q.shape[-3], q.shape[-3])
        if mask.ndim > len(seen_by) or any(
            a not in (1, b) for a, b in zip(mask.shape[::-1], seen_by[::-1], strict=False)
        ):
            raise ValueError(f"mask has shape {mask.shape}; for queries {q.shape} it must broadcast to {seen_by}")
    if cache is not None:
        if not is_causal or mask is not None or segment_ids is not None:
            raise ValueError("a cache is for causal attention, without mask and segment_ids")
        empty, cache = cache.length is None, cache.append(k, v)
        if not empty:
            assert cache.length is not None
            slots = jnp.arange(cache.capacity)
            queries = (cache.length[:, None] - q.shape[1] + jnp.arange(q.shape[1]))[:, :, None]
            seen = slots <= queries
            if sliding_window is not None:
                seen &= slots > queries - sliding_window
            y = _dot_product_attention(q, cache.k, cache.v, mask=seen[:, None], implementation="xla")
            return y, cache
    if segment_ids is not None:
        same = (segment_ids[..., :, None] == segment_ids[..., None, :])[..., None, :, :]
        mask = same if mask is None else mask & same
    window = None if sliding_window is None else (sliding_window - 1, 0)
    if mask is not None:
        length = q.shape[-3]
        if sliding_window is not None:
            window, index = None, jnp.arange(length)
            mask = mask & (index > index[:, None] - sliding_window)
        mask = jnp.broadcast_to(mask, (*mask.shape[:-2], length, length))  # cuDNN broadcasts only the other axes
    implementation = implementation or _implementation(q, masked=mask is not None)
    y = _dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=is_causal,
        local_window_size=window,
        implementation=implementation,
    )
    if implementation == "xla":  # a policy finds cuDNN's results by its primitive
        y = named(y, CONTEXT)
    return y, cache


def _dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    # JAX asks for a float16 product summed in float32, which XLA refuses to compile for anything but GPUs.
    if q.dtype == jnp.float16 and jax.default_backend() != "gpu":
        widened = (x.astype(jnp.float32) for x in (q, k, v))
        return jax.nn.dot_product_attention(*widened, **options).astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, **options)


def _implementation(q: jax.Array, masked: bool) -> Implementation:
    # Not lax.platform_dependent: tracing the cuDNN branch needs cuDNN, and the residuals of both branches would be
    # allocated.
    length: Any = q.shape[-3]
    head_dim = q.shape[-1]
    if jax.default_backend() != "gpu" or q.dtype not in (jnp.bfloat16, jnp.float16) or head_dim % 8 or head_dim > 128:
        return "xla"
    if not isinstance(length, int):  # of an export; of what follows nothing is known
        return "xla"
    # cuDNN before 9.10 takes no single causal query; the backward pass of a masked one takes even lengths only.
    return "xla" if length == 1 or (masked and length % 2) else "cudnn"
