"""The checks by which configurations refuse values, before a model is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flax_layers.activation import ACTIVATIONS

UNLIKE = "only equal layers can be scanned, scan_layers must be False for others"


def check_counts(config: Any, *names: str, least: int = 1) -> None:
    """Checks fields that are counts; those with the default None may be None.

    Raises:
      ValueError: one is no integer, or below `least`.
    """
    for name in names:
        value = getattr(config, name)
        if value is None and _may_be_none(config, name):
            continue
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise _refusal(config, name, f"an integer, {least} or more")


def check_not_negative(config: Any, *names: str) -> None:
    """Checks fields that are numbers.

    Raises:
      ValueError: one is not a finite number, or below 0.
    """
    for name in names:
        value = getattr(config, name)
        if not is_number(value) or value < 0:
            raise _refusal(config, name, "a number, 0 or more")


def check_positive(config: Any, *names: str) -> None:
    """Checks fields that are numbers; those with the default None may be None.

    Raises:
      ValueError: one is not a finite number above 0.
    """
    for name in names:
        value = getattr(config, name)
        if value is None and _may_be_none(config, name):
            continue
        if not is_number(value) or value <= 0:
            raise _refusal(config, name, "positive, a number")


def check_flags(config: Any, *names: str) -> None:
    """Checks fields that are True or False; those with the default None may be None.

    Raises:
      ValueError: one is neither, as "false" is.
    """
    for name in names:
        value = getattr(config, name)
        if value is None and _may_be_none(config, name):
            continue
        if not isinstance(value, bool | np.bool_):
            raise _refusal(config, name, "True or False")


def check_activation(config: Any, name: str) -> None:
    """Checks a field that is an activation.

    Raises:
      ValueError: it is no function, and no name in `flax_layers.activation`.
    """
    value = getattr(config, name)
    if not callable(value) and not (isinstance(value, str) and value in ACTIVATIONS):
        raise _refusal(config, name, f"a function, or one of {', '.join(ACTIVATIONS)}")


def check_positive_argument(name: str, value: Any) -> None:
    """Checks an argument that is a number above 0.

    Raises:
      TypeError: it is no number, as an array or a truth value is.
      ValueError: it is not finite, or not above 0.
    """
    refusal = f"{name}={value!r}; it must be a finite number above 0"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{refusal}, not a {type(value).__name__}")
    if not is_number(value) or value <= 0:
        raise ValueError(refusal)


def check_implementation(implementation: Any, soft_cap: float | None, *, has_sinks: bool = False) -> None:
    """Checks an attention's implementation: None, "xla", "cudnn" or a function.

    Raises:
      ValueError: it is none of these, or "cudnn" beside a soft_cap or sinks; sinks beside a soft_cap.
    """
    if not (implementation in (None, "xla", "cudnn") or callable(implementation)):
        raise ValueError(f"{implementation=} must be None, 'xla', 'cudnn' or a function")
    if soft_cap is not None and implementation == "cudnn":
        raise ValueError(
            f"{soft_cap=}: cuDNN's attention by JAX has none; implementation must be None, 'xla' or a function that "
            "takes soft_cap="
        )
    if has_sinks and (soft_cap is not None or implementation == "cudnn"):
        raise ValueError(
            f"sinks beside {soft_cap=}, {implementation=}: there must be no soft cap, and another implementation than "
            "cuDNN's, which JAX's call has without sinks"
        )


def check_alike(settings: Sequence[Mapping[str, Any]]) -> None:
    """Checks that layers can be stacked.

    Args:
      settings: each layer's, by name; "mlp.width", below "mlp", is compared only where all layers have the same "mlp".

    Raises:
      ValueError: they differ in one, which is named with its values.
    """
    unlike: dict[str, str] = {}
    for name in dict.fromkeys(name for layer_settings in settings for name in layer_settings):
        parts = name.split(".")
        if any(".".join(parts[:i]) in unlike for i in range(len(parts))):
            continue
        groups: list[tuple[Any, list[int]]] = []
        for i, value in enumerate(layer_settings.get(name, "missing") for layer_settings in settings):
            same = next((numbers for other, numbers in groups if other is value or other == value), None)
            if same is None:
                groups.append((value, [i]))
            else:
                same.append(i)
        if len(groups) > 1:
            unlike[name] = ", ".join(f"{_text(value)} in {_layers(numbers)}" for value, numbers in groups)
    if unlike:
        told = "; ".join(f"{name or 'the class'} is {text}" for name, text in unlike.items())
        raise ValueError(f"{UNLIKE}: {told}")


def _text(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


def _layers(numbers: list[int]) -> str:
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _may_be_none(config: Any, name: str) -> bool:
    return getattr(type(config), name, 0) is None


def _refusal(config: Any, name: str, rule: str) -> ValueError:
    return ValueError(f"{type(config).__name__}: {name}={getattr(config, name)!r}; it must be {rule}")
