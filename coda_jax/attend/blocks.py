"""Attention by XLA, a block of queries at a time: O(T) memory in both passes. The reference for the kernels.

    s = score(scale q k^T) + bias, -inf where a query does not see a key    m = rows' maximum    e = exp(s - m)
    l = rows' sums of e + exp(sink - m)          y = (z e v) / l          lse = m + log l

The backward pass makes the probabilities again, from lse:

    p = exp(s - lse)        ds = p (z dy v^T - delta)        delta = rowsum(dy y) - dlse        dx = score'(x) ds
    dq = scale dx k         dk = scale dx^T q         dv = (z p)^T dy       dbias = ds, summed over its axes of size 1

An array that the score reads has score's derivative by it, times ds, summed as the bias's; an entry of a table, summed
over the pairs that read it.

Sinks count in m too. z is what dropout multiplies a probability by, 0 or 1 / (1 - rate); without it 1.
Products are summed in float32 (float64 of float64 arrays), as are s, e and p; e, p and ds are rounded to the arrays'
dtype where they are factors. A score of `HIDDEN` or less hides its key. A row that sees nothing has y = 0, lse = -inf
or its sink, and no gradient.

A query is not reached by what it does not see, in either pass, even where that is NaN or infinite: where a sum runs
over such numbers they are zeros here, and the scores of their row or key are NaN instead.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.attend.score import HIDDEN
from coda_jax.attend.score.evaluate import evaluate
from coda_jax.attend.score.program import Table
from coda_jax.attend.spec import AttentionSpec, MaskArrays, MaskSpec
from coda_jax.epilogue.random_bits import column_bits, is_kept
from coda_jax.epilogue.values import same_size

_MOST_BYTES = 64 << 20  # of a block's scores
_MOST_CPU_BYTES = 4 << 20  # on a CPU, whose caches hold no more
_LEAST_ROWS = 16  # of a block, whatever its bytes
_MOST_SPANS = 8  # of queries that read the same keys: causal attention then computes 1/2 + 1/16 of all scores
_LEAST_SPAN = 512
_WINDOW_ROWS = 128  # of a block whose keys move with it, at least


class Span(NamedTuple):
    """Queries start to start + blocks * size, in blocks of `size`, which read keys from first to first + count.

    Attributes:
      width: how many of these keys a block reads. Where they are not all, its keys move with its queries.
    """

    start: int
    size: Any
    blocks: int
    first: int
    count: Any
    width: Any


def spans(heads: Any, length: Any, keys: Any, mask: MaskSpec, on_cpu: bool = False) -> list[Span]:
    """The spans of queries (of all heads of a batch) that read the same keys.

    Symbolic sizes of queries or keys are one block. A symbolic number of heads counts as one.
    """
    if not (isinstance(length, int) and isinstance(keys, int)) or length == 0:
        return [Span(0, length, 1, 0, keys, keys)]
    row_bytes = 4 * keys * (heads if isinstance(heads, int) else 1)
    most_rows = max((_MOST_CPU_BYTES if on_cpu else _MOST_BYTES) // max(row_bytes, 1), _LEAST_ROWS)
    if mask.left is not None and mask.right is not None:
        reach = max(mask.left + mask.right, 0)
        size = _block_size(length, min(most_rows, max(reach, _WINDOW_ROWS)))
        return [Span(0, size, -(-length // size), 0, keys, max(min(size + mask.left + mask.right, keys), 0))]
    is_bounded = mask.left is not None or mask.right is not None
    count = min(max(length // _LEAST_SPAN, 1), _MOST_SPANS) if is_bounded else 1
    size = _block_size(length, min(most_rows, -(-length // count)))
    blocks = -(-length // size)
    each, found = -(-blocks // count), []
    for block in range(0, blocks, each):
        number = min(each, blocks - block)
        start, end = block * size, (block + number) * size
        first = 0 if mask.left is None else min(max(start - mask.left, 0), keys)
        last = keys if mask.right is None else max(min(end + mask.right, keys), first)
        found.append(Span(start, size, number, first, last - first, last - first))
    return found


def _block_size(length: int, most_rows: int) -> int:
    """Rows of a block: a power of two where these divide the length, else as even as can be."""
    if length <= most_rows:
        return length
    power = 1 << (most_rows.bit_length() - 1)
    return power if length % power == 0 else -(-length // -(-length // most_rows))


def forward(*arrays: jax.Array, spec: AttentionSpec, on_cpu: bool) -> list[jax.Array]:
    """Attention's results.

    Args:
      *arrays: q (B, T, H, D), k (B, S, K, D), v (B, S, K, Dv) and the arrays of the mask and of the score.
      on_cpu: whether blocks are as small as a CPU's caches.

    Returns:
      y (B, T, H, Dv) in q's dtype and lse (B, H, T), float32 or wider.
    """
    q, k, v, *others = arrays
    problem = _Problem.of([q, k, _finite(v), *others], spec, on_cpu, _poison(v))

    def block(at: _Block) -> tuple[Any, tuple[()]]:
        s = at.scores()
        m = jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf)
        sinks = problem.masks.sinks
        m = m if sinks is None else jnp.maximum(m, sinks)
        m = jnp.where(m == -jnp.inf, 0, m)
        e = jnp.exp(s - m)
        total = jnp.sum(e, axis=-1, keepdims=True)
        total = total if sinks is None else total + jnp.exp(sinks - m)
        is_empty = total == 0
        total = jnp.where(is_empty, 1, total)
        e = at.dropped(e)
        y = at.product("bngts,bnsh->bngth", e.astype(v.dtype), at.keys(problem.v)) / total
        return (y.astype(q.dtype), jnp.where(is_empty, -jnp.inf, m + jnp.log(total))), ()

    pieces = [problem.over_blocks(block, span)[0] for span in problem.spans]
    y, lse = (problem.join(each) for each in zip(*pieces, strict=True))
    return [_from_heads(y), _from_heads(lse)[..., 0].transpose(0, 2, 1)]


def backward(*arrays: jax.Array, spec: AttentionSpec, on_cpu: bool) -> list[jax.Array]:
    """Attention's gradients.

    Args:
      *arrays: as `forward` takes them, and then its results y and lse and their cotangents dy and dlse.
      on_cpu: as `forward` has it.

    Returns:
      dq, dk and dv, with the types of q, k and v; with sinks also delta (B, H, T), 0 of rows without a sum; the
      gradients of the score's arrays that the spec names.
    """
    problem, again = _again(arrays, spec, on_cpu)
    q, k, v = arrays[:3]
    accumulator = problem.accumulator

    def block(at: _Block) -> tuple[Any, Any]:
        p, ds = again(at)
        dy = at.rows(again.dy)
        rounded, keys = at.through_score(ds).astype(k.dtype), at.keys(problem.k)
        dq = at.product("bngts,bnsh->bngth", rounded, keys) * spec.scale
        dk = at.product("bngts,bngth->bnsh", rounded, at.rows(problem.q)) * spec.scale
        return (dq.astype(q.dtype),), (dk, at.product("bngts,bngth->bnsh", at.dropped(p).astype(dy.dtype), dy))

    dq_pieces, totals = [], tuple(jnp.zeros(x.shape, accumulator) for x in (problem.k, problem.v))
    for span in problem.spans:
        (dq,), totals = problem.over_blocks(block, span, totals)
        dq_pieces.append(dq)
    dk, dv = (total.transpose(0, 2, 1, 3).astype(x.dtype) for total, x in zip(totals, (k, v), strict=True))
    of_sinks = [again.delta] if spec.mask.has_sinks else []
    of_score = score_cotangents(*arrays, spec=spec, on_cpu=on_cpu) if spec.score_gradients else []
    return [_from_heads(problem.join(dq_pieces)), dk, dv, *of_sinks, *of_score]


def bias_cotangents(*arrays: jax.Array, spec: AttentionSpec, on_cpu: bool) -> list[jax.Array]:
    """The bias's gradient, with its type, from what `backward` takes."""

    def terms(at: _Block, again: _Again) -> list[jax.Array]:
        return [again(at)[1]]

    likes = [spec.mask_arrays(range(len(arrays))).bias]
    return _sums_of_pairs(arrays, likes, lambda problem: [problem.masks.bias], terms, spec, on_cpu)


