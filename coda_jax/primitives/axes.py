"""Arrays of many axes, and several arrays, as a matrix or a vector.

M, N and K may each be several axes of an array: (B, T, K) factors, (K, 2, F) halves. N or K may be several arrays,
concatenated: the weights of query, key and value. These are pieces of one matrix. They stay apart in the primitive,
because each may be sharded over a device mesh; a device reshapes its shards, which moves nothing, and concatenates
them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.primitives.mesh_types import explicit_cuts, reshaped


class Dimension(enum.Enum):
    """A dimension of a product; the value is its name in text."""

    BATCH = "batch"
    M = "m"
    N = "n"
    K = "k"
    GROUP = "group"


class ProductAxis(NamedTuple):
    """One axis of a dimension: M may be the axes (M, 0), of batches, and (M, 1), of tokens."""

    dimension: Dimension
    number: int = 0

    def __str__(self) -> str:
        return f"{self.dimension.value}{self.number}"


BATCH = ProductAxis(Dimension.BATCH)
# The product's axis for each axis of an array; None for one that is never sharded. Pieces of a matrix have the same.
ProductAxes = tuple[ProductAxis | None, ...]


class MatrixAxis(NamedTuple):
    """The axes of an array that are one axis of its matrix.

    Attributes:
      dimension: M, N, K or the groups; None for an axis that is never sharded.
      rank: how many axes of the array.
      piece: which piece of a concatenated dimension.
    """

    dimension: Dimension | None
    rank: int = 1
    piece: int = 0


MatrixAxes = tuple[MatrixAxis, ...]  # of an array
Pieces = Sequence[MatrixAxes]  # of the arrays that make one matrix

UNSHARDED = MatrixAxis(None)


class FactorSizes(NamedTuple):
    """The sizes of the axes of M and N in a product's factors; of one half of N, where halves are apart.

    Attributes:
      m, n: sizes.
      m_mesh_axes, n_mesh_axes: the explicit mesh axes over which each is sharded.
      pieces: sizes of the pieces of N or K.
    """

    m: tuple[Any, ...]
    n: tuple[Any, ...]
    m_mesh_axes: tuple[tuple[str, ...], ...]
    n_mesh_axes: tuple[tuple[str, ...], ...]
    pieces: tuple[Any, ...]


def as_matrix(x: Any, axes: MatrixAxes, *, has_batch: bool = False) -> Any:
    """An array with these axes as a matrix or vector. An array of another rank is returned unchanged."""
    counts = [axis.rank for axis in axes]
    first = has_batch + _has_row(x.shape[has_batch:], axes, sum(counts))
    if all(count == 1 for count in counts) or x.ndim != first + sum(counts):
        return x
    shape, rest = x.shape[:first], x.shape[first:]
    for count in counts:
        shape, rest = (*shape, math.prod(rest[:count])), rest[count:]
    return reshaped(x, shape, [*[1] * first, *counts])


def _has_row(shape: Sequence[Any], axes: MatrixAxes, count: int) -> bool:
    """True if a vector of `count` axes has an axis of size 1 in front of them, for its row: (1, N) for (N,)."""
    return len(axes) == 1 and len(shape) == 1 + count and same_size(shape[0], 1)


def flat_rows(x: jax.Array, rows: Sequence[Any]) -> jax.Array:
    """An operand as the epilogue reads it, with one axis for the rows; `rows` are the sizes of all axes of the rows."""
    if x.ndim <= max(len(rows), 1 + (len(rows) == 1)) or not same_shape(x.shape[: len(rows)], rows):
        return x
    return as_matrix(x, (MatrixAxis(Dimension.M, len(rows)), MatrixAxis(Dimension.N, x.ndim - len(rows))))


def concatenated(arrays: Sequence[jax.Array], pieces: Pieces, flags: Sequence[bool] | None = None) -> jax.Array:
    """The matrix or vector that is concatenated from these pieces, or an array whose last axes are the matrix's.

    Args:
      flags: which have a batch axis.
    """
    if len(arrays) == 1:
        return arrays[0]
    if flags is not None and any(flags) and not all(flags):
        batch = next(x.shape[0] for x, flag in zip(arrays, flags, strict=True) if flag)
        each = zip(arrays, flags, strict=True)
        arrays = [x if flag else jnp.broadcast_to(x, (batch, *x.shape)) for x, flag in each]
    return jnp.concatenate(arrays, axis=_joined_axis(pieces))


def _joined_axis(pieces: Pieces) -> int:
    """The axis of the matrix along which its pieces are concatenated, counted from the end."""
    return next(i for i, axis in enumerate(pieces[1]) if axis.piece) - len(pieces[1])


def as_array(x: jax.Array, axes: MatrixAxes, sizes: FactorSizes, *, has_batch: bool = False) -> jax.Array:
    """A matrix or vector with the axes that go with these sizes. An array that has them is returned unchanged."""
    counts = [axis.rank for axis in axes]
    first = has_batch + _has_row(x.shape[has_batch:], axes, 1)
    if all(count == 1 for count in counts) or x.ndim != first + len(axes):
        return x
    shape, old = list(x.shape[:first]), list(explicit_cuts(x))
    new: list[tuple[str, ...]] = old[:first]
    for (dimension, count, _), size, names in zip(axes, x.shape[first:], old[first:], strict=True):
        if count == 1:
            shape, new = [*shape, size], [*new, names]
            continue
        is_m = dimension is Dimension.M
        own, mesh_axes = (sizes.m, sizes.m_mesh_axes) if is_m else (sizes.n, sizes.n_mesh_axes)
        halves = count - len(own)
        shape += [*[2] * halves, *own]
        new += [*[()] * halves, *(tuple(name for name in axis_names if name in names) for axis_names in mesh_axes)]
    return reshaped(x, tuple(shape), cuts=new)


def as_pieces(x: jax.Array, pieces: Pieces, sizes: FactorSizes, *, has_batch: bool = False) -> Iterator[jax.Array]:
    """The arrays of a matrix or vector."""
    if len(pieces) == 1:
        yield as_array(x, pieces[0], sizes, has_batch=has_batch)
        return
    axis = _joined_axis(pieces)
    first = 0
    for axes, size in zip(pieces, sizes.pieces, strict=True):
        piece = jax.lax.slice_in_dim(x, first, first + size, axis=x.ndim + axis)
        first += size
        yield as_array(piece, axes, sizes, has_batch=has_batch)
