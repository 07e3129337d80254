"""Hugging Face's config.json from and to our configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flax_layers.checkpoints.hf_experts import MXFP4_REMEDY
from flax_layers.checkpoints.hf_families import FAMILIES, NOT_HERE, Family
from flax_layers.checkpoints.hf_files import CONFIG
from flax_layers.checkpoints.hf_kinds import MULTIPLIERS, model_types
from flax_layers.checkpoints.hf_rope import ROPE, own_rope, read_rope, with_rope_ignored, written_rope
from flax_layers.checkpoints.hf_windows import own_windows, read_windows
from flax_layers.checkpoints.settings import check_settings, refusal, without
from flax_layers.models.gemma import GemmaConfig
from flax_layers.models.gpt2 import GPT2Config
from flax_layers.models.llama_config import FULL, LlamaConfig
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.origin import settings_in, with_settings

# Settings of how parameters were stored, which do not hold for the files that are written.
_STORAGE_SETTINGS = ("quantization_config", "compression_config", "transformers_weights")
# The origin keeps ignored settings under this name: they are written again and not read.
_IGNORED = f"ignored of {CONFIG}"
# Settings that not all kinds of models have, or not with the same meaning.
_KIND_SETTINGS = (
    *("attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    *("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval", "auto_map"),
)
# Fields that are read together with other settings.
_READ_APART = frozenset({"rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"})
_READ_APART |= {"sliding_window", "layer_types", "no_rope_layers"}
# A Gemma's fields whose defaults are not those of transformers.
_GEMMA_SETTINGS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
_ARCHITECTURES = {"gpt_oss": "GptOssForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "smollm3": "SmolLM3ForCausalLM"}


def config_from_hf(settings: Mapping[str, Any], *, ignore: Sequence[str] = ()) -> LlamaConfig | GPT2Config:
    """The configuration in a config.json, of one of the kinds in `flax_layers.checkpoints.hf_families`.

    A LlamaConfig of a Llama, Mistral, Qwen2, Qwen3, Phi-3, Granite or SmolLM3; a MoEConfig of a Mixtral, Qwen2-MoE or
    Qwen3-MoE, a GptOssConfig of a gpt-oss; a GemmaConfig of a Gemma, Gemma 2 or text model of Gemma 3; an Olmo2Config,
    a CohereConfig of a Command R or R7B, or a GPT2Config.

    Each setting is one of ours, one that is known not to change what is computed (`flax_layers.checkpoints.hf_settings`
    lists them), or has the value that our models compute with; any other is refused.

    Args:
      settings: the file's dictionary, or `transformers`' config.to_dict().
      ignore: names of settings that are not read, as if the file did not have them. Of rope_scaling or rope_parameters
        the scaling is ignored; their rope_theta is read.

    Returns:
      The configuration. Its `origin`, from which `config_to_hf` starts, has all settings except ignored ones that are
      among its fields.

    Raises:
      TypeError: settings that are no dictionary, or an `ignore` that is no sequence of names.
      ValueError: another model_type, a setting that our models do not have, or one that is out of its range.
    """
    check_settings(settings, "config_from_hf", "a config.json", "load_hf_folder")
    all_settings, settings = settings, with_rope_ignored(settings, without(settings, ignore), ignore)
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"{model_type=} is not supported; it must be one of {', '.join(FAMILIES)}{_of_text(settings)}")
    family = FAMILIES[model_type]
    for alias, name in family.aliases.items():
        if (value := settings.pop(alias, None)) is not None:
            settings[name] = value
    for theirs, ours in family.names.items():
        settings.pop(ours, None)
        if theirs in settings:
            settings[ours] = settings.pop(theirs)
    if model_type == "gemma" and settings.get("hidden_act") == "gelu":  # as transformers reads it
        settings["hidden_act"] = "gelu_pytorch_tanh"
    where = f"a config.json of model_type {model_type!r}"
    stored = settings.get("quantization_config")
    if isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4":
        raise ValueError(f"quantization_config says that experts are in MXFP4. {MXFP4_REMEDY}")
    family.known.check(settings, where)
    code = settings.get("auto_map") or {}
    if not isinstance(code, Mapping) or any(
        _is_other_code(name, reference, family) for name, reference in code.items()
    ):
        raise refusal("auto_map", code, "the model has code of its own")
    fields = {**family.fields, "origin": _origin(all_settings, settings, family)}
    for field in dataclasses.fields(family.config):
        if field.name in family.known.read - _READ_APART:
            fields[field.name] = _value(settings, family, field)
    if family.config is GPT2Config:
        return GPT2Config(**fields)
    cls: Any = family.config
    config: LlamaConfig = cls(**fields)
    windows = read_windows(settings, family, config.num_hidden_layers)
    config = dataclasses.replace(config, **read_rope(settings, family), **windows)
    family.known.check_restated(settings, config, where)
    return config


def config_to_hf(config: LlamaConfig | GPT2Config, *, model_type: str | None = None) -> dict[str, Any]:
    """The config.json of a model with this configuration: the settings of the one it came from, and our fields.

    Args:
      config: of the model.
      model_type: which one is written where several kinds compute the same, as a Mistral without a window and a Llama
        do; default the one it came from. If that does not fit, the first kind that fits is written: see
        `flax_layers.checkpoints.hf_kinds`.

    Raises:
      ValueError: a field that none of these models of Hugging Face has.
    """
    former = (settings_in(config.origin, _IGNORED) or {}) | (settings_in(config.origin, CONFIG) or {})
    return _written_over(former, _own_settings(config, model_type or former.get("model_type")), config)


def _of_text(settings: Mapping[str, Any]) -> str:
    """The remedy for the settings of a model of texts and images, whose model of texts may be one of ours."""
    text = settings.get("text_config")
    name = text.get("model_type") if isinstance(text, Mapping) else None
    if not isinstance(name, str) or name not in FAMILIES:
        return ""
    return (
        f". Its text model is one, a {name}: give config_from_hf the file's text_config, and from_hf the "
        "arrays whose names have 'language_model.' in them, without that, and lm_head.weight if there is one"
    )


def _is_other_code(name: Any, reference: Any, family: Family) -> bool:
    """Whether an auto_map names a model with other code than transformers' own class of that name."""
    own = f".{family.own_class}"
    return str(name).startswith("AutoModel") and not (family.own_class and str(reference).endswith(own))


