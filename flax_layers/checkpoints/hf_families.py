"""The known settings in Hugging Face's config.json, for each kind of model that is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from flax_layers.checkpoints.hf_settings import HARMLESS, RESTATED
from flax_layers.checkpoints.settings import Known
from flax_layers.models.cohere import CohereConfig
from flax_layers.models.gemma import GemmaConfig
from flax_layers.models.gpt2 import GPT2Config
from flax_layers.models.gpt_oss import GptOssConfig
from flax_layers.models.llama import LlamaConfig
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.olmo2 import Olmo2Config

# How a file says which layers have a sliding window: none; all; Qwen's settings; a list or a pattern; SmolLM3's.
Windows = Literal["none", "all", "qwen", "pattern", "smollm3"]

_NO_WINDOW = {"a window that models of this kind do not have": ("sliding_window", "max_window_layers")}

# Settings that change what is computed, in a file of any kind.
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
    "tie_encoder_decoder": (False,),
}
_ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class Family:
    """Models of one model_type.

    Attributes:
      config: their configuration here.
      known: their known settings.
      defaults: of fields, where they are not those of `config`.
      fields: fields of the configuration that the file does not have, with their values.
      aliases: other names of settings, which take precedence in `transformers`.
      names: names of settings -> of fields, where they differ; a setting with the field's name is not read.
      windows: which layers have a sliding window.
      turns_parts: whether partial_rotary_factor is read.
      own_class: the class of `transformers` that files also name as code of their own.
      pattern: one layer in so many has no window, where a file has neither a list of layers nor another pattern.
    """

    config: type[LlamaConfig] | type[GPT2Config]
    known: Known
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    windows: Windows = "none"
    pattern: int = 1
    turns_parts: bool = False
    own_class: str = ""


# Fields of a LlamaConfig that a config.json does not have under their names, or not in each family.
NOT_HERE = frozenset(
    {"rope_theta", "rope_scaling", "qk_norm", "sliding_window", "attention_bias", "attention_out_bias", "origin"}
    | {"layer_types", "no_rope_layers", "partial_rotary_factor", "embedding_multiplier", "attention_multiplier"}
    | {"residual_multiplier", "logits_scaling"}
)
_LLAMA_NAMES = frozenset(field.name for field in dataclasses.fields(LlamaConfig)) - NOT_HERE
_GPT2_NAMES = frozenset(field.name for field in dataclasses.fields(GPT2Config)) - NOT_HERE
_ORIGINAL = "original_max_position_embeddings"
_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")


def _rotary(
    *read: str,
    values: Mapping[str, tuple[Any, ...]] | None = None,
    harmless: Mapping[str, tuple[str, ...]] | None = None,
    restated: Mapping[str, str] | None = None,
) -> Known:
    """The known settings of a family of Llamas that reads these settings beside those that all read."""
    names = _LLAMA_NAMES | {*_ROTARY, *read, "layer_types", "auto_map"}
    constants = {name: x for name, x in RESTATED.items() if isinstance(x, tuple) and "." not in name}
    fields = {name: x for name, x in RESTATED.items() if isinstance(x, str) and name not in names}
    fields |= restated or {}
    return Known(names, {**_VALUES, **constants, **(values or {})}, {**HARMLESS, **(harmless or {})}, fields)


_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}
_MISTRAL = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_EXPERTS = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef", "router_z_loss_coef")
_QWEN_EXPERTS = (*_EXPERTS, "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
_QWEN_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32768,
    "norm_topk_prob": False,
}
_GEMMA = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
}
_GEMMA_SETTINGS = ("attention_bias", "query_pre_attn_scalar", "final_logit_softcapping", "sliding_window")
_LISTED = {"layers are listed, or a pattern": ("use_sliding_window", "max_window_layers")}
_CAUSAL: Mapping[str, tuple[Any, ...]] = {"use_bidirectional_attention": (False,)}
_ALONE: Mapping[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}
_PARALLEL: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope_gptj",),
    "rotary_pct": (1.0,),
    "use_embedding_sharing": (True,),
    "use_gated_activation": (True,),
    "use_parallel_block": (True,),
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(LlamaConfig, _rotary("attention_bias", values=_ALONE, harmless=_NO_WINDOW)),
    "mistral": Family(LlamaConfig, _rotary("sliding_window"), _MISTRAL, windows="all"),
    "qwen2": Family(
        LlamaConfig,
        _rotary(*_WINDOW),
        _QWEN,
        {"attention_bias": True, "attention_out_bias": False},
        windows="qwen",
    ),
    "qwen3": Family(
        LlamaConfig,
        _rotary("attention_bias", *_WINDOW),
        {**_QWEN, "head_dim": 128},
        {"qk_norm": True},
        windows="qwen",
    ),
    "mixtral": Family(
        MoEConfig,
        _rotary("sliding_window", *_EXPERTS),
        {**_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
        aliases={"num_local_experts": "num_experts"},
        windows="all",
    ),
    "qwen2_moe": Family(
        MoEConfig,
        _rotary(
            *_QWEN_EXPERTS,
            "shared_expert_intermediate_size",
            values=_ALONE,
            harmless=_NO_WINDOW,
        ),
        {
            **_QWEN_MOE,
            "intermediate_size": 5632,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        {"attention_bias": True, "attention_out_bias": False, "shared_expert_gate": True},
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen3_moe": Family(
        MoEConfig,
        _rotary(
            *_QWEN_EXPERTS,
            "attention_bias",
            values={"shared_expert_intermediate_size": (0,), **_ALONE},
            harmless=_NO_WINDOW,
        ),
        {
            **_QWEN_MOE,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        {"qk_norm": True},
        aliases={"num_local_experts": "num_experts"},
    ),
    "gpt_oss": Family(
        GptOssConfig,
        _rotary(
            *(*_EXPERTS, "attention_bias", "sliding_window", "swiglu_limit", "swiglu_alpha"),
            harmless={"what original_max_position_embeddings says too": ("initial_context_length",)},
            restated={"experts_per_token": "num_experts_per_tok"},
        ),
        {
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, _ORIGINAL: 4096},
        },
        aliases={"num_local_experts": "num_experts"},
        windows="pattern",
        pattern=2,
    ),
    "phi3": Family(
        LlamaConfig,
        _rotary("sliding_window"),
        {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "original_max_position_embeddings": 4096,
        },
        windows="all",
        turns_parts=True,
        own_class="Phi3ForCausalLM",
    ),
    "granite": Family(
        LlamaConfig,
        _rotary(
            "attention_bias",
            *("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
            values=_ALONE,
            harmless=_NO_WINDOW,
        ),
        {"attention_multiplier": 1.0},
    ),
    "smollm3": Family(
        LlamaConfig,
        _rotary("attention_bias", *_WINDOW, "no_rope_layers", "no_rope_layer_interval"),
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
        },
        windows="smollm3",
        pattern=4,
    ),
    "olmo2": Family(Olmo2Config, _rotary("attention_bias", values=_ALONE, harmless=_NO_WINDOW), {}, {"qk_norm": True}),
    "gemma": Family(
        GemmaConfig,
        _rotary(
            "attention_bias", values=_CAUSAL, harmless={**_NO_WINDOW, "hidden_act is read": ("hidden_activation",)}
        ),
        {
            **_GEMMA,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
        {"sandwich_norms": False},
    ),
    "gemma2": Family(
        GemmaConfig,
        _rotary(*_GEMMA_SETTINGS, "attn_logit_softcapping", values=_CAUSAL, harmless=_LISTED),
        {**_GEMMA, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        names={"hidden_activation": "hidden_act"},
        windows="pattern",
        pattern=2,
    ),
    "gemma3_text": Family(
        GemmaConfig,
        _rotary(
            *_GEMMA_SETTINGS,
            *("sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"),
            values=_CAUSAL,
            harmless={**_LISTED, "transformers caps no scores": ("attn_logit_softcapping",)},
        ),
        {
            **_GEMMA,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
        },
        {"qk_norm": True},
        names={"hidden_activation": "hidden_act"},
        windows="pattern",
        pattern=6,
    ),
    "cohere": Family(
        CohereConfig,
        _rotary("attention_bias", "logit_scale", values=_PARALLEL, harmless=_NO_WINDOW),
        {"rope_theta": 500000.0},
        names={"layer_norm_eps": "rms_norm_eps"},
    ),
    "cohere2": Family(
        CohereConfig,
        _rotary(
            *("attention_bias", "logit_scale", "sliding_window", "sliding_window_pattern"),
            values={**_PARALLEL, "order_of_interleaved_layers": ("local_attn_first",)},
            harmless={
                **_LISTED,
                "what sliding_window_pattern says too": ("layer_switch",),
                "how devices share the embedding": ("use_parallel_embedding",),
            },
        ),
        {"rope_theta": 10000.0, "sliding_window": 4096},
        names={"layer_norm_eps": "rms_norm_eps"},
        windows="pattern",
        pattern=4,
    ),
    "gpt2": Family(
        GPT2Config,
        Known(
            _GPT2_NAMES | {"auto_map"},
            {
                **_VALUES,
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
            },
            HARMLESS,
        ),
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
    ),
}
