"""Halves of the columns that an epilogue combines: which columns they are, and how many halves an array has."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import jax


class Width(enum.Enum):
    """Whether an array has all columns of the program's widest arrays or half of them.

    The widest have N columns, or 2N where acc itself is HALF (`Halves.acc`). Rope tables and head vectors have the
    columns of a head, or half of them.
    """

    FULL = "full"
    HALF = "half"


@dataclass(frozen=True)
class Halves:
    """How a program pairs columns. A thread holds both columns of a pair, so that f may combine them.

    Attributes:
      count: 2 where two halves are combined: an element of the tile then has a value for each. Else 1.
      acc: HALF where acc (M, N) meets arrays of 2N columns.
      head: columns of a head, where the halves are those of heads; else 0, and they are those of the widest arrays.
      interleaved: the halves of a head are its even and its odd columns.
    """

    count: int = 1
    acc: Width = Width.FULL
    head: int = 0
    interleaved: bool = False

    def of(self, width: Width) -> int:
        """Values that an element has of an array of this width: one for each half that the array spans."""
        return self.count if width is Width.FULL else 1

    @property
    def acc_halves(self) -> int:
        """Values that an element has of acc, and so halves that acc and b span."""
        return self.of(self.acc)

    def runs(self, width: Width) -> int:
        """Runs of adjacent columns of such an array in a tile, or in a head of it: interleaved halves are one run."""
        return 1 if self.interleaved else self.of(width)

    def tensor_map_halves(self, width: Width) -> int:
        """Halves of such an array that are half of all its columns apart: a dimension of its tensor map."""
        return 1 if self.head else self.of(width)

    @property
    def n_halves(self) -> int:
        """Halves of N, in acc and in b, of which a tile has matching columns: 2, or 1 for all of N."""
        return self.tensor_map_halves(self.acc)

    def columns(self, width: Width, n: Any) -> Any:
        """Columns of an array of this width, beside acc's n."""
        return n * self.of(width) // self.acc_halves

    def columns_of(self, x: jax.Array, half: int, columns: int) -> jax.Array:
        """Half `half` of the columns of x, `columns` of them; x itself if it has no more."""
        if x.shape[1] <= columns:
            return x
        if self.interleaved:
            return x[:, half::2]
        if self.head:
            return x.reshape(x.shape[0], x.shape[1] // self.head, 2, self.head // 2)[:, :, half].reshape(
                x.shape[0], columns
            )
        return x[:, half * columns : (half + 1) * columns]
