"""Language models made of the layers."""

from flax_layers.models.gpt2 import GPT2, GPT2Config, gpt2_block
from flax_layers.models.llama import Llama, LlamaConfig

__all__ = ["GPT2", "GPT2Config", "Llama", "LlamaConfig", "gpt2_block"]
