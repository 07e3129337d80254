"""coda.ragged_gemm and coda.ragged_contraction: products of groups of rows, as in a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import ByGroup, Epilogue
from coda_jax.epilogue.dtypes import INT32
from coda_jax.epilogue.group_reductions import group_reductions, reduces_rows
from coda_jax.epilogue.groups import GroupOffsets, check_group_sizes, group_offsets, unmarked
from coda_jax.epilogue.values import same_size
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.call_arguments import (
    as_operand,
    check_epilogue,
    check_options,
    check_out_sharding,
    tile_dtypes,
)
from coda_jax.primitives.derivative import Options, product
from coda_jax.primitives.dtypes import check_dtype
from coda_jax.primitives.fallbacks import with_fallback_note
from coda_jax.primitives.mesh_types import (
    axes_of_dimension,
    mesh_axes_of,
    partition_spec,
    sharding_over_explicit,
    without_axes,
)
from coda_jax.primitives.product_arrays import placed_tiles
from coda_jax.tiles.config import GemmConfig


def ragged_gemm(
    a: jax.Array,
    b: jax.Array | Sequence[jax.Array],
    group_sizes: jax.Array,
    *operands: jax.Array | ByGroup,
    epilogue: Callable[..., Any] | None = None,
    out_dtype: Any = None,
    transpose_b: bool = False,
    residuals: str = "preactivation",
    implementation: str = "auto",
    config: GemmConfig | None = None,
    group_offset: jax.Array | int | None = None,
    out_sharding: jax.P | None = None,
) -> Any:
    """epilogue(acc, *operands), where each group of rows of a is multiplied by a matrix of its own.

        acc[m, n] = sum_k a[m, k] b[g(m), k, n] in float32;   outputs = epilogue(acc, *operands)

    The rows of a are sorted by group: the first group_sizes[0] are multiplied by b[0], the next group_sizes[1] by b[1],
    and so on, as in `jax.lax.ragged_dot`, which it is equal to without an epilogue. Sizes are on the device and may be
    zero. Rows beyond their sum are in no group: they are zeros in every result and every gradient, whatever the
    epilogue; their values in a, in operands and in cotangents, NaN too, affect nothing.

    Args:
      a: (M, K) bfloat16, float16 or float32, rows sorted by group.
      b: (G, K, N); with transpose_b (G, N, K). N may be several axes, which the epilogue sees as one and tiles of the
        result have again; where it works on halves of N, gate and up, they are (2, N/2). Several arrays (G, K, Ni) are
        one with N = sum Ni, as in `gemm`.
      group_sizes: (G,) int32: how many rows each group has.
      *operands: as in `gemm`, scalars (), row vectors (N,) or (1, N), column vectors (M, 1) and tiles (M, N); and
        `coda.ByGroup(x)`, of which each row reads its group's entry: vectors (G, N), with N/2 or 2N as there, or
        scalars (G,) or (G, 1). The epilogue sees these as (M, N) or (M, 1).
      epilogue: as in `gemm`. A row's results may depend on that row alone. A sum, maximum or minimum over rows,
        `jnp.sum(x, axis=0)`, is one for each group: (G, N) instead of (N,), (G,) instead of (); for a group without
        rows it is 0, or an infinity. It can only be returned unchanged. XLA computes it, from a float32 tile that the
        kernel writes for it; `coda.explain` says so.
      out_dtype: of the tile outputs, as in `gemm`; a's by default.
      transpose_b: how the matrices of b are stored.
      residuals: as in `gemm`. With operands by group "recompute" computes the rounded acc again, and goes on as
        "preactivation".
      implementation: as in `gemm`. XLA's form is `jax.lax.ragged_dot_general`, which on most platforms multiplies every
        row by the matrix of every group.
      config: as in `gemm`.
      group_offset: the first group of b where group_sizes has more groups than b, an int32 scalar or (1,): b has the
        groups from group_offset to group_offset + G. Rows of the others are in no group. As in the documentation of
        `jax.lax.ragged_dot`, which itself may raise NotImplementedError for it.
      out_sharding: as in `gemm`. Explicit mesh axes shard K and N; rows and groups are gathered, and a result is
        resharded to it.

    Returns:
      What the epilogue returns: tiles (M, N), results of rows (M,), reductions over rows (G, N).

    Raises:
      TypeError, ValueError, NotTileLocalError, NotImplementedError: as `gemm`; and where a is no matrix, b has no axis
        of groups, group_sizes is not (G,) int32, or operands by group have another number of groups.

    Negative sizes, a sum of sizes above M, and a group_offset by which b's groups are not among group_sizes are
    undefined: rows are then of some groups or none, and no memory outside of the arrays is read or written.

    Numerics: as `gemm`. The gradient of a is a product of groups too, with the pullback in its epilogue or before it,
    and that of b a `ragged_contraction`, written in b's dtype straight from float32. Under `jax.vmap` the products of a
    batch run one after the other. A group without rows may hold anything in b. In XLA's form a value of another that is
    not finite may make rows of all groups NaN, as in `jax.lax.ragged_dot`.
    """
    a = _matrix("ragged_gemm", "a", a)
    several = isinstance(b, tuple | list)
    pieces = [_grouped(f"b[{i}]" if several else "b", x) for i, x in enumerate(b if several else [b])]
    marked = tuple(
        ByGroup(as_operand("ragged_gemm", i, unmarked(x)))
        if isinstance(x, ByGroup)
        else as_operand("ragged_gemm", i, x)
        for i, x in enumerate(operands)
    )
    check_options("ragged_gemm", residuals, implementation, config)
    check_epilogue("ragged_gemm", epilogue, operands)
    groups, m, columns = _sizes(a, pieces, transpose_b)
    offsets = _offsets(group_sizes, m, groups, group_offset)
    shape = (m, *columns)
    check_out_sharding("ragged_gemm", out_sharding, shape)

    def dtypes(traced: Epilogue) -> list[np.dtype]:
        return tile_dtypes("ragged_gemm", traced, out_dtype, a.dtype, same_size(m, 1))

    options = Options(
        transpose_b=transpose_b,
        residuals=residuals,
        implementation=implementation,
        config=config,
        halves=pieces[0].ndim == 4 and same_size(pieces[0].shape[1 if transpose_b else 2], 2),
        ragged=Dimension.M,
        out_sharding=sharding_over_explicit(None if out_sharding is None else _column_spec(out_sharding, len(shape))),
    )
    joined_b = pieces if len(pieces) > 1 else pieces[0]
    outputs, traced = product(a, joined_b, marked, epilogue, dtypes, options, GroupOffsets(offsets))
    if reduces_rows(traced.program):
        for i in group_reductions(traced):
            outputs[i] = with_fallback_note(
                outputs[i],
                f"ragged_gemm '{traced.name}'",
                "a reduction over the rows of each group is left to XLA, from a float32 tile that the kernel writes",
            )
    if options.out_sharding is not None:
        outputs = placed_tiles(outputs, traced.program, shape, 1, sharding_over_explicit(out_sharding))
    return jax.tree.unflatten(traced.out_tree, outputs)


def ragged_contraction(
    a: jax.Array,
    b: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: Any = None,
    implementation: str = "auto",
    config: GemmConfig | None = None,
) -> jax.Array:
    """The product of the rows of each group: the gradient of b in `ragged_gemm`.

        out[g, m, n] = sum_{r in group g} a[r, m] b[r, n], in float32

    It is `jax.lax.ragged_dot_general` with a ragged contracting dimension. The rows of both are sorted by group, as in
    `ragged_gemm`; a group without rows gives zeros, and rows in no group, NaN too, add nothing.

    Args:
      a: (R, M) bfloat16, float16 or float32.
      b: (R, N), of these dtypes too.
      group_sizes: (G,) int32: how many rows each group has.
      out_dtype: of the result, as in `gemm`; a's by default.
      implementation, config: as in `gemm`.

    Returns:
      (G, M, N), rounded once. Its gradients are two products of groups, in the dtypes of a and b.

    Raises:
      TypeError: an argument of another dtype or kind.
      ValueError: shapes that do not fit.
      NotImplementedError: as `gemm`.

    Negative sizes and a sum of sizes above R are undefined: rows are then of some groups or none, and no memory outside
    of the arrays is read or written.
    """
    name = "ragged_contraction"
    a, b = _matrix(name, "a", a), _matrix(name, "b", b)
    check_options(name, "preactivation", implementation, config)
    if not same_size(a.shape[0], b.shape[0]):
        raise ValueError(f"{name}: a {a.shape} has {a.shape[0]} rows, b {b.shape} has {b.shape[0]}; they must be equal")
    _check_group_sizes(name, group_sizes)

    def dtypes(traced: Epilogue) -> list[np.dtype]:
        return tile_dtypes(name, traced, out_dtype, a.dtype, False)

    options = Options(transpose_a=True, implementation=implementation, config=config, ragged=Dimension.K)
    (out,), _ = product(a, b, (), None, dtypes, options, jnp.asarray(group_sizes))
    return out


def _matrix(function: str, name: str, x: Any) -> jax.Array:
    check_dtype(function, name, x)
    if np.ndim(x) != 2:
        raise ValueError(f"{function}: {name} has shape {np.shape(x)}; it must be a matrix, of rows sorted by group")
    return jnp.asarray(x)


def _grouped(name: str, x: Any) -> jax.Array:
    check_dtype("ragged_gemm", name, x)
    if np.ndim(x) < 3:
        raise ValueError(
            f"ragged_gemm: {name} has shape {np.shape(x)}; it must be (G, K, N), or (G, N, K) with transpose_b"
        )
    return jnp.asarray(x)


def _sizes(a: jax.Array, pieces: Sequence[jax.Array], transpose_b: bool) -> tuple[Any, Any, tuple[Any, ...]]:
    """The number of groups, M, and the sizes of all axes of the product's columns."""
    b = pieces[0]
    k_axis = -1 if transpose_b else 1
    alike = all(same_size(x.shape[axis], b.shape[axis]) for x in pieces for axis in (0, k_axis))
    if len(pieces) > 1 and (any(x.ndim != 3 for x in pieces) or not alike):
        shapes = ", ".join(str(x.shape) for x in pieces)
        raise ValueError(f"ragged_gemm: b has factors of shapes {shapes}; several must be (G, K, Ni) with one G and K")
    if not same_size(a.shape[1], b.shape[k_axis]):
        raise ValueError(
            f"ragged_gemm: a {a.shape} has K = {a.shape[1]}, b {b.shape}{' transposed' if transpose_b else ''} has "
            f"K = {b.shape[k_axis]}; they must be equal"
        )
    _check_count("ragged_gemm", "b", b)
    columns = b.shape[1:-1] if transpose_b else b.shape[2:]
    if len(pieces) > 1:
        columns = (sum(x.shape[1 if transpose_b else 2] for x in pieces),)
    return b.shape[0], a.shape[0], columns


