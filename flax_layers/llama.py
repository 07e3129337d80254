"""Llama: a decoder-only language model of pre-norm blocks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_layers.block import TransformerBlock
from flax_layers.lm_head import LMHead
from flax_layers.norm import RMSNorm
from flax_layers.rope_scaling import RopeScaling
from flax_layers.stream import Stream


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama or a Qwen3, with the names and defaults of Hugging Face's LlamaConfig.

    num_key_value_heads defaults to num_attention_heads, head_dim to hidden_size / num_attention_heads. attention_bias
    gives the query, key, value and output projections biases. qk_norm normalises queries and keys: a Qwen3 is a Llama
    with qk_norm. hidden_act is a name in `flax_layers.activation`.
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
    rope_scaling: RopeScaling | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False

    @classmethod
    def llama3_8b(cls) -> LlamaConfig:
        """Llama 3 8B."""
        return cls(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
        )

    @classmethod
    def llama3_1b(cls) -> LlamaConfig:
        """Llama 3.2 1B."""
        return cls(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling=RopeScaling(factor=32.0),
            tie_word_embeddings=True,
        )

    @classmethod
    def qwen3_0_6b(cls) -> LlamaConfig:
        """Qwen3 0.6B."""
        return cls(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
            rope_theta=1000000.0,
            qk_norm=True,
            tie_word_embeddings=True,
        )


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
                rope_scaling=config.rope_scaling,
                qk_norm=config.qk_norm,
                use_bias=config.attention_bias,
                activation=config.hidden_act,
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
        self, tokens: jax.Array, *, positions: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:
        """Logits (B, T, V) of tokens (B, T), or (T, V) of (T,); `positions` and `mask` as in Attention.

        Raises:
          ValueError: more tokens than max_position_embeddings.
        """
        if tokens.shape[-1] > self.config.max_position_embeddings:
            raise ValueError(f"{tokens.shape[-1]} tokens exceed {self.config.max_position_embeddings=}")
        stream = Stream.of(self.embed(tokens))
        for layer in self.layers:
            stream = layer(stream, positions=positions, mask=mask)
        embedding = self.embed.embedding[...] if self.config.tie_word_embeddings else None
        return self.head(self.norm(stream), embedding=embedding)
