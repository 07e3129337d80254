"""The kinds of Hugging Face's models that compute what a configuration says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flax_layers.checkpoints.hf_experts import is_mixtral
from flax_layers.checkpoints.hf_files import CONFIG
from flax_layers.models.cohere import CohereConfig
from flax_layers.models.gemma import GemmaConfig
from flax_layers.models.gpt_oss import GptOssConfig
from flax_layers.models.llama_config import EXTRA_FIELDS, LlamaConfig, check_is_plain
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
    if isinstance(config, MoEConfig) and not isinstance(config, GptOssConfig):
        return _expert_model_types(config)
    kinds = next(kinds for cls, kinds in _KINDS.items() if isinstance(config, cls))
    broken = {name: _broken(config, rules) for name, rules in kinds.items()}
    if fitting := [name for name, faults in broken.items() if not faults]:
        return fitting
    if config.is_plain and type(config) is LlamaConfig:
        fields = f"attention_bias={config.attention_bias}, attention_out_bias={config.resolved_attention_out_bias}, "
        fields += f"qk_norm={config.qk_norm}, sliding_window={config.sliding_window}"
        raise ValueError(
            f"{fields} has no place in a config.json: a Llama has both biases "
            "or none, and no window; a Mistral has no biases; a Qwen2 has attention_bias alone; a Qwen3 has qk_norm, "
            "and both biases or none"
        )
    nearest = min(broken, key=lambda name: len(broken[name]))
    raise ValueError(
        f"this {type(config).__name__} has no place in a config.json of {', '.join(kinds)}: as a {nearest}, "
        f"{'; '.join(broken[nearest])}"
    )


def is_phi3(config: LlamaConfig) -> bool:
    """Whether files of a model with this configuration are a Phi-3's, with packed weights, as those it came from."""
    former = settings_in(config.origin, CONFIG) or {}
    if former.get("model_type") != "phi3" or config.rope_theta is None or isinstance(config, MoEConfig):
        return False
    return "phi3" in model_types(config)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """The rule that a field must obey for a kind of models.

    Attributes:
      name: of the field.
      requirement: what the field must be, in words.
      holds: whether a configuration's field is that.
    """

    name: str
    requirement: str
    holds: Callable[[Any], bool]


def _broken(config: LlamaConfig, rules: Sequence[_Rule]) -> list[str]:
    """The fields that break a rule, with value and rule."""
    broken = [rule for rule in rules if not rule.holds(config)]
    return [f"{rule.name}={getattr(config, rule.name)!r} must be {rule.requirement}" for rule in broken]


def _is(**fields: Any) -> list[_Rule]:
    return [_Rule(name, repr(value), partial(_has, name, value)) for name, value in fields.items()]


def _has(name: str, value: Any, config: Any) -> bool:
    return bool(getattr(config, name) == value)


_ALIKE = _Rule(
    "attention_out_bias",
    "None or as attention_bias",
    lambda config: config.attention_bias == config.resolved_attention_out_bias,
)
_OUT_BIAS = _Rule("attention_out_bias", "False", lambda config: not config.resolved_attention_out_bias)
_NO_BIASES = [*_is(attention_bias=False), _OUT_BIAS]
_NO_QK_NORM = _is(qk_norm=False)
# No more than a Llama, except for windows of some layers.
_PLAIN_LAYERS = _is(**{name: value for name, value in EXTRA_FIELDS.items() if name != "layer_types"})
_NO_EXTRAS = [*_PLAIN_LAYERS, _ALIKE]
# Without a window, and no more than a Llama.
_UNIFORM = [*_is(layer_types=None, sliding_window=None), *_NO_EXTRAS]
_NO_MULTIPLIERS = _is(**{name: EXTRA_FIELDS[name] for name in ("attention_multiplier", *MULTIPLIERS)})

