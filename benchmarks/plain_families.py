"""Models of `flax_layers.models` in plain jnp, of the same parameters: what the fused ones are compared with.

Compute is in one dtype; norms, rotary embedding, softmax and logits are float32. Attention is
`jax.nn.dot_product_attention`, cuDNN's on a GPU, but where scores have a soft cap, which that has not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from flax_layers import CohereConfig, GemmaConfig, LlamaConfig, Olmo2Config
from flax_layers.activation import activation_of
from flax_layers.rope_scaling import rotary_angles

Params = Mapping[str, Any]


def parameters(model: nnx.Module) -> Params:
    """A model's parameters as nested dictionaries, kernels and their biases by their names."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def loss(
    params: Params, config: LlamaConfig, tokens: jax.Array, labels: jax.Array, dtype: Any, *, remat: bool = False
) -> jax.Array:
    """Mean cross-entropy of labels (B, T) after tokens (B, T); with remat layers are computed again backward."""
    z = logits(params, config, tokens, dtype, remat=remat)
    picked = jnp.take_along_axis(z, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(z, axis=-1) - picked)


def logits(params: Params, config: LlamaConfig, tokens: jax.Array, dtype: Any, *, remat: bool = False) -> jax.Array:
    """Logits (B, T, V), float32, of tokens (B, T)."""
    layer = jax.checkpoint(block, static_argnums=(1, 2)) if remat else block
    table = params["embed"]["embedding"]
    x = table[tokens].astype(dtype) * jnp.asarray(config.embedding_factor, dtype)
    for i in range(config.num_hidden_layers):
        x = layer(params["layers"][i], config, i, x)
    head = table.T if config.tie_word_embeddings else params["head"]["kernel"]
    h = norm(x, params["norm"], config)
    z = jnp.matmul(h, head.astype(dtype), preferred_element_type=jnp.float32) * config.logits_factor
    return z if config.soft_cap is None else config.soft_cap * jnp.tanh(z / config.soft_cap)


def block(p: Params, config: LlamaConfig, layer: int, x: jax.Array) -> jax.Array:
    """The output of a layer for x (B, T, D)."""
    if isinstance(config, CohereConfig):
        h = norm(x, p["norm"], config)
        return x + attention(p["attention"], config, layer, h) + mlp(p["mlp"], config, h)
    if isinstance(config, Olmo2Config):
        x = x + norm(attention(p["attention"], config, layer, x), p["attention_norm"], config)
        return x + norm(mlp(p["mlp"], config, x), p["mlp_norm"], config)
    if isinstance(config, GemmaConfig) and config.sandwich_norms:
        y = attention(p["attention"], config, layer, norm(x, p["attention_norm"], config))
        x = x + norm(y, p["attention_out_norm"], config)
        y = mlp(p["mlp"], config, norm(x, p["mlp_norm"], config))
        return x + norm(y, p["mlp_out_norm"], config)
    factor = jnp.asarray(config.residual_multiplier, x.dtype)
    x = x + factor * attention(p["attention"], config, layer, norm(x, p["attention_norm"], config))
    return x + factor * mlp(p["mlp"], config, norm(x, p["mlp_norm"], config))


def norm(x: jax.Array, p: Params, config: LlamaConfig) -> jax.Array:
    """LayerNorm of a Cohere without a bias; else RMSNorm, with 1 + scale of a Gemma."""
    y, offset = x.astype(jnp.float32), 1.0 if isinstance(config, GemmaConfig) else 0.0
    if isinstance(config, CohereConfig):
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + config.rms_norm_eps)
    return (y * (offset + p["scale"].astype(jnp.float32))).astype(x.dtype)


def linear(x: jax.Array, p: Params) -> jax.Array:
    y = x @ p["kernel"].astype(x.dtype)
    return y + p["bias"].astype(x.dtype) if "bias" in p else y


def mlp(p: Params, config: LlamaConfig, x: jax.Array) -> jax.Array:
    gate, up = (x @ p["gate_up"][:, i].astype(x.dtype) for i in (0, 1))
    return linear(activation_of(config.hidden_act)(gate) * up, p["down"])


def attention(p: Params, config: LlamaConfig, layer: int, x: jax.Array) -> jax.Array:
    size, heads, kv_heads = config.resolved_head_dim, config.num_attention_heads, config.resolved_num_key_value_heads
    if "qkv" in p:
        ends = [heads * size, (heads + kv_heads) * size]
        columns = jnp.split(linear(x, p["qkv"]), ends, axis=-1)
    else:
        columns = [linear(x, p[name]) for name in ("query", "key", "value")]
    is_wide = isinstance(config, Olmo2Config)
    q, k, v = (y if is_wide else y.reshape(*y.shape[:-1], -1, size) for y in columns)
    if config.qk_norm:
        # A Cohere has none; the norms are RMSNorms.
        q, k = norm(q, p["q_norm"], config), norm(k, p["k_norm"], config)
    q, k, v = (y.reshape(*x.shape[:-1], -1, size) for y in (q, k, v))
    theta, scaling = config.layer_rotary(layer)
    if theta is not None:
        partial = config.partial_rotary_factor
        cos, sin = rotary_angles(jnp.arange(x.shape[1]), size, theta, scaling, partial_rotary_factor=partial)
        is_turned = jnp.arange(size // 2) < int(size * partial) // 2
        factors = jnp.where(is_turned, 1.0 if scaling is None else scaling.amplitude, 1.0)
        q, k = (rotated(y, cos * factors, sin * factors) for y in (q, k))
    y = attended(q, k, v, config, config.layer_window(layer))
    return linear(y.reshape(*x.shape[:-1], -1), p["out"])


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x (B, T, H, Dh), cos and sin (T, Dh / 2)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def attended(q: jax.Array, k: jax.Array, v: jax.Array, config: LlamaConfig, window: int | None) -> jax.Array:
    scale = q.shape[-1] ** -0.5 if config.score_scale is None else config.score_scale
    cap = getattr(config, "attn_logit_softcapping", None)
    if cap is None:
        seen = None if window is None else (window - 1, 0)
        by = "cudnn" if jax.default_backend() == "gpu" and q.dtype != jnp.float32 else "xla"
        options = {"is_causal": True, "local_window_size": seen, "implementation": by}
        return jax.nn.dot_product_attention(q, k, v, scale=scale, **options)
    k, v = (jnp.repeat(y, q.shape[2] // k.shape[2], axis=2) for y in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * scale
    age = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    is_seen = (age >= 0) if window is None else (age >= 0) & (age < window)
    weights = jax.nn.softmax(jnp.where(is_seen, cap * jnp.tanh(scores / cap), -1e30), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)


def with_layers(config: LlamaConfig, layers: int) -> LlamaConfig:
    """The same model with so many layers, the first."""
    return dataclasses.replace(config, num_hidden_layers=layers)
