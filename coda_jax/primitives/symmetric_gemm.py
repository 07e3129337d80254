"""coda.symmetric_gemm: a matrix product whose result is symmetric, of which half of the tiles are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import Epilogue, Program
from coda_jax.epilogue.values import same_size
from coda_jax.primitives.call_arguments import (
    as_operand,
    check_epilogue,
    check_options,
    check_out_sharding,
    tile_dtypes,
)
from coda_jax.primitives.derivative import Options, product
from coda_jax.primitives.dtypes import check_factors, result_dtype
from coda_jax.primitives.mesh_types import sharding_over_explicit
from coda_jax.primitives.product_arrays import placed_tiles
from coda_jax.tiles.config import GemmConfig

_NAME = "symmetric_gemm"


def symmetric_gemm(
    a: jax.Array,
    b: jax.Array,
    *operands: jax.Array,
    epilogue: Callable[..., Any] | None = None,
    out_dtype: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    residuals: str = "preactivation",
    implementation: str = "auto",
    config: GemmConfig | None = None,
    out_sharding: jax.P | None = None,
) -> Any:
    """epilogue(a @ b, *operands) for results that are symmetric: the kernel computes half of the tiles.

        acc[m, n] = sum_k a[m, k] b[k, n] in float32;   outputs = epilogue(acc, *operands)

    Only tiles on and below the diagonal are multiplied. Each tile below it is stored twice, as it is and transposed.
    The caller promises that the product is symmetric: b is a transposed (`symmetric_gemm(x, x, transpose_b=True)` is
    x @ x.T), or a and b are symmetric and commute, as powers of one matrix do. The epilogue must keep it so: its tiles
    are symmetric, and column and row vectors appear in pairs. Nothing checks that; where it does not hold, results
    above the diagonal are those below it on a Hopper GPU, and the general product's elsewhere. Compare with
    `coda.gemm`, which takes the same arguments.

        x = jnp.ones((2048, 8192), jnp.bfloat16)
        gram = coda.symmetric_gemm(x, x, transpose_b=True)
        polynomial = coda.symmetric_gemm(gram, gram, gram, epilogue=lambda acc, a: 2.03 * acc - 4.78 * a)

    Args:
      a: (N, K) bfloat16, float16 or float32; with transpose_a (K, N). A batch is `jax.vmap` of this function.
      b: (K, N); with transpose_b (N, K).
      *operands: as of `coda.gemm`, without heads: scalars (), row vectors (N,) or (1, N), column vectors (N, 1),
        symmetric tiles (N, N).
      epilogue: as of `coda.gemm`; its outputs are tiles (N, N), not transposed. None returns acc.
      out_dtype: as of `coda.gemm`; the kernel stores results of 16 bits.
      residuals, implementation, config, out_sharding: as of `coda.gemm`.

    Returns:
      What the epilogue returns: (N, N) each.

    Raises:
      TypeError, ValueError, NotTileLocalError, NotImplementedError: as `coda.gemm`. ValueError: a product that is not
        square; an epilogue that combines columns, or has outputs that are reductions, slices or transposed.

    Numerics: those of `coda.gemm`. The gradient is that of the general product: cotangents need not be symmetric.
    Over a mesh that cuts the rows or columns of the result each device computes its part as a general product; over
    one that cuts the batch of a vmap each computes half of its own.
    """
    check_factors(_NAME, a=a, b=b)
    a, b = jnp.asarray(a), jnp.asarray(b)
    operands = tuple(as_operand(_NAME, i, x) for i, x in enumerate(operands))
    check_options(_NAME, residuals, implementation, config)
    check_epilogue(_NAME, epilogue, operands)
    shape = _checked_shape(a, b, transpose_a, transpose_b)
    check_out_sharding(_NAME, out_sharding, shape)

    def checked_dtypes(traced: Epilogue) -> list[np.dtype]:
        _check_program(traced.name, traced.program)
        return tile_dtypes(_NAME, traced, out_dtype, result_dtype(a), False)

    options = Options(
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        residuals=residuals,
        implementation=implementation,
        config=config,
        out_sharding=sharding_over_explicit(out_sharding),
        symmetric=True,
    )
    outputs, traced = product(a, b, operands, epilogue, checked_dtypes, options)
    if options.out_sharding is not None:
        outputs = placed_tiles(outputs, traced.program, shape, 1, options.out_sharding)
    return jax.tree.unflatten(traced.out_tree, outputs)


def _checked_shape(a: jax.Array, b: jax.Array, transpose_a: bool, transpose_b: bool) -> tuple[Any, Any]:
    for name, x in (("a", a), ("b", b)):
        if x.ndim != 2:
            raise ValueError(
                f"{_NAME}: {name} has shape {x.shape}; it must be a matrix. jax.vmap makes a batch of them."
            )
    (m, k), (n, k_of_b) = a.shape[:: -1 if transpose_a else 1], b.shape[:: 1 if transpose_b else -1]
    given = f"a {a.shape}{' transposed' * transpose_a} @ b {b.shape}{' transposed' * transpose_b}"
    if not same_size(k, k_of_b):
        raise ValueError(f"{_NAME}: {given} has K = {k} in a and K = {k_of_b} in b; they must be equal")
    if not same_size(m, n):
        raise ValueError(f"{_NAME}: {given} has shape {(m, n)}; a symmetric result must be square")
    return m, n


def _check_program(name: str, program: Program) -> None:
    """Raises where the epilogue's outputs are no whole tiles, or its columns are combined."""
    if program.halves.count > 1:
        raise ValueError(f"{_NAME}: epilogue '{name}' combines columns; that of a symmetric result is elementwise")
    tiles = {store.output for store in program.stores if not (store.slice or store.transposed)}
    for output in range(program.num_outputs):
        if output not in tiles:
            raise ValueError(
                f"{_NAME}: epilogue '{name}': output {output} is no tile (N, N), but a reduction, a slice or a "
                "transposed tile; those of a symmetric result are tiles. Compute it outside, or use coda.gemm."
            )
