"""Groups of the rows of a product: their offsets, and what replaces rows in no group."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue import Operand, Program
from coda_jax.epilogue.groups import GroupOffsets, RowGroups, check_group_sizes, group_offsets, unmarked
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.mesh_types import axes_of_dimension, without_axes
from coda_jax.primitives.product_arrays import row_sizes
from coda_jax.primitives.pullback import Pullback
from coda_jax.primitives.spec import CallOptions


@dataclasses.dataclass(frozen=True)
class RowsInGroups:
    """How the derivative of an epilogue treats rows in no group.

    A sum over the rows, as the cotangent of a vector is, would include them, and be NaN where f or its derivative is
    NaN there. So where there is such a sum, each of these rows is replaced by the nearest row in a group, with a
    cotangent of zeros.

    Attributes:
      offsets: of the groups.
      rows: M.
    """

    offsets: jax.Array
    rows: Any

    @property
    def groups(self) -> RowGroups:
        return RowGroups.of(self.offsets, self.rows)

    def pulled_back(
        self,
        pullback: Pullback,
        program: Program,
        acc: jax.Array | None,
        arguments: Sequence[jax.Array],
        cotangents: Sequence[Any],
    ) -> tuple[jax.Array, list[jax.Array | None]]:
        """pullback(acc, arguments, cotangents) of a program's epilogue; the cotangents of such rows may be NaN.

        So may the resulting cotangent of acc, whose rows in no group the products of groups do not read.
        """
        if any(x.sums_rows for x in program.operands):
            needed = itertools.compress(program.operands, pullback.needs)
            arguments = [self.filled(x) if one.has_rows else x for one, x in zip(needed, arguments, strict=True)]
            if pullback.needs[-1]:  # the offsets
                arguments[-1] = self._stretched()
            each = zip(cotangents, program.row_axes, strict=True)
            cotangents = [None if x is None else self.masked(x, axes) for x, axes in each]
            acc = None if acc is None else self.filled(acc)
        dacc, argument_cotangents = pullback(acc, arguments, cotangents)
        each_operand = zip(argument_cotangents, program.operands, strict=True)
        return dacc, [x if x is None else self.cotangent(x, one) for x, one in each_operand]

    def filled(self, x: jax.Array) -> jax.Array:
        """x (M, ...) with each row in no group replaced by the nearest row in a group."""
        if isinstance(self.rows, int) and self.rows == 0:
            return x
        first, last = self.offsets[0], self.offsets[-1] - 1
        row = jnp.arange(self.rows, dtype=jnp.int32).reshape(-1, *[1] * (x.ndim - 1))
        before, behind = (lax.dynamic_slice_in_dim(x, jnp.maximum(i, 0), 1) for i in (first, last))
        return jnp.where(row < first, before, jnp.where(row > last, behind, x))

    def _stretched(self) -> jax.Array:
        """Offsets that put each row in no group into the group of the nearest row that is in one."""
        ends = self.offsets[1:]
        rows = jnp.asarray(self.rows, jnp.int32)
        ends = jnp.where(ends == self.offsets[-1], rows, jnp.where(ends == self.offsets[0], 0, ends))
        return jnp.concatenate([jnp.zeros_like(ends, shape=1), ends])

    def masked(self, x: jax.Array, axes: Sequence[int]) -> jax.Array:
        """x with zeros in rows in no group, along these axes of it."""
        for axis in axes:
            x = self.groups.masked(x, axis)
        return x

    def cotangent(self, x: jax.Array, operand: Operand) -> jax.Array:
        """An operand's cotangent: zeros in rows in no group; of an operand without rows, zeros if no row is in any."""
        if operand.has_rows:
            return self.masked(x, (0,))
        return jnp.where(self.offsets[0] < self.offsets[-1], x, jnp.zeros((), x.dtype))


def offsets_of_rows(
    group_sizes: jax.Array | GroupOffsets | None,
    arrays: Sequence[Sequence[jax.Array]],
    options: CallOptions,
    *,
    has_operands: bool,
) -> jax.Array | None:
    """The offsets of the groups of a product's rows, replicated on each device; None for a product without groups."""
    if group_sizes is None:
        return None
    offsets = unmarked(group_sizes)
    offsets = without_axes(offsets, 0, axes_of_dimension(offsets, 0))
    if isinstance(group_sizes, GroupOffsets):
        return offsets
    check_group_sizes(offsets, "gemm")
    if options.ragged is None and not has_operands:
        raise ValueError(f"gemm: group_sizes has shape {offsets.shape}, and no operand is by group")
    a, ragged_k = arrays[0][0], options.ragged is Dimension.K
    return group_offsets(offsets, math.prod(a.shape[: options.k_axes] if ragged_k else row_sizes(a, options)))
