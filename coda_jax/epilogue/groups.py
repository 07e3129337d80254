"""Groups of a product's rows, and operands with an entry for each group.

The rows of a product are sorted by group. A caller gives the sizes of the groups, any of which may be zero; a product
has their offsets: group g has the rows from `offsets[g]` on, before `offsets[g + 1]`. Rows before the first group and
after the last are in none.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue.dtypes import INT32
from coda_jax.epilogue.values import same_size


@dataclass(frozen=True, eq=False)
class Marked:
    """An operand whose kind its shape does not tell, since G may be equal to M."""

    array: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=[])
class ByGroup(Marked):
    """A row for each group, (G, N) or (G, N/2), or a scalar for each, (G, 1) or (G,).

    f sees those of each row of the product: (M, N), (M, N/2) or (M, 1). For rows in no group it sees zeros.
    """


class GroupOffsets(Marked):
    """The offsets where the groups begin and the last one ends, (G + 1,) int32, in the place of their sizes."""


def unmarked(x: Any) -> Any:
    return x.array if isinstance(x, Marked) else x


def check_group_sizes(sizes: Any, function: str) -> None:
    """Raises TypeError where the sizes of groups are not int32, ValueError where they are not (G,).

    Args:
      function: for messages.
    """
    if sizes.dtype != INT32:
        raise TypeError(f"{function}: group_sizes has dtype {sizes.dtype}; it must be int32")
    if len(sizes.shape) != 1:
        raise ValueError(f"{function}: group_sizes has shape {sizes.shape}; it must be (G,)")


def group_offsets(sizes: jax.Array, rows: Any) -> jax.Array:
    """The offsets of groups of these sizes, (G + 1,) int32, which rise from 0 and are at most `rows`.

    Where sizes are negative, or are more than the rows, they are the offsets of some other groups.
    """
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    ends = lax.cummax(jnp.clip(ends, 0, jnp.asarray(rows, jnp.int32)))
    return jnp.concatenate([jnp.zeros_like(ends, shape=1), ends])


def check_groups(operands: Sequence[Any], offsets: Any, labels: Sequence[str], name: str) -> None:
    """Checks that operands by group have as many entries as there are groups.

    Args:
      labels: of the operands, for messages.
      name: of the epilogue, for messages.

    Raises:
      ValueError: operands are by group without groups, or have another number of them.
    """
    by_group = {label: x.array for label, x in zip(labels, operands, strict=True) if isinstance(x, ByGroup)}
    for label, x in by_group.items():
        if offsets is None:
            raise ValueError(f"epilogue '{name}': {label} is by group, and group_sizes is None; it must be (G,) int32")
        groups = offsets.shape[0] - 1
        if not x.shape or not same_size(x.shape[0], groups):
            raise ValueError(
                f"epilogue '{name}': {label} has shape {x.shape} and is by group, and group_sizes has "
                f"{groups} groups; its first axis must be these"
            )


class RowGroups(NamedTuple):
    """The groups of the rows of a product.

    Attributes:
      group_index: of each row, (M,) int32, rising; after the last group it is the number of groups.
      is_in: whether a row is in a group, (M,) bool.
    """

    group_index: jax.Array
    is_in: jax.Array

    @classmethod
    def of(cls, offsets: jax.Array, rows: Any) -> RowGroups:
        row = jnp.arange(rows, dtype=jnp.int32)
        group_index = jnp.sum(offsets[1:, None] <= row[None, :], axis=0, dtype=jnp.int32)
        return cls(group_index, (row >= offsets[0]) & (row < offsets[-1]))

    def for_each_row(self, x: jax.Array) -> jax.Array:
        """Each row's entry of x (G, N), or of (G,) as (G, 1). The derivative sums over the rows of each group."""
        x = x.reshape(-1, 1) if x.ndim == 1 else x
        values = jnp.take(x, self.group_index, axis=0, mode="fill", fill_value=0, indices_are_sorted=True)
        return self.masked(values)

    def masked(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """x with zeros for rows in no group; `axis` is that of the rows."""
        shape = [-1 if i == axis else 1 for i in range(x.ndim)]
        return jnp.where(self.is_in.reshape(shape), x, jnp.zeros((), x.dtype))