def score_cotangents(*arrays: jax.Array, spec: AttentionSpec, on_cpu: bool) -> list[jax.Array]:
    """The gradients of the score's arrays that the spec names, with their types, from what `backward` takes."""
    assert spec.score is not None
    slopes = [dict(spec.score.slopes)[number] for number in spec.score_gradients]

    def by_heads(problem: _Problem) -> list[jax.Array]:
        return [problem.operands[number] for number in spec.score_gradients]

    tables = spec.gradient_tables

    def terms(at: _Block, again: _Again) -> list[jax.Array]:
        ds = again(at)[1]
        each = zip((_times(ds, slope) for slope in at.by_score(slopes)), by_heads(at.problem), tables, strict=True)
        return [term if table is None else at.by_entry(term, like, table) for term, like, table in each]

    likes = spec.gradient_arrays(range(len(arrays)))
    return _sums_of_pairs(arrays, likes, by_heads, terms, spec, on_cpu, tables)


def _sums_of_pairs(
    arrays: Sequence[jax.Array],
    places: Sequence[int],
    by_heads: Callable[[_Problem], Sequence[jax.Array]],
    terms: Callable[[_Block, _Again], Sequence[jax.Array]],
    spec: AttentionSpec,
    on_cpu: bool,
    tables: Sequence[Table | None] = (None,),
) -> list[jax.Array]:
    """For each array at these places what pairs add to it: `terms`, summed over its axes of size 1, in one order.

    Terms of `tables` are those of entries.

    Each block's sum is put into its place, so that nothing larger than a block and the result is in memory. Where a
    block of few rows of all sequences is too large, some of them are taken at a time, each `count`-th, so that devices
    with others stay apart.
    """
    run = functools.partial(
        _with_sums_of_pairs, by_heads=by_heads, terms=terms, spec=spec, on_cpu=on_cpu, tables=tables
    )
    likes, batch, count = (
        [arrays[i] for i in places],
        arrays[0].shape[0],
        _groups_of_sequences(arrays[0], arrays[1], on_cpu),
    )
    if count == 1:
        sums = run([None] * len(likes), arrays, [False] * len(likes))
        return [x.reshape(like.shape).astype(like.dtype) for x, like in zip(sums, likes, strict=True)]
    parts = [x if _is_one(x.shape[0]) else x.reshape(batch // count, count, *x.shape[1:]) for x in arrays]
    is_shared = [_is_one(like.shape[0]) for like in likes]

    def some(i: Any) -> list[jax.Array]:
        each = zip(arrays, parts, strict=True)
        return [x if x is part else lax.dynamic_index_in_dim(part, i, 1, keepdims=False) for x, part in each]

    def step(totals: Any, i: Any) -> tuple[Any, Any]:
        found = run(totals, some(i), is_shared)
        each = list(zip(found, is_shared, strict=True))
        return [x if shared else None for x, shared in each], [None if shared else x for x, shared in each]

    totals, first = step([None] * len(likes), 0)
    totals, others = lax.scan(step, totals, jnp.arange(1, count, dtype=jnp.int32))
    found = []
    for like, total, one, more in zip(likes, totals, first, others, strict=True):
        if total is None:
            total = jnp.concatenate([one[:, None], jnp.moveaxis(more, 0, 1)], axis=1)
        found.append(total.reshape(like.shape).astype(like.dtype))
    return found


def _groups_of_sequences(q: jax.Array, k: jax.Array, on_cpu: bool) -> int:
    """The number of groups of sequences, such that scores of the least block of one are few enough bytes."""
    batch, heads, keys = q.shape[0], q.shape[2], k.shape[1]
    if not all(isinstance(size, int) and size > 0 for size in (batch, heads, keys)):
        return 1
    most = max((_MOST_CPU_BYTES if on_cpu else _MOST_BYTES) // (4 * heads * keys * _LEAST_ROWS), 1)
    return next(n for n in range(1, batch + 1) if batch % n == 0 and batch // n <= most)


def _with_sums_of_pairs(
    totals: Sequence[jax.Array | None],
    arrays: Sequence[jax.Array],
    is_sum: Sequence[bool],
    *,
    by_heads: Callable[[_Problem], Sequence[jax.Array]],
    terms: Callable[[_Block, _Again], Sequence[jax.Array]],
    spec: AttentionSpec,
    on_cpu: bool,
    tables: Sequence[Table | None],
) -> list[jax.Array]:
    """The totals of other sequences, if there are any, and what these sequences add.

    Args:
      is_sum: whether more is added to a result, which is in the accumulator's dtype then.
    """
    problem, again = _again(arrays, spec, on_cpu)
    likes = by_heads(problem)
    has_rows, has_keys = ([not _is_one(x.shape[axis]) for x in likes] for axis in (3, 4))
    padding = problem.q.shape[3] - problem.length  # rows beyond the last have distances too, and add nothing

    def begin(total: jax.Array | None, like: jax.Array, has_rows: bool, is_sum: bool, table: Table | None) -> jax.Array:
        if total is None:  # rows that a block has are its sums alone
            total = jnp.zeros(like.shape, like.dtype if has_rows and not is_sum else problem.accumulator)
        if table is not None and table.is_by_distance:
            return _padded(total, like.shape[4] + padding, axis=4)
        return _padded(total, like.shape[3], axis=3)

    def block(at: _Block) -> tuple[Any, Any]:
        each = zip(likes, terms(at, again), strict=True)
        axes = [tuple(axis for axis, size in enumerate(like.shape) if _is_one(size)) for like in likes]
        return (), tuple(jnp.sum(term, axis=axis, keepdims=True) for (_, term), axis in zip(each, axes, strict=True))

    def add(number: int, total: jax.Array, term: jax.Array, at: _Block) -> jax.Array:
        of_keys = at.key_start if (table := tables[number]) is None else at.first_entry(table)
        of_rows, of_keys = at.start if has_rows[number] else 0, of_keys if has_keys[number] else 0
        place = [jnp.asarray(x, jnp.int32) for x in (0, 0, 0, of_rows, of_keys)]  # of one dtype, with x64 too
        before = lax.dynamic_slice(total, place, term.shape).astype(term.dtype)
        return lax.dynamic_update_slice(total, (before + term).astype(total.dtype), place)

    found: Any = tuple(begin(*each) for each in zip(totals, likes, has_rows, is_sum, tables, strict=True))
    for span in problem.spans:
        _, found = problem.over_blocks(block, span, found, add)
    found = [
        x[..., : like.shape[4]] if table is not None and table.is_by_distance else x
        for x, like, table in zip(found, likes, tables, strict=True)
    ]
    return [problem.join([x]) if rows else x for x, rows in zip(found, has_rows, strict=True)]


def seen(spec: MaskSpec, arrays: Sequence[jax.Array], length: Any, keys: Any) -> jax.Array | None:
    """The pairs that see each other, (1 or B, 1 or H, 1 or T, 1 or S) bool, from a mask's arrays; None where all do."""
    masks = spec.arrays(arrays)
    conditions = _conditions(spec, masks, jnp.arange(length)[:, None], jnp.arange(keys))
    conditions = [x[:, :, 0] if x.ndim == 5 else x[None, None] for x in conditions]
    conditions += [] if masks.mask is None else [masks.mask]
    return functools.reduce(jnp.logical_and, conditions) if conditions else None


class _Block(NamedTuple):
    """A block of queries from `start` on, and the keys from `key_start` on."""

    problem: _Problem
    span: Span
    start: Any
    key_start: Any

    def rows(self, x: jax.Array, axis: int = 3) -> jax.Array:
        """The block's rows of an array."""
        return _sliced(x, self.start, self.span.size, axis)

    def keys(self, x: jax.Array, axis: int = 2) -> jax.Array:
        """The keys of an array that the block reads."""
        return _sliced(x, self.key_start, self.span.width, axis)

    def pairs(self, x: jax.Array) -> jax.Array:
        """The part of a mask or bias, by heads, that is of the block's pairs; axes of size 1 stay."""
        x = x if _is_one(x.shape[3]) else self.rows(x)
        return x if _is_one(x.shape[4]) else self.keys(x, axis=4)

    def product(self, equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(equation, a, b, preferred_element_type=self.problem.accumulator)

    def products(self) -> jax.Array:
        """The scaled products of queries and keys, (B, K, G, t, s)."""
        problem = self.problem
        return self.product("bngth,bnsh->bngts", self.rows(problem.q), self.keys(problem.k)) * problem.spec.scale

    def by_score(self, roots: Sequence[int]) -> list[jax.Array]:
        """The values of these nodes of the score, which broadcast to (B, K, G, t, s)."""
        score = self.problem.spec.score
        assert score is not None
        arrays = [x if number in score.table_of else self.pairs(x) for number, x in enumerate(self.problem.operands)]
        return evaluate(score, roots, self.products(), *self.positions(), arrays)

    def by_entry(self, term: jax.Array, like: jax.Array, table: Table) -> jax.Array:
        """The sums of pairs for entries of a table, (B, K, G, 1, entries), of one by distance from `first_entry` on.

        Args:
          term: of pairs, which broadcasts to (B, K, G, t, s).
          like: the table, by heads.
        """
        rows, keys = self.span.size, self.span.width
        term = jnp.broadcast_to(term, (*term.shape[:3], rows, keys))
        summed = tuple(axis for axis in range(3) if _is_one(like.shape[axis]))
        if table.is_by_distance:
            return _sums_by_distance(jnp.sum(term, axis=summed, keepdims=True))
        (index,) = self.by_score([table.index])
        within = jnp.clip(index, 0, like.shape[4] - 1)
        if table.fills:
            term = jnp.where(index == within, term, 0)

        def of_entry(entry: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(within == entry, term, 0), axis=(*summed, 3, 4), keepdims=True)

        found = lax.map(of_entry, jnp.arange(like.shape[4], dtype=jnp.int32))
        return jnp.moveaxis(found[..., 0], 0, 4)

    def first_entry(self, table: Table) -> Any:
        """The first entry of a table that the block adds to."""
        score = self.problem.spec.score
        assert score is not None
        if not table.is_by_distance:
            return 0
        row, column = self.positions()
        # The index reads only rows of arrays, if they are those of a device.
        arrays = [x if _is_one(x.shape[3]) else self.rows(x)[:, :, :, :1] for x in self.problem.operands]
        s = jnp.zeros((), self.problem.accumulator)
        (index,) = evaluate(score, [table.index], s, row[:1], column[-1:], arrays)
        return index.reshape(())

    def through_score(self, ds: jax.Array) -> jax.Array:
        """The cotangents of scaled products, from those of what the score makes of them."""
        score = self.problem.spec.score
        if score is None or score.has_unit_slope:
            return ds
        return _times(ds, *self.by_score([score.slope]))

    def scores(self, shift: jax.Array | None = None) -> jax.Array:
        """s (B, K, G, t, s), less what `shift` has for each row; -inf where a query does not see a key."""
        problem, hidden = self.problem, None
        if problem.spec.score is None:
            s = self.products()
        else:
            (s,) = self.by_score([problem.spec.score.value])
            hidden = s <= HIDDEN
        if problem.masks.bias is not None:
            s = s + self.pairs(problem.masks.bias).astype(s.dtype)
        s = s + self.keys(problem.key_poison, axis=4)
        if shift is not None:
            s = s - shift
        for condition in self._conditions():
            s = jnp.where(condition, s, -jnp.inf)
        return s if hidden is None else jnp.where(hidden, -jnp.inf, s)

    def positions(self) -> tuple[jax.Array, jax.Array]:
        """The rows (t, 1) and the keys (s,) of the block."""
        rows = self.start + jnp.arange(self.span.size, dtype=jnp.int32)[:, None]
        return rows, self.key_start + jnp.arange(self.span.width, dtype=jnp.int32)

    def dropped(self, x: jax.Array) -> jax.Array:
        """Values of the block's pairs, (B, K, G, t, s), times what dropout multiplies probabilities by."""
        rate, row_bits = self.problem.spec.mask.dropout_rate, self.problem.masks.row_bits
        if row_bits is None:
            return x
        keys = self.key_start + jnp.arange(self.span.width, dtype=jnp.int32)
        kept = is_kept(self.rows(row_bits), column_bits(keys), rate)
        return x * jnp.where(kept, jnp.asarray(1 / (1 - rate), x.dtype), 0)  # what is NaN stays so

    def _conditions(self) -> list[jax.Array]:
        masks = self.problem.masks
        rows, keys = self.positions()
        arrays = MaskArrays(
            intervals=None if masks.intervals is None else self.rows(masks.intervals, axis=2),
            query_ids=None if masks.query_ids is None else self.rows(masks.query_ids, axis=1),
            key_ids=None if masks.key_ids is None else self.keys(masks.key_ids, axis=1),
        )
        found = _conditions(self.problem.spec.mask, arrays, rows, keys)
        if not same_size(self.problem.q.shape[3], self.problem.length):  # padding sees nothing
            found.append(rows < self.problem.length)
        return found if masks.mask is None else [*found, self.pairs(masks.mask)]


def _conditions(spec: MaskSpec, masks: MaskArrays, rows: jax.Array, keys: jax.Array) -> list[jax.Array]:
    """The conditions by which a query sees a key, beside the mask: (t, s) or (B, 1, 1, t, s), of some rows and keys."""
    found = []
    if spec.left is not None:
        found.append(keys >= rows - spec.left)
    if spec.right is not None:
        found.append(keys <= rows + spec.right)
    if masks.intervals is not None:
        bounds = masks.intervals[:, :, None, None, :, None]
        each = [(bounds[:, i] <= keys) & (keys <= bounds[:, i + 1]) for i in range(0, 2 * spec.intervals, 2)]
        found.append(functools.reduce(jnp.logical_or, each))
    if masks.query_ids is not None:
        found.append(masks.query_ids[:, None, None, :, None] == masks.key_ids[:, None, None, None, :])
    return found


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The arrays of attention, by heads: K of keys with G of queries to each.

    Attributes:
      length: T; q and all that has rows is padded to whole blocks.
      q: (B, K, G, T, D).
      k, v: (B, K, S, D or Dv).
      key_poison: (B, K, 1, 1, S), NaN for keys whose scores are to be NaN, else 0.
      masks: mask and bias are (B or 1, K or 1, G or 1, T or 1, S or 1), sinks (B or 1, K, G, 1, 1) in the
        accumulator's dtype, row_bits (B, K, G, T, 1).
      operands: what the score reads, of such shapes as the mask.
    """

    spec: AttentionSpec
    length: Any
    spans: tuple[Span, ...]
    q: jax.Array
    k: jax.Array
    v: jax.Array
    key_poison: jax.Array
    masks: MaskArrays
    operands: tuple[jax.Array, ...]

    @classmethod
    def of(cls, arrays: Sequence[jax.Array], spec: AttentionSpec, on_cpu: bool, key_poison: jax.Array) -> _Problem:
        q, k, v = arrays[:3]
        length, kv_heads, masks = q.shape[1], k.shape[2], spec.mask_arrays(arrays)
        found = spans(q.shape[0] * q.shape[2], length, k.shape[1], spec.mask, on_cpu)
        rows = found[-1].start + found[-1].blocks * found[-1].size
        key_poison = key_poison.transpose(0, 2, 3, 1)[:, :, None]

        def by_heads(x: jax.Array) -> jax.Array:
            groups = (1, 1) if _is_one(x.shape[1]) else (kv_heads, x.shape[1] // kv_heads)
            return _padded(x.reshape(x.shape[0], *groups, *x.shape[2:]), rows, axis=3)

        sinks, row_bits = masks.sinks, masks.row_bits
        if sinks is not None:
            sinks = sinks.astype(jnp.promote_types(q.dtype, jnp.float32))[..., None, None]
            sinks = sinks.reshape(sinks.shape[0], kv_heads, sinks.shape[1] // kv_heads, 1, 1)
        masks = masks._replace(
            intervals=None if masks.intervals is None else _padded(masks.intervals, rows, axis=2),
            query_ids=None if masks.query_ids is None else _padded(masks.query_ids, rows, axis=1),
            mask=None if masks.mask is None else by_heads(masks.mask),
            bias=None if masks.bias is None else by_heads(masks.bias),
            sinks=sinks,
            row_bits=None if row_bits is None else by_heads(row_bits[..., None]),
        )
        operands = tuple(map(by_heads, spec.score_arrays(arrays)))
        k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
        q = _padded(_by_heads(q, kv_heads), rows, axis=3)
        return cls(spec, length, tuple(found), q, k, v, key_poison, masks, operands)

    @property
    def accumulator(self) -> Any:
        return jnp.promote_types(self.q.dtype, jnp.float32)

    def of_rows(self, x: jax.Array) -> jax.Array:
        """An array of queries (B, T, H, n) as (B, K, G, T, n), T padded."""
        return _padded(_by_heads(x, self.k.shape[1]), self.q.shape[3], axis=3)

    def over_blocks(
        self, block: Callable[[_Block], Any], span: Span, totals: Any = (), add: Callable[..., jax.Array] | None = None
    ) -> Any:
        """The results of a block for the rows of a span, whose axis is 3, and the totals with all that blocks add.

        Args:
          add: (number of a total, total, term, block) -> total. By default a term is for all keys, or for those that
            the block reads, in axis 2.
        """

        def at(start: Any) -> _Block:
            key_start: Any = span.first
            if not same_size(span.width, span.count):
                key_start = jnp.clip(start - (self.spec.mask.left or 0), 0, span.count - span.width).astype(jnp.int32)
            return _Block(self, span, start, key_start)

        def step(totals: Any, start: Any) -> tuple[Any, Any]:
            rows, terms = results(start)
            each = enumerate(zip(totals, terms, strict=True))
            return tuple((add or _added)(i, x, term, at(start)) for i, (x, term) in each), rows

        def results(start: Any) -> Any:
            return block(at(start))

        if span.blocks == 1:
            totals, rows = step(totals, span.start)
            return rows, totals
        starts = jnp.arange(span.blocks, dtype=jnp.int32) * span.size + span.start
        # So that a second derivative keeps no scores. Totals are not part of what is computed again, and so not kept.
        results = jax.checkpoint(results, prevent_cse=False)
        totals, rows = lax.scan(step, totals, starts)
        return jax.tree.map(_of_all_blocks, rows), totals

    def join(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """The rows of all spans, without padding."""
        x = pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=3)
        return x if same_size(x.shape[3], self.length) else x[:, :, :, : self.length]


class _Again(NamedTuple):
    """The probabilities of a block again, and the cotangents of its scores.

    Attributes:
      dy: (B, K, G, T, Dv).
      lse: (B, K, G, T, 1), inf for rows that see nothing, whose p is 0 then, and NaN for those whose p is to be.
      row_delta: delta of each row, where it is finite.
      delta: (B, H, T), as it is.
    """

    v: jax.Array
    dy: jax.Array
    lse: jax.Array
    row_delta: jax.Array
    delta: jax.Array

    def __call__(self, at: _Block) -> tuple[jax.Array, jax.Array]:
        p = jnp.exp(at.scores(at.rows(self.lse)))
        dp = at.dropped(at.product("bngth,bnsh->bngts", at.rows(self.dy), at.keys(self.v)))
        return p, p * (dp - at.rows(self.row_delta))


def _again(arrays: Sequence[jax.Array], spec: AttentionSpec, on_cpu: bool) -> tuple[_Problem, _Again]:
    q, k, v, *others, y, lse, dy, dlse = arrays
    # Without the barrier XLA finds the scores of the forward pass equal to these, and keeps them.
    k, dy = lax.optimization_barrier((k, dy))
    key_poison = _poison(k) + _poison(v)
    problem = _Problem.of([_finite(q), _finite(k), _finite(v), *others], spec, on_cpu, key_poison)
    lse, dlse = (x.transpose(0, 2, 1)[..., None] for x in (lse, dlse))
    is_empty = lse == -jnp.inf
    dy = jnp.where(is_empty, 0, dy)
    delta = jnp.sum(dy.astype(problem.accumulator) * y.astype(problem.accumulator), axis=-1, keepdims=True)
    delta = jnp.where(is_empty, 0, delta - dlse)
    poison = _poison(dy) + _poison(delta) + _poison(q)
    shift = jnp.where(is_empty, jnp.inf, lse + poison)
    return problem, _Again(
        problem.v,
        problem.of_rows(_finite(dy)),
        problem.of_rows(shift),
        problem.of_rows(_finite(delta)),
        delta[..., 0].transpose(0, 2, 1),
    )


def _sums_by_distance(x: jax.Array) -> jax.Array:
    """The sums of x (.., t, s) along its diagonals, (.., 1, t + s - 1): entry i has those of row - column = i + 1 - s.

    Rows of reversed columns are one column longer than the result's: each begins one entry behind the last.
    """
    rows, columns = x.shape[-2:]
    x = jnp.pad(lax.rev(x, (x.ndim - 1,)), [(0, 0)] * (x.ndim - 1) + [(0, rows)])
    flat = x.reshape(*x.shape[:-2], rows * (rows + columns))[..., : rows * (rows + columns - 1)]
    return jnp.sum(flat.reshape(*x.shape[:-2], rows, rows + columns - 1), axis=-2, keepdims=True)


def _times(ds: jax.Array, slope: jax.Array) -> jax.Array:
    """Their product; 0 where a key is hidden, whatever the slope is there."""
    return jnp.where(ds == 0, 0, ds * slope.astype(ds.dtype))


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _poison(x: jax.Array) -> jax.Array:
    """NaN for each row (..., 1) with a number that is not finite, else 0; float32 or wider."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.where(jnp.all(jnp.isfinite(x), axis=-1, keepdims=True), jnp.zeros((), dtype), jnp.nan)


def _by_heads(x: jax.Array, kv_heads: int) -> jax.Array:
    """An array of queries (B, T, H, n) as (B, K, G, T, n)."""
    return x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, x.shape[3]).transpose(0, 2, 3, 1, 4)


def _from_heads(x: jax.Array) -> jax.Array:
    """`_by_heads` the other way."""
    batch, kv_heads, groups, length, last = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, last)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _padded(x: jax.Array, size: Any, axis: int) -> jax.Array:
    """x with this axis made as long as `size` by zeros, but where it is 1 for all."""
    if _is_one(x.shape[axis]) or same_size(x.shape[axis], size):
        return x
    widths = [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths)


def _sliced(x: jax.Array, start: Any, size: Any, axis: int) -> jax.Array:
    if same_size(x.shape[axis], size):
        return x
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=axis)
    return lax.dynamic_slice_in_dim(x, start, size, axis=axis)


def _added(_: int, total: jax.Array, term: jax.Array, at: _Block) -> jax.Array:
    if same_size(total.shape[2], term.shape[2]):
        return total + term
    before = lax.dynamic_slice_in_dim(total, at.key_start, term.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, before + term, at.key_start, axis=2)


def _of_all_blocks(x: jax.Array) -> jax.Array:
    """Results of blocks, which are in the first axis, with their rows in axis 3."""
    x = jnp.moveaxis(x, 0, 3)
    return x.reshape(*x.shape[:3], x.shape[3] * x.shape[4], *x.shape[5:])
