"""The keys that a score hides: as a band, at all, and in which tiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.attend.score.program import Score
from coda_jax.attend.score.ranges import Bounds, Number, Tiles, Truth, bounds, hidden, unknown
from coda_jax.epilogue.dtypes import BOOL, FLOAT32, INT32
from coda_jax.epilogue.values import same_size

_MOST_DIAGONALS = 1 << 22
_NO_END = 1 << 30  # of positions
# The least and the greatest number that arrays without rows and columns usually have, as slopes and indices.
_USUAL = {INT32: (np.int32(0), np.int32(1 << 20)), FLOAT32: (np.float32(-(2.0**60)), np.float32(2.0**60))}


class Band(NamedTuple):
    """Keys i - left to i + right of query i, outside of which a score hides all; None is no bound.

    Attributes:
      is_all: whether the score hides nothing inside, whatever its arrays have.
      is_likely_all: the same if numbers of heads and sequences are of usual size: slopes, indices. What depends on this
        is the kernels' speed, and no value.
    """

    left: int | None
    right: int | None
    is_all: bool
    is_likely_all: bool


def band(score: Score, shapes: Sequence[Sequence[Any]], queries: Any, keys: Any) -> Band:
    """The narrowest band that is known of a score.

    Args:
      shapes: of its arrays.
    """
    has_positions = _have_positions(score, shapes)
    is_known = isinstance(queries, int) and isinstance(keys, int) and 0 < queries + keys < _MOST_DIAGONALS
    return _band(score, has_positions, queries if is_known else None, keys if is_known else None)


@functools.lru_cache(maxsize=1024)
def _band(score: Score, has_positions: tuple[bool, ...], queries: int | None, keys: int | None) -> Band:
    arrays, usual = _arrays(score, None), _arrays(score, has_positions)
    if not queries or not keys:
        ends = 0, _NO_END - 1
        is_all, is_likely_all = (
            bool(np.all(hidden(score, Tiles(np, ends, ends, each))[1])) for each in (arrays, usual)
        )
        return Band(None, None, is_all, is_likely_all)
    ages = np.arange(1 - keys, queries, dtype=np.int32)  # of a query: its row less the key's
    columns = np.maximum(0, -ages), np.minimum(keys, queries - ages) - 1
    tiles = Tiles(np, (columns[0] + ages, columns[1] + ages), columns, arrays, difference=(ages, ages))
    all_hidden, none_hidden = (np.broadcast_to(x, ages.shape) for x in hidden(score, tiles))
    likely_none = np.broadcast_to(hidden(score, tiles._replace(arrays=usual))[1], ages.shape)
    shown = np.flatnonzero(~all_hidden)
    if not len(shown):
        return Band(-keys, 0, True, True)
    inside = slice(shown[0], shown[-1] + 1)
    first, last = int(ages[shown[0]]), int(ages[shown[-1]])
    left, right = (None if last == queries - 1 else last), (None if first == 1 - keys else -first)
    return Band(left, right, bool(none_hidden[inside].all()), bool(likely_none[inside].all()))


def _have_positions(score: Score, shapes: Sequence[Sequence[Any]]) -> tuple[bool, ...]:
    each = enumerate(shapes)
    return tuple(i not in score.table_of and not (same_size(x[2], 1) and same_size(x[3], 1)) for i, x in each)


def _arrays(score: Score, has_positions: Sequence[bool] | None) -> list[Bounds]:
    """Bounds of arrays of unknown values; with `has_positions`, those without rows and columns have usual ones."""
    dtypes = [dtype if dtype in (BOOL, INT32) else "float32" for dtype in score.dtypes]
    if has_positions is None:
        return [unknown(dtype, np) for dtype in dtypes]
    return [
        unknown(dtype, np) if flag or dtype == BOOL else Number(*_USUAL[dtype])
        for dtype, flag in zip(dtypes, has_positions, strict=True)
    ]


def keeps_hidden(score: Score, shapes: Sequence[Sequence[Any]]) -> bool:
    """Whether the score of a product far below all others is so, too: as of a sum, but not of a cap."""
    ends = 0, _NO_END - 1
    usual = _arrays(score, _have_positions(score, shapes))
    return bool(np.all(bounds(score, Tiles(np, ends, ends, usual, product=(-(2.0**93), -(2.0**93)))).high < -(2.0**92)))


def shown(score: Score, arrays: Sequence[jax.Array]) -> tuple[Score | None, tuple[jax.Array, ...]]:
    """A score where it hides nothing, and what it reads there; None if it is the product itself."""
    is_product = score.nodes[score.shown].op == "score"
    if is_product and score.has_unit_slope and not score.slopes and score.why_no_slope is None:
        return None, ()
    roots = [score.shown, score.slope, *(node for _, node in score.slopes)]
    kept = sorted(score.reads([*roots, *(x.index for x in score.tables if x.array in dict(score.slopes))]))
    return score.of_arrays(kept), tuple(arrays[i] for i in kept)


def tiles_hidden(
    score: Score, arrays: Sequence[jax.Array], queries: Any, keys: Any, rows: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    """Whether all heads hide a tile of `rows` x `columns` entirely, and whether none of them hides anything of it.

    Returns:
      Two arrays (1 or B, tiles of queries or 1, tiles of keys or 1) bool.
    """

    def positions(count: Any, size: int) -> tuple[jax.Array, jax.Array]:
        first = jnp.arange(-(-count // size), dtype=jnp.int32) * size
        return first, jnp.minimum(first + size, count) - 1

    row, column = positions(queries, rows), positions(keys, columns)
    of_arrays = [_of_tiles(x, rows, x.shape[3] if i in score.table_of else columns) for i, x in enumerate(arrays)]
    all_hidden, none_hidden = hidden(score, Tiles(jnp, (row[0][:, None], row[1][:, None]), column, of_arrays))

    def of_heads(flags: Any) -> jax.Array:
        flags = jnp.asarray(flags)
        flags = jnp.expand_dims(flags, range(4 - flags.ndim))
        return jnp.all(flags, axis=1)

    return of_heads(all_hidden), of_heads(none_hidden)


def _of_tiles(x: jax.Array, rows: int, columns: int) -> Bounds:
    """The bounds of an array of a score in each tile."""
    least, most = x, x
    for axis, size in ((2, rows), (3, columns)):
        if same_size(x.shape[axis], 1):
            continue
        count = -(-x.shape[axis] // size)
        padding = [(0, count * size - x.shape[axis] if i == axis else 0) for i in range(4)]
        shape = (*least.shape[:axis], count, size, *least.shape[axis + 1 :])
        least = jnp.min(jnp.pad(least, padding, mode="edge").reshape(shape), axis=axis + 1)
        most = jnp.max(jnp.pad(most, padding, mode="edge").reshape(shape), axis=axis + 1)
    if x.dtype == jnp.bool_:
        return Truth(~least, most)
    of = jnp.int32 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    return Number(least.astype(of), most.astype(of))
