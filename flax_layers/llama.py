"""Llama: a decoder-only language model of pre-norm blocks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_layers.block import TransformerBlock
from flax_layers.kv_cache import KVCache
from flax_layers.lm_head import LMHead
from flax_layers.norm import RMSNorm
from flax_layers.stream import Stream


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama, with the names and defaults of Hugging Face's LlamaConfig.

    num_key_value_heads defaults to num_attention_heads, head_dim to hidden_size / num_attention_heads. sliding_window,
    as Mistral's config names it: how many tokens a token sees, itself and those before; default all.
    Not supported: rope_scaling (Llama 3.1 and later), biases, an activation other than SiLU.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    sliding_window: int | None = None


class Llama(nnx.Module):
    """Llama: token embedding, pre-norm blocks, final norm, language-model head.

    Args:
      config: sizes.
      dtype: compute dtype, also of the logits; default that of the parameters.
      param_dtype: storage dtype of the parameters.
      rngs: source of keys.
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        width = config.hidden_size
        kernel_init = nnx.initializers.normal(config.initializer_range)
        self.embed = nnx.Embed(
            config.vocab_size, width, dtype=dtype, param_dtype=param_dtype, embedding_init=kernel_init, rngs=rngs
        )
        self.layers = nnx.List(
            TransformerBlock(
                width,
                config.intermediate_size,
                config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                rope_theta=config.rope_theta,
                sliding_window=config.sliding_window,
                epsilon=config.rms_norm_eps,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                rngs=rngs,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(width, epsilon=config.rms_norm_eps, param_dtype=param_dtype, rngs=rngs)
        self.head = LMHead(
            width,
            config.vocab_size,
            tied=config.tie_word_embeddings,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Logits (B, T, V) of tokens (B, T), or (T, V) of (T,); `positions`, `mask`, `segment_ids` as in Attention.

        Raises:
          ValueError: more tokens than max_position_embeddings.
        """
        if tokens.shape[-1] > self.config.max_position_embeddings:
            raise ValueError(f"{tokens.shape[-1]} tokens exceed {self.config.max_position_embeddings=}")
        stream = Stream.of(self.embed(tokens))
        for layer in self.layers:
            stream = layer(stream, positions=positions, mask=mask, segment_ids=segment_ids)
        return self._logits(stream)

    def init_cache(self, batch_size: int, capacity: int) -> list[KVCache]:
        """Empty caches of all layers, for `capacity` tokens a row.

        Raises:
          ValueError: a capacity beyond max_position_embeddings.
        """
        if capacity > self.config.max_position_embeddings:
            raise ValueError(f"{capacity} tokens exceed {self.config.max_position_embeddings=}")
        return [layer.attention.init_cache(batch_size, capacity) for layer in self.layers]

    def decode(
        self, tokens: jax.Array, cache: list[KVCache], *, lengths: jax.Array | None = None
    ) -> tuple[jax.Array, list[KVCache]]:
        """Logits of what follows the tokens, which the cache then holds too.

        Args:
          tokens: (B, T): a whole prompt, or T more tokens.
          cache: of the tokens before, as `init_cache` or this returns it.
          lengths: (B,) int32, 1 to T: how many tokens of each row there are, padding comes after; default T.

        Returns:
          Logits (B, V) after the last token of each row, and the cache.
        """
        stream, longer = Stream.of(self.embed(tokens)), []
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            stream, layer_cache = layer(stream, cache=layer_cache)
            if lengths is not None:  # forgets the padding
                assert layer_cache.length is not None
                layer_cache = dataclasses.replace(layer_cache, length=layer_cache.length - tokens.shape[1] + lengths)
            longer.append(layer_cache)
        last = jnp.full(tokens.shape[0], tokens.shape[1] - 1) if lengths is None else lengths - 1
        stream = jax.tree.map(lambda x: x[jnp.arange(tokens.shape[0]), last][:, None], stream)
        return self._logits(stream)[:, 0], longer

    def _logits(self, stream: Stream) -> jax.Array:
        embedding = self.embed.embedding[...] if self.config.tie_word_embeddings else None
        return self.head(self.norm(stream), embedding=embedding)
