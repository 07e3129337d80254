"""Sinks, which are terms of the sums of rows of scores, and dropout of probabilities.

    p = exp(s - lse)        lse = log(sum exp(s) + exp(sink))        y = dropped(p) v

With a sink the backward pass is what it is without: lse has all of it. Its own gradient is that of a column of scores
whose values are zeros,

    dsink = -sum over rows of exp(sink - lse) delta        delta = rowsum(dy y) - dlse

Dropout is that of `coda.dropout`, of probabilities (B, N, T, S), with the same bits.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.attend.masks import Sizes
from coda_jax.epilogue.random_bits import row_bits
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.primitives.mesh_types import explicit_cuts, explicit_sharding, partition_spec


def checked_sinks(sinks: Any, sizes: Sizes) -> jax.Array | None:
    """Sinks (N,) as the primitives take them, (1, N).

    Raises:
      ValueError: another shape or dtype.
    """
    if sinks is None:
        return None
    sinks = jnp.asarray(sinks)
    if not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(f"attention: sinks is {sinks.dtype}; it must be of a floating dtype")
    if not same_shape(sinks.shape, (sizes.heads,)):
        raise ValueError(f"attention: sinks has shape {sinks.shape}; it must be ({sizes.heads},), one for each head")
    return sinks[None]


def checked_dropout(key: Any, rate: Any, query: jax.Array) -> tuple[float, jax.Array | None]:
    """The rate of dropout, 0 if there is none, and the bits of the rows of probabilities, (B, N, T) int32.

    Raises:
      ValueError: a rate outside of [0, 1) or that is traced, a rate without a key, or no key.
    """
    number = float(rate) if isinstance(rate, numbers.Real) else math.nan
    if not 0 <= number < 1:
        raise ValueError(f"attention: dropout_rate = {rate}; it must be a number of at least 0 and less than 1")
    if number == 0:
        return 0.0, None
    if key is None:
        raise ValueError(f"attention: dropout_rate = {rate} without dropout_key; what is dropped is drawn of a key")
    batch, queries, heads, _ = query.shape
    sharding = explicit_sharding(query)
    if sharding is not None:
        cuts = explicit_cuts(query)
        sharding = sharding.update(spec=partition_spec([cuts[0], cuts[2], cuts[1]]))
    return number, row_bits(key, (batch, heads, queries), sharding)


def sinks_cotangent(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of sinks (1 or B, H), with their type.

    Args:
      lse, delta: (B, H, T).
    """
    wide = sinks[..., None].astype(lse.dtype)
    terms = jnp.where(lse == -jnp.inf, 0, jnp.exp(wide - lse) * -delta)  # of a row without a sum: nothing
    total = jnp.sum(terms, axis=2)
    if same_size(sinks.shape[0], 1):  # one for all sequences
        total = jnp.sum(total, axis=0, keepdims=True)
    return total.astype(sinks.dtype)
