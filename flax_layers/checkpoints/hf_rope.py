"""Rotary embeddings in Hugging Face's config.json: base, scaling, and the fraction of a head that is turned."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from flax_layers.checkpoints.hf_families import FAMILIES, Family
from flax_layers.checkpoints.hf_settings import RESTATED
from flax_layers.checkpoints.settings import refusal, same, without
from flax_layers.config_checks import is_number
from flax_layers.models.gemma import GemmaConfig
from flax_layers.models.llama_config import LAYER_TYPES, LlamaConfig
from flax_layers.rope_scaling import SCALINGS, DynamicRopeScaling, LongRopeScaling, RotaryScaling

# Dictionaries of rotary settings; `transformers` reads the first.
ROPE = ("rope_scaling", "rope_parameters")
ORIGINAL = "original_max_position_embeddings"
# A Phi-3's own name for a rope_type.
_LONG = {"su": "longrope"}


def read_rope(settings: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The fields of our configuration that say how heads are turned."""
    default_theta = family.defaults.get("rope_theta", 10000.0)
    where, rope = _rope_dictionary(settings)
    if not any(settings.get(name) for name in ROPE):
        rope = {**family.defaults.get("rope_scaling", {}), **rope}
    fields: dict[str, Any] = {}
    if "rope_local_base_freq" in family.known.read:
        local = settings.get("rope_local_base_freq") or family.defaults["rope_local_base_freq"]
        if set(rope) & set(LAYER_TYPES):
            full, sliding = (dict(rope.get(kind) or {}) for kind in LAYER_TYPES)
            kinds = {sliding.get(name, "default") for name in ("rope_type", "type")}
            if kinds != {"default"} or sliding.keys() - {"rope_type", "type", "rope_theta"}:
                raise refusal(where, rope, "layers with a sliding window turn heads without scaling")
            rope, local = full, sliding.get("rope_theta", local)
        elif settings.get("rope_parameters"):
            raise refusal("rope_parameters", rope, f"it must have a dictionary for each of {', '.join(LAYER_TYPES)}")
        fields["rope_local_base_freq"] = local
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise refusal("type", rope["type"], f"rope_type is {kind!r} in {where}")
    kind = _LONG.get(kind, kind) if family.turns_parts else kind
    known = ["default", "longrope"] if family.turns_parts else ["default", *SCALINGS]
    if kind not in known:
        raise refusal(where, rope, f"rope_type {kind!r} must be one of {', '.join(known)}")
    theta = rope.get("rope_theta", default_theta)
    fields["rope_theta"] = float(theta) if is_number(theta) else theta
    fields["rope_scaling"] = _scaling(kind, rope, settings, where, family.defaults.get(ORIGINAL))
    partial = rope.get("partial_rotary_factor", 1)
    if family.turns_parts:
        fields["partial_rotary_factor"] = partial
    elif not same(partial, 1):
        raise refusal("partial_rotary_factor", partial, "heads are turned whole, as with 1.0")
    return fields


def _scaling(
    kind: str, rope: Mapping[str, Any], settings: Mapping[str, Any], where: str, default_original: Any
) -> RotaryScaling | None:
    cls = SCALINGS.get(kind)
    fields = {field.name: field for field in dataclasses.fields(cls)} if cls is not None else {}
    for name, value in rope.items():
        if name in {"rope_type", "type", "rope_theta", "partial_rotary_factor", *fields} or value is None:
            continue
        allowed = RESTATED.get(f"{kind}.{name}", ())
        if not any(same(value, x) for x in allowed):
            why = f"must be {' or '.join(map(repr, allowed))}" if allowed else "is not known"
            raise refusal(name, value, f"it {why} of rope_type {kind!r} in {where}")
    if cls is None:
        return None
    values = {name: rope[name] for name in fields if rope.get(name) is not None}
    original = settings.get(ORIGINAL, default_original)
    if kind == "dynamic":
        original = settings.get("max_position_embeddings")
    if original is not None and values.get(ORIGINAL, original) != original:
        raise refusal(ORIGINAL, original, f"it is another one in {where}")
    if kind != "llama3":
        values = _implied(kind, fields, settings, values.get(ORIGINAL, original)) | values
    required = [name for name, field in fields.items() if kind == "llama3" or field.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"rope_type {kind!r} lacks {', '.join(missing)}: {dict(rope)}")
    return cls(**values)


