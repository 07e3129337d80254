"""A Llama in plain jnp, as fast as XLA makes it: what the fused one is timed against.

Compute is in one 16-bit dtype, the gate's too; norms, rotary embedding and the loss are float32; attention is cuDNN's
on a GPU. Products have one kernel each, as the checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from flax_layers import LlamaConfig, segment_positions
from flax_layers.axis_names import PARAMETERS
from flax_layers.sharding import STREAM, constrain

Params = dict[str, Any]
Multiply = Callable[[jax.Array, Params, str], jax.Array]

# What the parameters are called in a fused Llama, and so the names of their axes, for `flax_layers.sharding`. Arrays
# are constrained only where its rules are in force.
_NAMES = {
    "embed": "embedding",
    "head": "head.kernel",
    "q": "query.kernel",
    "k": "key.kernel",
    "v": "value.kernel",
    "out": "out.kernel",
    "gate": "gate.kernel",
    "up": "up.kernel",
    "down": "down.kernel",
    "attention_norm": "scale",
    "mlp_norm": "scale",
    "norm": "scale",
}
AXES = {name: PARAMETERS[ours] for name, ours in _NAMES.items()}


def from_fused(fused: Mapping[str, Any], config: LlamaConfig) -> Params:
    """The parameters (or their gradient) of a `flax_layers.Llama`, as a pure dictionary, under this model's names."""
    return {
        "embed": fused["embed"]["embedding"],
        "layers": [layer_from_fused(fused["layers"][i], config) for i in range(config.num_hidden_layers)],
        "norm": fused["norm"]["scale"],
        "head": fused["head"]["kernel"],
    }


def layer_from_fused(layer: Mapping[str, Any], config: LlamaConfig) -> Params:
    """One layer of the same."""
    attention, gate_up = layer["attention"], layer["mlp"]["gate_up"]
    if "qkv" in attention:
        head_dim = config.resolved_head_dim
        queries, keys = config.num_attention_heads * head_dim, config.resolved_num_key_value_heads * head_dim
        q, k, v = jnp.split(attention["qkv"]["kernel"], [queries, queries + keys], axis=1)
    else:
        q, k, v = (attention[name]["kernel"] for name in ("query", "key", "value"))
    return {
        "attention_norm": layer["attention_norm"]["scale"],
        "q": q,
        "k": k,
        "v": v,
        "out": layer["attention"]["out"]["kernel"],
        "mlp_norm": layer["mlp_norm"]["scale"],
        "gate": gate_up[:, 0],
        "up": gate_up[:, 1],
        "down": layer["mlp"]["down"]["kernel"],
    }


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + epsilon)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x (..., T, H, Dh), cos and sin (..., T, Dh / 2) float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def angles(positions: jax.Array, config: LlamaConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin of positions (..., T), (..., T, Dh / 2) float32."""
    half = config.resolved_head_dim // 2
    angle = positions[..., None].astype(jnp.float32) / config.rope_theta ** (jnp.arange(half) / half)
    return jnp.cos(angle), jnp.sin(angle)


def multiplied(x: jax.Array, p: Params, name: str) -> jax.Array:
    """x (..., K) @ p[name] (K, N), in the dtype of x."""
    return x @ p[name].astype(x.dtype)


def mlp(x: jax.Array, p: Params, epsilon: float, multiply: Multiply = multiplied) -> jax.Array:
    """x + MLP(norm(x)), from kernels "gate" and "up", or one "gate_up"."""
    y = rms_norm(x, p["mlp_norm"], epsilon)
    if "gate_up" in p:
        gate, up = jnp.split(multiply(y, p, "gate_up"), 2, axis=-1)
    else:
        gate, up = multiply(y, p, "gate"), multiply(y, p, "up")
    hidden = constrain(jax.nn.silu(gate) * up, "batch", None, "mlp")
    return constrain(x + multiply(hidden, p, "down"), *STREAM)


def qkv(
    x: jax.Array,
    p: Params,
    cos: jax.Array,
    sin: jax.Array,
    config: LlamaConfig,
    multiply: Multiply = multiplied,
) -> list[jax.Array]:
    """The rotated queries and keys, and the values, of norm(x); from kernels "q", "k", "v", or one "qkv".

    Queries and keys are normalised before, where there are scales "q_norm" and "k_norm".
    """
    y = rms_norm(x, p["attention_norm"], config.rms_norm_eps)
    head_dim, kv_heads = config.resolved_head_dim, config.resolved_num_key_value_heads
    if "qkv" in p:
        z = multiply(y, p, "qkv").reshape(*y.shape[:-1], -1, head_dim)
        q, k, v = jnp.split(z, [config.num_attention_heads, config.num_attention_heads + kv_heads], axis=-2)
    else:
        heads = (multiply(y, p, name) for name in "qkv")
        q, k, v = (z.reshape(*z.shape[:-1], -1, head_dim) for z in heads)
    if "q_norm" in p:
        q, k = (rms_norm(y, p[name], config.rms_norm_eps) for y, name in ((q, "q_norm"), (k, "k_norm")))
    return [rotate(q, cos, sin), rotate(k, cos, sin), v]


def attention(
    x: jax.Array,
    p: Params,
    cos: jax.Array,
    sin: jax.Array,
    config: LlamaConfig,
    mask: jax.Array | None = None,
    multiply: Multiply = multiplied,
) -> jax.Array:
    """x + attention(norm(x))."""
    names = ("heads", "kv_heads", "kv_heads")
    heads = zip(qkv(x, p, cos, sin, config, multiply), names, strict=True)
    q, k, v = (constrain(y, "batch", None, name, None) for y, name in heads)
    implementation = "cudnn" if jax.default_backend() == "gpu" and x.dtype != jnp.float32 else "xla"
    y = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)
    return constrain(x + multiply(y.reshape(*y.shape[:-2], -1), p, "out"), *STREAM)


def cross_entropy(logits: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Mean of logsumexp(logits) - logits[label], in float32."""
    logits = logits.astype(jnp.float32)
    target = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target, where=where)


def loss(
    params: Params,
    tokens: jax.Array,
    labels: jax.Array,
    *,
    config: LlamaConfig,
    dtype: Any,
    remat: bool = False,
    segment_ids: jax.Array | None = None,
    multiply: Multiply = multiplied,
) -> jax.Array:
    """The mean cross-entropy of tokens and labels (B, T).

    Args:
      params: as `from_fused` gives them; "layers" may be one layer of stacked arrays, which is scanned.
      dtype: of the computation.
      remat: whether the backward pass computes every layer again.
      segment_ids: (B, T), of packed rows. A segment attends to itself alone, and its last token has no label.
      multiply: the layers' products, of what is multiplied, a layer's parameters and the name of one.
    """
    mask = counts = None
    positions = jnp.arange(tokens.shape[1])
    if segment_ids is not None:
        positions = segment_positions(segment_ids)
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        counts = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    cos, sin = angles(positions, config)

    def one(x: jax.Array, p: Params) -> jax.Array:
        return mlp(attention(x, p, cos, sin, config, mask, multiply), p, config.rms_norm_eps, multiply)

    if remat:
        one = jax.checkpoint(one)
    x = constrain(params["embed"][tokens].astype(dtype), *STREAM)
    if isinstance(params["layers"], list):
        for p in params["layers"]:
            x = one(x, p)
    else:
        x, _ = jax.lax.scan(lambda x, p: (one(x, p), None), x, params["layers"])
    logits = rms_norm(x, params["norm"], config.rms_norm_eps) @ params["head"].astype(dtype)
    return cross_entropy(logits, labels, counts)
