"""Hugging Face's config.json from and to our configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flax_layers.checkpoints.hf_experts import is_mixtral
from flax_layers.checkpoints.hf_files import CONFIG
from flax_layers.checkpoints.hf_settings import FAMILIES, NOT_HERE, Family
from flax_layers.checkpoints.settings import check_settings, refusal, same, without
from flax_layers.config_checks import is_number
from flax_layers.models.gpt2 import GPT2Config
from flax_layers.models.llama import LlamaConfig
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.origin import settings_in, with_settings
from flax_layers.rope_scaling import RopeScaling

_LLAMA3 = tuple(field.name for field in dataclasses.fields(RopeScaling))
# Names of layers with attention to all tokens before.
_FULL = ("full_attention", "attention")
# Dictionaries of rotary settings; `transformers` reads the first.
_ROPE = ("rope_scaling", "rope_parameters")
# Settings of how parameters were stored, which are not those of what is written.
_OF_FORMER_FILES = ("quantization_config", "compression_config", "transformers_weights")
# The origin keeps ignored settings by this name: they are written again and not read.
_IGNORED = f"ignored of {CONFIG}"
# Settings that not all kinds of models have, or not in one sense.
_OF_A_KIND = ("attention_bias", "use_sliding_window", "sliding_window", "max_window_layers")


def config_from_hf(settings: Mapping[str, Any], *, ignore: Sequence[str] = ()) -> LlamaConfig | GPT2Config:
    """The configuration in a config.json, of a Llama, a Mistral, a Qwen2, a Qwen3 or a GPT-2, or of one with experts.

    A MoEConfig of a Mixtral, a Qwen2-MoE or a Qwen3-MoE.

    Each setting is one of ours, one that is known not to change what is computed (`flax_layers.checkpoints.hf_settings`
    lists them), or has the value that ours compute with; any other is refused.

    Args:
      settings: what the file holds, or `transformers`' config.to_dict().
      ignore: names of settings that are not read, as if the file did not have them. What is ignored of rope_scaling or
        rope_parameters is the scaling; their rope_theta is read.

    Returns:
      The configuration. All settings are its `origin`, from which `config_to_hf` starts, but for ignored ones that its
      fields say.

    Raises:
      TypeError: settings that are no dictionary, or an `ignore` that is no sequence of names.
      ValueError: another model_type, a setting that ours do not have, or one that is out of its range.
    """
    check_settings(settings, "config_from_hf", "a config.json", "load_hf_folder")
    given, settings = settings, _with_rope_ignored(settings, without(settings, ignore), ignore)
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"{model_type=} is not supported; it must be one of {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    for alias, name in family.aliases.items():
        if (value := settings.pop(alias, None)) is not None:
            settings[name] = value
    family.known.check(settings, f"a config.json of model_type {model_type!r}")
    code = settings.get("auto_map") or {}
    if not isinstance(code, Mapping) or any(str(name).startswith("AutoModel") for name in code):
        raise refusal("auto_map", code, "the model has code of its own")
    fields = {**family.fields, "origin": _origin(given, settings, family)}
    for field in dataclasses.fields(family.config):
        if field.name in family.known.read - {"rope_theta", "rope_scaling", "sliding_window"}:
            fields[field.name] = _value(settings, family, field)
    if family.config is GPT2Config:
        return GPT2Config(**fields)
    theta, scaling = _rope(settings, family.defaults.get("rope_theta", 10000.0))
    cls: Any = family.config
    config: LlamaConfig = cls(**fields, rope_theta=theta, rope_scaling=scaling)
    return dataclasses.replace(config, sliding_window=_window(settings, family, config.num_hidden_layers))


def config_to_hf(config: LlamaConfig | GPT2Config, *, model_type: str | None = None) -> dict[str, Any]:
    """What config.json says of a model with this configuration: what it said where that came from, and our fields.

    Args:
      config: of the model.
      model_type: what is written where several kinds compute the same, as a Mistral without a window and a Llama do;
        default what it came from, and where that does not fit, the first that fits of llama, mistral, qwen2 and qwen3.

    Raises:
      ValueError: it has what none of these models of Hugging Face has.
    """
    former = (settings_in(config.origin, _IGNORED) or {}) | (settings_in(config.origin, CONFIG) or {})
    return _written_over(former, _own_settings(config, model_type or former.get("model_type")), config)


def _origin(given: Mapping[str, Any], read: Mapping[str, Any], family: Family) -> str:
    """A model keeps these of a file: the settings that are read, and ignored ones that no field of ours says."""
    # Parts of a dictionary that are ignored stand where they stood.
    origin = with_settings(None, CONFIG, {**read, **{name: given[name] for name in _ROPE if name in read}})
    ours = {*(family.known.read - {"auto_map", "partial_rotary_factor"}), *family.aliases}
    ignored = {name: value for name, value in given.items() if name not in read and name not in ours}
    return with_settings(origin, _IGNORED, ignored) if ignored else origin


def _own_settings(config: LlamaConfig | GPT2Config, model_type: str | None) -> dict[str, Any]:
    """What our fields are in config.json."""
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in NOT_HERE and getattr(config, field.name) is not None
    }
    if isinstance(config, GPT2Config):
        _check_name(config, "activation_function")
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **settings}
    _check_name(config, "hidden_act")
    fitting = _model_types(config)
    name = model_type if model_type in fitting else fitting[0]
    if isinstance(config, MoEConfig):
        settings = _of_experts(config, settings, name)
    # Written out: transformers has other defaults for these models.
    settings["num_key_value_heads"] = config.resolved_num_key_value_heads
    settings["head_dim"] = config.resolved_head_dim
    if "attention_bias" in FAMILIES[name].known.read:
        settings["attention_bias"] = config.attention_bias
    if name in ("mistral", "mixtral", "qwen2", "qwen3"):
        settings["sliding_window"] = config.sliding_window
    if "use_sliding_window" in FAMILIES[name].known.read:
        settings["use_sliding_window"] = config.sliding_window is not None
        if config.sliding_window is not None:
            settings["max_window_layers"] = 0  # the first layer that has one
    scaling = config.rope_scaling
    return {
        "model_type": name,
        "architectures": [f"{name.title().replace('_', '')}ForCausalLM"],
        **settings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **dataclasses.asdict(scaling)},
    }


def _of_experts(config: MoEConfig, settings: dict[str, Any], name: str) -> dict[str, Any]:
    """The settings that a kind of models with experts has, by its names."""
    settings |= {
        "moe_intermediate_size": config.resolved_moe_intermediate_size,
        "mlp_only_layers": list(config.mlp_only_layers),
    }
    read = FAMILIES[name].known.read - {"router_z_loss_coef"}
    found = {key: value for key, value in settings.items() if key in read}
    if config.router_z_loss_coef:  # which transformers does not know
        found["router_z_loss_coef"] = config.router_z_loss_coef
    if name == "mixtral":
        found["num_local_experts"] = found.pop("num_experts")
    return found


def _written_over(former: dict[str, Any], own: dict[str, Any], config: LlamaConfig | GPT2Config) -> dict[str, Any]:
    """Settings of Hugging Face's that a model came with, our own in their place; rotary ones in the form they had."""
    kept = {name: value for name, value in former.items() if name not in _OF_FORMER_FILES}
    if "num_local_experts" in own:
        kept.pop("num_experts", None)
    unset = {field.name for field in dataclasses.fields(config)} - NOT_HERE - own.keys()
    kept |= dict.fromkeys(unset & kept.keys())  # as an n_inner that is the default now
    if isinstance(config, GPT2Config):
        return kept | own
    if own["model_type"] != kept.get("model_type"):
        kept = {name: value for name, value in kept.items() if name not in _OF_A_KIND}
    kinds = _FULL if config.sliding_window is None or "use_sliding_window" not in own else ("sliding_attention",)
    types = kept.get("layer_types")
    if types is not None and (len(types) != config.num_hidden_layers or any(kind not in kinds for kind in types)):
        del kept["layer_types"]
    if config.rope_scaling is not None:
        kept.pop("original_max_position_embeddings", None)
    parameters, scaling = kept.pop("rope_parameters", None), kept.pop("rope_scaling", None)
    rope = own.pop("rope_scaling") or {"rope_type": "default"}
    of_former = parameters or scaling or {}
    if of_former.get("rope_type", of_former.get("type", "default")) == rope["rope_type"]:
        rope = {**of_former, **rope}
    if parameters:
        kept.pop("rope_theta", None)
        rope["rope_theta"] = own.pop("rope_theta")
        return kept | own | {"rope_parameters": rope}
    return kept | own | {"rope_scaling": None if rope["rope_type"] == "default" else rope}


