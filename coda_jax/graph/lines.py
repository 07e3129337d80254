"""Helpers for the library's own blocks: what `coda.Value` does not offer to users."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue.groups import RowGroups, group_offsets
from coda_jax.graph.author import Computed, Value, mapped_values
from coda_jax.graph.rounded import Recipe
from coda_jax.graph.values import ForEachRow, Product, kept_weight


def fused(
    name: str,
    f: Callable[..., Any],
    x: Value,
    *operands: Value | None,
    inverse: Callable[..., Any] | None = None,
    derived: str = "",
    **options: Any,
) -> Any:
    """x.map(f, *operands, inverse=inverse) under a name; f gets operands that are None as None, and the options."""
    function = with_absent(functools.partial(f, **options), [operand is not None for operand in operands])
    function.__name__ = name
    back = None if inverse is None else functools.partial(inverse, **options)
    inputs = [x, *(operand for operand in operands if operand is not None)]
    return mapped_values(x._trace, function, inputs, inverse=back, derived=derived)


def with_absent(f: Callable[..., Any], present: Sequence[bool]) -> Callable[..., Any]:
    """f(x, *operands) as a function of x and of the operands that are present; f gets the others as None."""

    def of_present(x: jax.Array, *arrays: jax.Array) -> Any:
        given = iter(arrays)
        return f(x, *(next(given) if flag else None for flag in present))

    return of_present


def by_xla(name: str, f: Callable[..., Any], x: Value, *operands: Value | None, **options: Any) -> Any:
    """`fused` for a function that no kernel's epilogue can compute; no note says so."""
    results = fused(name, f, x, *operands, derived=name, **options)
    for value in jax.tree.leaves(results):
        value._node.is_pass = True
    return results


def product(
    x: Value,
    weights: Sequence[Value],
    *,
    keep_weights: bool,
    recipe: Recipe | None = None,
    history: Any = None,
) -> Value:
    """x w, where w is given as pieces (K, N_i), or as one (K, N), or (K, 2, F) of which a mesh may shard F.

    With keep_weights w is kept for the backward pass in the products' dtype, multiplied by the scale of x's RMSNorm.
    A recipe replaces the block's; history: as in `Value.matmul`.
    """
    w = weights[0] if len(weights) == 1 else concatenate(weights)
    return x._times(w, keep=keep_weights, recipe=recipe, history=history)


def grouped_product(x: Value, w: Value, group_sizes: Value, *, keep_weights: bool) -> Value:
    """`Value.ragged_dot` for w (G, K, N), or (G, K, 2, F)."""
    node = w._as_weight(2)
    node = kept_weight(node) if keep_weights else node
    flat = Computed(w._trace, node, None, (*w.shape[:2], math.prod(w.shape[2:])))
    if w._plain is not None:
        flat._plain = w._plain.reshape(flat.shape)
    return x.ragged_dot(flat, group_sizes)


def for_each_row(x: Value, group_sizes: Value, rows: Any) -> Value:
    """The row of x (G, N), or (G, 2, F), that each of these rows, sorted by group, has: (rows, N).

    In the epilogue of a product of these groups it costs no array. Its cotangent is summed over the rows of each group.
    """
    plain = None
    if x._plain is not None:
        groups = RowGroups.of(group_offsets(group_sizes._array(), rows), rows)
        plain = groups.for_each_row(x._plain.reshape(x.shape[0], -1))
    node = x._viewed((x.shape[0], math.prod(x.shape[1:])))
    return Computed(x._trace, ForEachRow(node, group_sizes._node, rows), plain)


def concatenate(arrays: Sequence[Value]) -> Value:
    """Matrices (K, N_i), or vectors (N_i,), concatenated along their last axis."""
    first, *others = arrays
    matrix: Value = mapped_values(first._trace, _concatenated, [first, *others])
    return matrix


def column(x: Value) -> Value:
    """(M,) as (M, 1)."""
    plain = None if x._plain is None else x._plain[:, None]
    return Computed(x._trace, x._viewed((*x.shape, 1)), plain)


def like(value: Value, x: Value) -> Value:
    """The value; a product is sharded as x over explicit mesh axes."""
    if isinstance(value._node, Product):
        value._node.like = x._node
    return value


def store_as(value: Value, dtype: Any) -> Value:
    """A result of the block, in this dtype."""
    value.dtype = np.dtype(dtype)
    return value


def _concatenated(*arrays: jax.Array) -> jax.Array:
    return jnp.concatenate(arrays, axis=-1)
