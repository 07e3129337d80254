"""The costs of attention: the pairs that its mask needs, their FLOPs, and about how long the kernels take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coda_jax.attend.score import Score
from coda_jax.attend.score.hiding import tiles_hidden
from coda_jax.attend.spec import MaskSpec
from coda_jax.tiles.arch import current


def pairs(mask: MaskSpec, queries: Any, keys: Any) -> int | None:
    """How many pairs of queries and keys see each other, of one head; None for symbolic sizes.

    A band says it. What arrays say is not known: intervals are then taken for causal ones, ids of documents halve what
    is left, and a dense mask hides nothing.
    """
    if not (isinstance(queries, int) and isinstance(keys, int)):
        return None
    band = MaskSpec(right=keys - queries) if mask.intervals else mask
    rows = np.arange(queries, dtype=np.int64)
    first, end = _bounds(band, rows, rows, keys)
    found = int(np.maximum(end - first, 0).sum())
    return found // 2 if mask.has_ids else found


def skipped(mask: MaskSpec, queries: Any, keys: Any, tile: int = 128, score: Score | None = None) -> float | None:
    """The share of square tiles in which a band hides all pairs; None where arrays hide others, or sizes are symbolic.

    Args:
      tile: queries, and keys, of a tile.
      score: a function without arrays that may hide keys, too.
    """
    if mask.intervals or mask.has_ids or mask.has_mask or not (isinstance(queries, int) and isinstance(keys, int)):
        return None
    rows = np.arange(0, queries, tile, dtype=np.int64)
    first, end = _bounds(mask, rows, np.minimum(rows + tile, queries) - 1, keys)
    starts = np.arange(0, keys, tile, dtype=np.int64)
    is_needed = (starts < end[:, None]) & (starts + tile > first[:, None]) & (end > first)[:, None]
    if score is not None:
        is_needed &= ~np.asarray(tiles_hidden(score, (), queries, keys, tile, tile)[0])[0]
    return 1 - int(is_needed.sum()) / max(is_needed.size, 1)


def _bounds(mask: MaskSpec, first_rows: np.ndarray, last_rows: np.ndarray, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """The first key that a band lets any of these rows see, and the end of those that it does."""
    first = np.zeros_like(first_rows) if mask.left is None else np.clip(first_rows - mask.left, 0, keys)
    end = np.full_like(last_rows, keys) if mask.right is None else np.clip(last_rows + mask.right + 1, 0, keys)
    return first, end


def flops(types: Sequence[Any], seen: int | None, *, is_backward: bool) -> int | None:
    """The FLOPs of attention, of so many pairs of each head; None if that or a size is not known.

    Args:
      types: of q, k and v, or these, on one device.
      seen: as `pairs` counts them.
    """
    q, _, v = types[:3]
    batch, _, heads, width = q.shape
    if seen is None or not all(isinstance(size, int) for size in (batch, heads, width, v.shape[3])):
        return None
    products = 3 * width + 2 * v.shape[3] if is_backward else width + v.shape[3]
    return int(2 * batch * heads * products * seen)


def nanoseconds(needed: int, *, is_backward: bool) -> int:
    """About how long the kernels take for so many FLOPs."""
    return int(needed / current().attention_tflops[is_backward] / 1e3)
