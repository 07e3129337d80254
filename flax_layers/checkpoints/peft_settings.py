"""The known settings in PEFT's adapter_config.json."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from flax_layers.checkpoints.settings import Known, refusal
from flax_layers.config_checks import is_number

_TARGETS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
KNOWN = Known(
    read=frozenset({"r", "lora_alpha", "alpha_pattern", "use_rslora", "ensure_weight_tying", *_TARGETS}),
    values={
        "peft_type": ("LORA",),
        "use_dora": (False,),
        "bias": ("none",),
        "modules_to_save": ([],),
        "lora_bias": (False,),
        # Other values change the adapted kernels: PEFT subtracts the adapters' initial values from them.
        "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
        "alora_invocation_tokens": (),
        "arrow_config": (),
        "kasa_config": (),
        "layer_replication": ([],),
        "megatron_config": (),
        "merge_weights": (False,),
        "monteclora_config": (),
        "target_parameters": ([],),
        "trainable_token_indices": ([], {}),
        "use_bdlora": (),
        "use_qalora": (False,),
    },
    harmless={
        "which model, file or program it is from": (
            "auto_mapping",
            "base_model_name_or_path",
            "inference_mode",
            "peft_version",
            "revision",
            "task_type",
        ),
        "of training alone": ("lora_dropout", "velora_config"),
        "the arrays tell the rank": ("rank_pattern",),
        "PEFT sets it as the layer is": ("fan_in_fan_out",),
        "read with another setting alone, which is refused": (
            "corda_config",
            "eva_config",
            "loftq_config",
            "lora_ga_config",
            "megatron_core",
            "qalora_group_size",
        ),
        "how the same thing is computed": ("runtime_config",),
    },
)


def check_targets(settings: Mapping[str, Any], module: str) -> None:
    """Raises a ValueError unless the settings name a module that has arrays: PEFT would not read these.

    Settings without target_modules name all modules that have arrays.

    Args:
      settings: of adapter_config.json.
      module: its name in the adapted model.
    """
    names = settings.get("target_modules", [module])
    excluded = settings.get("exclude_modules")
    if names is None:  # PEFT's default for these models
        names = ["q_proj", "v_proj", "c_attn"]
    if excluded and _matches("exclude_modules", excluded, module):
        raise refusal("exclude_modules", excluded, f"it names {module}, which has an adapter", " of an adapter")
    is_all = isinstance(names, str) and names.lower() == "all-linear" and module != "lm_head"
    if not is_all and not _matches("target_modules", names, module):
        raise refusal("target_modules", names, f"it does not name {module}, which has an adapter", " of an adapter")
    if isinstance(names, str):
        return
    layers, pattern = settings.get("layers_to_transform"), settings.get("layers_pattern") or r"[^.]*"
    if layers is None or layers == []:
        return
    patterns = [pattern] if isinstance(pattern, str) else pattern
    matches = [match for x in patterns if (match := _match("layers_pattern", rf"(?:.*?\.)?{x}\.(\d+)\.", module))]
    if not matches or int(matches[0][1]) not in (layers if isinstance(layers, list) else [layers]):
        why = f"with layers_pattern={settings.get('layers_pattern')!r} it does not name {module}, which has an adapter"
        raise refusal("layers_to_transform", layers, why, " of an adapter")


def scaling(settings: Mapping[str, Any], module: str, rank: int) -> float:
    """alpha / r, or alpha / sqrt(r) of a rank-stabilised adapter; a pattern matches the end of a module's name."""
    name, alpha = "lora_alpha", settings.get("lora_alpha", 8)
    patterns = settings.get("alpha_pattern") or {}
    if not isinstance(patterns, Mapping):
        raise ValueError(f"alpha_pattern={patterns!r} of an adapter; it must be a dictionary")
    for pattern, value in patterns.items():
        if _match("alpha_pattern", rf"(.*\.)?({pattern})$", module):
            name, alpha = f"alpha_pattern of {pattern!r}", value
            break
    is_stabilised = settings.get("use_rslora") or False
    if not is_number(alpha):
        raise ValueError(f"{name}={alpha!r} of an adapter; it must be a number")
    if not isinstance(is_stabilised, bool):
        raise ValueError(f"use_rslora={is_stabilised!r} of an adapter; it must be True or False")
    return float(alpha) / (math.sqrt(rank) if is_stabilised else rank)


def _matches(name: str, patterns: Any, module: str) -> bool:
    """Whether a regular expression matches a module's name, or one of a list of names is its end."""
    if isinstance(patterns, str):
        return _match(name, rf"(?:{patterns})\Z", module) is not None
    if not isinstance(patterns, list | tuple | set) or not all(isinstance(x, str) for x in patterns):
        raise ValueError(f"{name}={patterns!r} of an adapter; it must be a regular expression or a list of names")
    return any(f".{module}".endswith(f".{x}") for x in patterns)


def _match(name: str, pattern: str, module: str) -> re.Match[str] | None:
    try:
        return re.match(pattern, module)
    except re.error as error:
        raise ValueError(f"{name}: {pattern!r} of an adapter is no regular expression: {error}") from None
