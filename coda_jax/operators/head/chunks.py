"""A loop over chunks of tokens: all of them, or those that a mask keeps, which are brought together; their size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import FACTORS
from coda_jax.epilogue.values import same_size


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some of the rows of arrays.

    Attributes:
      start, size: of the chunk among the rows, or among the kept ones.
      rows: where there is a mask, the kept ones' numbers in their order, followed by numbers beyond the last row.
    """

    start: Any
    size: Any
    rows: jax.Array | None = None

    def of(self, x: Any) -> Any:
        """The chunk's rows of x, None for None; after the last kept row the first one again, which is finite."""
        if x is None:
            return None
        if self.rows is None:
            return x if same_size(self.size, x.shape[0]) else lax.dynamic_slice_in_dim(x, self.start, self.size)
        rows = self._own()
        return jnp.take(x, jnp.where(rows < x.shape[0], rows, self.rows[0]), axis=0, mode="clip")

    def or_zeros(self, x: Any) -> Any:
        """The chunk's rows of x, None for None; zeros after the last kept row."""
        if x is None or self.rows is None:
            return self.of(x)
        return jnp.take(x, self._own(), axis=0, mode="fill", fill_value=0)

    def put(self, rows: jax.Array, values: jax.Array) -> jax.Array:
        """`rows`, an array of all rows, with the chunk's values in their places."""
        if self.rows is not None:
            return rows.at[self._own()].set(values, mode="drop", unique_indices=True, indices_are_sorted=True)
        has_all_rows = same_size(values.shape[0], rows.shape[0])
        return values if has_all_rows else lax.dynamic_update_slice_in_dim(rows, values, self.start, 0)

    def _own(self) -> jax.Array:
        assert self.rows is not None
        has_all_rows = same_size(self.size, self.rows.shape[0])
        return self.rows if has_all_rows else lax.dynamic_slice_in_dim(self.rows, self.start, self.size)


def over_chunks(
    step: Callable[[Any, Chunk], Any],
    state: Any,
    rows: Any,
    size: int | None,
    mask: jax.Array | None = None,
    *,
    all_chunks: bool = False,
) -> Any:
    """step(state, chunk) for the chunks of so many rows.

    Args:
      step: gives the next state.
      rows: their number.
      size: of a chunk; without a mask the last one may be shorter. None: all rows are one chunk.
      mask: (rows,) bool: which are kept. There are as many steps as chunks of kept rows, perhaps none.
      all_chunks: as many steps as without a mask, which JAX can differentiate.
    """
    if mask is not None and isinstance(rows, int) and rows == 0:
        return state
    if mask is not None:
        size = rows if size is None else size
        steps = -(-rows // size)
        kept = kept_rows(mask, steps * size)
        count = steps if all_chunks else (jnp.sum(mask, dtype=jnp.int32) + (size - 1)) // size
        return lax.fori_loop(0, count, lambda i, state: step(state, Chunk(i * size, size, kept)), state)
    if size is None:
        return step(state, Chunk(0, rows))
    state = lax.fori_loop(0, rows // size, lambda i, state: step(state, Chunk(i * size, size)), state)
    return step(state, Chunk(rows // size * size, rows % size)) if rows % size else state


def chunk_size(rows: Any, row_bytes: int, chunk_bytes: int) -> int | None:
    """Rows of a chunk, a multiple of 128; None: one chunk.

    All have one size if that takes less than twice as many chunks as are needed, else nearly one: a last chunk of
    another size has its own kernels and memory.
    """
    most = max(chunk_bytes // row_bytes // 128 * 128, 128)
    if not isinstance(rows, int) or rows <= most:
        return None
    needed = -(-rows // most)
    alike = (count for count in range(needed, 2 * needed) if rows % (128 * count) == 0)
    return _round_up(-(-rows // next(alike, needed)), 128)


def columns_of(vocabulary: int, dtype: Any) -> int:
    """Columns of the logits: the vocabulary, or a multiple of 128 where rows of it cannot be addressed."""
    if np.dtype(dtype).name not in FACTORS or vocabulary * np.dtype(dtype).itemsize % 16 == 0:
        return vocabulary
    return _round_up(vocabulary, 128)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def kept_rows(mask: jax.Array, size: Any) -> jax.Array:
    """(size,) int32: the numbers of the rows that a mask (rows,) keeps, followed by rows, rows + 1, ..."""
    rows = mask.shape[0]
    places = jnp.cumsum(mask, dtype=jnp.int32) - 1
    beyond = rows + lax.iota(jnp.int32, size)
    # Rows that are not kept have distinct places beyond the last.
    places = jnp.where(mask, places, size + lax.iota(jnp.int32, rows))
    return beyond.at[places].set(lax.iota(jnp.int32, rows), mode="drop", unique_indices=True)