def _check_group_sizes(function: str, sizes: Any) -> None:
    if not hasattr(sizes, "dtype") or not hasattr(sizes, "shape"):
        raise TypeError(f"{function}: group_sizes is {type(sizes).__name__}; it must be an array (G,) int32")
    check_group_sizes(sizes, function)
    _check_count(function, "group_sizes", sizes)


def _check_count(function: str, name: str, x: Any) -> None:
    """Raises where the number of groups, the first axis of x, is 0 or symbolic."""
    if not isinstance(x.shape[0], int):
        raise ValueError(f"{function}: {name} has shape {x.shape}; the number of groups must be known, not symbolic")
    if x.shape[0] == 0:
        raise ValueError(f"{function}: {name} has shape {x.shape}; it must have at least one group")


def _offsets(sizes: Any, rows: Any, groups: Any, first: Any) -> jax.Array:
    """The offsets of b's groups."""
    _check_group_sizes("ragged_gemm", sizes)
    sizes = jnp.asarray(sizes)
    sizes = without_axes(sizes, 0, axes_of_dimension(sizes, 0))
    if first is None:
        if sizes.shape[0] != groups:
            raise ValueError(
                f"ragged_gemm: group_sizes has {sizes.shape[0]} groups, b has {groups}; they must be as many, or "
                "group_offset says which of them b has"
            )
        return group_offsets(sizes, rows)
    if sizes.shape[0] < groups:
        raise ValueError(f"ragged_gemm: group_sizes has {sizes.shape[0]} groups, b has {groups}; it must have b's")
    if isinstance(first, int) and not isinstance(first, bool):
        if not 0 <= first <= sizes.shape[0] - groups:
            raise ValueError(
                f"ragged_gemm: group_offset = {first}; group_sizes has {sizes.shape[0]} groups, b has {groups}: it "
                f"must be from 0 to {sizes.shape[0] - groups}"
            )
        return group_offsets(sizes, rows)[first : first + groups + 1]
    if getattr(first, "dtype", None) != INT32 or first.shape not in ((), (1,)):
        raise TypeError(
            f"ragged_gemm: group_offset is {getattr(first, 'dtype', type(first).__name__)} of shape "
            f"{getattr(first, 'shape', ())}; it must be an int32 scalar or (1,)"
        )
    return jax.lax.dynamic_slice_in_dim(group_offsets(sizes, rows), first.reshape(()), groups + 1)


def _column_spec(out_sharding: jax.P, rank: int) -> jax.P:
    """The sharding of a product whose rows are gathered on every device."""
    return partition_spec([(), *mesh_axes_of(out_sharding, rank)[1:]])
