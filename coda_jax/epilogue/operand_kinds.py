"""The kinds of an epilogue's operands: a class for each, with all that the library knows of it.

A new kind needs a class here, code that loads it in CUDA, and a test; no other file names a kind. The class defines:

  word            its name: in the text of programs, as its list in the generated struct, and in messages
  shapes          its shapes, for messages; `fits` decides
  mark            the wrapper by which a caller names the kind, where its shape does not
  has_rows        whether f sees a row of it for each row of the product
  columns         which columns f sees: none, those of the product, or those of a head
  axes            which dimensions of the product its array's axes are: these are sharded alike, other axes never
  as_seen, value  the array that f sees, and its value for XLA, where that is not the array itself
  only_floats     whether it is never int32 or bool
  by_tensor_map, in_shared_memory, is_kept, by_group
                  how the kernel loads it: by a tensor map, not a pointer; as words for the columns of a tile; early,
                  into registers; at the index of the rows' group, in the place of a batch index
  list_name, member
                  its list in the generated struct, and the member of Element that has its values, where these are not
                  named by `word`. cuda/epilogue_abi.cuh declares both, cuda/epilogue_operands_sm90.cuh loads the values
  with_own_rows, more_rows, folds
                  what it becomes where the products of a batch become rows of one product
  row_unit        a number that divides the rows of each shard of the product

and appends an instance to `KINDS`. The defaults of `OperandKind` in operand.py are those of an array that is loaded by
a pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.epilogue.groups import ByGroup, GroupOffsets, RowGroups
from coda_jax.epilogue.halves import Width
from coda_jax.epilogue.operand import Along, Beside, Columns, Operand, OperandKind
from coda_jax.epilogue.values import TABLE_ROW, Tag, same_shape, same_size


class Tile(OperandKind):
    """An element for each element of the product; the kernel's copy engine loads it tile by tile."""

    word, shapes = "tile", "(M, N)"
    has_rows, columns = True, Columns.OF_PRODUCT
    only_floats = by_tensor_map = True

    list_name = "tile_load"

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        return same_shape(shape, (rows, columns)) and not same_size(rows, 1) and not same_size(columns, 1)

    def axes(self, operand: Operand) -> tuple[Along | None, ...]:
        return (Along.ROWS, Along.COLUMNS)

    def folds(self, operand: Operand, *, has_batch: bool) -> bool:
        return has_batch  # a tile that the products share would be copied for each


class RowVector(OperandKind):
    """An element for each column, the same in every row."""

    word, shapes = "row_vector", "(N,) or (1, N)"
    columns = Columns.OF_PRODUCT
    in_shared_memory = True

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        is_vector = same_shape(shape, (columns,)) or same_shape(shape, (1, columns))
        return is_vector and not _is_scalar(shape)

    def axes(self, operand: Operand) -> tuple[Along | None, ...]:
        return (Along.COLUMNS,)

    @property
    def with_own_rows(self) -> OperandKind | None:
        return TILE


class ColumnVector(OperandKind):
    """An element for each row, the same in every column."""

    word, shapes = "column_vector", "(M, 1)"
    has_rows = True

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        return same_shape(shape, (rows, 1)) and not _is_scalar(shape)

    def axes(self, operand: Operand) -> tuple[Along | None, ...]:
        return (Along.ROWS, None)


class Scalar(OperandKind):
    word, shapes = "scalar", "()"

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        return _is_scalar(shape)

    @property
    def with_own_rows(self) -> OperandKind | None:
        return COLUMN_VECTOR


class RopeTable(OperandKind):
    """A row for each row of the product, the same for every head; or S rows, which f repeats to M with jnp.tile."""

    word, shapes = "rope_table", "(M, Dh) or (M, Dh/2)"
    has_rows, columns = True, Columns.OF_HEAD
    only_floats = is_kept = True

    @property
    def text(self) -> str:
        return "head_table"

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        return same_shape(shape, (rows, columns)) or (is_repeated(shape, rows) and same_size(shape[1], columns))

    def period(self, shape: Sequence[Any], rows: Any) -> int:
        return 0 if same_size(shape[0], rows) else int(shape[0])

    def tags(self, operand: Operand, rank: int) -> tuple[Tag, ...]:
        row, column = super().tags(operand, rank)
        return (TABLE_ROW if operand.period else row, column)

    def value(self, x: jax.Array, operand: Operand, half: int, beside: Beside) -> jax.Array:
        repeats = beside.rows // operand.period if operand.period else 1
        return _for_every_head(x, half, beside, repeats)

    def axes(self, operand: Operand) -> tuple[Along | None, ...]:
        return (None if operand.period else Along.ROWS, None)

    def row_unit(self, operand: Operand) -> int:
        return operand.period or 1


