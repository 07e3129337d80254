"""The loss of a language model: softmax cross-entropy of a projection to the vocabulary, without all of its logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.operators.deferred_norm import DeferredNorm
from coda_jax.operators.head.arguments import (
    LowRank,
    array_of,
    check_head,
    check_options,
    coefficient,
    head_arguments,
    known_labels,
)
from coda_jax.operators.head.arrays import Statistics
from coda_jax.operators.head.shifted_heads import ExponentialHead
from coda_jax.operators.head.statistics import statistics, weighted_sum
from coda_jax.primitives.dtypes import check_floats

_NAME = "linear_cross_entropy"
REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: jax.Array | DeferredNorm,
    w: jax.Array,
    labels: jax.Array,
    *,
    weights: jax.Array | None = None,
    low_rank: LowRank | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float | jax.Array = 0.0,
    z_loss: float | jax.Array = 0.0,
    soft_cap: float | jax.Array | None = None,
    transpose_w: bool = False,
    chunk_bytes: int | None = None,
    dtype: Any = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of softmax(x w) with integer labels, without an array of all logits; x may be a norm.

        z = x w,  or soft_cap * tanh(that / soft_cap)        lse[m] = log(sum_v exp(z[m, v]))
        loss[m] = lse - (1 - label_smoothing) z[m, labels[m]] - label_smoothing mean_v z[m, v] + z_loss lse^2

    Tokens are worked on in chunks. Where no gradient is asked for, one product a chunk gives the three sums over the
    vocabulary in its epilogue, and logits never exist. Where one is, the epilogue stores the chunk's exponentials for a
    moment, of which the logits' cotangent is a multiple in each row, and two products make the chunk's dx and add to dw
    in place, in float32. (With smoothing, a cap or in other dtypes the logits are kept, and one pass makes their
    cotangent.) So the gradients are formed in the forward pass, with the weights; the backward pass scales them by the
    loss's cotangent. That of reduction="none" is not known in the forward pass: there the backward pass computes the
    logits again, four products instead of three, the second of which gives their cotangent in its epilogue.

    A norm is applied on its way into the product, not in the epilogue as elsewhere: with V > D a pass over (M, D) is
    cheaper than one over w, where the scale would be folded, and as accurate.

    Over a device mesh each device works on chunks of its own tokens. Axes that shard the vocabulary leave each device
    its shard of w: sums over the vocabulary, vectors, are finished over them in each chunk, and dx once. Over axes that
    shard tokens w is gathered, once; over automatic ones in the compute dtype.

    Args:
      x: (..., D), the array that is projected, or a DeferredNorm of it.
      w: (D, V); with transpose_w (V, D), as of a tied embedding.
      labels: (...) integers from 0 to V - 1, or ignore_index. For any other label, loss and gradient are NaN.
      weights: (...), of the tokens; default 1. They receive their gradient.
      low_rank: A (D, r) and B (r, V): logits of x w + (x A) B, as of an adapted head. One product a chunk still, over
        D + r; w has a gradient product of its own. A rank that is a multiple of 8 reaches the kernel.
      reduction: "mean": sum(weights * loss) / sum(weights), and 0 where nothing has weight; "sum": sum(weights * loss);
        "none": weights * loss.
      ignore_index: tokens with this label have weight 0 (their x must be finite all the same); None: there is none.
      label_smoothing: in [0, 1), the share of the target distribution that is spread over all of the vocabulary.
      z_loss: coefficient of lse^2, which keeps the logits from drifting.
      soft_cap: bound of the logits, as in Gemma 2; None: none. It, label_smoothing and z_loss are numbers or arrays (),
        which receive their gradient and make one program of a schedule. A traced one that is out of its range makes
        loss and gradients NaN.
      chunk_bytes: the most that a chunk's logits or exponentials take; they are those of a multiple of 128 tokens, at
        least 128. The default is 2^29, 2048 tokens for V = 128256 and bfloat16, and half of it where a copy of w in
        the compute dtype is beside them; of exponentials 1.6 times what dw takes in float32, if both are within
        3.25 GiB, for adding to dw costs the more, the more chunks there are. A symbolic number of tokens is one chunk.
      dtype: compute dtype, of the products' inputs and the chunk's logits, but that these are float32 where it is
        float16, beyond whose range, 65504, logits without a norm may be; default the promotion of x and w.
      implementation: as in `gemm`.

    Returns:
      The loss, float32, () or with reduction="none" (...); and the sum of the weights, () float32. Over
      devices or microbatches the mean is sum(losses) / sum(weight sums), of reduction="sum".

    Raises:
      TypeError: labels that are no integers, or a floating array or dtype that is not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, or an option out of its range.

    Numerics: lse and the label's logit come from the float32 accumulator. For other logits the gradient reads
    exponentials in bfloat16 where that is the compute dtype and there is neither smoothing nor a cap; else rounded
    logits: in bfloat16 a probability whose logit is 20 is off by up to 6 %; with reduction="none" nothing is rounded
    before the probability. Where a row's log-sum-exp is 41 below or 76 above the logits of some labels, or nearer with
    a weight far from 1, all chunks are computed again from rounded logits, in twice the time. dx and dw leave the
    products in float32 where x or w are.
    In 16-bit dtypes a vocabulary that is no multiple of 8 is padded to one of 128, in a copy of w.
    Source: the algebra is CODA's (arXiv 2605.19269), the order of the products that of Liger's fused linear
    cross-entropy (arXiv 2410.10989).
    """
    _check(x, w, labels, weights, low_rank, transpose_w)
    check_options(
        _NAME,
        ("reduction", reduction, reduction in REDUCTIONS, f"one of {', '.join(map(repr, REDUCTIONS))}"),
    )
    coefficients = (
        coefficient(_NAME, "label_smoothing", label_smoothing, lambda x: (x >= 0) & (x < 1), "in [0, 1)"),
        coefficient(_NAME, "z_loss", z_loss, lambda x: (x >= 0) & (x < jnp.inf), "0 or a positive number"),
    )
    head, tokens, kernel, rows = head_arguments(
        _NAME,
        x,
        w,
        low_rank,
        soft_cap=soft_cap,
        transpose_w=transpose_w,
        chunk_bytes=chunk_bytes,
        dtype=dtype,
        implementation=implementation,
    )
    fixed = [x if isinstance(x, float) else None for x in coefficients]
    has_smoothing, has_square = (x != 0 for x in fixed)
    head = ExponentialHead.of(dataclasses.replace(head, has_total=has_smoothing), tokens, kernel, chunk_bytes)
    labels, ignored, unknown = known_labels(rows.flat(labels), head.vocabulary, ignore_index)
    weights = jnp.ones_like(labels, jnp.float32) if weights is None else rows.flat(weights).astype(jnp.float32)
    weights = jnp.where(unknown, jnp.nan, jnp.where(ignored, 0.0, weights))
    total, arrays = jnp.sum(weights), [x for x in coefficients if not isinstance(x, float)]

    def loss(token_stats: Statistics, *arrays: jax.Array) -> jax.Array:
        remaining = iter(arrays)
        smoothing, square_weight = (next(remaining) if x is None else x for x in fixed)
        value = token_stats.lse - (1 - smoothing) * token_stats.target
        if has_square:
            value += square_weight * token_stats.lse * token_stats.lse
        return value - smoothing / head.vocabulary * token_stats.total if has_smoothing else value

    if reduction == "none":
        stats = statistics(head, _NAME, tokens, kernel, labels)
        return rows.split_rows(weights * loss(stats, *arrays)), total
    summed = weighted_sum(head, _NAME, loss, tokens, kernel, labels, weights, *arrays)
    return summed / jnp.where(total == 0, 1.0, total) if reduction == "mean" else summed, total


def _check(
    x: jax.Array | DeferredNorm,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array | None,
    low_rank: LowRank | None,
    transpose_w: bool,
) -> None:
    check_head(_NAME, x, w, labels, low_rank, transpose_w=transpose_w)
    if weights is not None and jnp.issubdtype(weights.dtype, jnp.floating):
        check_floats(_NAME, weights=weights)
    shape = array_of(x).shape
    for name, array in (("labels", labels), ("weights", weights)):
        if array is not None and array.shape != shape[:-1]:
            raise ValueError(f"{_NAME}: {name} has shape {array.shape}; beside x {shape} it must be {shape[:-1]}")
