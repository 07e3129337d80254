"""Products by XLA as float32 accumulators: of two matrices, and of groups of rows with one matrix each.

Rows are sorted by group. `offsets` (G + 1,) holds the first row of each group and the end of the last one; see
`epilogue/groups.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from coda_jax.epilogue import types_of
from coda_jax.epilogue.dtypes import is_of_8_bits
from coda_jax.epilogue.groups import RowGroups
from coda_jax.epilogue.rounding import stored
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.dtypes import compute_dtype
from coda_jax.primitives.mesh_types import (
    axes_of_dimension,
    explicit_axes,
    explicit_sharding,
    mesh_axes_of,
    partition_spec,
    without_axes,
)
from coda_jax.tiles.arch import current

_NO_BATCH: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def accumulate(
    a: jax.Array, b: jax.Array, *, transpose_a: bool, transpose_b: bool, out_sharding: Any, in_8_bits: bool = False
) -> jax.Array:
    """a @ b, (M, N) float32, from two matrices converted to their common dtype.

    An explicit mesh axis that shards m in a and n in b, as FSDP's does, shards m of the product: b is gathered.

    Args:
      in_8_bits: whether XLA multiplies factors of 8 bits as they are, by a Hopper GPU's instructions for them. The
        precision keeps cuBLAS from summing more than `Arch.unpromoted_k` of k in the tensor cores alone.
    """
    dtypes, precision = [compute_dtype(a, b)] * 2, None
    if in_8_bits and is_of_8_bits(a.dtype):
        dtypes = [a.dtype, b.dtype]
        precision = lax.Precision.HIGHEST if a.shape[0 if transpose_a else 1] > current().unpromoted_k else None
    contraction = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    if out_sharding is None:
        m_mesh_axes = axes_of_dimension(a, 1 if transpose_a else 0)
        b = without_axes(b.astype(dtypes[1]), 0 if transpose_b else 1, m_mesh_axes)
    return lax.dot_general(
        _converted(a, dtypes[0]),
        _converted(b, dtypes[1]),
        (contraction, ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )


def _converted(x: jax.Array, dtype: Any) -> jax.Array:
    """x in this dtype. XLA may drop the rounding of an x of 8 bits that is widened, so it is rounded once more."""
    return (stored(x.astype(jnp.float32), x.dtype) if is_of_8_bits(x.dtype) and x.dtype != dtype else x).astype(dtype)


def accumulate_groups(
    a: jax.Array, b: jax.Array, offsets: jax.Array, *, ragged: Dimension, transpose_b: bool, out_sharding: Any
) -> jax.Array:
    """`accumulate` for groups. Rows in no group have any values in the result if M is ragged, and add nothing if K is.

    Args:
      a, b: if M is ragged (M, K) and (G, K, N), or (G, N, K) with transpose_b; if K is ragged (K, M) and (K, N).
      out_sharding: of the product of one group.

    Returns:
      (M, N) if M is ragged, (G, M, N) if K is; float32.
    """
    groups, ragged_k, dtype = RowGroups.of(offsets, a.shape[0]), ragged is Dimension.K, compute_dtype(a, b)
    if (sharding := explicit_sharding(a)) is not None:
        one_group = functools.partial(
            accumulate, transpose_a=ragged_k, transpose_b=transpose_b, out_sharding=out_sharding
        )
        (dense,) = types_of(lambda a, b: one_group(a, b if ragged_k else b[0]), a, b)
        cuts = mesh_axes_of(dense.sharding.spec, 2)
        sharding = NamedSharding(sharding.mesh, partition_spec([(), *cuts] if ragged_k else cuts))
    # The first group may have the rows before it too: they are masked to zeros, or their results belong to no group.
    sizes = jnp.diff(offsets.at[0].set(0))
    contraction = ((0,), (0,)) if ragged_k else ((1,), (2 if transpose_b else 1,))

    def product(a: jax.Array, b: jax.Array, sizes: jax.Array, rows: jax.Array) -> jax.Array:
        b = b if ragged_k else without_unread(b, rows)
        return lax.ragged_dot_general(
            a,
            b,
            sizes,
            lax.RaggedDotDimensionNumbers(
                dot_dimension_numbers=(contraction, _NO_BATCH),
                lhs_ragged_dimensions=[0],
                rhs_group_dimensions=[] if ragged_k else [0],
            ),
            preferred_element_type=jnp.float32,
        )

    # In JAX's expansion of it no explicit axis may shard the arguments.
    run = product
    if sharding is not None:
        run = jax.sharding.auto_axes(product, axes=explicit_axes(sharding.mesh), out_sharding=sharding)
    a, b = a.astype(dtype), b.astype(dtype)
    if ragged_k:
        a, b = groups.masked(a), groups.masked(b)
    return run(a, b, sizes, jnp.diff(offsets))


def without_unread(b: jax.Array, sizes: jax.Array) -> jax.Array:
    """b (G, ...) with zeros for groups without rows, which may hold anything.

    XLA multiplies all rows by the matrix of each group, those of other groups as zeros, and 0 times infinity is NaN.
    """
    return jnp.where((sizes > 0).reshape(-1, *[1] * (b.ndim - 1)), b, jnp.zeros((), b.dtype))
