"""Sequences packed into one row: segments, their positions, and the labels that cross from one to the next.

A segment is a run of equal ids. An id that comes again later in its row is a new segment: ids need not be unique, and
padding, a segment of its own, may have 0 wherever it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.extend import int32_labels, register_pytree

_IGNORED = -100  # int32_labels returns no number below -1


def segment_runs(segment_ids: jax.Array) -> jax.Array:
    """0, 1, 2, ... for the segments of each row, (..., T) int32 from integers (..., T).

    Raises:
      ValueError: ids that are not integers.
    """
    return jnp.cumsum(_begins(segment_ids), axis=-1, dtype=jnp.int32)


@register_pytree()
@dataclasses.dataclass(frozen=True)
class Segments:
    """The segments of rows of T tokens, a pytree: layers take it as segment_ids, so that a model makes it once for all.

    Attributes:
      ids: (..., T) int32, rising by 1 from each segment to the next, from 0 on.
      first, last: (..., T) int32, the first and the last token of each token's segment.
    """

    ids: jax.Array
    first: jax.Array
    last: jax.Array

    @classmethod
    def of(cls, segment_ids: jax.Array | Segments) -> Segments:
        """The segments of integers (..., T).

        Raises:
          ValueError: ids that are not integers.
        """
        if isinstance(segment_ids, Segments):
            return segment_ids
        begins = _begins(segment_ids)
        index = jnp.arange(segment_ids.shape[-1], dtype=jnp.int32)
        ends = jnp.concatenate([begins[..., 1:], jnp.ones_like(begins[..., :1])], axis=-1)
        return cls(
            jnp.cumsum(begins, axis=-1, dtype=jnp.int32),
            lax.cummax(jnp.where(begins, index, 0), axis=begins.ndim - 1),
            lax.cummin(jnp.where(ends, index, index[-1:]), axis=begins.ndim - 1, reverse=True),
        )

    @property
    def shape(self) -> tuple[Any, ...]:
        """(..., T)."""
        return self.ids.shape


def shared_segments(segment_ids: Any, layers: Iterable[Any]) -> Any:
    """segment_ids for all of these layers: as `Segments` where each says by its `takes_segments` that it takes them.

    Raises:
      ValueError: ids that are not integers.
    """
    if segment_ids is None or not all(getattr(layer, "takes_segments", False) for layer in layers):
        return segment_ids
    return Segments.of(segment_ids)


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """Each token's position in its segment, (..., T) int32 from integers (..., T).

    Raises:
      ValueError: ids that are not integers.
    """
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[-1], dtype=jnp.int32), segment_ids.shape)
    starts = jnp.where(_begins(segment_ids), index, 0)
    return index - lax.cummax(starts, axis=starts.ndim - 1)


def text_lengths(positions: jax.Array, segment_ids: jax.Array | None, is_seen: jax.Array | None) -> jax.Array:
    """How long the text of each token is: the largest of its positions less the smallest, plus 1.

    Args:
      positions: (..., T) integers.
      segment_ids: (..., T) integers, each segment a text; None: each row is one.
      is_seen: bool, broadcastable to (..., T), False for padding, which no text has; None: there is none.

    Returns:
      int32, (..., T) or (..., 1).
    """
    limits, others = jnp.iinfo(jnp.int32), [x for x in (segment_ids, is_seen) if x is not None]
    # Sums, not broadcast_to: over explicit mesh axes they have the others' shardings.
    smallest = largest = sum((jnp.zeros_like(x, jnp.int32) for x in others), positions.astype(jnp.int32))
    if is_seen is not None:
        smallest, largest = (jnp.where(is_seen, smallest, x) for x in (limits.max, limits.min))
    if segment_ids is None:
        smallest, largest = smallest.min(axis=-1, keepdims=True), largest.max(axis=-1, keepdims=True)
    else:
        smallest, largest = jnp.vectorize(_extremes_of_runs, signature="(t),(t),(t)->(t),(t)")(
            segment_runs(segment_ids) + jnp.zeros_like(smallest), smallest, largest
        )
    return jnp.where(largest < smallest, 0, largest - smallest + 1)


def _extremes_of_runs(runs: jax.Array, smallest: jax.Array, largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The smallest and the largest number of each run, at each of its tokens; all (T,) int32."""
    limits = jnp.iinfo(jnp.int32)
    lows = jnp.full_like(smallest, limits.max).at[runs].min(smallest)
    highs = jnp.full_like(largest, limits.min).at[runs].max(largest)
    return lows[runs], highs[runs]


def labels_within_segments(labels: jax.Array, segment_ids: jax.Array, ignored: int) -> jax.Array:
    """labels (..., T) or (..., T, k), with `ignored` at the last token of each segment that another one follows.

    They are int32 where their own dtype cannot hold `ignored`.

    Raises:
      ValueError: ids that are not integers, or of another shape than the labels.
    """
    if segment_ids.shape not in (labels.shape, labels.shape[:-1]):
        raise ValueError(f"segment_ids has shape {segment_ids.shape}; beside labels {labels.shape} it must be the same")
    begins = _begins(segment_ids)
    ends = jnp.concatenate([begins[..., 1:], jnp.zeros_like(begins[..., :1])], axis=-1)
    ends = jnp.expand_dims(ends, range(ends.ndim, labels.ndim))
    if jnp.issubdtype(labels.dtype, jnp.integer):
        limits = jnp.iinfo(labels.dtype)
        labels = labels if limits.min <= ignored <= limits.max else int32_labels(labels, None)[0]
    return jnp.where(ends, jnp.asarray(ignored, labels.dtype), labels)


def counted_labels(labels: jax.Array, segment_ids: jax.Array, ignore_index: int | None) -> tuple[jax.Array, int | None]:
    """`labels_within_segments` of labels of any integer dtype, and the ignore_index of the result.

    Args:
      labels: (..., T) or (..., T, k).
      segment_ids: (..., T).
      ignore_index: of the given labels, whose dtype need not hold it; None: none of them is ignored.
    """
    if not hasattr(labels, "dtype") or not jnp.issubdtype(labels.dtype, jnp.integer):
        return labels, ignore_index  # the head refuses them
    labels, ignored = int32_labels(labels, ignore_index)
    return labels_within_segments(jnp.where(ignored, _IGNORED, labels), segment_ids, _IGNORED), _IGNORED


def _begins(segment_ids: jax.Array) -> jax.Array:
    """Whether another segment begins at a token; not at the first one of a row."""
    if not jnp.issubdtype(jnp.result_type(segment_ids), jnp.integer):
        raise ValueError(f"segment_ids are integers, got {jnp.result_type(segment_ids)}")
    first = jnp.zeros_like(segment_ids[..., :1], dtype=bool)
    return jnp.concatenate([first, segment_ids[..., 1:] != segment_ids[..., :-1]], axis=-1)
