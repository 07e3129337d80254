"""The tokens of arrays with leading axes, as the rows that a head over a vocabulary reads."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from coda_jax.operators.deferred_norm import DeferredNorm
from coda_jax.primitives.axes import UNSHARDED, Dimension, MatrixAxis, as_matrix
from coda_jax.primitives.mesh_types import explicit_cuts, placed, reshaped


class Rows(NamedTuple):
    """The leading axes of x (..., D), which the arrays of each token have too.

    Over explicit mesh axes all of these are sharded as x, whose width is gathered: mesh axes that shard one of its
    leading axes shard the rows.

    Attributes:
      sizes: of the leading axes.
      cuts: for each, the explicit mesh axes that shard it.
      mesh: of these mesh axes; None where there are none.
    """

    sizes: tuple[Any, ...]
    cuts: tuple[tuple[str, ...], ...]
    mesh: Any

    @classmethod
    def of(cls, x: jax.Array, *others: jax.Array | None) -> Rows:
        """The rows of x; the mesh is that of the first of x and the other arrays that explicit mesh axes shard."""
        sharded = [y for y in (x, *others) if y is not None and any(explicit_cuts(y))]
        return cls(x.shape[:-1], explicit_cuts(x)[:-1], jax.typeof(sharded[0]).sharding.mesh if sharded else None)

    def flat(self, x: jax.Array) -> jax.Array:
        """x (..., *rest) as (M, *rest)."""
        rest = x.ndim - len(self.sizes)
        return self._placed(as_matrix(x, (MatrixAxis(Dimension.M, len(self.sizes)), *[UNSHARDED] * rest)))

    def norm(self, norm: DeferredNorm) -> DeferredNorm:
        """The norm of x as (M, D), its statistics as (M,), its scale and bias replicated."""
        row_fields = {name: getattr(norm, name) for name in ("x", "sumsq", "mean")}
        rows: dict[str, Any] = {name: None if x is None else self.flat(x) for name, x in row_fields.items()}
        return dataclasses.replace(norm, **rows, scale=self.replicated(norm.scale), bias=self.replicated(norm.bias))

    def apart(self, x: jax.Array) -> jax.Array:
        """x (M, *rest) as (..., *rest)."""
        return reshaped(x, (*self.sizes, *x.shape[1:]), cuts=(*self.cuts, *[()] * (x.ndim - 1)))

    def replicated(self, x: Any) -> Any:
        """x, gathered over explicit mesh axes."""
        return x if x is None or not any(explicit_cuts(x)) else placed(x, NamedSharding(self.mesh, PartitionSpec()))

    def _placed(self, x: jax.Array) -> jax.Array:
        if self.mesh is None:
            return x
        rows = tuple(axis for axes in self.cuts for axis in axes)
        return placed(x, NamedSharding(self.mesh, PartitionSpec(rows or None, *[None] * (x.ndim - 1))))
