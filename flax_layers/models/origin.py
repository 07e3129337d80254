"""The settings that parameters came with, which the checkpoints written of them start from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


class Origin(str):
    """Settings of a checkpoint as JSON, by the names of their files.

    A string, so that it is written as JSON with a config. A config has one as a field that does not count when configs
    are compared. A model has it too, where it does count: else a program compiled for one model, whose results have
    that model's attributes, would give them to another one.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Origin({', '.join(json.loads(self))})"


def settings_in(origin: str | None, name: str) -> dict[str, Any] | None:
    """The settings of one file, if there were some."""
    found: dict[str, Any] | None = json.loads(origin or "{}").get(name)
    return found


def with_settings(origin: str | None, name: str, settings: Mapping[str, Any]) -> Origin:
    """The origin, with these settings in the place of those of that name."""
    return Origin(json.dumps(json.loads(origin or "{}") | {name: dict(settings)}, default=_plain))


def remember(model: Any, name: str, settings: Mapping[str, Any]) -> None:
    """Adds settings to a model's origin, in place."""
    model.origin = with_settings(model.origin, name, settings)
    model.config = dataclasses.replace(model.config, origin=model.origin)


def end_tokens(origin: str | None) -> tuple[int, ...]:
    """The tokens that end a text, of generation_config.json, or of config.json where that has none.

    Raises:
      ValueError: what is neither an integer nor a list of integers.
    """
    for name in ("generation_config.json", "config.json"):
        ends = (settings_in(origin, name) or {}).get("eos_token_id")
        if ends is None:
            continue
        found = ends if isinstance(ends, list) else [ends]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in found):
            raise ValueError(f"eos_token_id={ends!r} of {name} is no integer or list of integers: give eos_token=")
        return tuple(found)
    return ()


def _plain(value: Any) -> Any:
    """For JSON: a number of NumPy's, the name of a dtype of torch's, a set."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.item() if hasattr(value, "item") else str(value).removeprefix("torch.")
