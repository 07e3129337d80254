"""Random bits of an element, made of those of its row and of its column: what `coda.dropout` and attention drop by.

    bits(row, column) = hash(r[row] + c[column])          c[column] = hash(column)

r has 32 random bits for each row, drawn of a key by JAX; the hash is lowbias32, of 32 bits. So an element's bits depend
on the key and on its place in the whole array alone. All are int32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# The multipliers of lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018), as int32, and its shifts.
_MULTIPLIERS, _SHIFTS = (0x7FEB352D, 0x846CA68B - 2**32), (16, 15, 16)


def row_bits(key: jax.Array, shape: tuple[Any, ...], out_sharding: Any = None) -> jax.Array:
    """The bits of rows, of any shape.

    Args:
      key: of `jax.random.key`, or one of two uint32.
      out_sharding: how the result is sharded over explicit mesh axes; its bits are the same.
    """
    bits = jax.random.bits(key, shape, jnp.uint32, out_sharding=out_sharding)
    return lax.bitcast_convert_type(bits, jnp.int32)


def column_bits(columns: jax.Array) -> jax.Array:
    """The bits of columns, from their numbers in the whole array."""
    return _hashed(columns)


def is_kept(rows: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """Whether elements are left where a part `rate` of them is dropped, from the bits of their rows and columns."""
    return _hashed(rows + columns) < min(round((0.5 - rate) * 2**32), 2**31 - 1)  # they are signed


def _hashed(bits: jax.Array) -> jax.Array:
    """Other bits for each int32, one for one."""
    first, second, third = _SHIFTS
    bits = (bits ^ lax.shift_right_logical(bits, jnp.int32(first))) * jnp.int32(_MULTIPLIERS[0])
    bits = (bits ^ lax.shift_right_logical(bits, jnp.int32(second))) * jnp.int32(_MULTIPLIERS[1])
    return bits ^ lax.shift_right_logical(bits, jnp.int32(third))
