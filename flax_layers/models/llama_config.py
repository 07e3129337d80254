"""Sizes of Llamas."""

from __future__ import annotations

import dataclasses

from flax_layers.config_checks import check_activation, check_counts, check_flags, check_not_negative, check_positive
from flax_layers.rope_scaling import RopeScaling


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama, a Mistral, a Qwen2 or a Qwen3, with the names and defaults of Hugging Face's LlamaConfig.

    num_key_value_heads defaults to num_attention_heads, head_dim to hidden_size / num_attention_heads. attention_bias
    gives the query, key and value projections biases, and the output projection too unless attention_out_bias says
    otherwise. hidden_act is a name in `flax_layers.activation`, or a function. qk_norm normalises queries and keys.
    sliding_window, as Mistral's config names it, is how many tokens a token sees, itself and those before; default all.
    rope_theta None is no rotary embedding. Beside a plain Llama, a Qwen2 has attention_bias without
    attention_out_bias, a Qwen3 qk_norm, a Mistral a sliding_window. `origin` is what stood in the settings that a
    checkpoint came with, see `flax_layers.models.origin`; it does not count when configs are compared.

    Raises:
      ValueError: a field out of its range.
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
    rope_theta: float | None = 10000.0
    rope_scaling: RopeScaling | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    origin: str | None = dataclasses.field(default=None, compare=False, repr=False)
    attention_out_bias: bool | None = None

    def __post_init__(self) -> None:
        check_counts(self, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        check_counts(self, "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
        check_counts(self, "num_hidden_layers", least=0)
        check_not_negative(self, "rms_norm_eps", "initializer_range")
        check_flags(self, "attention_bias", "attention_out_bias", "qk_norm", "tie_word_embeddings")
        check_activation(self, "hidden_act")
        if self.rope_theta is not None:
            check_positive(self, "rope_theta")
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(
                f"LlamaConfig: rope_scaling={self.rope_scaling!r}; it must be a RopeScaling or None. "
                "config_from_hf makes one of Hugging Face's dictionary."
            )

    @property
    def resolved_head_dim(self) -> int:
        """head_dim, or what it is by default."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def resolved_num_key_value_heads(self) -> int:
        """num_key_value_heads, or what it is by default."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def resolved_attention_out_bias(self) -> bool:
        """attention_out_bias, or what it is by default."""
        return self.attention_bias if self.attention_out_bias is None else self.attention_out_bias

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
