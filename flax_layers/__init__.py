"""Flax modules whose norms, gates and residuals run inside the products of `coda_jax`."""

from flax.nnx import Embed

from flax_layers.attention import Attention, rotary, rotary_angles
from flax_layers.block import TransformerBlock
from flax_layers.generate import Decoder, Generated, generate
from flax_layers.kv_cache import KVCache
from flax_layers.linear import Linear, project
from flax_layers.llama import Llama, LlamaConfig
from flax_layers.lm_head import LMHead
from flax_layers.mlp import GatedMLP
from flax_layers.norm import RMSNorm
from flax_layers.stream import Normalized, Stream

__all__ = [
    "Attention",
    "Decoder",
    "Embed",
    "GatedMLP",
    "Generated",
    "KVCache",
    "LMHead",
    "Linear",
    "Llama",
    "LlamaConfig",
    "Normalized",
    "RMSNorm",
    "Stream",
    "TransformerBlock",
    "generate",
    "project",
    "rotary",
    "rotary_angles",
]
