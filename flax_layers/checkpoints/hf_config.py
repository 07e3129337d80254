"""Hugging Face's config.json from and to our configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike
from typing import Any

from flax_layers.activation import ACTIVATIONS
from flax_layers.checkpoints.hf_files import CONFIG
from flax_layers.models.gpt2 import GPT2Config
from flax_layers.models.llama import LlamaConfig
from flax_layers.models.origin import settings_in, with_settings
from flax_layers.rope_scaling import RopeScaling

# Settings that change what a model computes, and the value that ours compute with.
_REQUIRED: dict[str, dict[str, Any]] = {
    "llama": {"mlp_bias": False},
    "qwen3": {"use_sliding_window": False},
    "gpt2": {
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}
# Fields of ours that config.json has elsewhere, or, as the window, not for these models.
_NOT_HERE = {"rope_theta", "rope_scaling", "qk_norm", "sliding_window", "origin"}
# Settings of how parameters were stored, which are not those of what is written; a number for each layer there was.
_OF_FORMER_FILES = ("quantization_config", "compression_config", "transformers_weights")
_OF_LAYERS = ("layer_types",)


def config_from_hf(settings: Mapping[str, Any]) -> LlamaConfig | GPT2Config:
    """The configuration in a config.json, of a Llama, a Qwen3 or a GPT-2.

    Args:
      settings: what the file holds, or `transformers`' config.to_dict().

    Returns:
      The configuration; all settings are its `origin`, from which `config_to_hf` starts.

    Raises:
      TypeError: no dictionary.
      ValueError: another model_type, or a setting that ours have not.
    """
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"config_from_hf takes a dictionary, not a {type(settings).__name__}: "
            + ("give config.to_dict()" if hasattr(settings, "to_dict") else "give what a config.json holds")
            + ("; load_hf_folder takes a folder" if isinstance(settings, str | PathLike) else "")
        )
    origin = with_settings(None, CONFIG, settings)
    model_type = settings.get("model_type")
    if model_type not in _REQUIRED:
        raise ValueError(f"{model_type=} is not supported; it must be one of {', '.join(_REQUIRED)}")
    for name, value in _REQUIRED[model_type].items():
        if settings.get(name, value) != value:
            raise ValueError(f"{name}={settings[name]!r} is not supported of {model_type}; it must be {value!r}")
    cls = GPT2Config if model_type == "gpt2" else LlamaConfig
    names = {field.name for field in dataclasses.fields(cls)} - _NOT_HERE
    fields = {name: settings[name] for name in names if settings.get(name) is not None}
    activation = fields.get("activation_function", fields.get("hidden_act", "silu"))
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not supported; it must be one of {', '.join(ACTIVATIONS)}")
    if cls is GPT2Config:
        return GPT2Config(**fields, origin=origin)
    # transformers 5 has one dictionary of all that is rotary, older releases have two settings.
    rope = {"rope_theta": settings.get("rope_theta")} | dict(
        settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    )
    partial = rope.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor={partial!r} is not supported: heads are turned whole, as with 1.0")
    return LlamaConfig(
        **fields,
        rope_theta=float(rope["rope_theta"] or 10000.0),
        rope_scaling=_scaling(rope),
        qk_norm=model_type == "qwen3",
        origin=origin,
    )


def config_to_hf(config: LlamaConfig | GPT2Config) -> dict[str, Any]:
    """What config.json says of a model with this configuration: what it said where that came from, and our fields.

    Raises:
      ValueError: it has what no Llama and no Qwen3 of Hugging Face has: a sliding window, or no rotary embedding.
    """
    return _written_over(settings_in(config.origin, CONFIG) or {}, config)


def _own_settings(config: LlamaConfig | GPT2Config) -> dict[str, Any]:
    """What our fields are in config.json."""
    if isinstance(config, LlamaConfig) and config.sliding_window is not None:
        raise ValueError(f"sliding_window={config.sliding_window} has no place in a config.json of a Llama or a Qwen3")
    if isinstance(config, LlamaConfig) and config.rope_theta is None:
        raise ValueError("rope_theta=None, no rotary embedding, has no place in a config.json of a Llama or a Qwen3")
    settings = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _NOT_HERE and getattr(config, field.name) is not None
    }
    if isinstance(config, GPT2Config):
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **settings}
    name = "qwen3" if config.qk_norm else "llama"
    # Written out: transformers has other defaults for Qwen3.
    settings["num_key_value_heads"] = config.resolved_num_key_value_heads
    settings["head_dim"] = config.resolved_head_dim
    scaling = config.rope_scaling
    return {
        "model_type": name,
        "architectures": [f"{name.capitalize()}ForCausalLM"],
        **settings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **dataclasses.asdict(scaling)},
    }


def _written_over(former: dict[str, Any], config: LlamaConfig | GPT2Config) -> dict[str, Any]:
    """Settings of Hugging Face's that a model came with, our own in their place; rotary ones in the form they had."""
    own = _own_settings(config)
    kept = {name: value for name, value in former.items() if name not in _OF_FORMER_FILES}
    for name in _OF_LAYERS:
        if kept.get(name) is not None and len(kept[name]) != own.get("num_hidden_layers"):
            del kept[name]
    unset = {field.name for field in dataclasses.fields(config)} - _NOT_HERE - own.keys()
    kept |= dict.fromkeys(unset & kept.keys())  # as an n_inner that is the default now
    if isinstance(config, GPT2Config):
        return kept | own
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


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type {kind!r} is not supported; it must be 'default' or 'llama3'")
    names = [field.name for field in dataclasses.fields(RopeScaling)]
    if missing := [name for name in names if name not in rope]:
        raise ValueError(f"rope_type 'llama3' lacks {', '.join(missing)}: {dict(rope)}")
    return RopeScaling(**{name: rope[name] for name in names})
