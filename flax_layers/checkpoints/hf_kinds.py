"""Which kinds of Hugging Face's models compute what a configuration says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from flax_layers.checkpoints.hf_experts import is_mixtral
from flax_layers.checkpoints.hf_files import CONFIG
from flax_layers.models.cohere import CohereConfig
from flax_layers.models.gemma import GemmaConfig
from flax_layers.models.llama_config import SLIDING, LlamaConfig, check_is_plain
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.olmo2 import Olmo2Config
from flax_layers.models.origin import settings_in
from flax_layers.rope_scaling import LongRopeScaling

# Fields with a default that a Granite has.
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def model_types(config: LlamaConfig) -> list[str]:
    """The kinds of models that compute what this configuration says.

    Raises:
      ValueError: there is none.
    """
    if config.rope_theta is None:
        raise ValueError("rope_theta=None, no rotary embedding, has no place in a config.json of a Llama or a Qwen3")
    if config.sliding_window is None and SLIDING in (config.layer_types or ()):
        raise ValueError(f"sliding_window=None beside layer_types={config.layer_types} has no place in a config.json")
    if isinstance(config, MoEConfig):
        return _of_experts(config)
    kinds = next(kinds for cls, kinds in _KINDS.items() if isinstance(config, cls))
    if found := [name for name, fits in kinds.items() if fits(config)]:
        return found
    given = f"attention_bias={config.attention_bias}, attention_out_bias={config.resolved_attention_out_bias}, "
    given += f"qk_norm={config.qk_norm}, sliding_window={config.sliding_window}"
    if config.is_plain and type(config) is LlamaConfig:
        raise ValueError(
            f"{given} has no place in a config.json: a Llama has both biases "
            "or none, and no window; a Mistral has no biases; a Qwen2 has attention_bias alone; a Qwen3 has qk_norm, "
            "and both biases or none"
        )
    raise ValueError(f"{config!r} has no place in a config.json: it is none of {', '.join(kinds)} of transformers")


def is_phi3(config: LlamaConfig) -> bool:
    """Whether files of a model with this configuration are a Phi-3's, with packed weights: as it came with."""
    former = settings_in(config.origin, CONFIG) or {}
    if former.get("model_type") != "phi3" or config.rope_theta is None or isinstance(config, MoEConfig):
        return False
    return "phi3" in model_types(config)


def _has_alike_biases(config: LlamaConfig) -> bool:
    return config.attention_bias == config.resolved_attention_out_bias


def _is_llama(config: LlamaConfig) -> bool:
    return config.is_plain and not config.qk_norm and _has_alike_biases(config) and config.sliding_window is None


def _is_mistral(config: LlamaConfig) -> bool:
    return config.is_plain and not config.qk_norm and not _has_biases(config)


def _has_biases(config: LlamaConfig) -> bool:
    return config.attention_bias or config.resolved_attention_out_bias


def _is_qwen2(config: LlamaConfig) -> bool:
    biases = (config.attention_bias, config.resolved_attention_out_bias)
    return _with_layers_alike(config).is_plain and not config.qk_norm and biases == (True, False)


def _is_qwen3(config: LlamaConfig) -> bool:
    return _with_layers_alike(config).is_plain and config.qk_norm and _has_alike_biases(config)


def _with_layers_alike(config: LlamaConfig) -> LlamaConfig:
    return dataclasses.replace(config, layer_types=None)


def _is_granite(config: LlamaConfig) -> bool:
    alike = config.layer_types is None and config.no_rope_layers is None and config.partial_rotary_factor == 1
    return alike and config.sliding_window is None and not config.qk_norm and _has_alike_biases(config)


def _is_smollm3(config: LlamaConfig) -> bool:
    whole = config.partial_rotary_factor == 1 and not _has_multipliers(config)
    return whole and not config.qk_norm and _has_alike_biases(config)


def _is_phi3(config: LlamaConfig) -> bool:
    alike = config.layer_types is None and config.no_rope_layers is None and not _has_multipliers(config)
    is_scaled_alike = isinstance(config.rope_scaling, LongRopeScaling | None)
    return alike and is_scaled_alike and not config.qk_norm and not _has_biases(config)


