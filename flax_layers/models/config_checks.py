"""What configurations refuse, before anything is made of them."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_counts(config: Any, *names: str, least: int = 1) -> None:
    """Checks fields that are counts; those with the default None may be None.

    Raises:
      ValueError: one is no integer, or below `least`.
    """
    for name in names:
        value = getattr(config, name)
        if value is None and getattr(type(config), name, 0) is None:
            continue
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise ValueError(f"{type(config).__name__}: {name}={value!r}; it must be an integer, {least} or more")


def check_not_negative(config: Any, *names: str) -> None:
    """Checks fields that are numbers.

    Raises:
      ValueError: one is not a number, or below 0.
    """
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int | float | np.number) or not 0 <= value < float("inf"):
            raise ValueError(f"{type(config).__name__}: {name}={value!r}; it must be a number, 0 or more")
