"""The common layout of a product's arrays over explicit mesh axes, if types leave it open or contradict each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from coda_jax.epilogue.values import same_shape
from coda_jax.primitives.mesh_types import (
    axes_of_dimension,
    explicit_cuts,
    explicit_sharding,
    mesh_axes_of,
    partition_spec,
    with_same_sharding,
    with_sharding,
    without_axes,
)
from coda_jax.primitives.spec import CallOptions

Options = TypeVar("Options", bound=CallOptions)


def spec_of_sum(a: jax.Array, b: jax.Array, *operands: jax.Array, transpose_b: bool = False) -> PartitionSpec | None:
    """The sharding of a @ b where explicit mesh axes shard K in both: rows as those of a, columns as those of b.

    None where they do not, since the factors' types determine it then, and where an operand is a tile, whose sharding
    the product has.
    """
    rows, columns = Factor.of(a, 1, k_first=False), Factor.of(b, 1, k_first=not transpose_b)
    has_tile = any(x.ndim == a.ndim and x.shape[-1] != 1 for x in operands)
    if has_tile or not set(rows.k_mesh_axes[0]) & set(columns.k_mesh_axes[0]):
        return None
    row_axes = {axis for axes in rows.mesh_axes for axis in axes}
    return partition_spec(
        [*rows.mesh_axes, *(tuple(axis for axis in axes if axis not in row_axes) for axes in columns.mesh_axes)]
    )


class Factor(NamedTuple):
    """A factor's axes that are rows or columns of the product, which are adjacent, and its axes of K.

    Attributes:
      first: the first of the rows' or columns' axes.
      sizes: their sizes.
      mesh_axes: for each of them, the explicit mesh axes that shard it.
      k_mesh_axes: the same for each axis of K.
    """

    first: int
    sizes: tuple[Any, ...]
    mesh_axes: tuple[tuple[str, ...], ...]
    k_mesh_axes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, x: jax.Array, k_axes: int, *, k_first: bool) -> Factor:
        mesh_axes, others = explicit_cuts(x), x.ndim - k_axes
        if k_first:
            return cls(k_axes, x.shape[k_axes:], mesh_axes[k_axes:], mesh_axes[:k_axes])
        return cls(0, x.shape[:others], mesh_axes[:others], mesh_axes[others:])


def laid_out(
    arrays: Sequence[Sequence[jax.Array]], along: Sequence[int], options: Options, by_group: Collection[int] = ()
) -> tuple[list[list[jax.Array]], Options]:
    """The arrays of a product, resharded to match each other, and the options with the product's own sharding.

    * The pieces of one array are all sharded as the first that is sharded.
    * Row vectors are gathered over the mesh axes of the product's rows, as b is.
    * Arrays by group are too, and over all mesh axes of their groups.
    * Column vectors that are sharded otherwise than the product's rows are sharded as these.
    * Tiles are sharded as the product, where the options give its sharding.
    * Where mesh axes shard K in both factors, which leaves it open, the product is sharded as its first tile.
    * Else b's columns are sharded as that tile's: b is gathered over mesh axes that shard parameters, as FSDP's.

    Args:
      arrays: a, b and the operands, each one array or several.
      along: the axis along which each is concatenated.
      options: of `product`.
      by_group: which operands are arrays by group.
    """
    a, b, *operands = (
        with_same_sharding(pieces, axis) if len(pieces) > 1 else [*pieces]
        for pieces, axis in zip(arrays, along, strict=True)
    )
    rows = Factor.of(a[0], options.k_axes, k_first=options.transpose_a)
    columns = Factor.of(b[0], options.k_axes, k_first=not options.transpose_b)
    row_axes = frozenset(name for names in rows.mesh_axes for name in names)
    by_shape = [i for i in range(len(operands)) if i not in by_group]  # operands that may be tiles
    for i, pieces in enumerate(operands):
        if i in by_shape:
            operands[i] = [_vector_beside_rows(x, row_axes) for x in pieces]
        else:
            operands[i] = [_with_all_groups(x, row_axes | _asked_row_axes(options, len(rows.sizes))) for x in pieces]
    if options.out_sharding is not None:
        sizes = columns.sizes if len(b) == 1 or len(a) > 1 else (sum(x.shape[along[1]] for x in b),)
        for i in by_shape:
            operands[i] = [_tile_placed(x, (*rows.sizes, *sizes), options) for x in operands[i]]
    elif len(b) == 1 and (tile := _first_tile([operands[i] for i in by_shape], rows, columns, options)) is not None:
        count = len(columns.sizes)
        mesh_axes = explicit_cuts(tile)
        if any(set(x) & set(y) for x, y in zip(rows.k_mesh_axes, columns.k_mesh_axes, strict=True)):
            mesh_axes = (*mesh_axes[: len(rows.sizes)], *mesh_axes[-count:])
            mesh = jax.typeof(a[0]).sharding.mesh
            options = dataclasses.replace(options, out_sharding=NamedSharding(mesh, partition_spec(mesh_axes)))
        else:
            b = [_with_columns(b[0], columns, mesh_axes[-count:], row_axes)]
    operands = [_columns_beside_rows(x, rows, options) if i in by_shape else x for i, x in enumerate(operands)]
    return [a, b, *operands], options


def _vector_beside_rows(x: jax.Array, row_axes: frozenset[str]) -> jax.Array:
    is_vector = x.ndim == 1 or (x.ndim == 2 and x.shape[0] == 1)
    return without_axes(x, x.ndim - 1, row_axes) if is_vector and row_axes else x


def _columns_beside_rows(pieces: Sequence[jax.Array], rows: Factor, options: CallOptions) -> list[jax.Array]:
    """The arrays of an operand; one that is a column vector, sharded as the product's rows."""
    asked, count = options.out_sharding, len(rows.sizes)
    target = (*(rows.mesh_axes if asked is None else mesh_axes_of(asked.spec, count)), ())

    def placed(x: jax.Array) -> jax.Array:
        own = explicit_cuts(x)
        if own == target or not any(own) or not same_shape(x.shape, (*rows.sizes, 1)):
            return x
        return with_sharding(x, NamedSharding(explicit_sharding(x).mesh, partition_spec(target)))

    return [placed(x) for x in pieces]


