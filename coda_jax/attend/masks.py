"""The masks of a call of attention: checked, and reduced to a `MaskSpec` and few arrays."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.attend.spec import MaskArrays, MaskSpec
from coda_jax.epilogue.values import same_shape, same_size

_MOST = 1 << 28  # of bounds: no array has as many rows, and sums of a few are in int32's range


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first", "last", "second_first", "second_last"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Intervals:
    """A mask by intervals of keys: query i sees keys first[i] to last[i], both inclusive, and those of a second one.

    An interval whose first key is behind its last is empty. There are no keys before 0 and from S on.

    Attributes:
      first, last: (B, T) int32, or (T,) for all sequences.
      second_first, second_last: the same, of a second interval, which may overlap the first; None if there is none.
    """

    first: jax.Array
    last: jax.Array
    second_first: jax.Array | None = None
    second_last: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a call: sequences, heads of queries, queries and keys."""

    batch: Any
    heads: Any
    queries: Any
    keys: Any


@dataclasses.dataclass(frozen=True)
class Masks:
    """The masks of a call as the user gives them, checked; fields are those of `coda.attention`, None where not given.

    Attributes:
      window: local_window_size, (left, right).
      ids: of queries and of keys, (B, T) and (B, S).
      intervals: arrays (B, T): firsts and lasts in turn.
      offset: a number, or (B,).
    """

    is_causal: bool
    window: tuple[int, int] | None
    ids: tuple[jax.Array, jax.Array] | None
    query_lengths: jax.Array | None
    key_lengths: jax.Array | None
    offset: int | jax.Array
    intervals: tuple[jax.Array, ...]
    dense: jax.Array | None
    bias: jax.Array | None

    @classmethod
    def checked(
        cls,
        sizes: Sizes,
        *,
        is_causal: bool,
        local_window_size: Any,
        segment_ids: Any,
        key_value_segment_ids: Any,
        query_seq_lengths: Any,
        key_value_seq_lengths: Any,
        query_offset: Any,
        mask: Any,
        bias: Any,
    ) -> Masks:
        """The masks of a call, from the arguments of `coda.attention`.

        Raises:
          ValueError: one that does not fit.
        """
        if not isinstance(is_causal, bool | np.bool_):
            raise ValueError(f"attention: is_causal = {is_causal!r}; it must be True or False")
        is_by_intervals = isinstance(mask, Intervals)
        return cls(
            bool(is_causal),
            _window(local_window_size),
            _ids(segment_ids, key_value_segment_ids, sizes),
            _of_sequences("query_seq_lengths", query_seq_lengths, sizes),
            _of_sequences("key_value_seq_lengths", key_value_seq_lengths, sizes),
            _offset(query_offset, sizes),
            _interval_rows(mask, sizes) if is_by_intervals else (),
            None if is_by_intervals else _pairs("mask", mask, sizes),
            _pairs("bias", bias, sizes),
        )

    @property
    def are_jax_own(self) -> bool:
        """Whether `jax.nn.dot_product_attention` has names for all masks but a dense one."""
        return self.ids is None and not self.intervals and isinstance(self.offset, int) and self.offset == 0

    @property
    def band(self) -> tuple[int | None, int | None]:
        """Bounds (left, right) around a query's position: it sees keys from position - left to position + right."""
        left, right = (None, None) if self.window is None else self.window
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    def reduced(self, sizes: Sizes) -> tuple[MaskSpec, MaskArrays]:
        """The masks as the primitives have them. What arrays say of each query becomes intervals of keys."""
        left, right = self.band
        is_moved = not isinstance(self.offset, int) and (left, right) != (None, None)
        intervals = None
        if self.intervals or is_moved or self.query_lengths is not None or self.key_lengths is not None:
            intervals, left, right = self._intervals(sizes), None, None
        else:
            left, right = _static_band(left, right, self.offset if isinstance(self.offset, int) else 0, sizes)
        spec = MaskSpec(
            left,
            right,
            0 if intervals is None else intervals.shape[1] // 2,
            self.ids is not None,
            self.dense is not None,
            self.bias is not None,
        )
        query_ids, key_ids = self.ids or (None, None)
        return spec, MaskArrays(intervals, query_ids, key_ids, self.dense, self.bias)

    def _intervals(self, sizes: Sizes) -> jax.Array:
        """(B, 2 or 4, T) int32, as `MaskArrays` has it: the user's intervals cut by the band and by lengths."""
        rows = jnp.arange(sizes.queries, dtype=jnp.int32)
        last_key = jnp.asarray(sizes.keys, jnp.int32) - 1
        lowest, highest = jnp.zeros_like(rows), last_key
        left, right = self.band
        offset = self.offset if isinstance(self.offset, int) else self.offset[:, None]
        position = rows + jnp.clip(jnp.asarray(offset), -_MOST, _MOST).astype(jnp.int32)
        if left is not None:
            lowest = jnp.maximum(lowest, position - min(left, _MOST))
        if right is not None:
            highest = jnp.minimum(highest, position + min(right, _MOST))
        if self.key_lengths is not None:
            highest = jnp.minimum(highest, self.key_lengths[:, None] - 1)
        is_row = True if self.query_lengths is None else rows < self.query_lengths[:, None]
        bounds = self.intervals or (jnp.zeros_like(rows), last_key)
        found = []
        for first, last in zip(bounds[::2], bounds[1::2], strict=True):
            first, last = jnp.maximum(first, lowest), jnp.minimum(last, highest)
            is_seen = (first <= last) & is_row
            found += [jnp.where(is_seen, first, last_key + 1), jnp.where(is_seen, last, -1)]
        shape = (sizes.batch, sizes.queries)
        return jnp.stack([jnp.broadcast_to(x, shape).astype(jnp.int32) for x in found], axis=1)


