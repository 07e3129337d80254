"""Columns of arrays seen as heads or as halves, over explicit mesh axes too."""

from __future__ import annotations

import jax

from coda_jax.primitives.mesh_types import cutting_evenly, explicit_cuts, reshaped, without_axes


def axes_of_heads(x: jax.Array, head_dim: int) -> tuple[str, ...]:
    """The explicit mesh axes that shard x (..., H Dh) into whole heads."""
    return _axes_cutting(x, x.shape[-1] // head_dim)


def in_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """x (..., H Dh) as (..., H, Dh); it is gathered over explicit mesh axes that do not shard it into whole heads."""
    x = _gathered(x, axes_of_heads(x, head_dim))
    return reshaped(x, (*x.shape[:-1], x.shape[-1] // head_dim, head_dim), cuts=(*explicit_cuts(x), ()))


def join_halves(x: jax.Array) -> jax.Array:
    """x (..., 2, F) as (..., 2F), its columns sharded over the explicit mesh axes of F."""
    *lead, _, features = explicit_cuts(x)
    x = without_axes(x, x.ndim - 2, frozenset(explicit_cuts(x)[-2]))
    return reshaped(x, (*x.shape[:-2], 2 * x.shape[-1]), cuts=(*lead, features))


def split_halves(x: jax.Array) -> jax.Array:
    """x (..., 2F) as (..., 2, F), F sharded over the explicit mesh axes of the columns, if they divide it evenly."""
    *lead, _ = explicit_cuts(x)
    features = x.shape[-1] // 2
    return reshaped(x, (*x.shape[:-1], 2, features), cuts=(*lead, (), _axes_cutting(x, features)))


def both_halves(x: jax.Array) -> list[jax.Array]:
    """The halves (..., F) of x (..., 2F), which is gathered over explicit mesh axes that do not divide F evenly."""
    features = x.shape[-1] // 2
    x = _gathered(x, _axes_cutting(x, features))
    return [x[..., :features], x[..., features:]]


def _axes_cutting(x: jax.Array, size: int) -> tuple[str, ...]:
    """The explicit mesh axes of the columns of x that divide this size evenly."""
    axes = explicit_cuts(x)[-1]
    return cutting_evenly(axes, jax.typeof(x).sharding.mesh.shape, size) if axes else ()


def _gathered(x: jax.Array, kept: tuple[str, ...]) -> jax.Array:
    """x, its columns sharded over these explicit mesh axes alone."""
    return without_axes(x, x.ndim - 1, frozenset(explicit_cuts(x)[-1]) - frozenset(kept))