def _check_name(config: LlamaConfig | GPT2Config, name: str) -> None:
    activation = getattr(config, name)
    if not isinstance(activation, str):
        raise ValueError(f"{name}={activation!r} has no place in a config.json, which has names of activations alone")


def _model_types(config: LlamaConfig) -> list[str]:
    """The kinds of models that compute what this configuration says."""
    if config.rope_theta is None:
        raise ValueError("rope_theta=None, no rotary embedding, has no place in a config.json of a Llama or a Qwen3")
    if isinstance(config, MoEConfig):
        return _model_types_of_experts(config)
    biases = (config.attention_bias, config.resolved_attention_out_bias)
    if config.qk_norm:
        found = ["qwen3"] if biases[0] == biases[1] else []
    else:
        fits = {
            "llama": biases[0] == biases[1] and config.sliding_window is None,
            "mistral": not any(biases),
            "qwen2": biases == (True, False),
        }
        found = [name for name, does in fits.items() if does]
    if not found:
        given = f"attention_bias={biases[0]}, attention_out_bias={biases[1]}, qk_norm={config.qk_norm}"
        raise ValueError(
            f"{given}, sliding_window={config.sliding_window} has no place in a config.json: a Llama has both biases "
            "or none, and no window; a Mistral has no biases; a Qwen2 has attention_bias alone; a Qwen3 has qk_norm, "
            "and both biases or none"
        )
    return found


