"""Attention with capped scores as products with fused epilogues, a block of queries at a time.

A score soft_cap tanh(s / soft_cap) is between -soft_cap and soft_cap, so its exponential needs no maximum of its row:
the epilogue of q k^T stores exponentials in bfloat16, which has float32's exponents, and sums them along rows.

    e = exp(c tanh(scale q k^T / c)) where a query sees a key, else 0      l = rows' sums of e
    y = (e v) / l                                                          of the epilogue, from Gemma 2 (2408.00118)

The backward pass makes e again, and beside it g, its derivative by q k^T, in the epilogue of that product. The cap's
derivative cannot come from e: near the cap it is the small difference of 1 and (log e / c)^2, of which the rounding of
e leaves little.

    g = e (1 - tanh(scale q k^T / c)^2) scale
    ds = g / l (dy v^T - rowsum(dy y))                                     in the epilogue of dy v^T
    dq = ds k      dk = ds^T q      dv = e^T (dy / l)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import coda_jax as coda
from flax_layers.remat import CONTEXT, named

LARGEST_CAP = 64.0  # a row's sum of exp(64) is in float32's range, and exp(-64) in bfloat16's
_MOST_BYTES = 256 << 20  # of a block's exponentials
_MOST_SPANS = 8  # of queries that read the same keys: causal attention then computes 1/2 + 1/16 of all scores
_LEAST_SPAN = 1024


@dataclasses.dataclass(frozen=True)
class Scores:
    """The form of scores, and which queries see which keys.

    Attributes:
      soft_cap, scale: numbers.
      is_causal: whether query i sees keys up to i alone.
      window: how many keys a query sees, itself and those before; None for all.
    """

    soft_cap: float
    scale: float
    is_causal: bool
    window: int | None


@dataclasses.dataclass(frozen=True)
class Span:
    """Queries start to end, which read the keys first to last, in blocks of `size` queries."""

    start: int
    end: int
    first: int
    last: int
    size: int

    @property
    def blocks(self) -> int:
        return -(-(self.end - self.start) // self.size)


def is_supported(q: jax.Array, k: jax.Array, soft_cap: float) -> bool:
    """Whether these products can compute attention of q ([B,] T, H, Dh) to k ([B,] S, Hkv, Dh)."""
    is_static = all(isinstance(size, int) for size in (*q.shape, *k.shape))
    is_product = q.dtype == k.dtype == jnp.bfloat16 and q.shape[-1] % 8 == 0
    return is_static and is_product and soft_cap <= LARGEST_CAP and q.shape[-3] > 1


def capped_attention(
    scores: Scores, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None = None
) -> jax.Array:
    """Attention with capped scores.

    Args:
      scores: with is_causal, S is T.
      q: (B, T, H, Dh) bfloat16.
      k, v: (B, S, Hkv, Dh) bfloat16.
      segment_ids: (B, T) int32, rising by 1 from each segment to the next, or None; a query sees keys of its own alone.

    Returns:
      (B, T, H, Dh) bfloat16.
    """
    return _attention(q, k, v, *_seen(q.shape[1], k.shape[1], scores, segment_ids), scores)


def _seen(length: int, keys: int, scores: Scores, segment_ids: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The first and the last key that each query sees, both (B or 1, 1, 1, T) int32; it sees those between, too."""
    positions = jnp.arange(length, dtype=jnp.int32)
    first = jnp.zeros_like(positions) if scores.window is None else jnp.maximum(positions - scores.window + 1, 0)
    last = positions if scores.is_causal else jnp.full_like(positions, keys - 1)
    first, last = first[None], last[None]
    if segment_ids is not None:
        is_new = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
        is_end = jnp.roll(is_new, -1, axis=1).at[:, -1].set(True)
        first = jnp.maximum(first, lax.cummax(jnp.where(is_new, positions, 0), axis=1))
        last = jnp.minimum(last, lax.cummin(jnp.where(is_end, positions, length - 1), axis=1, reverse=True))
    return first[:, None, None], last[:, None, None]


