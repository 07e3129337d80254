"""The table of model families: what `coda.explain` says of one layer of each, beside plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import coda_jax as coda
from benchmarks import plain_families
from benchmarks.markdown import table
from flax_layers import CohereConfig, GemmaConfig, LlamaConfig, Olmo2Config
from flax_layers.models import model_class

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
TOKENS = (2, 4096)
GEMMA = {"layer_types": ["sliding_attention"], "sliding_window": 1024, "query_pre_attn_scalar": 128}
# What a row is called -> configuration. Granite's multipliers are those of its 2B.
FAMILIES: dict[str, LlamaConfig] = {
    "Llama, Mistral, Phi-3, SmolLM3": LlamaConfig(**SIZES),
    "Qwen2": LlamaConfig(**SIZES, attention_bias=True, attention_out_bias=False),
    "Qwen3": LlamaConfig(**SIZES, qk_norm=True),
    "Granite": LlamaConfig(**SIZES, attention_multiplier=0.015625, residual_multiplier=0.22),
    "Gemma": GemmaConfig(**SIZES, sandwich_norms=False),
    "Gemma 2": GemmaConfig(**SIZES, **GEMMA, attn_logit_softcapping=50.0),
    "Gemma 3": GemmaConfig(**SIZES, **GEMMA, qk_norm=True, rope_local_base_freq=10000.0),
    "OLMo 2": Olmo2Config(**SIZES),
    "Command R": CohereConfig(**SIZES),
}


def layers() -> str:
    """A row for each family: products, passes over activations between them, their bytes."""
    lines = [row(name, config) for name, config in FAMILIES.items()]
    head = (
        *("layer of", "products", "of them fused"),
        *("passes forward", "backward", "MB", "plain JAX: forward", "backward", "plain: MB"),
    )
    return table(head, lines)


def row(name: str, config: LlamaConfig) -> list[str]:
    model = nnx.eval_shape(lambda: model_class(config)(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model.layers[0])
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), state)
    x = jax.ShapeDtypeStruct((*TOKENS, config.hidden_size), jnp.bfloat16)

    def fused(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, state)(x)

    def plain(state: Any, x: jax.Array) -> jax.Array:
        return plain_families.block(nnx.to_pure_dict(state), config, 0, x)

    ours, theirs = (explained(f, types, x) for f in (fused, plain))
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    products = sum(ours.products.values())
    kernels = sum(count for one, count in ours.products.items() if not one.reason)
    return [name, str(products), str(kernels), *passes(ours), *passes(theirs, without_scores=capped)]


def explained(f: Callable[..., Any], state: Any, x: Any) -> coda.Explanation:
    def step(state: Any, x: jax.Array, dy: jax.Array) -> Any:
        y, pullback = jax.vjp(f, state, x)
        return y, pullback(dy)

    return coda.explain(step, state, x, x, platform="cuda", device="H100")


def passes(found: coda.Explanation, *, without_scores: bool = False) -> list[str]:
    """How many forward and backward read and write as much as x or more, and the megabytes of all.

    Args:
      without_scores: leaves out those over scores, which are XLA's where it computes attention.
    """
    own = {one: count for one, count in found.passes.items() if not (without_scores and _is_of_scores(one.array))}
    least = 2 * TOKENS[0] * TOKENS[1] * SIZES["hidden_size"]
    large = {one: count for one, count in own.items() if one.bytes >= least}
    counts = [sum(count for one, count in large.items() if one.is_backward == is_backward) for is_backward in (0, 1)]
    return [*map(str, counts), f"{sum(one.bytes * count for one, count in own.items()) / 1e6:.0f}"]


def _is_of_scores(array: str) -> bool:
    """Whether an array has a number for each pair of a query and a key."""
    sizes = [int(size) for size in array.partition("[")[2].rstrip("]").split(",") if size]
    return len(sizes) > 3


def tiny(config: LlamaConfig) -> LlamaConfig:
    """The same family in a size for tests."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return dataclasses.replace(config, head_dim=32, **small)