def _origin(all_settings: Mapping[str, Any], read: Mapping[str, Any], family: Family) -> str:
    """The settings of a file that a model keeps: those that are read, and ignored ones that are no fields of ours."""
    # Rotary dictionaries are kept with their ignored entries.
    origin = with_settings(None, CONFIG, {**read, **{name: all_settings[name] for name in ROPE if name in read}})
    ours = {*(family.known.read - {"auto_map", "partial_rotary_factor"}), *family.aliases}
    ignored = {name: value for name, value in all_settings.items() if name not in read and name not in ours}
    return with_settings(origin, _IGNORED, ignored) if ignored else origin


def _own_settings(config: LlamaConfig | GPT2Config, model_type: str | None) -> dict[str, Any]:
    """The settings of config.json for our fields."""
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in NOT_HERE and getattr(config, field.name) is not None
    }
    if isinstance(config, GPT2Config):
        _check_name(config, "activation_function")
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **settings}
    _check_name(config, "hidden_act")
    fitting = model_types(config)
    name = model_type if model_type in fitting else fitting[0]
    if isinstance(config, MoEConfig):
        settings = _expert_settings(config, settings, name)
    # Written out: transformers has other defaults for these models.
    settings["num_key_value_heads"] = config.resolved_num_key_value_heads
    settings["head_dim"] = config.resolved_head_dim
    family = FAMILIES[name]
    if "attention_bias" in family.known.read:
        settings["attention_bias"] = config.attention_bias
    if name == "granite":
        settings |= {key: getattr(config, key) for key in MULTIPLIERS}
        scale = config.attention_multiplier
        settings["attention_multiplier"] = config.resolved_head_dim**-0.5 if scale is None else scale
    if isinstance(config, GemmaConfig):
        ours = ("sandwich_norms", "rope_local_base_freq", *_GEMMA_SETTINGS)
        settings = {key: value for key, value in settings.items() if key not in ours}
        settings |= {key: getattr(config, key) for key in _GEMMA_SETTINGS if key in family.known.read}
        if settings.get("query_pre_attn_scalar", 0) is None:
            settings["query_pre_attn_scalar"] = config.resolved_head_dim
    settings |= own_windows(config, name, family)
    for theirs, field in family.names.items():
        settings[theirs] = settings.pop(field)
    return {
        "model_type": name,
        "architectures": [_architecture(name)],
        **settings,
        **own_rope(config, name),
    }