def _model_types_of_experts(config: MoEConfig) -> list[str]:
    """The kind of models with experts that computes what this configuration says."""
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


def _value(settings: Mapping[str, Any], family: Family, field: dataclasses.Field[Any]) -> Any:
    """A field as the file says it: null is None where that means something, else it is not said."""
    if settings.get(field.name) is not None or (field.name in settings and field.default is None):
        return settings[field.name]
    return family.defaults.get(field.name, field.default)


def _with_rope_ignored(settings: Mapping[str, Any], rest: dict[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """What is not ignored, in the dictionaries of rotary settings too; of an ignored one rope_theta is left."""
    # The length is a setting beside these dictionaries too, where it contradicts theirs.
    inside = [name for name in ignore if name != "original_max_position_embeddings"]
    for name in _ROPE:
        if isinstance(rope := settings.get(name), Mapping):
            rope = without(rope, inside)
            if name not in ignore:
                rest[name] = rope
            elif rope.get("rope_theta") is not None:
                rest["rope_theta"] = rope["rope_theta"]
    return rest


def _rope(settings: Mapping[str, Any], default_theta: float) -> tuple[Any, RopeScaling | None]:
    """rope_theta and the scaling."""
    where, rope = _rope_dictionary(settings)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise refusal("type", rope["type"], f"rope_type is {kind!r} in {where}")
    if kind not in ("default", "llama3"):
        raise refusal(where, rope, f"rope_type {kind!r} must be 'default' or 'llama3'")
    scaling = _LLAMA3 if kind == "llama3" else ()
    if missing := [name for name in scaling if name not in rope]:
        raise ValueError(f"rope_type 'llama3' lacks {', '.join(missing)}: {rope}")
    for name, value in rope.items():
        if name not in {"rope_type", "type", "rope_theta", "partial_rotary_factor", *scaling}:
            raise refusal(name, value, f"it is not known of rope_type {kind!r} in {where}")
    original = settings.get("original_max_position_embeddings")
    if scaling and original is not None and original != rope["original_max_position_embeddings"]:
        raise refusal("original_max_position_embeddings", original, f"it is another one in {where}")
    theta = rope.get("rope_theta", default_theta)
    theta = float(theta) if is_number(theta) else theta
    return theta, RopeScaling(**{name: rope[name] for name in scaling}) if scaling else None


def _rope_dictionary(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What is said of the rotary embedding, and where: transformers 5 has it in one dictionary, older ones in two."""
    given = {name: settings[name] for name in _ROPE if settings.get(name)}
    for name, value in given.items():
        if not isinstance(value, Mapping):
            raise refusal(name, value, "it must be a dictionary or null")
    where, rope = next(iter(given.items()), ("rope_scaling", {}))
    if any(dict(other) != dict(rope) for other in given.values()):
        raise refusal("rope_parameters", given["rope_parameters"], f"rope_scaling is {given['rope_scaling']!r}")
    outside = {name: settings.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    found = {name: value for of in (outside, rope) for name, value in of.items() if value is not None}
    if not same(partial := found.get("partial_rotary_factor", 1), 1):
        raise refusal("partial_rotary_factor", partial, "heads are turned whole, as with 1.0")
    return where, found


def _window(settings: Mapping[str, Any], family: Family, layers: int) -> Any:
    """The window of all layers; a ValueError where it is one of some layers alone."""
    types = settings.get("layer_types")
    if types is not None and (not isinstance(types, list | tuple) or len(types) != layers):
        raise refusal("layer_types", types, f"it must be a list of {layers}, one of each layer")
    if "use_sliding_window" not in family.known.read:
        if any(kind not in _FULL for kind in types or ()):
            raise refusal("layer_types", types, "all layers must be alike")
        is_read = "sliding_window" in family.known.read
        return settings.get("sliding_window", family.defaults["sliding_window"]) if is_read else None
    is_used = settings.get("use_sliding_window") or False
    first = settings.get("max_window_layers")
    first = 28 if first is None else first
    if not isinstance(is_used, bool):
        raise refusal("use_sliding_window", is_used, "it must be True or False")
    if not isinstance(first, int) or isinstance(first, bool):
        raise refusal("max_window_layers", first, "it must be an integer")
    window = settings.get("sliding_window", 4096) if is_used else None
    if types is not None:
        if all(kind in _FULL for kind in types):
            return None
        if window is None or any(kind != "sliding_attention" for kind in types):
            raise refusal("layer_types", types, "all layers must have the same window, of use_sliding_window")
    elif window is not None and 0 < first < layers:
        raise refusal("use_sliding_window", is_used, f"layers before max_window_layers={first} have no window")
    return window if types is not None or first < layers else None
