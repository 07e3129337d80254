"""The layers with a sliding window, and those with a rotary embedding, in Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flax_layers.checkpoints.hf_families import Family
from flax_layers.checkpoints.settings import refusal
from flax_layers.models.llama_config import FULL, LAYER_TYPES, SLIDING, LlamaConfig

# Names of layers with attention to all earlier tokens.
_FULL = (FULL, "attention")
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")


def read_windows(settings: Mapping[str, Any], family: Family, layers: int) -> dict[str, Any]:
    """The fields of our configuration that say which layers have a window, or no rotary embedding."""
    types = settings.get("layer_types")
    if types is not None and (not isinstance(types, list | tuple) or len(types) != layers):
        raise refusal("layer_types", types, f"it must be a list of {layers}, one of each layer")
    for kind in types or ():
        if kind not in (*_FULL, SLIDING):
            raise refusal("layer_types", types, f"layers must be of {' or '.join(LAYER_TYPES)}")
    named_types = types
    if types is not None:
        types = tuple(FULL if kind in _FULL else SLIDING for kind in types)
    window = settings.get("sliding_window", family.defaults.get("sliding_window"))
    if family.windows in ("none", "all"):
        if SLIDING in (types or ()):
            raise refusal("layer_types", named_types, "all layers must be alike")
        return {"sliding_window": window if family.windows == "all" else None}
    if family.windows == "pattern":
        patterns = (settings[name] for name in _PATTERN if settings.get(name) is not None)
        types = types or _in_turn(next(patterns, family.pattern), layers)
        if window is None and SLIDING in types:
            raise refusal("sliding_window", window, "layers of layer_types, or of the pattern, have one")
        return {"sliding_window": window, "layer_types": types}
    if family.windows == "smollm3":
        return _smollm3_layers(settings, family, types, layers)
    return _qwen_windows(settings, types, layers)


def own_windows(config: LlamaConfig, model_type: str, family: Family) -> dict[str, Any]:
    """The settings for our fields of windows and of rotary layers, in a config.json of this model_type."""
    written: dict[str, Any] = {}
    if "sliding_window" in family.known.read:
        written["sliding_window"] = config.sliding_window
    if "use_sliding_window" in family.known.read:
        written["use_sliding_window"] = config.sliding_window is not None
        if config.sliding_window is not None and config.layer_types is None and family.windows == "qwen":
            written["max_window_layers"] = 0  # the first layer that has one
    if config.layer_types is not None or family.windows in ("pattern", "smollm3"):
        kind = FULL if config.sliding_window is None else SLIDING
        written["layer_types"] = list(config.layer_types or [kind] * config.num_hidden_layers)
    if model_type == "smollm3":
        written["no_rope_layers"] = list(config.no_rope_layers or [1] * config.num_hidden_layers)
    return written


def _in_turn(pattern: Any, layers: int) -> tuple[str, ...]:
    """One layer without a window in every `pattern` layers, the others with one."""
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 1:
        raise refusal("sliding_window_pattern", pattern, "it must be an integer, 1 or more")
    return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(layers))


def _qwen_windows(settings: Mapping[str, Any], types: tuple[str, ...] | None, layers: int) -> dict[str, Any]:
    is_used, first = _is_used(settings), settings.get("max_window_layers")
    first = 28 if first is None else first
    if not isinstance(first, int) or isinstance(first, bool):
        raise refusal("max_window_layers", first, "it must be an integer")
    window = settings.get("sliding_window", 4096) if is_used else None
    if types is None and window is not None:
        types = tuple(SLIDING if i >= first else FULL for i in range(layers))
    return _window_fields(types, window)


def _window_fields(types: tuple[str, ...] | None, window: Any) -> dict[str, Any]:
    """The fields for layers of these types, where those with a window have this one."""
    if types is None or SLIDING not in types:
        return {"sliding_window": None}
    if window is None:
        raise refusal("layer_types", list(types), "layers with a window want use_sliding_window, and sliding_window")
    return {"sliding_window": window, "layer_types": types if FULL in types else None}


def _smollm3_layers(
    settings: Mapping[str, Any], family: Family, types: tuple[str, ...] | None, layers: int
) -> dict[str, Any]:
    turned = settings.get("no_rope_layers")
    if turned is None:
        interval = settings.get("no_rope_layer_interval")
        interval = family.pattern if interval is None else interval
        if not isinstance(interval, int) or isinstance(interval, bool) or interval < 1:
            raise refusal("no_rope_layer_interval", interval, "it must be an integer, 1 or more")
        turned = [int((i + 1) % interval != 0) for i in range(layers)]
    if not isinstance(turned, list | tuple) or len(turned) < layers or any(x not in (0, 1) for x in turned):
        raise refusal("no_rope_layers", turned, f"it must be a list of 0 and 1, one of each of {layers} layers")
    turned = tuple(int(x) for x in turned[:layers])
    window = settings.get("sliding_window") if _is_used(settings) else None
    if types is None and window is not None:
        types = tuple(FULL if x else SLIDING for x in turned)
    return {"no_rope_layers": turned if 0 in turned else None, **_window_fields(types, window)}


def _is_used(settings: Mapping[str, Any]) -> bool:
    is_used = settings.get("use_sliding_window") or False
    if not isinstance(is_used, bool):
        raise refusal("use_sliding_window", is_used, "it must be True or False")
    return is_used
