"""coda.gemm: a matrix product with an epilogue written in JAX."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import Epilogue, TileStore
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.primitives import batching as batching
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


def gemm(
    a: jax.Array,
    b: jax.Array | Sequence[jax.Array],
    *operands: jax.Array,
    epilogue: Callable[..., Any] | None = None,
    out_dtype: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    residuals: str = "preactivation",
    implementation: str = "auto",
    config: GemmConfig | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
    out_sharding: jax.P | None = None,
) -> Any:
    """epilogue(a @ b, *operands), where the epilogue runs inside the product on the float32 accumulator.

        acc[m, n] = sum_k a[m, k] b[k, n] in float32;   outputs = epilogue(acc, *operands)

    The factors are multiplied in their common dtype, `jnp.promote_types(a.dtype, b.dtype)`: bfloat16 with float16
    gives float32. The Hopper kernel takes bfloat16 and float16; for everything else, and on every other platform, XLA
    evaluates the same function.

    Factors of 8 bits, float8_e4m3fn and float8_e5m2, may be mixed with each other and with nothing else. The kernel
    takes them as (M, K) and (N, K); in other layouts XLA multiplies them, on a Hopper GPU in 8 bits and elsewhere as
    bfloat16, which has all their values. They have no gradient: a function with one quantises inside a custom_vjp.

    Args:
      a: (..., M, K) bfloat16, float16, float32, float8_e4m3fn or float8_e5m2. The epilogue sees the leading axes
        flattened into M. With transpose_a (K, M), without leading axes.
      b: (K, N); with transpose_b (N, K). N may be several axes, which the epilogue sees as one and tiles of the result
        have again; where it works on halves of N they are (2, N/2). Several matrices (K, Ni) are one with N = sum Ni,
        joined on each device: a mesh may cut each, if the epilogue returns their columns apart (jnp.split) or the
        two of them are its halves.
      *operands: scalars (), also Python's, row vectors (N,) or (1, N), column vectors (..., M, 1) and tiles
        (..., M, N). N/2 or 2N may stand in the place of N where the epilogue works on halves, of acc or of wider
        tiles beside it. Where it works on heads of Dh columns, also tables of them, (..., M, Dh), and vectors (Dh,); a
        table (S, Dh), which it repeats with jnp.tile, where S divides M (with leading axes: is M). Dh/2 may stand
        in the place of Dh. All are bfloat16, float16 or float32; tiles may also be float8_e4m3fn or float8_e5m2, what
        is no tile and not over heads also int32 or bool.
      epilogue: a JAX function f(acc, *operands) -> output or pytree of outputs, of whole arrays, local to a tile:
        elementwise operations, the two halves of N or 2N, and as outputs sums, maxima and minima along rows or columns,
        the maximum of all, and log-sum-exps (`coda.logsumexp`, `jax.nn.logsumexp`) along rows. A tile may be returned
        transposed, y.T, and in `coda.contraction_order`.
        acc and every floating operand are float32 inside it; `astype` rounds, `coda.saturate` too. A value in
        float8_e4m3fn or float8_e5m2 can be stored, and converted to another dtype, and no more. Arrays that it closes
        over become operands, with gradients (but what a custom_vjp function closes over has none). None returns acc.
      out_dtype: of the tile outputs: one dtype, or a pytree of dtypes (None for the default) that is a prefix of what
        the epilogue returns. By default it is a's, bfloat16 of factors of 8 bits; but what the epilogue itself makes
        float8_e4m3fn or float8_e5m2 stays so. Reductions are float32.
      transpose_a, transpose_b: how a and b are stored.
      residuals: what is kept for the gradient of an epilogue that is not linear in acc: "preactivation" keeps acc
        rounded to the common dtype of a and b, but float32 where that is float16, which would overflow, and bfloat16
        of factors of 8 bits, and runs the derivative as one XLA kernel; "recompute" keeps only the arguments and runs
        the derivative in the epilogue of the product computed again. The derivatives of a maximum and of a log-sum-exp
        need the finished one: there "recompute" computes the rounded acc again and goes on as "preactivation".
      implementation: "auto" uses the kernel where it can, and warns once per reason on a GPU where it cannot; "cuda"
        raises there; "xla" never uses it.
      config: tile and pipeline sizes of the kernel; not those of the gradient's products.
      input_output_aliases: {operand index: flat output index} lets a float32 tile output take the place of a float32
        tile operand of its shape, to accumulate without a copy.
      out_sharding: the sharding of the product (..., M, N), and of tiles of its shape beside it and of the result (of
        transposed ones with the axes in the other order), over the explicit axes of the mesh of `jax.set_mesh`; its
        other axes are passed over. Default as the factors say, and where these leave it open, since mesh axes shard K
        in both, as the first tile.

    Returns:
      What the epilogue returns, with the leading axes of a in the place of M and the axes of N in that of N: of a
      transposed tile (*N, *M). Results are finished and have the same shapes on every platform.

    Raises:
      TypeError: an argument of another dtype or kind; a gradient of a factor of 8 bits.
      ValueError: shapes that do not fit; an out_sharding with more axes than the product, or with mesh axes that the
        mesh has not, or that do not cut the product evenly.
      NotTileLocalError (a ValueError): an epilogue that one tile of the product cannot compute by itself, on every
        platform.
      NotImplementedError: implementation="cuda" where the kernel cannot run, when the call is lowered; forward-mode
        differentiation.

    Numerics: float32 accumulation and epilogue, one rounding at the store. The gradient is JAX's own of the epilogue,
    taken at the rounded acc ("preactivation") or at the float32 one ("recompute"), so ties of maxima are split as JAX
    splits them. Where a derivative changes within acc's rounding only "recompute" is right: in bfloat16 an acc of 160
    is off by up to 0.5, and so the gradient of exp(acc - lse) by 20 %; with "recompute" by 0.25 %. The cotangent of
    acc is rounded to the common dtype; in float16 scale the loss, as in any float16 program. Under vmap a batch of a
    beside a b that it shares is more rows, and the gradient of b one product that sums over the batch, but with
    transpose_a.
    Reverse mode only, of any order: a Hessian is jax.jacrev(jax.jacrev(f)). checkify's float_checks do not look into a
    product, for which JAX has no public rule; jax_debug_nans does, and names the operation of the epilogue.
    Call it under jit: outside, each call traces the epilogue anew.
    In the kernel sin and cos are right to 2e-7, and those of a product of two float32 values, as in
    sin(position * frequency), of the exact product up to 2^22 rad; XLA rounds the product first, by 0.03 rad at 10^6.
    """
    named = {f"b[{i}]": x for i, x in enumerate(b)} if isinstance(b, tuple | list) else {"b": b}
    check_factors("gemm", a=a, **named)
    a, *parts = (_factor(name, x) for name, x in {"a": a, **named}.items())
    operands = tuple(as_operand("gemm", i, x) for i, x in enumerate(operands))
    check_options("gemm", residuals, implementation, config)
    check_epilogue("gemm", epilogue, operands)
    if not isinstance(input_output_aliases, Mapping | None):
        raise TypeError(f"gemm: input_output_aliases = {input_output_aliases!r}; it must be a dict or None")
    leading, m, n = _product_shape(a, parts, transpose_a, transpose_b)
    aliases = tuple(sorted((input_output_aliases or {}).items()))

    one_row = same_size(math.prod(leading) * m, 1)
    if one_row:
        aliases = ()  # a tile of one row is a row vector: there is nothing to gain
    for i, x in enumerate(operands):
        _check_rows(i, x, leading, m, n)
    columns = (n,) if len(parts) > 1 else parts[0].shape[:-1] if transpose_b else parts[0].shape[1:]
    shape = (*leading, m, *columns)
    check_out_sharding("gemm", out_sharding, shape)

    def checked_dtypes(traced: Epilogue) -> list[np.dtype]:
        dtypes = tile_dtypes("gemm", traced, out_dtype, result_dtype(a), one_row)
        _check_aliases(traced, dtypes, aliases, len(operands))
        return dtypes

    options = Options(
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        residuals=residuals,
        implementation=implementation,
        config=config,
        input_output_aliases=aliases,
        halves=parts[0].ndim == 3 and parts[0].shape[0 if transpose_b else 1] == 2,
        out_sharding=sharding_over_explicit(out_sharding),
    )
    right = parts if len(parts) > 1 else parts[0]
    outputs, traced = product(a, right, operands, epilogue, checked_dtypes, options)
    if options.out_sharding is not None:
        outputs = placed_tiles(outputs, traced.program, shape, len(leading) + 1, options.out_sharding)
    return jax.tree.unflatten(traced.out_tree, outputs)


def _factor(name: str, x: Any) -> jax.Array:
    if np.ndim(x) < 2:
        raise ValueError(f"gemm: {name} has shape {np.shape(x)}; it must be a matrix")
    return jnp.asarray(x)


def _product_shape(
    a: jax.Array, parts: Sequence[jax.Array], transpose_a: bool, transpose_b: bool
) -> tuple[tuple[Any, ...], Any, Any]:
    """Leading axes of a, M and N."""
    b = parts[0]
    if any(x.ndim != 2 or not same_size(x.shape[transpose_b], b.shape[transpose_b]) for x in parts[1:]) or (
        len(parts) > 1 and b.ndim != 2
    ):
        shapes = ", ".join(str(x.shape) for x in parts)
        raise ValueError(f"gemm: b has factors of shapes {shapes}; several must be matrices with one K")
    if transpose_a and a.ndim != 2:
        raise ValueError(f"gemm: a has shape {a.shape}; with transpose_a it must be (K, M), without leading axes")
    columns, k_b = (b.shape[:-1], b.shape[-1]) if transpose_b else (b.shape[1:], b.shape[0])
    n = math.prod(columns) if len(parts) == 1 else sum(x.shape[not transpose_b] for x in parts)
    *leading, m, k = (a.shape[1], a.shape[0]) if transpose_a else a.shape
    if not same_size(k, k_b):
        raise ValueError(
            f"gemm: a {a.shape}{' transposed' if transpose_a else ''} has K = {k}, b {b.shape}"
            f"{' transposed' if transpose_b else ''} has K = {k_b}; they must be equal"
            + (". Use jax.vmap for a batch of products." if b.ndim > 2 else "")
        )
    return tuple(leading), m, n


def _check_rows(index: int, x: jax.Array, leading: tuple[Any, ...], m: Any, n: Any) -> None:
    """Raises where an operand has rows, and other leading axes than the product."""
    if not leading or x.ndim < 2 or (x.ndim == 2 and same_size(x.shape[0], 1)):
        return  # what it is, if anything, the epilogue's trace decides
    if x.ndim == 2 and same_size(x.shape[0], m) and isinstance(n, int) and 1 < x.shape[1] < n:
        return  # so for a table of heads that the epilogue repeats
    if not same_shape(x.shape[:-1], (*leading, m)):
        raise ValueError(
            f"gemm: operand {index} has shape {x.shape}; beside an output of shape {(*leading, m, n)} it must be "
            f"a scalar (), a row vector ({n},) or (1, {n}), a column vector {(*leading, m, 1)} or a tile "
            f"{(*leading, m, n)}; beside heads of Dh columns also a table ({m}, Dh) or of rows {(*leading, m)}"
        )


def _check_aliases(
    traced: Epilogue, dtypes: Sequence[np.dtype], aliases: Sequence[tuple[int, int]], num_operands: int
) -> None:
    stores: dict[int, TileStore] = {store.output: store for store in traced.program.stores}
    if aliases and traced.program.columns:  # a tile at the end of a slice has columns of the next one
        raise ValueError(
            f"gemm: input_output_aliases = {dict(aliases)} beside outputs that are slices of the columns; nothing can "
            "be accumulated in place there"
        )
    if len({output for _, output in aliases}) < len(aliases):
        raise ValueError(f"gemm: input_output_aliases = {dict(aliases)} gives two operands to one output")
    for index, output in aliases:
        if not 0 <= index < num_operands:
            raise ValueError(f"gemm: input_output_aliases names operand {index}; there are {num_operands}")
        operand = traced.program.operands[index]
        if not operand.kind.by_tensor_map or operand.dtype != jnp.float32:
            raise ValueError(
                f"gemm: input_output_aliases names operand {index}, {operand.kind.shapes} {operand.dtype}; only a "
                "float32 tile can be aliased"
            )
        store = stores.get(output)
        moved = store is not None and (store.slice or store.transposed or store.contraction_order)
        whole = store is not None and store.width is operand.width and not moved
        if not whole or dtypes[output] != jnp.float32:
            raise ValueError(
                f"gemm: input_output_aliases gives operand {index} to output {output}, which is not a float32 tile of "
                "its shape"
            )
