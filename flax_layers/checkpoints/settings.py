"""Settings in the files of other libraries: each is read, harmless, or has the value that our models compute with.

All others are refused: an unknown setting may change what a model computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Known:
    """The known settings in a file.

    Attributes:
      read: names of those that are read.
      values: names of those that change what is computed -> our models' values for them; None is allowed, too.
      harmless: reason -> names of those that do not change it.
      restated: names of those that say again what a field of our configuration is -> the field.
    """

    read: frozenset[str]
    values: Mapping[str, tuple[Any, ...]]
    harmless: Mapping[str, tuple[str, ...]]
    restated: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def check(self, settings: Mapping[str, Any], where: str, suffix: str = "") -> None:
        """Raises a ValueError for the first setting that is neither known nor None.

        Args:
          settings: of the file.
          where: what the file is.
          suffix: what follows a setting in a message.
        """
        harmless = {name for names in self.harmless.values() for name in names}
        for name, value in settings.items():
            if value is None or name in self.read or name in harmless or name in self.restated:
                continue
            allowed = self.values.get(name, ())
            if not any(same(value, x) for x in allowed):
                expected = " or ".join(map(repr, allowed)) or "null"
                why = f"it must be {expected}" if name in self.values else "it is not known"
                raise refusal(name, value, f"{why} in {where}", suffix)

    def check_restated(self, settings: Mapping[str, Any], config: Any, where: str) -> None:
        """Raises a ValueError for the first setting that says of a field what the configuration does not have."""
        for name, field in self.restated.items():
            value, ours = settings.get(name), getattr(config, field)
            if value is not None and not same(value, ours):
                raise refusal(name, value, f"{field} is {ours!r} in {where}")


def refusal(name: str, value: Any, why: str, suffix: str = "") -> ValueError:
    """The error for a setting that our models do not have, with its remedy."""
    text = repr(value)
    text = text if len(text) <= 200 else f"{text[:200]}..."
    return ValueError(
        f"{name}={text}{suffix} is not supported: {why}. If it does not change what is computed, ignore=({name!r},) "
        "reads the file without it."
    )


def check_settings(settings: Any, door: str, file: str, folder_door: str) -> None:
    """Raises a TypeError unless the settings are a dictionary; it names this door, and the one for folders."""
    if isinstance(settings, Mapping):
        return
    raise TypeError(
        f"{door} takes a dictionary, not a {type(settings).__name__}: "
        + ("give config.to_dict()" if hasattr(settings, "to_dict") else f"give what {file} holds")
        + (f"; {folder_door} takes a folder" if isinstance(settings, str | PathLike) else "")
    )


def without(settings: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """A copy of the settings without those that are to be ignored.

    Raises:
      TypeError: an `ignore` that is no sequence of names.
    """
    is_sequence = isinstance(ignore, Collection) and not isinstance(ignore, str | bytes)
    if not is_sequence or not all(isinstance(name, str) for name in ignore):
        raise TypeError(f"ignore={ignore!r} must be a sequence of names of settings, as ignore=('auto_map',)")
    return {name: value for name, value in settings.items() if name not in ignore}


def same(value: Any, other: Any) -> bool:
    """Whether they are equal, True and False being no numbers."""
    if isinstance(value, bool | np.bool_) != isinstance(other, bool):
        return False
    return type(value) is type(other) and value == other if isinstance(other, dict | list | str) else value == other
