"""From the arrays that a product is given to the arguments of its primitive."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from coda_jax.epilogue import Epilogue, NotTileLocalError, Program
from coda_jax.epilogue.values import same_shape
from coda_jax.primitives.accumulate import accumulate
from coda_jax.primitives.axes import (
    UNSHARDED,
    Dimension,
    MatrixAxes,
    MatrixAxis,
    as_array,
    as_matrix,
    as_pieces,
    concatenated,
    flat_rows,
)
from coda_jax.primitives.mesh_types import (
    MeshAxes,
    axes_of_dimension,
    merged_sharding,
    mesh_axes_of,
    partition_spec,
    with_sharding,
    without_axes,
)
from coda_jax.primitives.spec import CallOptions, GemmSpec

Parts = jax.Array | Sequence[jax.Array]  # an array, or the pieces of one, concatenated along one dimension


def as_parts(x: Parts) -> list[jax.Array]:
    return list(x) if isinstance(x, tuple | list) else [x]  # type: ignore[list-item]


def concatenated_axes(arrays: Sequence[Sequence[jax.Array]], options: CallOptions) -> tuple[int, ...]:
    """The axis along which the pieces of a, of b and of each operand are concatenated."""
    is_n_joined = len(arrays[0]) == 1  # else of K
    b_axis = -1 if options.transpose_b != is_n_joined else num_group_axes(options)
    return (0 if options.transpose_a else -1, b_axis, *[-1] * (len(arrays) - 2))


def are_halves(arrays: Sequence[jax.Array], program: Program) -> bool:
    """True if two arrays are the halves of N that the epilogue works on."""
    same = len(arrays) == 2 and same_shape(arrays[0].shape, arrays[1].shape)
    return same and program.halves.n_halves == 2


def with_joined_halves(outputs: Sequence[jax.Array], row_axes: int, program: Program) -> list[jax.Array]:
    """Outputs with one axis of columns where they have the halves apart."""
    transposed = {store.output for store in program.stores if store.transposed}

    def joined(i: int, x: jax.Array) -> jax.Array:
        if x.ndim != row_axes + 2:
            return x
        return (
            x.reshape(-1, *x.shape[2:])
            if i in transposed
            else x.reshape(*x.shape[:row_axes], math.prod(x.shape[row_axes:]))
        )

    return [joined(i, x) for i, x in enumerate(outputs)]


def placed_tiles(
    outputs: Sequence[jax.Array], program: Program, shape: Sequence[Any], row_axes: int, sharding: Any
) -> list[jax.Array]:
    """Outputs resharded as the product, (*M, *N) with this sharding, where they have its shape or the transposed one.

    Args:
      row_axes: how many axes M is.
    """
    transposed = {store.output for store in program.stores if store.transposed}
    names = mesh_axes_of(sharding.spec, len(shape))
    transposed_sharding = NamedSharding(sharding.mesh, partition_spec([*names[row_axes:], *names[:row_axes]]))
    transposed_shape = (*shape[row_axes:], *shape[:row_axes])

    def in_place(i: int, x: jax.Array) -> jax.Array:
        if i in transposed:
            return with_sharding(x, transposed_sharding) if same_shape(x.shape, transposed_shape) else x
        return with_sharding(x, sharding) if same_shape(x.shape, shape) else x

    return [in_place(i, x) for i, x in enumerate(outputs)]


def row_sizes(a: jax.Array, options: CallOptions) -> tuple[Any, ...]:
    """The sizes of M's axes."""
    return a.shape[options.k_axes :] if options.transpose_a else a.shape[: a.ndim - options.k_axes]


def primitive_arguments(arrays: Sequence[Sequence[jax.Array]], rows: Sequence[Any], spec: GemmSpec) -> list[jax.Array]:
    """The primitive's arguments; operands have axes that match the factors'."""
    arguments = [x for pieces in arrays[:2] for x in pieces]
    sizes = spec.matrices.factor_sizes(arguments)
    for operand, pieces in zip(arrays[2:], spec.matrices.operands, strict=True):
        # Beside one row a tile is a row vector, and has no rows of its own.
        has_rows = any(axis.dimension is Dimension.M for axis in pieces[0])
        matrices = operand if has_rows else [flat_rows(x, rows) for x in operand]
        if len(matrices) == len(pieces):
            arguments += [as_array(x, axes, sizes) for x, axes in zip(matrices, pieces, strict=True)]
        else:  # one array beside several, or several beside one
            along_columns: list[MatrixAxes] = [(UNSHARDED,), (MatrixAxis(Dimension.N, 1, 1),)]
            arguments += as_pieces(concatenated(matrices, along_columns), pieces, sizes)
    return arguments