def _architecture(model_type: str) -> str:
    return _ARCHITECTURES.get(model_type, f"{model_type.title().replace('_', '')}ForCausalLM")


def _expert_settings(config: MoEConfig, settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings that this kind of models with experts has, by its names."""
    settings |= {
        "moe_intermediate_size": config.resolved_moe_intermediate_size,
        "mlp_only_layers": list(config.mlp_only_layers),
    }
    read = FAMILIES[name].known.read - {"router_z_loss_coef"}
    written = {key: value for key, value in settings.items() if key in read}
    if config.router_z_loss_coef:  # which transformers does not know
        written["router_z_loss_coef"] = config.router_z_loss_coef
    if name in ("mixtral", "gpt_oss"):
        written["num_local_experts"] = written.pop("num_experts")
    return written


def _written_over(former: dict[str, Any], own: dict[str, Any], config: LlamaConfig | GPT2Config) -> dict[str, Any]:
    """Hugging Face's settings that a model came with, replaced by our own; rotary ones have the form they came in."""
    kept = {name: value for name, value in former.items() if name not in _STORAGE_SETTINGS}
    if "num_local_experts" in own:
        kept.pop("num_experts", None)
    unset = {field.name for field in dataclasses.fields(config)} - NOT_HERE - own.keys()
    if not isinstance(config, GPT2Config):
        renamed = FAMILIES[own["model_type"]].names
        kept = {name: value for name, value in kept.items() if name not in renamed.values() or name in own}
        restated = FAMILIES[own["model_type"]].known.restated
        kept |= {name: getattr(config, field) for name, field in restated.items() if kept.get(name) is not None}
    kept |= dict.fromkeys(unset & kept.keys())  # as n_inner, where that is the default now
    if isinstance(config, GPT2Config):
        return kept | own
    if own["model_type"] != kept.get("model_type"):
        kept = {name: value for name, value in kept.items() if name not in _KIND_SETTINGS}
    if "layer_types" not in own and not _fits(kept.get("layer_types"), config, own):
        kept.pop("layer_types", None)
    return written_rope(kept, own)


def _fits(types: Any, config: LlamaConfig, own: dict[str, Any]) -> bool:
    """Whether a file's list of kinds of layers fits a configuration whose layers are alike."""
    has_windows = config.sliding_window is not None and "use_sliding_window" in own
    kinds = ("sliding_attention",) if has_windows else (FULL, "attention")
    return types is None or (len(types) == config.num_hidden_layers and all(kind in kinds for kind in types))


def _check_name(config: LlamaConfig | GPT2Config, name: str) -> None:
    activation = getattr(config, name)
    if not isinstance(activation, str):
        raise ValueError(f"{name}={activation!r} has no place in a config.json, which has names of activations alone")


def _value(settings: Mapping[str, Any], family: Family, field: dataclasses.Field[Any]) -> Any:
    """A field's value in the file: null is None if the field's default is None, else as if it were not there."""
    if settings.get(field.name) is not None or (field.name in settings and field.default is None):
        return settings[field.name]
    return family.defaults.get(field.name, field.default)
