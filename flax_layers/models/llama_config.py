"""Sizes of Llamas."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax_layers.activation import Activation
from flax_layers.config_checks import check_activation, check_counts, check_flags, check_not_negative, check_positive
from flax_layers.rope_scaling import DynamicRopeScaling, RopeScaling, RotaryScaling

FULL, SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama or one of its kin, with the names and defaults of Hugging Face's LlamaConfig.

    Its kin are Mistral, Qwen2, Qwen3, Phi-3, Granite and SmolLM3.

    num_key_value_heads defaults to num_attention_heads, head_dim to hidden_size / num_attention_heads. attention_bias
    gives the query, key and value projections biases, and the output projection too unless attention_out_bias says
    otherwise. hidden_act is a name in `flax_layers.activation`, or a function. qk_norm normalises queries and keys.
    sliding_window, as Mistral's config names it, is how many tokens a token sees, itself and those before; default all.
    rope_theta None is no rotary embedding. Beside a plain Llama, a Qwen2 has attention_bias without
    attention_out_bias, a Qwen3 qk_norm, a Mistral a sliding_window.

    With layer_types layer i has the sliding_window if layer_types[i] is "sliding_attention", none if it is
    "full_attention". With no_rope_layers, SmolLM3's, layer i has a rotary embedding if no_rope_layers[i] is 1, none if
    it is 0. partial_rotary_factor is the fraction of a head that is turned, as in some Phi-3. Granite's multipliers are
    those of the embedding, of attention's scores (default 1 / sqrt(head_dim)) and of what each sub-layer adds to the
    stream; logits are divided by logits_scaling.

    `origin` holds the settings that a checkpoint came with, see `flax_layers.models.origin`; it does not count when
    configs are compared.

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
    rope_scaling: RotaryScaling | None = None
    hidden_act: str | Activation = "silu"
    attention_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    origin: str | None = dataclasses.field(default=None, compare=False, repr=False)
    attention_out_bias: bool | None = None
    _: dataclasses.KW_ONLY
    layer_types: tuple[str, ...] | None = None
    no_rope_layers: tuple[int, ...] | None = None
    partial_rotary_factor: float = 1.0
    embedding_multiplier: float = 1.0
    attention_multiplier: float | None = None
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    def __post_init__(self) -> None:
        check_counts(self, "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        check_counts(self, "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
        check_counts(self, "num_hidden_layers", least=0)
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"{type(self).__name__}: hidden_size={self.hidden_size} must be a multiple of "
                f"num_attention_heads={self.num_attention_heads} where head_dim is None"
            )
        check_not_negative(self, "rms_norm_eps", "initializer_range")
        check_flags(self, "attention_bias", "attention_out_bias", "qk_norm", "tie_word_embeddings")
        check_activation(self, "hidden_act")
        if self.rope_theta is not None:
            check_positive(self, "rope_theta")
        check_positive(self, "partial_rotary_factor", "embedding_multiplier", "attention_multiplier")
        check_positive(self, "residual_multiplier", "logits_scaling")
        if self.partial_rotary_factor > 1:
            raise ValueError(
                f"{type(self).__name__}: partial_rotary_factor={self.partial_rotary_factor!r}; it must be a part of a "
                "head, above 0 and at most 1"
            )
        if not isinstance(self.rope_scaling, RotaryScaling | None):
            raise ValueError(
                f"{type(self).__name__}: rope_scaling={self.rope_scaling!r}; it must be a RopeScaling, another of "
                "flax_layers.rope_scaling, or None. "
                "config_from_hf makes one of Hugging Face's dictionary."
            )
        self._check_per_layer("layer_types", LAYER_TYPES)
        if self.sliding_window is None and SLIDING in (self.layer_types or ()):
            raise ValueError(
                f"{type(self).__name__}: sliding_window=None beside layer_types={self.layer_types!r}; it must be how "
                f"many tokens a token of a layer of {SLIDING!r} sees"
            )
        self._check_per_layer("no_rope_layers", (0, 1))
        if self.no_rope_layers is not None and all(self.no_rope_layers):
            object.__setattr__(self, "no_rope_layers", None)

    def _check_per_layer(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Makes a field with a value for each layer a tuple, so that configs can be hashed; more values are dropped."""
        values = getattr(self, name)
        if values is None:
            return
        is_sequence = isinstance(values, tuple | list) and all(value in allowed for value in values)
        if not is_sequence or len(values) < self.num_hidden_layers:
            rule = " or ".join(map(repr, allowed))
            raise ValueError(
                f"{type(self).__name__}: {name}={values!r}; it must be {rule} for each of "
                f"{self.num_hidden_layers} layers"
            )
        object.__setattr__(self, name, tuple(values)[: self.num_hidden_layers])

    def layer_window(self, layer: int) -> int | None:
        """How many tokens a token of this layer sees; None for all."""
        is_full = self.layer_types is not None and self.layer_types[layer] == FULL
        return None if is_full else self.sliding_window

    def layer_rotary(self, layer: int) -> tuple[float | None, RotaryScaling | None]:
        """The base of this layer's rotary frequencies, None for no rotary embedding, and how they are stretched."""
        if self.no_rope_layers is not None and not self.no_rope_layers[layer]:
            return None, None
        return self.rope_theta, self.rope_scaling

    @property
    def embedding_factor(self) -> float:
        """The factor that the token embedding is multiplied by."""
        return self.embedding_multiplier

    @property
    def score_scale(self) -> float | None:
        """The factor that attention's scores are multiplied by; None for 1 / sqrt(head_dim)."""
        return self.attention_multiplier

    @property
    def logits_factor(self) -> float:
        """The factor that logits are multiplied by."""
        return 1 / self.logits_scaling

    @property
    def soft_cap(self) -> float | None:
        """Bound of the logits; None for none."""
        return None

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens: max_position_embeddings, which dynamic scaling stretches."""
        stretched = self.rope_scaling.factor if isinstance(self.rope_scaling, DynamicRopeScaling) else 1
        return int(self.max_position_embeddings * stretched)

    @property
    def resolved_head_dim(self) -> int:
        """head_dim, or its default."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def resolved_num_key_value_heads(self) -> int:
        """num_key_value_heads, or its default."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def resolved_attention_out_bias(self) -> bool:
        """attention_out_bias, or its default."""
        return self.attention_bias if self.attention_out_bias is None else self.attention_out_bias

    @property
    def is_plain(self) -> bool:
        """Whether this has no more than Llama, Mistral, Qwen2 and Qwen3 have."""
        return all(getattr(self, name) == default for name, default in EXTRA_FIELDS.items())

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


# Fields that only Granite, SmolLM3, Phi-3 and models with several kinds of layers have, with their defaults.
EXTRA_FIELDS = {
    field.name: field.default
    for field in dataclasses.fields(LlamaConfig)
    if field.name in ("layer_types", "no_rope_layers", "partial_rotary_factor")
    or field.name.endswith(("_multiplier", "logits_scaling"))
}


def check_is_plain(config: LlamaConfig, where: str) -> None:
    """Checks that a configuration has no more than Llama, Mistral, Qwen2 and Qwen3 have, or experts.

    Raises:
      ValueError: another kind of configuration, or a field that they do not have.
    """
    if type(config).__name__ not in ("LlamaConfig", "MoEConfig"):
        raise ValueError(f"a {type(config).__name__} has no place in {where}")
    for name, default in EXTRA_FIELDS.items():
        if (value := getattr(config, name)) != default:
            raise ValueError(f"{name}={value!r} has no place in {where}")


def check_unused(config: LlamaConfig, *names: str) -> None:
    """Checks that fields which models of this configuration do not have are left as they are.

    Raises:
      ValueError: one is not.
    """
    for name in names:
        if (value := getattr(config, name)) != EXTRA_FIELDS[name]:
            raise ValueError(
                f"{type(config).__name__}: {name}={value!r}; its models have none, leave {EXTRA_FIELDS[name]}"
            )
