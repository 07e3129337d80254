"""Language models made of the layers."""

from flax_layers.models.gpt2 import GPT2, GPT2Config, gpt2_block
from flax_layers.models.llama import Llama, LlamaConfig
from flax_layers.models.moe_config import MoEConfig

__all__ = ["GPT2", "GPT2Config", "Llama", "LlamaConfig", "MoEConfig", "gpt2_block"]
