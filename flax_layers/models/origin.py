"""The settings that parameters came with, from which the checkpoints written of them start."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


class Origin(str):
    """Settings of a checkpoint as JSON, by the names of their files.

    It is a string, so that it is written as JSON with a config. Configs have it as a field that is not compared. Models
    have it as an attribute that is: else a program compiled for one model would return its origin with another one's
    results.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Origin({', '.join(json.loads(self))})"


def settings_in(origin: str | None, name: str) -> dict[str, Any] | None:
    """The settings of one file, if there are some."""
    settings: dict[str, Any] | None = json.loads(origin or "{}").get(name)
    return settings


def with_settings(origin: str | None, name: str, settings: Mapping[str, Any]) -> Origin:
    """The origin, with these settings instead of those of that name."""
    return Origin(json.dumps(json.loads(origin or "{}") | {name: dict(settings)}, default=_plain))


def remember(model: Any, name: str, settings: Mapping[str, Any]) -> None:
    """Adds settings to a model's origin, in place."""
    model.origin = with_settings(model.origin, name, settings)
    model.config = dataclasses.replace(model.config, origin=model.origin)


def end_tokens(origin: str | None) -> tuple[int, ...]:
    """The tokens that end a text, of generation_config.json, or of config.json where that has none.

    Raises:
      ValueError: an eos_token_id that is neither an integer nor a list of integers.
    """
    for name in ("generation_config.json", "config.json"):
        ends = (settings_in(origin, name) or {}).get("eos_token_id")
        if ends is None:
            continue
        tokens = ends if isinstance(ends, list) else [ends]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise ValueError(f"eos_token_id={ends!r} of {name} is no integer or list of integers: give eos_token=")
        return tuple(tokens)
    return ()


def _plain(value: Any) -> Any:
    """For JSON: a number of NumPy's, the name of a dtype of torch's, a set."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.item() if hasattr(value, "item") else str(value).removeprefix("torch.")