def spans(shape: tuple[int, ...], keys: int, scores: Scores) -> list[Span]:
    """The spans of queries of this shape, (B, N, G, T, Dh), for `keys` keys, a multiple of 8."""
    batch, kv_heads, groups, length, _ = shape
    count = min(max(length // _LEAST_SPAN, 1), _MOST_SPANS) if scores.is_causal else 1
    span_length, result = -(-length // count), []
    for start in range(0, length, span_length):
        end = min(start + span_length, length)
        first = 0 if scores.window is None else max(start - scores.window + 1, 0) // 8 * 8
        last = -(-end // 8) * 8 if scores.is_causal else keys
        row_bytes = 2 * batch * kv_heads * groups * (last - first)
        most = max(_MOST_BYTES // max(row_bytes, 1), 1)
        blocks = -(-(end - start) // most)
        result.append(Span(start, end, first, last, -(-(end - start) // blocks)))
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array, scores: Scores
) -> jax.Array:
    y, _ = _forward(q, k, v, first, last, scores)
    return y


def _kept(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array, scores: Scores
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    y, sums = (named(x, CONTEXT) for x in _forward(q, k, v, first, last, scores))
    return y, (q, k, v, first, last, y, sums)


def _pullback(scores: Scores, kept: tuple[jax.Array, ...], dy: jax.Array) -> tuple[Any, ...]:
    return (*_backward(*kept, dy, scores), None, None)


_attention.defvjp(_kept, _pullback)


@functools.partial(jax.jit, static_argnums=5)
def _forward(
    q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array, last: jax.Array, scores: Scores
) -> tuple[jax.Array, jax.Array]:
    """y (B, T, H, Dh), and the sums of exponentials (B, N, G, T), float32; G heads of queries to each of N of keys."""
    shape, q, k, v = q.shape, _by_heads(q, k.shape[2]), _padded(k), _padded(v)

    def on_span(span: Span) -> Any:
        keys, values = (x[:, :, span.first : span.last] for x in (k, v))

        def block(q: jax.Array, first: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
            e, sums = _of_scores(_exponentials, q, keys, first, last, span.first, scores)
            y = _over_heads(_mixed)(e, values, _column(1 / sums))
            return y.reshape(q.shape), sums.reshape(q.shape[:-1])

        return _over_blocks(block, span, q, first, last)

    y, sums = zip(*map(on_span, spans(q.shape, k.shape[2], scores)), strict=True)
    return _by_rows(jnp.concatenate(y, axis=3)).reshape(shape), jnp.concatenate(sums, axis=3)


@functools.partial(jax.jit, static_argnums=8)
def _backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    first: jax.Array,
    last: jax.Array,
    y: jax.Array,
    sums: jax.Array,
    dy: jax.Array,
    scores: Scores,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and dv."""
    # Without the barrier XLA finds the exponentials of the forward pass equal to these, and keeps them.
    k, dy = lax.optimization_barrier((k, dy))
    shape, keys, kv_heads = q.shape, k.shape[1], k.shape[2]
    dy_y = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1, keepdims=True)
    q, dy, dy_y = (_by_heads(x, kv_heads) for x in (q, dy, dy_y))
    k, v = _padded(k), _padded(v)
    query_arrays = (q, first, last, dy, 1 / sums, dy_y[..., 0])
    dq_spans, dk, dv = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for span in spans(q.shape, k.shape[2], scores):
        seen = slice(span.first, span.last)
        block = functools.partial(_block_backward, k[:, :, seen], v[:, :, seen], span.first, scores)
        dq, dk_span, dv_span = _summed_over_blocks(block, span, *query_arrays)
        dq_spans.append(dq)
        dk, dv = dk.at[:, :, seen].add(dk_span), dv.at[:, :, seen].add(dv_span)
    dk, dv = (x[:, :, :keys].astype(k.dtype).transpose(0, 2, 1, 3) for x in (dk, dv))
    return _by_rows(jnp.concatenate(dq_spans, axis=3)).reshape(shape), dk, dv


def _block_backward(
    k: jax.Array,
    v: jax.Array,
    start: int,
    scores: Scores,
    q: jax.Array,
    first: jax.Array,
    last: jax.Array,
    dy: jax.Array,
    inverse: jax.Array,
    dy_y: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq of a block, and what its queries add to dk and dv (B, N, S, Dh), float32."""
    e, slopes = _of_scores(_slopes, q, k, first, last, start, scores)
    rows = (*q.shape[:2], math.prod(q.shape[2:-1]), q.shape[-1])
    weighted = (dy * inverse[..., None]).astype(dy.dtype)
    q, dy, weighted = (x.reshape(rows) for x in (q, dy, weighted))
    ds = _over_heads(_score_cotangents)(dy, v, slopes, _column(inverse), _column(dy_y))
    dq = _over_heads(coda.gemm)(ds, k)
    transposed_product = functools.partial(coda.gemm, transpose_a=True, out_dtype=jnp.float32)
    return (
        dq.reshape(*inverse.shape, rows[-1]),
        _over_heads(transposed_product)(ds, q),
        _over_heads(transposed_product)(e, weighted),
    )


def _of_scores(
    epilogue: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    first: jax.Array,
    last: jax.Array,
    start: int,
    scores: Scores,
) -> tuple[jax.Array, jax.Array]:
    """The results of `_exponentials` or `_slopes` for the M rows of a block and the S keys from key `start` on."""
    seen = (jnp.broadcast_to(x, q.shape[:-1]) for x in (first, last))
    positions = start + jnp.arange(k.shape[2], dtype=jnp.int32)

    def product(q: jax.Array, k: jax.Array, first: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        result: tuple[jax.Array, jax.Array] = coda.gemm(
            q, k, first, last, positions, transpose_b=True, epilogue=epilogue(scores)
        )
        return result

    rows = q.reshape(*q.shape[:2], math.prod(q.shape[2:-1]), q.shape[-1])
    made, beside = _over_heads(product)(rows, k, *map(_column, seen))
    return made, beside


def _exponentials(scores: Scores) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """An epilogue that makes e (B, N, M, S), bfloat16, and its rows' sums (B, N, M), float32."""

    def capped_exponentials(
        acc: jax.Array, first: jax.Array, last: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        e = jnp.exp(scores.soft_cap * jnp.tanh(acc * (scores.scale / scores.soft_cap)))
        e = jnp.where((first <= position) & (position <= last), e, 0.0)
        return e, jnp.sum(e, axis=1)

    return capped_exponentials


def _slopes(scores: Scores) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """An epilogue that makes e and g, both (B, N, M, S), bfloat16."""

    def capped_slopes(
        acc: jax.Array, first: jax.Array, last: jax.Array, position: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        capped = jnp.tanh(acc * (scores.scale / scores.soft_cap))
        e = jnp.exp(scores.soft_cap * capped)
        e = jnp.where((first <= position) & (position <= last), e, 0.0)
        return e, e * ((1 - capped * capped) * scores.scale)

    return capped_slopes


def _mixed(e: jax.Array, v: jax.Array, inverse: jax.Array) -> Any:
    def weighted_values(acc: jax.Array, inverse: jax.Array) -> jax.Array:
        return acc * inverse

    return coda.gemm(e, v, inverse, epilogue=weighted_values)


def _score_cotangents(dy: jax.Array, v: jax.Array, slopes: jax.Array, inverse: jax.Array, dy_y: jax.Array) -> Any:
    """The cotangent of q k^T."""

    def capped_scores_cotangent(acc: jax.Array, slope: jax.Array, inverse: jax.Array, dy_y: jax.Array) -> jax.Array:
        return slope * inverse * (acc - dy_y)

    return coda.gemm(dy, v, slopes, inverse, dy_y, transpose_b=True, epilogue=capped_scores_cotangent)


def _by_heads(x: jax.Array, kv_heads: int) -> jax.Array:
    """An array of queries (B, T, H, D) as (B, N, G, T, D)."""
    return x.reshape(*x.shape[:2], kv_heads, x.shape[2] // kv_heads, x.shape[3]).transpose(0, 2, 3, 1, 4)


def _by_rows(x: jax.Array) -> jax.Array:
    """An array of queries (B, N, G, T, D) as (B, T, N, G, D)."""
    return x.transpose(0, 3, 1, 2, 4)


def _padded(x: jax.Array) -> jax.Array:
    """Keys or values (B, S, N, Dh) as (B, N, S, Dh), S made a multiple of 8 by keys that no query sees.

    Rows of exponentials are then multiples of 16 bytes, as the kernels need them.
    """
    return jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, -x.shape[1] % 8), (0, 0)))


def _over_heads(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(jax.vmap(f))


def _column(x: jax.Array) -> jax.Array:
    """(B, N, G, T), or with rows already in one axis (B, N, M), as columns (B, N, M, 1)."""
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:]), 1)


def _blocks(x: jax.Array, span: Span) -> jax.Array:
    """The span's blocks of an array whose axis 3 is the queries, in a new first axis."""
    span_rows = x[:, :, :, span.start : span.end]
    padding = span.blocks * span.size - span_rows.shape[3]
    # Padding sees the keys that the last query sees; it and its cotangents are zeros.
    mode = "edge" if jnp.issubdtype(x.dtype, jnp.integer) else "constant"
    span_rows = jnp.pad(span_rows, [(0, padding if axis == 3 else 0) for axis in range(x.ndim)], mode=mode)
    return jnp.moveaxis(span_rows.reshape(*x.shape[:3], span.blocks, span.size, *x.shape[4:]), 3, 0)


def _joined(x: jax.Array, span: Span) -> jax.Array:
    """The span's queries in axis 3, from results with the blocks in the first axis."""
    rows = jnp.moveaxis(x, 0, 3)
    return rows.reshape(*rows.shape[:3], math.prod(rows.shape[3:5]), *rows.shape[5:])[:, :, :, : span.end - span.start]


def _over_blocks(block: Callable[..., Any], span: Span, *arrays: jax.Array) -> Any:
    """The results of a block, for all blocks of a span."""
    if span.blocks == 1:
        return block(*(x[:, :, :, span.start : span.end] for x in arrays))
    results = lax.map(lambda rows: block(*rows), tuple(_blocks(x, span) for x in arrays))
    return jax.tree.map(lambda x: _joined(x, span), results)


def _summed_over_blocks(block: Callable[..., Any], span: Span, *arrays: jax.Array) -> Any:
    """The first result of a block as by `_over_blocks`, and the sums of the others over the blocks."""
    if span.blocks == 1:
        return block(*(x[:, :, :, span.start : span.end] for x in arrays))
    blocks = tuple(_blocks(x, span) for x in arrays)
    first_result, *sums = block(*(x[0] for x in blocks))

    def step(sums: list[jax.Array], rows: tuple[jax.Array, ...]) -> tuple[list[jax.Array], jax.Array]:
        result, *terms = block(*rows)
        return [a + b for a, b in zip(sums, terms, strict=True)], result

    sums, other_results = lax.scan(step, sums, tuple(x[1:] for x in blocks))
    return (_joined(jnp.concatenate([first_result[None], other_results]), span), *sums)
