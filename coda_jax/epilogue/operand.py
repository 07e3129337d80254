"""An operand of an epilogue, and the base class of its kind; operand_kinds.py has the kinds themselves."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from coda_jax.epilogue.dtypes import FLOATS, TILES
from coda_jax.epilogue.groups import Marked, RowGroups
from coda_jax.epilogue.halves import Halves, Width
from coda_jax.epilogue.values import CHANNEL, COLUMN, HALF, HALF_CHANNEL, ROW, Tag


class Columns(enum.Enum):
    """The columns that an operand has. A value is two tags: of an axis with all of them, and with half of them."""

    NONE = (None, None)
    OF_PRODUCT = (COLUMN, HALF)
    OF_HEAD = (CHANNEL, HALF_CHANNEL)


class Along(enum.Enum):
    """The dimension of the product that an axis of an operand's array is: its rows, or its columns or half of them."""

    ROWS = "rows"
    COLUMNS = "columns"


class Beside(NamedTuple):
    """The size of the values beside an operand when XLA evaluates a program: rows, and the columns of one half.

    `groups` are the groups of the rows, or None.
    """

    rows: Any
    columns: int
    halves: Halves
    groups: RowGroups | None


@dataclass(frozen=True)
class Operand:
    """An array beside acc.

    Attributes:
      dtype: as stored.
      traced_dtype: what f sees: float32 for floating operands, the stored dtype for captured arrays.
      width: if it has columns, whether it has all or half of them.
      period: the number of rows of a rope table whose rows f repeats: row r reads row r % period. Else 0.
    """

    kind: OperandKind
    dtype: np.dtype
    traced_dtype: np.dtype
    width: Width = Width.FULL
    period: int = 0

    @property
    def axes(self) -> tuple[Along | None, ...]:
        return self.kind.axes(self)

    @property
    def has_rows(self) -> bool:
        """True if its array has a row for each row of the product."""
        return Along.ROWS in self.axes

    @property
    def sums_rows(self) -> bool:
        """True if its cotangent is a sum over rows of the product."""
        return self.dtype.name in FLOATS and not self.has_rows


class OperandKind:
    """A kind of operand; the list at the top of operand_kinds.py says what a kind declares."""

    word: str
    shapes: str
    mark: type[Marked] | None = None
    has_rows = False
    columns = Columns.NONE
    only_floats = False
    by_tensor_map = False
    in_shared_memory = False
    is_kept = False
    by_group = False

    def __repr__(self) -> str:
        return self.word

    @property
    def text(self) -> str:
        """Its word in a program's text. Keys in tables of tiles are digests of that text, so it must not change."""
        return self.word

    @property
    def list_name(self) -> str:
        """Its list in the generated struct; empty if it is in none."""
        return self.word

    @property
    def member(self) -> str:
        """The member of Element that has its values."""
        return self.word

    @property
    def has_columns(self) -> bool:
        return self.columns is not Columns.NONE

    @property
    def is_tile(self) -> bool:
        """True if its value varies with row and column."""
        return self.has_rows and self.has_columns

    # --- in f

    def fits(self, shape: Sequence[Any], rows: Any, columns: Any) -> bool:
        """True if an array of this shape is of this kind, beside so many rows and columns of the product.

        No shape fits two kinds with the same mark.
        """
        raise NotImplementedError

    def period(self, shape: Sequence[Any], rows: Any) -> int:
        """`Operand.period` of an array that fits."""
        return 0

    def tags(self, operand: Operand, rank: int) -> tuple[Tag, ...]:
        """The tag of each axis that f sees: what indexes it; see values.py."""
        both = (ROW if self.has_rows else None, self.columns.value[operand.width is Width.HALF])
        return both[2 - rank :]

    def as_seen(self, x: jax.Array, groups: RowGroups | None) -> jax.Array:
        """The array that f sees; `groups` are those of the product's rows."""
        return x

    def value(self, x: jax.Array, operand: Operand, half: int, beside: Beside) -> jax.Array:
        """The value of one half that XLA computes with: (rows or 1, columns or 1)."""
        matrix = self.as_seen(x, beside.groups) if self.has_rows else x.reshape(1, -1)
        return beside.halves.columns_of(matrix, half, beside.columns)

    # --- as an array

    def axes(self, operand: Operand) -> tuple[Along | None, ...]:
        """The dimension of each axis of its array, without a batch axis; an axis with None is never sharded."""
        return ()

    def row_unit(self, operand: Operand) -> int:
        """A number that divides the rows of each shard of the product; 0 where rows may not be sharded."""
        return 1

    # --- where the products of a batch become rows of one product

    @property
    def with_own_rows(self) -> OperandKind | None:
        """The kind that it becomes if each of several products of one row has its own; None if there is none."""
        return None

    def more_rows(self, operand: Operand, *, has_batch: bool, is_row: bool) -> Operand | None:
        """The operand of the one product whose rows are those of a batch of products; None if there is none.

        Args:
          has_batch: whether each product has its own array.
          is_row: whether each product has one row.
        """
        if operand.has_rows:
            return operand if has_batch else None
        if not has_batch:
            return operand
        if self.with_own_rows is None or not is_row or operand.dtype.name not in TILES:
            return None
        return replace(operand, kind=self.with_own_rows)

    def folds(self, operand: Operand, *, has_batch: bool) -> bool:
        """True if a launch may treat the batch as rows: the operand has rows too, or the products share it."""
        return operand.has_rows or not has_batch
