"""A Llama and its parts in plain jnp: what the layers are judged against, in float64 and in the working dtype.

Parameters are the pure dictionaries of the modules' states. Products have inputs and outputs of the working dtype;
norm, rotary embedding and softmax are computed in float32, or float64 where that is the working dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


def wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def rms_norm(p: Params, x: jax.Array, eps: float) -> jax.Array:
    y = x.astype(wide(x.dtype))
    y = y / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps) * p["scale"].astype(y.dtype)
    return y.astype(x.dtype)


def linear(p: Params, x: jax.Array) -> jax.Array:
    return x @ p["kernel"].astype(x.dtype)


def gated_mlp(p: Params, x: jax.Array) -> jax.Array:
    gate, up = (x @ p["gate_up"][:, i].astype(x.dtype) for i in range(2))
    return linear(p["down"], gate / (1 + jnp.exp(-gate)) * up)


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """x (B, T, H, Dh): the points (x[i], x[i + Dh/2]) turned by the angles positions * theta ** (-2 i / Dh)."""
    half = x.shape[-1] // 2
    y = x.astype(wide(x.dtype))
    angle = positions[..., None, None] * theta ** (-jnp.arange(half, dtype=y.dtype) / half)
    turned_by_90 = jnp.concatenate([-y[..., half:], y[..., :half]], axis=-1)
    angles = jnp.concatenate([angle, angle], axis=-1)
    return (y * jnp.cos(angles) + turned_by_90 * jnp.sin(angles)).astype(x.dtype)


def attention(
    p: Params, x: jax.Array, heads: int, kv_heads: int, theta: float, positions: Any = None, seen: Any = None
) -> jax.Array:
    """seen (T, T) or (B, T, T): which keys a query sees; default itself and those before."""
    batch, length, _ = x.shape
    if "qkv" in p:
        qkv = linear(p["qkv"], x).reshape(batch, length, heads + 2 * kv_heads, -1)
        q, k, v = qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads], qkv[:, :, heads + kv_heads :]
    else:
        separate = (("query", heads), ("key", kv_heads), ("value", kv_heads))
        q, k, v = (linear(p[name], x).reshape(batch, length, count, -1) for name, count in separate)
    positions = jnp.arange(length) if positions is None else positions
    q, k = rotary(q, positions, theta), rotary(k, positions, theta)
    k, v = (jnp.repeat(y, heads // kv_heads, axis=2) for y in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(wide(x.dtype)) / q.shape[-1] ** 0.5
    seen = jnp.tril(jnp.ones((length, length), bool)) if seen is None else seen
    scores = jnp.where(seen if seen.ndim == 2 else seen[:, None], scores, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(x.dtype)
    return linear(p["out"], jnp.einsum("bhts,bshd->bthd", weights, v).reshape(batch, length, -1))


def block(p: Params, x: jax.Array, heads: int, kv_heads: int, theta: float, eps: float) -> jax.Array:
    x = x + attention(p["attention"], rms_norm(p["attention_norm"], x, eps), heads, kv_heads, theta)
    return x + gated_mlp(p["mlp"], rms_norm(p["mlp_norm"], x, eps))


def llama(p: Params, tokens: jax.Array, config: Any, dtype: Any) -> jax.Array:
    heads = config.num_attention_heads
    x = p["embed"]["embedding"].astype(dtype)[tokens]
    for i in range(config.num_hidden_layers):
        kv_heads = config.num_key_value_heads or heads
        x = block(p["layers"][i], x, heads, kv_heads, config.rope_theta, config.rms_norm_eps)
    x = rms_norm(p["norm"], x, config.rms_norm_eps)
    if config.tie_word_embeddings:
        return x @ p["embed"]["embedding"].astype(dtype).T
    return linear(p["head"], x)
