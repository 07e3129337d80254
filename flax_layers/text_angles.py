"""The angles of attention's rotary embedding, which for some scalings depend on how long the text of a token is."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.extend import varying_axes
from flax_layers.attend import checked_shapes
from flax_layers.decoding.kv_cache import KVCache
from flax_layers.packing import Segments, text_lengths
from flax_layers.rope_scaling import RotaryScaling, rotary_angles

Angles = tuple[jax.Array, jax.Array]
"""Cosines and sines, (T, Dh / 2) or with the rows of x."""


def angles_of(
    layer: Any,
    shape: tuple[Any, ...],
    positions: Any = None,
    cache: KVCache | None = None,
    segment_ids: Any = None,
    mask: Any = None,
    bias: Any = None,
) -> Angles | None:
    """The angles of an input of this shape; None for a layer without rotary embedding.

    Args:
      layer: the Attention.
      shape: (B, T, D) or (T, D).
      positions, cache, segment_ids, mask, bias: as in Attention.

    Raises:
      ValueError: a shape of other axes, positions of another shape; and where frequencies depend on the length of a
        token's text, arrays that do not say it.
    """
    if len(shape) not in (2, 3):
        raise ValueError(f"attention wants (B, T, D) or (T, D), got shape {shape}")
    given, rows = positions, (shape[-2:-1], shape[:-1])
    if positions is None:
        positions = jnp.arange(shape[-2]) if cache is None else cache.positions(shape[-2])
    if positions.shape not in rows:
        raise ValueError(f"positions has shape {positions.shape} beside an input of shape {shape}: (T,) or (B, T)")
    if layer.rope_theta is None:
        return None
    scaling = layer.rope_scaling
    angles = partial(
        rotary_angles,
        head_dim=layer.head_dim,
        theta=layer.rope_theta,
        scaling=scaling,
        partial_rotary_factor=layer.partial_rotary_factor,
    )
    if scaling is None or not scaling.needs_length:
        return angles(positions)
    most = shape[-2] if cache is None else cache.capacity
    if (given is None or cache is not None) and not scaling._varies(most):
        return angles(positions, length=most)
    if cache is not None:
        return angles(positions, length=_length_of(scaling, cache)[:, None])
    segment_ids = segment_ids.ids if isinstance(segment_ids, Segments) else segment_ids
    _check_texts(layer, shape, given, segment_ids, mask, bias)
    is_seen = _seen_keys(mask) if mask is not None and _is_of_keys(mask) else None
    return angles(positions, length=text_lengths(positions, segment_ids, is_seen))


def _length_of(scaling: RotaryScaling, cache: KVCache) -> jax.Array:
    """The cache's text_length, (B,).

    Raises:
      ValueError: it has none.
    """
    if cache.text_length is None:
        raise ValueError(
            f"{type(scaling).__name__}: frequencies depend on the length of the text, and a cache for {cache.capacity} "
            "tokens would keep keys of those of a shorter text. Give the cache text_length, how many tokens each row's "
            "text has in the end; or call decode of a model, which makes keys anew"
        )
    return cache.text_length


def _check_texts(layer: Any, shape: tuple[Any, ...], positions: Any, segment_ids: Any, mask: Any, bias: Any) -> None:
    """Checks that the arrays say which text each token is in.

    Raises:
      ValueError: they do not, or one is of another shape.
      TypeError: one is of another type.
    """
    heads: Any = jax.ShapeDtypeStruct((*shape[:-1], layer.num_heads, layer.head_dim), jnp.float32)
    checked_shapes(heads, heads, segment_ids, {"mask": mask, "bias": bias})
    name = type(layer.rope_scaling).__name__
    for what, x in (("mask", mask), ("bias", bias)):
        if segment_ids is None and x is not None and not (what == "mask" and _is_of_keys(x)):
            raise ValueError(
                f"{name}: frequencies depend on the length of a token's text, which a {what} of shape {x.shape} does "
                "not say. Give segment_ids too, an id for each text and padding; or for padding a mask over keys "
                "alone, (B, 1, 1, T)"
            )
    if callable(layer.implementation) and isinstance(positions, jax.Array) and varying_axes(positions):
        raise ValueError(
            f"{name}: frequencies depend on the length of a token's text, which positions that differ between devices "
            "of a shard_map do not say where an implementation of attention may read those of others. Leave positions "
            "out where a device has entire texts"
        )


def _is_of_keys(mask: Any) -> bool:
    """Whether a mask hides keys from all queries or from none."""
    return mask is not None and (len(mask.shape) < 2 or mask.shape[-2] == 1)


def _seen_keys(mask: jax.Array) -> jax.Array:
    """Whether queries see a key, (B or 1, T or 1) or (T or 1,), by a mask over keys ([B,] H, 1, T)."""
    if mask.ndim < 2:
        return jnp.atleast_1d(mask)
    mask = jnp.squeeze(mask, -2)
    return mask if mask.ndim < 2 else mask.any(axis=-2)
