"""Sub-layers of models, from their configurations."""

from __future__ import annotations

from typing import Any

from flax_layers.attention import Attention
from flax_layers.mlp import GatedMLP
from flax_layers.models.llama_config import LlamaConfig

_BOTH = ("dtype", "param_dtype", "kernel_init", "fp8", "rngs")


def attention_options(config: LlamaConfig, layer: int) -> dict[str, Any]:
    """The options of a layer's attention in a configuration, by Attention's and LlamaBlock's keywords."""
    theta, scaling = config.layer_rotary(layer)
    return {
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": config.partial_rotary_factor,
        "qk_norm": config.qk_norm,
        "epsilon": config.rms_norm_eps,
        "use_bias": config.attention_bias,
        "use_out_bias": config.resolved_attention_out_bias,
        "sliding_window": config.layer_window(layer),
        "scale": config.score_scale,
    }


def attention_of(config: LlamaConfig, layer: int, **options: Any) -> Attention:
    """The attention of a layer.

    Args:
      config: of the model.
      layer: its number.
      **options: as of `Llama._block`, and others of Attention.
    """
    implementation = options.pop("attention_implementation")
    del options["separate_gate_up"]
    all_options = attention_options(config, layer) | options
    return Attention(config.hidden_size, config.num_attention_heads, implementation=implementation, **all_options)


def gated_mlp_of(config: LlamaConfig, **options: Any) -> GatedMLP:
    """The gated feed-forward layer; options as of `Llama._block`."""
    shared = {name: options[name] for name in (*_BOTH, "separate_gate_up")}
    return GatedMLP(config.hidden_size, config.intermediate_size, activation=config.hidden_act, **shared)
