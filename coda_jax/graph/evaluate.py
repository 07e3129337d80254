"""A graph as plain JAX, value by value: the reference that plans are compared with."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits
from coda_jax.epilogue.user_code import default_types
from coda_jax.graph.calls import Result, results_of_call
from coda_jax.graph.values import Leaf, Map, Product, Transposed, Value, is_float, reachable

_FLOAT32 = np.dtype(FLOAT32)


def evaluate(
    values: Sequence[Value], arrays: Mapping[Value, jax.Array], dtype: jax.typing.DTypeLike
) -> list[jax.Array]:
    """The arrays of these values: results of products in float32, of maps in the maps' own dtypes.

    Args:
      arrays: of leaves, and of other values that are known.
      dtype: to which the factors of products are rounded, except factors of 8 bits.
    """
    known = dict(arrays)
    with default_types():
        for value in reachable(values, known):
            if value not in known:
                known[value] = _evaluated(value, known, dtype)
    return [known[value] for value in values]


def _evaluated(value: Value, known: Mapping[Value, jax.Array], dtype: jax.typing.DTypeLike) -> jax.Array:
    if isinstance(value, Product):
        pairs = [(_as_factor(known[a], dtype), _as_factor(known[b], dtype)) for a, b in value.pairs]
        if value.groups is not None:
            return _grouped_product(value, *pairs[0], known[value.groups])
        axes = ((int(not value.transpose_a),), (int(value.transpose_b),))
        products = [lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=FLOAT32) for a, b in pairs]
        return functools.reduce(operator.add, products)
    if isinstance(value, Leaf):
        raise KeyError(f"no array of a leaf of shape {value.shape}")
    if isinstance(value, Result):
        return results_of_call([value], [known[x] for x in value.inputs])[value].reshape(value.shape)
    return applied(value, [known[x] for x in value.inputs])


def applied(value: Value, inputs: Sequence[jax.Array]) -> jax.Array:
    """A map or a transpose, from the arrays of its inputs."""
    if isinstance(value, Transposed):
        return inputs[0].T
    assert isinstance(value, Map), f"{type(value).__name__} is not known yet"
    return value(*map(as_seen, inputs))


def _grouped_product(value: Product, a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
    """A product of groups: each group's matrix times its own rows, the others as zeros."""
    ends = jnp.cumsum(sizes)
    row_groups = jnp.searchsorted(ends, jnp.arange(a.shape[0]), side="right")
    own = (row_groups == jnp.arange(sizes.shape[0])[:, None]).astype(a.dtype)  # (G, rows)
    b = jnp.swapaxes(b, 1, 2) if value.transpose_b else b
    which = "gr,rm,rn->gmn" if value.transpose_a else "gr,rk,gkn->rn"
    return jnp.einsum(which, own, a, b, preferred_element_type=FLOAT32)


def _as_factor(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """x rounded; an x of 8 bits keeps its values, which bfloat16 has too."""
    return x.astype(jnp.bfloat16 if is_of_8_bits(x.dtype) else dtype)


def as_seen(x: jax.Array) -> jax.Array:
    """x as a map sees it."""
    is_same = x.dtype == _FLOAT32 and not jax.typeof(x).weak_type
    return x.astype(jnp.float32) if is_float(x.dtype) and not is_same else x
