"""Flax modules whose norms, gates and residuals run inside the products of `coda_jax`, by `coda.fuse`."""

from flax_layers import fp8 as fp8
from flax_layers import sharding as sharding
from flax_layers.activation import ACTIVATIONS
from flax_layers.attention import Attention, rotary, rotary_angles
from flax_layers.axis_metadata import name_parameters
from flax_layers.block import TransformerBlock
from flax_layers.block_orders import NormBeforeSumBlock, ParallelBlock, PostNormBlock, SandwichNormBlock
from flax_layers.cross_attention import CrossAttention
from flax_layers.decoding import Decoder, Generated, KVCache, TextCache, generate
from flax_layers.embed import Embed
from flax_layers.linear import Linear
from flax_layers.lm_head import LMHead
from flax_layers.lora import add_lora, merge_lora, remove_lora
from flax_layers.mlp import MLP, GatedMLP
from flax_layers.models import (
    GPT2,
    Cohere,
    CohereConfig,
    Gemma,
    GemmaConfig,
    GPT2Config,
    GptOss,
    GptOssConfig,
    Llama,
    LlamaBlock,
    LlamaConfig,
    MoEConfig,
    Olmo2,
    Olmo2Config,
)
from flax_layers.moe import BalanceBias, MoE, RouterStatistics, load_balancing_loss, router_z_loss, update_balance_bias
from flax_layers.muon import muon_dimension_numbers
from flax_layers.norm import LayerNorm, RMSNorm
from flax_layers.packing import Segments, segment_positions
from flax_layers.rope_scaling import (
    DynamicRopeScaling,
    LinearRopeScaling,
    LongRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

__all__ = [
    "ACTIVATIONS",
    "GPT2",
    "MLP",
    "Attention",
    "BalanceBias",
    "Cohere",
    "CohereConfig",
    "CrossAttention",
    "Decoder",
    "DynamicRopeScaling",
    "Embed",
    "GPT2Config",
    "GatedMLP",
    "Gemma",
    "GemmaConfig",
    "Generated",
    "GptOss",
    "GptOssConfig",
    "KVCache",
    "LMHead",
    "LayerNorm",
    "Linear",
    "LinearRopeScaling",
    "Llama",
    "LlamaBlock",
    "LlamaConfig",
    "LongRopeScaling",
    "MoE",
    "MoEConfig",
    "NormBeforeSumBlock",
    "Olmo2",
    "Olmo2Config",
    "ParallelBlock",
    "PostNormBlock",
    "RMSNorm",
    "RopeScaling",
    "RouterStatistics",
    "SandwichNormBlock",
    "Segments",
    "TextCache",
    "TransformerBlock",
    "YarnRopeScaling",
    "add_lora",
    "fp8",
    "generate",
    "load_balancing_loss",
    "merge_lora",
    "muon_dimension_numbers",
    "name_parameters",
    "remove_lora",
    "rotary",
    "rotary_angles",
    "router_z_loss",
    "segment_positions",
    "sharding",
    "update_balance_bias",
]
