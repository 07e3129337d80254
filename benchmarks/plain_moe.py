"""A Qwen3-MoE in plain jnp, with `jax.lax.ragged_dot`: what the fused one is timed against.

As `plain_llama` but for the experts: rows are sorted by expert, gathered, and come back by the inverse permutation.
Router, norms, rotary embedding and losses are float32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.plain_llama import Params, angles, attention, cross_entropy, rms_norm
from flax_layers import MoEConfig


def from_fused(fused: Mapping[str, Any], config: MoEConfig) -> Params:
    """The parameters (or their gradient) of a `flax_layers.Llama` with experts, as a pure dictionary, in plain form."""
    return {
        "embed": fused["embed"]["embedding"],
        "layers": [layer_from_fused(fused["layers"][i]) for i in range(config.num_hidden_layers)],
        "norm": fused["norm"]["scale"],
        "head": fused["head"]["kernel"],
    }


def layer_from_fused(layer: Mapping[str, Any]) -> Params:
    """One layer of the same."""
    of_attention, of_mlp = layer["attention"], layer["mlp"]
    return {
        "attention_norm": layer["attention_norm"]["scale"],
        "q_norm": of_attention["q_norm"]["scale"],
        "k_norm": of_attention["k_norm"]["scale"],
        "qkv": of_attention["qkv"]["kernel"],
        "out": of_attention["out"]["kernel"],
        "mlp_norm": layer["mlp_norm"]["scale"],
        "router": of_mlp["router"]["kernel"],
        "gate_up": of_mlp["experts"]["gate_up"],
        "down": of_mlp["experts"]["down"],
    }


class Load(NamedTuple):
    """The load that the auxiliary loss sums over all layers: tokens and probabilities of experts, (E,) float32 each."""

    counts: jax.Array
    probabilities: jax.Array


def experts(x: jax.Array, p: Params, config: MoEConfig) -> tuple[jax.Array, Load]:
    """The weighted sum of top_k experts of each token of x (T, D), and the load."""
    tokens, top_k, count = x.shape[0], config.num_experts_per_tok, config.num_experts
    logits = jnp.matmul(x.astype(jnp.float32), p["router"].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, ids = jax.lax.top_k(probabilities, top_k)
    if config.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    order = jnp.argsort(ids.reshape(-1))
    sizes = jnp.bincount(ids.reshape(-1), length=count).astype(jnp.int32)
    rows = x[order // top_k]
    gate_up = p["gate_up"].reshape(count, x.shape[1], -1).astype(x.dtype)
    gate, up = jnp.split(jax.lax.ragged_dot(rows, gate_up, sizes), 2, axis=1)
    y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, p["down"].astype(x.dtype), sizes)
    y = y * weights.reshape(-1)[order, None].astype(y.dtype)
    load = Load(sizes.astype(jnp.float32), jnp.sum(probabilities, axis=0))
    return jnp.sum(y[jnp.argsort(order)].reshape(tokens, top_k, -1), axis=1), load


def layer(x: jax.Array, p: Params, cos: jax.Array, sin: jax.Array, config: MoEConfig) -> tuple[jax.Array, Load]:
    x = attention(x, p, cos, sin, config)
    y, load = experts(rms_norm(x, p["mlp_norm"], config.rms_norm_eps).reshape(-1, x.shape[-1]), p, config)
    return x + y.reshape(x.shape), load


def loss(params: Params, tokens: jax.Array, labels: jax.Array, *, config: MoEConfig, dtype: Any, remat: bool) -> Any:
    """The mean cross-entropy of tokens and labels (B, T), and the auxiliary loss with its coefficient."""
    one = functools.partial(layer, config=config)
    if remat:
        one = jax.checkpoint(one)
    cos, sin = angles(jnp.arange(tokens.shape[1]), config)
    x, loads = params["embed"][tokens].astype(dtype), []
    for p in params["layers"]:
        x, load = one(x, p, cos, sin)
        loads.append(load)
    counts, probabilities = (sum(of) / (tokens.size * len(loads)) for of in zip(*loads, strict=True))
    auxiliary = config.num_experts * jnp.sum(counts * probabilities)
    logits = rms_norm(x, params["norm"], config.rms_norm_eps) @ params["head"].astype(dtype)
    return cross_entropy(logits, labels) + config.router_aux_loss_coef * auxiliary
