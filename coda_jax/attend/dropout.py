"""Dropout in the kernels: the text of its epilogue, and its arrays.

The epilogue is the one that a product with `coda.dropout` has, of the same function: what is dropped is said by the
sign, so that the backward kernel has it beside the probability.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.attend.spec import MaskSpec
from coda_jax.epilogue import emit, trace
from coda_jax.epilogue.dtypes import FLOAT32, INT32
from coda_jax.epilogue.random_bits import column_bits, is_kept


@functools.cache
def text(rate: float) -> str:
    """CUDA text of dropout::Epilogue, which makes an element p that is dropped -p.

    The bits of its row are a vector (M, 1), those of its column one (N,).
    """

    def signed(p: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
        return jnp.where(is_kept(rows, columns, rate), p, -p)

    size = 128  # the text depends on none
    p = jax.ShapeDtypeStruct((size, size), FLOAT32)
    bits = [jax.ShapeDtypeStruct(shape, INT32) for shape in ((size, 1), (size,))]
    epilogue, _ = trace(signed, p, bits)
    struct = emit(epilogue.program, [jnp.dtype(jnp.float32)], [False] * len(bits))
    return f"namespace dropout {{\n{struct}}}  // namespace dropout\n"


def members(mask: MaskSpec) -> dict[str, Any]:
    """Members of a kernel's Config."""
    return {"has_dropout": mask.has_dropout, "kept_factor": 1 / (1 - mask.dropout_rate)}


def bits(row_bits: jax.Array | None, keys: Any, rows: int = 1) -> list[jax.Array]:
    """The kernels' arrays of dropout, none without it: bits of rows (B, H, T), and of columns (S).

    Args:
      keys: S, which is padded to a multiple of 128.
      rows: the multiple to which T is padded.
    """
    if row_bits is None:
        return []
    columns = column_bits(jnp.arange(-(-keys // 128) * 128, dtype=jnp.int32))
    return [jnp.pad(row_bits, ((0, 0), (0, 0), (0, -row_bits.shape[2] % rows))), columns]
