"""Statistics and sums of functions of them for labels of which some are in no column: these have a logit of 0.

    target[m] = sum_v [v == labels[m]] z[m, v]

as the sum over a one-hot array has it, in value and gradient. `coda.fuse` finds losses of this form, and makes others
of it; the public operators have NaN there.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from coda_jax.operators.head.arguments import HeadArguments, head_arguments, int32_labels
from coda_jax.operators.head.arrays import Statistics
from coda_jax.operators.head.exponential_head import ExponentialHead
from coda_jax.operators.head.statistics import statistics, weighted_sum


def statistics_of_any(x: jax.Array, w: jax.Array, labels: jax.Array, *, transpose_w: bool) -> Statistics:
    """The statistics of every token, (...) float32 each, of x (..., D), w (D, V) or (V, D) and labels (...)."""
    name = "token_logprobs"
    head, tokens, kernel, rows = _arguments(name, x, w, transpose_w)
    narrow, _ = int32_labels(rows.flat(labels), None)
    stats: Statistics = jax.tree.map(rows.apart, statistics(head, name, tokens, kernel, narrow))
    return stats


def sum_of_any(
    value: Callable[..., jax.Array],
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *coefficients: jax.Array,
    transpose_w: bool,
) -> jax.Array:
    """The number sum(value(statistics, *coefficients)); its gradients are formed in the forward pass.

    Args:
      value: elementwise; it closes over no array.
      x, w, labels, transpose_w: as in `statistics_of_any`.
      coefficients: (...) float32, as the labels are, or ().
    """
    name = "linear_cross_entropy"
    head, tokens, kernel, rows = _arguments(name, x, w, transpose_w)
    head = ExponentialHead.of(head, tokens, kernel, None)
    narrow, _ = int32_labels(rows.flat(labels), None)
    flat = [rows.flat(y) if y.ndim else y for y in coefficients]
    weights = jnp.ones_like(narrow, jnp.float32)
    return weighted_sum(head, name, value, tokens, kernel, narrow, weights, *flat)


def _arguments(operator: str, x: jax.Array, w: jax.Array, transpose_w: bool) -> HeadArguments:
    return head_arguments(
        operator,
        x,
        w,
        None,
        soft_cap=None,
        transpose_w=transpose_w,
        chunk_bytes=None,
        dtype=None,
        implementation="auto",
    )
