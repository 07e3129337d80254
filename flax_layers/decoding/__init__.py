"""Generation of text: the cache of keys and values, and the loop over tokens."""

from flax_layers.decoding.generate import Decoder, Generated, generate
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.decoding.text_cache import TextCache

__all__ = ["Decoder", "Generated", "KVCache", "TextCache", "generate"]