def _implied(kind: str, fields: Collection[str], settings: Mapping[str, Any], original: Any) -> dict[str, Any]:
    """The fields that follow from settings beside the dictionary, as in transformers."""
    context = settings.get("max_position_embeddings")
    original = context if original is None else original
    if ORIGINAL not in fields or original is None:
        return {}
    implied = {ORIGINAL: original}
    if kind == "longrope" and is_number(context) and is_number(original) and original > 0:
        implied["factor"] = context / original
    return implied


def _rope_dictionary(settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and settings of the rotary embedding: transformers 5 has them in one dictionary, older ones in two."""
    dictionaries = {name: settings[name] for name in ROPE if settings.get(name)}
    for name, value in dictionaries.items():
        if not isinstance(value, Mapping):
            raise refusal(name, value, "it must be a dictionary or null")
    where, rope = next(iter(dictionaries.items()), ("rope_scaling", {}))
    if any(dict(other) != dict(rope) for other in dictionaries.values()):
        raise refusal(
            "rope_parameters", dictionaries["rope_parameters"], f"rope_scaling is {dictionaries['rope_scaling']!r}"
        )
    outside = {name: settings.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    return where, {name: value for source in (outside, rope) for name, value in source.items() if value is not None}


def with_rope_ignored(settings: Mapping[str, Any], rest: dict[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """The settings that are not ignored, also in rotary dictionaries; an ignored dictionary keeps its rope_theta."""
    # The length may also be a setting outside of these dictionaries, and then contradict theirs.
    inside = [name for name in ignore if name != ORIGINAL]
    for name in ROPE:
        if isinstance(rope := settings.get(name), Mapping):
            rope = without(rope, inside)
            if name not in ignore:
                rest[name] = rope
            elif rope.get("rope_theta") is not None:
                rest["rope_theta"] = rope["rope_theta"]
    return rest


def own_rope(config: LlamaConfig, model_type: str) -> dict[str, Any]:
    """The settings of a config.json for our rotary fields, with the scaling as `rope_scaling`."""
    scaling = config.rope_scaling
    written: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_scaling": None}
    if scaling is not None:
        fields = {name: value for name, value in dataclasses.asdict(scaling).items() if value is not None}
        if isinstance(scaling, DynamicRopeScaling) and fields.pop(ORIGINAL) != config.max_position_embeddings:
            raise ValueError(
                f"{scaling!r} has no place in a config.json beside max_position_embeddings="
                f"{config.max_position_embeddings}: that is its original_max_position_embeddings there"
            )
        for name, value in fields.items():
            fields[name] = list(value) if isinstance(value, tuple) else value
        written["rope_scaling"] = {"rope_type": scaling.rope_type, **fields}
    if model_type == "phi3":
        written["partial_rotary_factor"] = config.partial_rotary_factor
        if isinstance(scaling, LongRopeScaling):
            written[ORIGINAL] = scaling.original_max_position_embeddings
    if model_type == "gemma3_text" and isinstance(config, GemmaConfig):
        written["rope_local_base_freq"] = config.rope_local_base_freq
    return written


def written_rope(kept: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The settings that a model came with, replaced by our own; rotary ones have the form that they came in."""
    if own["rope_scaling"] is not None and ORIGINAL not in own:
        kept.pop(ORIGINAL, None)
    parameters, scaling = kept.pop("rope_parameters", None), kept.pop("rope_scaling", None)
    rope = own.pop("rope_scaling") or {"rope_type": "default"}
    nested = parameters if set(parameters or {}) & set(LAYER_TYPES) else None
    former_rope = (nested or {}).get(LAYER_TYPES[0]) if nested else parameters or scaling
    former_rope = former_rope or {}
    former_kind = former_rope.get("rope_type", former_rope.get("type", "default"))
    if _LONG.get(former_kind, former_kind) == rope["rope_type"]:
        rope = {**former_rope, **rope}
        rope.pop("type", None)
    if parameters:
        kept.pop("rope_theta", None)
        rope["rope_theta"] = own.pop("rope_theta")
        if "partial_rotary_factor" in own:
            rope["partial_rotary_factor"] = own.pop("partial_rotary_factor")
    if nested is not None:
        local = {**(nested.get(LAYER_TYPES[1]) or {}), "rope_type": "default"}
        local["rope_theta"] = own.pop("rope_local_base_freq")
        kept.pop("rope_local_base_freq", None)
        return kept | own | {"rope_parameters": dict(zip(LAYER_TYPES, (rope, local), strict=True))}
    if parameters:
        return kept | own | {"rope_parameters": rope}
    is_implied = rope["rope_type"] == "default" and "rope_scaling" not in FAMILIES[own["model_type"]].defaults
    return kept | own | {"rope_scaling": None if is_implied else rope}
