"""Types inside shard_map: which manual mesh axes an array varies over."""

from __future__ import annotations

from typing import Any

import jax


def varying_axes(*arrays: Any) -> frozenset[str]:
    """The manual mesh axes of an enclosing shard_map over which any of the arrays varies."""
    axes: frozenset[str] = frozenset()
    for x in arrays:
        axes |= frozenset(jax.typeof(x).manual_axis_type.varying)
    return axes


def vary(axes: frozenset[str], *arrays: Any) -> list[Any]:
    """The arrays, all varying over `axes`, so that every cotangent has its argument's type."""
    missing = [tuple(sorted(axes - varying_axes(x))) for x in arrays]
    return [jax.lax.pcast(x, names, to="varying") if names else x for x, names in zip(arrays, missing, strict=True)]
