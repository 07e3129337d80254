"""Which products the kernel can address and cut at all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import Program
from coda_jax.tiles.config import choose_tiling
from coda_jax.tiles.cost_model import Product

_MAX_PARAMETER_BYTES = 4096  # as in ffi/handler.cc


def unsupported_reason(
    a: jax.ShapeDtypeStruct,
    b: jax.ShapeDtypeStruct,
    program: Program,
    out_dtypes: Sequence[np.dtype],
    transpose_a: bool,
    transpose_b: bool,
) -> str | None:
    """The rule that keeps the kernel from computing this product, with the value that breaks it; None if none does.

    Shapes are those of the product itself: (M, K) or (K, M), (K, N) or (N, K), with or without a leading batch axis.
    """
    for name, array in (("a", a), ("b", b)):
        if array.dtype not in (jnp.bfloat16, jnp.float16):
            return f"{name} is {np.dtype(array.dtype).name}; the kernel multiplies bfloat16 and float16"
    if a.dtype != b.dtype:
        return f"a is {np.dtype(a.dtype).name} and b is {np.dtype(b.dtype).name}; the kernel wants one dtype"
    k, m = a.shape[-2:] if transpose_a else a.shape[::-1][:2]
    n = b.shape[-2] if transpose_b else b.shape[-1]
    for name, size in (("n", n), ("k", k)):
        if not isinstance(size, int):
            return f"{name} = {size} is symbolic; only m may be"
    if 0 in (m, n, k) or 0 in a.shape or 0 in b.shape:
        return f"m, n, k = {m}, {n}, {k}; an empty product needs no kernel"

    if program.tiles_of_heads:
        return (
            f"operand {program.tiles_of_heads[0]}: a reduction of each head depends on this tile, which the kernel "
            "reads once; it reduces heads of what follows from acc and vectors"
        )
    split = program.splits
    rows = [("a", a.shape[-1], a.dtype), ("b", b.shape[-1] if transpose_b else n // split, b.dtype)]
    rows += [(f"operand {i}", n // split, program.operands[i].dtype) for i in program.tile_operands]
    rows += [
        (f"output {store.output}", store.part[1] - store.part[0] if store.part else n // split, dtype)
        for store, dtype in zip(program.stores, out_dtypes, strict=True)
    ]
    for name, size, dtype in rows:
        if not isinstance(size, int):
            return f"{name}: its rows have the symbolic length {size}"
        row_bytes = size * np.dtype(dtype).itemsize
        if row_bytes % 16:
            return (
                f"{name}: a row{' of a half' if split > 1 and name != 'a' else ''} of {size} {np.dtype(dtype).name} is "
                f"{row_bytes} bytes; TMA addresses multiples of 16"
            )
    for name, array in (("a", a), ("b", b)):
        known = [size for size in array.shape if isinstance(size, int)]
        if math.prod(known) >= 2**40 or math.prod(known[:-1]) >= 2**31 or known[-1] >= 2**31:
            return f"{name}: shape {array.shape} is beyond the kernel's 32-bit coordinates"
    buffers = 2 + len(program.operands) + len(program.stores) + len(program.reductions)
    maps = 2 + len(program.tile_operands) + len(program.stores)
    if 128 * maps + 8 * buffers + 16 > _MAX_PARAMETER_BYTES:
        return (
            f"product and epilogue have {buffers} arrays, {maps} of them matrices; a launch takes "
            f"{_MAX_PARAMETER_BYTES - 16} bytes, at 128 a matrix and 8 an array"
        )
    try:
        choose_tiling(Product(m, n, k, transpose_b=transpose_b), program, out_dtypes)
    except ValueError as error:
        return str(error)
    return None