def _has_multipliers(config: LlamaConfig) -> bool:
    return config.attention_multiplier is not None or any(getattr(config, name) != 1 for name in MULTIPLIERS)


def _is_gemma(config: GemmaConfig) -> bool:
    extras = (config.attn_logit_softcapping, config.final_logit_softcapping, config.sliding_window, config.layer_types)
    same_scale = config.query_pre_attn_scalar in (None, config.resolved_head_dim)
    is_first = (
        not config.sandwich_norms
        and config.hidden_act != "gelu"
        and not config.qk_norm
        and config.rope_local_base_freq is None
    )
    return is_first and same_scale and not any(extras) and _has_no_extras(config)


def _is_gemma2(config: GemmaConfig) -> bool:
    is_second = config.sandwich_norms and not config.qk_norm and config.rope_local_base_freq is None
    return is_second and _has_no_extras(config)


def _is_gemma3(config: GemmaConfig) -> bool:
    is_third = config.sandwich_norms and config.qk_norm and config.rope_local_base_freq is not None
    return is_third and _has_no_extras(config)


# Class of configurations -> kind -> whether it computes what one says; the first that fits is written by default.
_KINDS: Mapping[type, Mapping[str, Callable[..., bool]]] = {
    GemmaConfig: {"gemma": _is_gemma, "gemma2": _is_gemma2, "gemma3_text": _is_gemma3},
    Olmo2Config: {"olmo2": lambda config: config.qk_norm and _is_uniform(config)},
    CohereConfig: {
        "cohere": lambda config: not config.qk_norm and _is_uniform(config),
        "cohere2": lambda config: not config.qk_norm and config.layer_types is not None and _has_no_extras(config),
    },
    LlamaConfig: {
        "llama": _is_llama,
        "mistral": _is_mistral,
        "qwen2": _is_qwen2,
        "qwen3": _is_qwen3,
        "granite": _is_granite,
        "smollm3": _is_smollm3,
        "phi3": _is_phi3,
    },
}


def _is_uniform(config: LlamaConfig) -> bool:
    """Without a window, and no more than a Llama."""
    return config.is_plain and config.sliding_window is None and _has_alike_biases(config)


def _has_no_extras(config: LlamaConfig) -> bool:
    """No more than a Llama, but for windows of some layers."""
    return _with_layers_alike(config).is_plain and _has_alike_biases(config)


def _of_experts(config: MoEConfig) -> list[str]:
    """The kind of models with experts that computes what this configuration says."""
    check_is_plain(config, "a config.json of a Mixtral or a Qwen3-MoE")
    default = {field.name: field.default for field in dataclasses.fields(config)}
    for name in ("scoring_func", "routed_scaling_factor", "n_group", "topk_group", "use_balance_bias"):
        if getattr(config, name) != default[name]:
            raise ValueError(
                f"{name}={getattr(config, name)!r} has no place in a config.json of a Mixtral or a Qwen3-MoE"
            )
    biases = (config.attention_bias, config.resolved_attention_out_bias)
    shared = config.shared_expert_intermediate_size is not None
    has_window = config.sliding_window is not None
    fits = {
        "mixtral": is_mixtral(config),
        "qwen2_moe": not config.qk_norm and biases == (True, False) and config.shared_expert_gate and not has_window,
        "qwen3_moe": config.qk_norm and biases[0] == biases[1] and not shared and not has_window,
    }
    found = [name for name, does in fits.items() if does]
    if not found:
        raise ValueError(
            f"attention_bias={biases[0]}, attention_out_bias={biases[1]}, qk_norm={config.qk_norm}, "
            f"sliding_window={config.sliding_window}, shared_expert_gate={config.shared_expert_gate}, "
            f"norm_topk_prob={config.norm_topk_prob} has no place in a config.json: a Mixtral has none of these but "
            "norm_topk_prob and a window, and experts of intermediate_size in each layer; a Qwen2-MoE attention_bias "
            "alone, and a shared expert with a gate; a Qwen3-MoE qk_norm, both biases or none, and no shared expert"
        )
    return found
