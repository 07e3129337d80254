"""How far two results are from each other."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def _squares(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jnp.sum(jnp.square(x - y)), jnp.sum(jnp.square(y))


def distance(
    results: Any, reference: Any, kind_of: Callable[[Any], str] = jax.tree_util.keystr, *, floor: float = 0.0
) -> float:
    """The largest |x - y| / |y| over the arrays of two trees; arrays of the same kind, by their path, are one.

    Below this part of the largest |y|, `floor`, no |y| counts: the gradient of a key's bias is the rest of a sum that
    is zero.
    """
    kinds: dict[str, list[tuple[jax.Array, jax.Array]]] = collections.defaultdict(list)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(results), jax.tree.leaves(reference), strict=True):
        kinds[kind_of(path)].append(_squares(x, y))
    sums = [(float(sum(d for d, _ in of)), float(sum(n for _, n in of))) for of in kinds.values()]
    least = floor**2 * max(n for _, n in sums)
    return max((d / max(n, least, 1e-300)) ** 0.5 for d, n in sums)  # zeros are at no distance from zeros