def check_halves(epilogue: Epilogue, b: jax.Array, options: CallOptions) -> None:
    """Raises if the columns are several axes and the epilogue works on halves that are not one of these axes."""
    shape = b.shape[num_group_axes(options) :]
    columns = shape[: len(shape) - options.k_axes] if options.transpose_b else shape[options.k_axes :]
    halves = epilogue.program.halves
    if halves.count == 1 or len(columns) == 1 or (options.halves and halves.n_halves == 2):
        return
    raise ValueError(
        f"{options.function}: b has columns {columns}, and epilogue '{epilogue.name}' works on "
        f"{f'heads of {halves.head} columns' if halves.head else 'halves'}; they must be one axis, or for halves of "
        "the product (2, N / 2)"
    )


def check_order_of_rows(epilogue: Epilogue, options: CallOptions) -> None:
    """Raises if rows of groups are to be stored in contraction order, which would mix rows of several groups."""
    ordered = [store.output for store in epilogue.program.stores if store.transposed and store.contraction_order]
    if ordered and options.ragged is Dimension.M:
        raise NotTileLocalError(
            f"epilogue '{epilogue.name}': output {ordered[0]} is in contraction order along rows that groups divide; "
            "order it along the columns, or outside the epilogue"
        )


def flat_product(a: jax.Array, b: jax.Array, options: CallOptions) -> jax.Array:
    """acc (M, N); of groups, all rows times the first group's matrix."""
    b = b[0] if options.ragged is Dimension.M else b
    options = dataclasses.replace(options, ragged=None)
    (m, n), k = product_axes(a, b, options), MatrixAxis(Dimension.K, options.k_axes)
    return accumulate(
        as_matrix(a, (k, m) if options.transpose_a else (m, k)),
        as_matrix(b, (n, k) if options.transpose_b else (k, n)),
        transpose_a=options.transpose_a,
        transpose_b=options.transpose_b,
        out_sharding=flat_sharding(a, b, options),
    )


def product_axes(a: jax.Array, b: jax.Array, options: CallOptions) -> MatrixAxes:
    """The axes of a @ b."""
    groups = (MatrixAxis(Dimension.GROUP),) * (options.ragged is Dimension.K)
    return (*groups, *(map(MatrixAxis, (Dimension.M, Dimension.N), num_product_axes(a, b, options))))


def num_product_axes(a: jax.Array, b: jax.Array, options: CallOptions) -> tuple[int, int]:
    """How many axes M and N are."""
    return a.ndim - options.k_axes, b.ndim - options.k_axes - num_group_axes(options)


def num_group_axes(options: CallOptions) -> int:
    """How many axes of groups are in front of b's matrix."""
    return int(options.ragged is Dimension.M)


def flat_sharding(a: jax.Array, b: jax.Array, options: CallOptions) -> Any:
    """The sharding of the product (M, N), from the one with all axes."""
    counts = num_product_axes(a, b, options)
    return None if options.out_sharding is None else merged_sharding(options.out_sharding, counts)


def row_mesh_axes(rows: Sequence[Any], options: CallOptions) -> tuple[MeshAxes, ...] | None:
    """`GemmSpec.row_mesh_axes` of a product with these axes of M."""
    asked = options.out_sharding
    return None if asked is None or len(rows) < 2 else mesh_axes_of(asked.spec, len(rows))


def with_whole_groups(arrays: Sequence[Sequence[jax.Array]], options: CallOptions) -> list[list[jax.Array]]:
    """The arrays of a product of groups, gathered over explicit mesh axes that shard its rows or its groups."""
    (first, *_), *_ = arrays
    ragged_k = options.ragged is Dimension.K
    shape = first.shape[: options.k_axes] if ragged_k else row_sizes(first, options)

    def gathered(x: jax.Array, count: int) -> jax.Array:
        for axis in range(count):
            x = without_axes(x, axis, axes_of_dimension(x, axis))
        return x

    def rows_gathered(x: jax.Array) -> jax.Array:
        has_rows = x.ndim > len(shape) and same_shape(x.shape[: len(shape)], shape)
        return gathered(x, len(shape) if has_rows else int(x.ndim == 2))

    a, b, *operands = arrays
    return [
        [gathered(x, len(shape)) for x in a],
        [gathered(x, len(shape) if ragged_k else 1) for x in b],
        *([rows_gathered(x) for x in pieces] for pieces in operands),
    ]