# Class of configurations -> kind -> what the fields of one must be; the first that fits is written by default.
_KINDS: Mapping[type, Mapping[str, Sequence[_Rule]]] = {
    GemmaConfig: {
        "gemma": [
            *_is(sandwich_norms=False, qk_norm=False, rope_local_base_freq=None, sliding_window=None),
            *_is(attn_logit_softcapping=None, final_logit_softcapping=None),
            _Rule("layer_types", "None", lambda config: not config.layer_types),
            _Rule("hidden_act", "another than 'gelu'", lambda config: config.hidden_act != "gelu"),
            _Rule(
                "query_pre_attn_scalar",
                "None or as head_dim",
                lambda config: config.query_pre_attn_scalar in (None, config.resolved_head_dim),
            ),
            *_NO_EXTRAS,
        ],
        "gemma2": [*_is(sandwich_norms=True, qk_norm=False, rope_local_base_freq=None), *_NO_EXTRAS],
        "gemma3_text": [
            *_is(sandwich_norms=True, qk_norm=True, attn_logit_softcapping=None),
            _Rule("rope_local_base_freq", "a number", lambda config: config.rope_local_base_freq is not None),
            *_NO_EXTRAS,
        ],
    },
    Olmo2Config: {"olmo2": [*_is(qk_norm=True), *_UNIFORM]},
    CohereConfig: {
        "cohere": [*_NO_QK_NORM, *_UNIFORM],
        "cohere2": [
            *_NO_QK_NORM,
            _Rule("layer_types", "a type for each layer", lambda config: config.layer_types is not None),
            *_NO_EXTRAS,
        ],
    },
    GptOssConfig: {
        "gpt_oss": [
            *_NO_QK_NORM,
            *_NO_EXTRAS,
            _Rule("layer_types", "a type for each layer", lambda config: config.layer_types is not None),
            *_is(norm_topk_prob=True, moe_intermediate_size=None, shared_expert_intermediate_size=None),
            *_is(scoring_func="softmax", routed_scaling_factor=1.0, n_group=None, topk_group=None),
            *_is(use_balance_bias=False, shared_expert_gate=False),
        ]
    },
    LlamaConfig: {
        "llama": [*_NO_QK_NORM, *_UNIFORM],
        "mistral": [*_is(layer_types=None), *_NO_QK_NORM, *_NO_BIASES, *_PLAIN_LAYERS],
        "qwen2": [*_is(attention_bias=True), _OUT_BIAS, *_NO_QK_NORM, *_PLAIN_LAYERS],
        "qwen3": [*_is(qk_norm=True), *_NO_EXTRAS],
        "granite": [
            *_is(layer_types=None, no_rope_layers=None, partial_rotary_factor=1.0, sliding_window=None),
            *_NO_QK_NORM,
            _ALIKE,
        ],
        "smollm3": [*_is(partial_rotary_factor=1.0), *_NO_MULTIPLIERS, *_NO_QK_NORM, _ALIKE],
        "phi3": [
            *_is(layer_types=None, no_rope_layers=None),
            *_NO_MULTIPLIERS,
            _Rule(
                "rope_scaling",
                "a LongRopeScaling or None",
                lambda config: isinstance(config.rope_scaling, LongRopeScaling | None),
            ),
            *_NO_QK_NORM,
            *_NO_BIASES,
        ],
    },
}


def _expert_model_types(config: MoEConfig) -> list[str]:
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
    fitting = [name for name, does in fits.items() if does]
    if not fitting:
        raise ValueError(
            f"attention_bias={biases[0]}, attention_out_bias={biases[1]}, qk_norm={config.qk_norm}, "
            f"sliding_window={config.sliding_window}, shared_expert_gate={config.shared_expert_gate}, "
            f"norm_topk_prob={config.norm_topk_prob} has no place in a config.json: a Mixtral has none of these but "
            "norm_topk_prob and a window, and experts of intermediate_size in each layer; a Qwen2-MoE attention_bias "
            "alone, and a shared expert with a gate; a Qwen3-MoE qk_norm, both biases or none, and no shared expert"
        )
    return fitting