def _asked_row_axes(options: CallOptions, count: int) -> frozenset[str]:
    """The mesh axes that shard the product's `count` axes of rows, where the options give its sharding."""
    spec = () if options.out_sharding is None else options.out_sharding.spec
    return frozenset(axis for axes in mesh_axes_of(spec, count) for axis in axes)


def _with_all_groups(x: jax.Array, row_axes: frozenset[str]) -> jax.Array:
    x = without_axes(x, 0, axes_of_dimension(x, 0))
    return without_axes(x, 1, row_axes)


def _tile_placed(x: jax.Array, shape: Sequence[Any], options: CallOptions) -> jax.Array:
    return with_sharding(x, options.out_sharding) if same_shape(x.shape, shape) else x


def _first_tile(
    operands: Sequence[Sequence[jax.Array]], rows: Factor, columns: Factor, options: CallOptions
) -> jax.Array | None:
    """The first operand with the product's shape, or where halves are apart that of both: (*M, 2, *N)."""
    shapes = [(*rows.sizes, *columns.sizes), *([(*rows.sizes, 2, *columns.sizes)] if options.halves else [])]
    tiles = (pieces[0] for pieces in operands if len(pieces) == 1)
    return next((x for x in tiles if any(same_shape(x.shape, shape) for shape in shapes)), None)


def _with_columns(
    b: jax.Array, columns: Factor, column_axes: Sequence[tuple[str, ...]], row_axes: frozenset[str]
) -> jax.Array:
    """b with its columns sharded over `column_axes`; unchanged where the rows' mesh axes are the only difference."""
    if [tuple(axis for axis in axes if axis not in row_axes) for axes in columns.mesh_axes] == [*column_axes]:
        return b
    taken = {axis for axes in column_axes for axis in axes}
    mesh_axes = [tuple(axis for axis in axes if axis not in taken) for axes in explicit_cuts(b)]  # of K
    mesh_axes[columns.first : columns.first + len(column_axes)] = column_axes
    sharding = explicit_sharding(b)
    return with_sharding(b, NamedSharding(sharding.mesh, partition_spec(mesh_axes)))
