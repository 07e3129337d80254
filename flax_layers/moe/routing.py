"""Rows of tokens to their experts and back: the permutation that sorts by expert, its gather and its sum.

A token t of T has k choices, the routed rows t k .. t k + k - 1. `Order` is the permutation that sorts routed rows by
expert, and those of an expert by token. With G the (T k, T) matrix whose row n is the unit vector of the token of
sorted row n,

    gathered(x) = G x,   combined(y) = G^T y

so each is the other's gradient, and neither is a scatter with additions: combined(y)[t] is a sum of the k rows that the
inverse permutation names. Sums are in float32, in the order of the choices: results are deterministic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from flax_layers.remat import EXPERT_ROWS, ROUTING, named

# experts(rows (R, D), row_scale (R,) float32, group_sizes (E,) int32) -> (R, D)
Experts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Order(NamedTuple):
    """The permutation that sorts routed rows by expert.

    Attributes:
      rows: (T k,) int32, the routed row that is sorted row n.
      places: (T k,) int32, the inverse: the sorted row of each routed row.
      group_sizes: (E,) int32, how many routed rows each expert has.
    """

    rows: jax.Array
    places: jax.Array
    group_sizes: jax.Array


def order_by_expert(ids: jax.Array, num_experts: int) -> Order:
    """The stable order by expert.

    Args:
      ids: (T, k) integers, 0 to num_experts - 1. Others are undefined.
      num_experts: E.

    Raises:
      ValueError: ids of another rank or no integers, or more routed rows than int32 has numbers.
    """
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"ids are {ids.dtype} of shape {ids.shape}; they must be integers (T, k)")
    flat = ids.reshape(-1).astype(jnp.int32)
    return Order(*(named(x, ROUTING) for x in (*_sorted(flat, num_experts), _counts(flat, num_experts))))


def _sorted(ids: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """The permutation and its inverse."""
    count = ids.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    if isinstance(count, int) and num_experts * count < 2**32:
        # One array of distinct keys: XLA sorts it by radix on a GPU, and needs no stable sort of pairs.
        keys = lax.sort(ids.astype(jnp.uint32) * jnp.uint32(count) + index.astype(jnp.uint32), is_stable=False)
        rows = (keys % jnp.uint32(max(count, 1))).astype(jnp.int32)
    else:
        rows = jnp.argsort(ids, stable=True).astype(jnp.int32)
    places = jnp.zeros_like(index).at[rows].set(index, unique_indices=True, mode="promise_in_bounds")
    return rows, places


def _counts(ids: jax.Array, num_experts: int) -> jax.Array:
    """How often each number occurs, by comparison: a scatter of additions would be atomic on a GPU."""
    return jnp.sum(ids[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gathered(x: jax.Array, order: Order, k: int) -> jax.Array:
    """Each sorted row's token: x (T, ...) -> (T k, ...)."""
    return x.at[order.rows // k].get(mode="promise_in_bounds")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def combined(y: jax.Array, order: Order, k: int, dtype: Any = None) -> jax.Array:
    """The sums of each token's k sorted rows, in float32, y (T k, ...) -> (T, ...) of `dtype`, default that of y."""
    routed = y.at[order.places].get(mode="promise_in_bounds")
    wide = jnp.promote_types(y.dtype, jnp.float32)
    total = jnp.sum(routed.reshape(-1, k, *y.shape[1:]).astype(wide), axis=1)
    return total.astype(y.dtype if dtype is None else dtype)


def _gathered_forward(x: jax.Array, order: Order, k: int) -> tuple[jax.Array, Order]:
    return gathered(x, order, k), order


def _gathered_backward(k: int, order: Order, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return combined(cotangent, order, k, None), None


def _combined_forward(y: jax.Array, order: Order, k: int, dtype: Any) -> tuple[jax.Array, tuple[Order, Any]]:
    return combined(y, order, k, dtype), (order, jnp.zeros((0,), y.dtype))


def _combined_backward(k: int, dtype: Any, kept: tuple[Order, jax.Array], cotangent: jax.Array) -> Any:
    order, empty_y = kept
    return gathered(cotangent.astype(empty_y.dtype), order, k), None


gathered.defvjp(_gathered_forward, _gathered_backward)
combined.defvjp(_combined_forward, _combined_backward)


def sorted_experts(
    experts: Experts, x: jax.Array, ids: jax.Array, weights: jax.Array, num_experts: int, *, dtype: Any = None
) -> jax.Array:
    """y[t] = sum over j of weights[t, j] * expert ids[t, j] of x[t]: no token is dropped.

    Args:
      experts: called with rows (T k, D), sorted by expert, their weights (T k,) float32 and the number of rows of each
        expert (E,) int32; returns (T k, D), multiplied by the weights.
      x: (T, D).
      ids: (T, k) integers, the experts of each token.
      weights: (T, k) float32.
      num_experts: E.
      dtype: of the result; default that of what `experts` returns.

    Returns:
      (T, D), sums in float32, rounded once.

    Raises:
      ValueError: shapes that do not fit.
    """
    if x.ndim != 2 or ids.shape != weights.shape or ids.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"x (T, D), ids (T, k) and weights (T, k) have shapes {x.shape}, {ids.shape} and {weights.shape}"
        )
    order, k = order_by_expert(ids, num_experts), ids.shape[1]
    row_scale = gathered(weights.reshape(-1), order, 1)
    rows = named(gathered(x, order, k), EXPERT_ROWS)
    return combined(experts(rows, row_scale, order.group_sizes), order, k, dtype)
