"""What is known of the settings in Hugging Face's config.json, for each kind of model that is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax_layers.checkpoints.settings import Known
from flax_layers.models.gpt2 import GPT2Config
from flax_layers.models.llama import LlamaConfig
from flax_layers.models.moe_config import MoEConfig

# Reason -> names. A setting that no version of `transformers` reads stands here only if its name leaves no doubt.
HARMLESS: Mapping[str, tuple[str, ...]] = {
    "which model, file or program it is from": (
        "model_type",
        "architectures",
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "is_llama_config",
        "language",
        "license",
    ),
    "dtypes: those of the arrays are looked at": ("torch_dtype", "dtype", "_pre_quantization_dtype", "use_bfloat16"),
    "how the same thing is computed, and on what": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "_flash_attn_2_enabled",
        "attn_implementation",
        "experts_implementation",
        "use_flash_attention",
        "use_flash_attn",
        "chunk_size_feed_forward",
        "pretraining_tp",
        "model_parallel",
        "reorder_and_upcast_attn",
        "gradient_checkpointing",
        "use_reentrant_checkpointing",
        "torchscript",
        "tf_legacy_loss",
        "transformers.js_config",
    ),
    "what a call returns beside logits": (
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "return_dict_in_generate",
        "tie_last_hidden_states",
        "keys_to_ignore_at_inference",
        "loss_type",
        "output_router_logits",
    ),
    "dropout and noise, of training alone; there are none here": (
        "attention_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "hidden_dropout",
        "resid_pdrop",
        "summary_first_dropout",
        "neftune_noise_alpha",
        "router_jitter_noise",
    ),
    "which tokens end, pad or begin a text": (
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "tokenizer_class",
        "processor_class",
        "prefix",
    ),
    "how `transformers` generates": (
        "use_cache",
        "cache_implementation",
        "max_length",
        "max_new_tokens",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "length_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "target_lookbehind",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "task_specific_params",
        "is_decoder",
    ),
    "heads of other tasks than language modelling": (
        "id2label",
        "label2id",
        "num_labels",
        "_num_labels",
        "problem_type",
        "finetuning_task",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_hidden_size",
        "n_special",
        "predict_special_tokens",
    ),
    "lengths that trainers and tokenizers cut texts to": (
        "n_ctx",
        "max_sequence_length",
        "max_seq_len",
        "max_seq_length",
        "model_max_length",
        "seq_length",
        "tokenizer_model_max_length",
    ),
}
_NO_WINDOW = {"a window that models of this kind do not have": ("sliding_window", "max_window_layers")}

# Settings that change what is computed, in a file of any kind.
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
    "tie_encoder_decoder": (False,),
}
_ROTARY_VALUES: Mapping[str, tuple[Any, ...]] = {
    "activation": ("swiglu",),
    "mlp_bias": (False,),
    "qk_layer_norms": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}
_ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class Family:
    """Models of one model_type.

    Attributes:
      config: their configuration here.
      known: what is known of their settings.
      defaults: of their fields where they are not those of `config`.
      fields: of the configuration, beside those that the file says.
      aliases: other names of settings, which win in `transformers`.
    """

    config: type[LlamaConfig] | type[MoEConfig] | type[GPT2Config]
    known: Known
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


# Fields of a LlamaConfig that a config.json does not have under their names, or not in each family.
NOT_HERE = frozenset(
    {"rope_theta", "rope_scaling", "qk_norm", "sliding_window", "attention_bias", "attention_out_bias", "origin"}
)
_LLAMA_NAMES = frozenset(field.name for field in dataclasses.fields(LlamaConfig)) - NOT_HERE
_GPT2_NAMES = frozenset(field.name for field in dataclasses.fields(GPT2Config)) - NOT_HERE
_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers")


def _rotary(
    *read: str,
    values: Mapping[str, tuple[Any, ...]] | None = None,
    harmless: Mapping[str, tuple[str, ...]] | None = None,
) -> Known:
    """What is known of a family of Llamas that reads these settings beside those of all."""
    names = _LLAMA_NAMES | {*_ROTARY, *read, "layer_types", "auto_map"}
    return Known(names, {**_VALUES, **_ROTARY_VALUES, **(values or {})}, {**HARMLESS, **(harmless or {})})


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
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        LlamaConfig, _rotary("attention_bias", values={"use_sliding_window": (False,)}, harmless=_NO_WINDOW)
    ),
    "mistral": Family(LlamaConfig, _rotary("sliding_window", values={"attention_bias": (False,)}), _MISTRAL),
    "qwen2": Family(
        LlamaConfig,
        _rotary(*_WINDOW, values={"attention_bias": (True,)}),
        _QWEN,
        {"attention_bias": True, "attention_out_bias": False},
    ),
    "qwen3": Family(
        LlamaConfig,
        _rotary("attention_bias", *_WINDOW, values={"use_qk_norm": (True,)}),
        {**_QWEN, "head_dim": 128},
        {"qk_norm": True},
    ),
    "mixtral": Family(
        MoEConfig,
        _rotary("sliding_window", *_EXPERTS, values={"attention_bias": (False,)}),
        {**_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
        aliases={"num_local_experts": "num_experts"},
    ),
    "qwen2_moe": Family(
        MoEConfig,
        _rotary(
            *_QWEN_EXPERTS,
            "shared_expert_intermediate_size",
            values={"qkv_bias": (True,), "use_sliding_window": (False,)},
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
            values={
                "qkv_bias": (False,),
                "shared_expert_intermediate_size": (0,),
                "use_qk_norm": (True,),
                "use_sliding_window": (False,),
            },
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