class HeadVector(OperandKind):
    """An element for each column of a head, the same for every row and head."""

    word, shapes = "head_vector", "(Dh,), (1, Dh), (Dh/2,) or (1, Dh/2)"
    columns = Columns.OF_HEAD
    only_floats = in_shared_memory = True

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        is_row = same_shape(shape, (1, columns)) and not same_size(rows, 1)  # with M = 1, (1, Dh) is a rope table
        return is_row or same_shape(shape, (columns,))

    def value(self, x: jax.Array, operand: Operand, half: int, beside: Beside) -> jax.Array:
        return _for_every_head(x.reshape(1, -1), half, beside)


class _GroupKind(OperandKind):
    """A kind that cannot be shared by the products of a batch, since groups are of one product's rows."""

    def more_rows(self, operand: Operand, *, has_batch: bool, is_row: bool) -> Operand | None:
        return None

    def folds(self, operand: Operand, *, has_batch: bool) -> bool:
        return False


class GroupVector(_GroupKind):
    """An element for each column and group of rows; see groups.py."""

    word, shapes, mark = "group_vector", "(G, N)", ByGroup
    has_rows, columns = True, Columns.OF_PRODUCT
    in_shared_memory = by_group = True
    list_name = member = "row_vector"

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        return len(shape) == 2 and same_size(shape[1], columns) and not same_size(columns, 1)

    def as_seen(self, x: jax.Array, groups: RowGroups | None) -> jax.Array:
        assert groups is not None
        return groups.for_each_row(x)

    def axes(self, operand: Operand) -> tuple[Along | None, ...]:
        return (None, Along.COLUMNS)


class GroupScalar(GroupVector):
    """An element for each group of rows, the same in every column."""

    word, shapes = "group_scalar", "(G, 1) or (G,)"
    columns = Columns.NONE
    in_shared_memory = False
    list_name = member = "scalar"

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        return len(shape) == 1 or (len(shape) == 2 and same_size(shape[1], 1))

    def axes(self, operand: Operand) -> tuple[Along | None, ...]:
        return (None, None)


class Offsets(_GroupKind):
    """The offsets where groups begin: the last operand of a product with groups. Neither f nor its code reads it."""

    word, shapes, mark = "group_offsets", "(G + 1,)", GroupOffsets
    list_name = member = ""

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        return len(shape) == 1

    def axes(self, operand: Operand) -> tuple[Along | None, ...]:
        return (None,)

    def row_unit(self, operand: Operand) -> int:
        return 0  # where a group begins depends on all rows before it


def groups_of_rows(operands: Sequence[Operand], arrays: Sequence[Any], rows: Any) -> RowGroups | None:
    """The groups of the product's rows, from the offsets, its last operand; None where it has no groups."""
    has_groups = bool(operands) and operands[-1].kind is GROUP_OFFSETS
    return RowGroups.of(arrays[-1], rows) if has_groups else None


def seen(operands: Sequence[Operand], arrays: Sequence[Any], rows: Any) -> list[jax.Array]:
    """The arrays of operands as f sees them, converted to `traced_dtype`."""
    groups = groups_of_rows(operands, arrays, rows)
    each = zip(operands, arrays, strict=True)
    return [one.kind.as_seen(lax.convert_element_type(x, one.traced_dtype), groups) for one, x in each]


def _is_scalar(shape: Sequence[Any]) -> bool:
    return len(shape) <= 2 and all(same_size(size, 1) for size in shape)


def is_repeated(shape: Sequence[Any], rows: Any) -> bool:
    """True if an array of this shape may be a table whose rows f repeats to `rows`."""
    return len(shape) == 2 and isinstance(shape[0], int) and shape[0] > 1 and bool(rows % shape[0] == 0)


def _for_every_head(x: jax.Array, half: int, beside: Beside, repeats: int = 1) -> jax.Array:
    """One half of a head's columns, repeated for every head, and the rows repeated so many times."""
    size = beside.halves.head // 2
    return jnp.tile(beside.halves.columns_of(x, half, size), (repeats, beside.columns // size))


TILE, ROW_VECTOR, COLUMN_VECTOR, SCALAR = Tile(), RowVector(), ColumnVector(), Scalar()
ROPE_TABLE, HEAD_VECTOR = RopeTable(), HeadVector()
GROUP_VECTOR, GROUP_SCALAR, GROUP_OFFSETS = GroupVector(), GroupScalar(), Offsets()
# In the order of their lists in the generated struct.
KINDS: tuple[OperandKind, ...] = (
    *(TILE, ROW_VECTOR, COLUMN_VECTOR, SCALAR, ROPE_TABLE, HEAD_VECTOR),
    *(GROUP_VECTOR, GROUP_SCALAR, GROUP_OFFSETS),
)


def tile_operand(dtype: np.dtype, width: Width) -> Operand:
    """A tile of floats of this width."""
    return Operand(TILE, np.dtype(dtype), np.dtype(FLOAT32), width)
