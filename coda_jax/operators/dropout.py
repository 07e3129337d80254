"""Dropout whose bits are made of an element's position, so that no mask is drawn, stored or kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue.random_bits import column_bits, is_kept, row_bits
from coda_jax.graph.values import is_float


def dropout(key: jax.Array, x: jax.Array, rate: float) -> jax.Array:
    """x with a part of its elements set to zero at random, the others divided by 1 - rate.

        y[..., j] = x[..., j] / (1 - rate) where hash(r[...] + c[j]) < 2^32 (1 - rate), else 0

    r has 32 random bits for each row, drawn of the key by JAX, and c a hash of the column's number; the hash is
    lowbias32, of 32 bits. So an element's bits depend on the key and on its place in the whole array alone: they are
    the same under any sharding, in `jax.checkpoint` and in the backward pass, where they are computed again. Under
    `coda.fuse` all this is a part of the epilogue in front; elsewhere XLA fuses it. Nothing as large as x is kept.

    Its bits are others than those of `jax.random.bernoulli`, and meant for dropout alone: of 93 thousand rows, one pair
    draws the same r on average, and has the same elements left.

    Args:
      key: of `jax.random.key`, or one of two uint32.
      x: (..., D), floats.
      rate: the part of the elements that is dropped, in [0, 1).

    Returns:
      An array of x's shape and dtype.

    Raises:
      TypeError: x is no array of floats.
      ValueError: another rate.
    """
    x = jnp.asarray(x)
    if not is_float(x.dtype):
        raise TypeError(f"dropout: x is {x.dtype}; it must be an array of floats")
    if not 0 <= rate < 1:
        raise ValueError(f"dropout: rate = {rate}; it must be at least 0 and less than 1")
    if rate == 0:
        return x
    rows = row_bits(key, (*x.shape[:-1], 1))
    columns = column_bits(lax.iota(jnp.int32, x.shape[-1] if x.ndim else 1))
    kept = is_kept(rows, columns, rate).reshape(x.shape)
    scaled = x.astype(jnp.promote_types(x.dtype, jnp.float32)) * (1 / (1 - rate))
    return jnp.where(kept, scaled.astype(x.dtype), jnp.zeros((), x.dtype))
