"""A graph by XLA, value by value, as plain JAX: what a plan is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.epilogue.user_code import default_types
from coda_jax.graph.values import Leaf, Map, Product, Value, is_float, reachable


def evaluate(
    wanted: Sequence[Value], arrays: Mapping[Value, jax.Array], dtype: jax.typing.DTypeLike
) -> list[jax.Array]:
    """The arrays of these values: results of products float32, of maps as the maps make them.

    Args:
      arrays: of leaves, and of other values that are known.
      dtype: to which the factors of products are rounded, but those of 8 bits.
    """
    known = dict(arrays)
    with default_types():
        for value in reachable(wanted, known):
            if value not in known:
                known[value] = _evaluated(value, known, dtype)
    return [known[value] for value in wanted]


def _evaluated(value: Value, known: Mapping[Value, jax.Array], dtype: jax.typing.DTypeLike) -> jax.Array:
    if isinstance(value, Product):
        a, b = (_as_factor(known[x], dtype) for x in value.inputs)
        axes = ((int(not value.transpose_a),), (int(value.transpose_b),))
        return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=FLOAT32)
    if isinstance(value, Map):
        return value(*(as_seen(known[x]) for x in value.inputs))
    assert isinstance(value, Leaf)
    raise KeyError(f"no array of a leaf of shape {value.shape}")


def _as_factor(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounded; but one of 8 bits keeps its values, which bfloat16 has too."""
    return x.astype(jnp.bfloat16 if is_of_8_bits(x.dtype) else dtype)


def as_seen(x: jax.Array) -> jax.Array:
    """As a map sees it."""
    return x.astype(jnp.float32) if is_float(x.dtype) else x