def intervals_of_band(spec: MaskSpec, first_row: Any, sizes: Sizes) -> jax.Array:
    """The intervals of keys (B, 2, T) int32 that a band lets queries see, the first of which is row `first_row`."""
    window: Any = (spec.left, spec.right)
    offset = jnp.broadcast_to(first_row, (sizes.batch,))
    return Masks(False, window, None, None, None, offset, (), None, None)._intervals(sizes)


def _static_band(left: int | None, right: int | None, offset: int, sizes: Sizes) -> tuple[int | None, int | None]:
    """The band around a query's row; without bounds that hide no key."""
    if left is not None:
        left = max(left - offset, -_MOST)
        if left >= (sizes.queries - 1 if isinstance(sizes.queries, int) else _MOST):
            left = None
    if right is not None:
        right = max(right + offset, -_MOST)
        if right >= (sizes.keys - 1 if isinstance(sizes.keys, int) else _MOST):
            right = None
    return left, right


def _window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    pair = (window, window) if _is_integer(window) else window
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(_is_integer(x) and x >= 0 for x in pair)):
        raise ValueError(
            f"attention: local_window_size = {window!r}; it must be a number of keys, or two (left, right), from 0 on"
        )
    return int(pair[0]), int(pair[1])


def _ids(query_ids: Any, key_ids: Any, sizes: Sizes) -> tuple[jax.Array, jax.Array] | None:
    if query_ids is None and key_ids is None:
        return None
    if query_ids is None:
        raise ValueError("attention: key_value_segment_ids without segment_ids; queries need ids too")
    if key_ids is None:
        if not same_size(sizes.queries, sizes.keys):
            raise ValueError(
                f"attention: segment_ids without key_value_segment_ids, for {sizes.queries} queries and {sizes.keys} "
                "keys; both have the same ids only where there are as many of them"
            )
        ids = _of_rows("segment_ids", query_ids, sizes.batch, sizes.queries)
        return ids, ids
    return (
        _of_rows("segment_ids", query_ids, sizes.batch, sizes.queries),
        _of_rows("key_value_segment_ids", key_ids, sizes.batch, sizes.keys),
    )


def _interval_rows(mask: Intervals, sizes: Sizes) -> tuple[jax.Array, ...]:
    if (mask.second_first is None) != (mask.second_last is None):
        raise ValueError("attention: mask has one of second_first and second_last; a second interval needs both")
    names = [field.name for field in dataclasses.fields(mask) if getattr(mask, field.name) is not None]
    return tuple(_of_rows(f"mask.{name}", getattr(mask, name), sizes.batch, sizes.queries) for name in names)


def _of_rows(name: str, x: Any, batch: Any, length: Any) -> jax.Array:
    """(B, length) int32 of such an array, or of (length,)."""
    x = _integers(name, x)
    if not any(same_shape(x.shape, shape) for shape in ((batch, length), (length,))):
        raise ValueError(f"attention: {name} has shape {x.shape}; it must be {(batch, length)} or ({length},)")
    return x if x.ndim == 2 else jnp.broadcast_to(x, (batch, length))


def _of_sequences(name: str, x: Any, sizes: Sizes) -> jax.Array | None:
    """(B,) int32 of such an array, or of a scalar."""
    if x is None:
        return None
    x = _integers(name, x)
    if x.ndim != 0 and not same_shape(x.shape, (sizes.batch,)):
        raise ValueError(f"attention: {name} has shape {x.shape}; it must be ({sizes.batch},), one for each sequence")
    return jnp.broadcast_to(x, (sizes.batch,))


def _offset(offset: Any, sizes: Sizes) -> int | jax.Array:
    if offset is None:
        return 0
    if _is_integer(offset):
        return int(offset)
    result = _of_sequences("query_offset", offset, sizes)
    assert result is not None
    return result


def _is_integer(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _integers(name: str, x: Any) -> jax.Array:
    dtype = getattr(x, "dtype", None)
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"attention: {name} is {dtype or x.dtype}; it must be int32")
    return x.astype(jnp.int32)


def _pairs(name: str, x: Any, sizes: Sizes) -> jax.Array | None:
    """A mask or bias with four axes, each 1 or whole."""
    if x is None:
        return None
    x = jnp.asarray(x)
    is_mask = name == "mask"
    if is_mask and x.dtype != jnp.bool_:
        raise ValueError(
            f"attention: mask is {x.dtype}; it must be bool, or coda_jax.Intervals. What is added to scores is bias="
        )
    if not is_mask and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"attention: bias is {x.dtype}; it must be of a floating dtype. What hides keys is mask=")
    whole = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    if x.ndim > 4 or not all(
        same_size(size, 1) or same_size(size, other) for size, other in zip(x.shape[::-1], whole[::-1], strict=False)
    ):
        raise ValueError(f"attention: {name} has shape {x.shape}; it must broadcast to (B, N, T, S) = {whole}")
    return x.reshape(*(1,) * (4 - x.ndim), *x.shape)
