"""Arrays of which a row's group chooses its own: how a caller marks them, and what f sees of them.

The rows of a product are sorted by group. Group g has `sizes[g]` of them, which may be none; rows behind the last group
are in none, and f sees zeros there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.epilogue.dtypes import INT32
from coda_jax.epilogue.values import same_size


@dataclass(frozen=True, eq=False)
class Marked:
    """An operand whose meaning its shape does not say, since G may be equal to M."""

    array: Any


class ByGroup(Marked):
    """A row for each group, (G, N) or (G, N/2), or a scalar for each, (G, 1) or (G,).

    f sees those of each row of the product: (M, N), (M, N/2) or (M, 1).
    """


class SizesOfGroups(Marked):
    """The number of rows of each group, (G,) int32, beside arrays that are `ByGroup`."""


def unmarked(x: Any) -> Any:
    return x.array if isinstance(x, Marked) else x


def check_groups(operands: Sequence[Any], sizes: Any, labels: Sequence[str], name: str) -> None:
    """Checks that operands by group and the sizes of the groups go together.

    Args:
      labels: of the operands, for messages.
      name: of the epilogue, for messages.

    Raises:
      TypeError: the sizes are not int32.
      ValueError: one is without the other, or they have different numbers of groups.
    """
    by_group = {label: x.array for label, x in zip(labels, operands, strict=True) if isinstance(x, ByGroup)}
    if sizes is None:
        if by_group:
            first = next(iter(by_group))
            raise ValueError(f"epilogue '{name}': {first} is by group, and group_sizes is None; it must be (G,) int32")
        return
    if not by_group:
        raise ValueError(f"epilogue '{name}': group_sizes has shape {sizes.shape}, and no operand is by group")
    if sizes.dtype != INT32:
        raise TypeError(f"epilogue '{name}': group_sizes has dtype {sizes.dtype}; it must be int32")
    if len(sizes.shape) != 1:
        raise ValueError(f"epilogue '{name}': group_sizes has shape {sizes.shape}; it must be (G,)")
    for label, x in by_group.items():
        if not x.shape or not same_size(x.shape[0], sizes.shape[0]):
            raise ValueError(
                f"epilogue '{name}': {label} has shape {x.shape} and is by group, and group_sizes has "
                f"{sizes.shape[0]} groups; its first axis must be these"
            )


def group_of_rows(sizes: jax.Array, rows: Any) -> jax.Array:
    """The group of each row, (M,) int32; for those in none the number of groups."""
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    return jnp.searchsorted(ends, jnp.arange(rows, dtype=jnp.int32), side="right", method="compare_all")


def for_each_row(x: jax.Array, group: jax.Array) -> jax.Array:
    """x (G, N), or (G,) as (G, 1), for each row that of its group. Its derivative sums over the rows of each group."""
    x = x.reshape(-1, 1) if x.ndim == 1 else x
    return jnp.take(x, group, axis=0, mode="fill", fill_value=0, indices_are_sorted=True)
