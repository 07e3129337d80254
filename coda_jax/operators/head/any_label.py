"""Statistics and sums of functions of them for labels of which some are in no column: these have a logit of 0.

    target[m] = sum_v [v == labels[m]] z[m, v]

as the sum over a one-hot array has it, in value and gradient. `coda.fuse` finds losses of this form, and makes others
of it; the public operators have NaN there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.operators.head.arguments import (
    CHUNK_BYTES_BESIDE_A_COPY,
    HeadArguments,
    head_arguments,
    int32_labels,
)
from coda_jax.operators.head.arrays import Statistics
from coda_jax.operators.head.shifted_heads import EntropyHead, ExponentialHead
from coda_jax.operators.head.statistics import statistics, weighted_sum
from coda_jax.primitives.mesh_types import vary, varying_axes

_BIAS_PARTS = 3  # float32 has the bits of three bfloat16
_BIAS_RANK = 8  # the width of the products stays a multiple of 8


def statistics_of_any(x: jax.Array, w: jax.Array, labels: jax.Array, **options: Any) -> Statistics:
    """The statistics of every token, (...) float32 each.

    Args:
      x, w, labels: (..., D), (D, V) or with transpose_w (V, D), and (...).
      options: transpose_w and soft_cap as in `linear_cross_entropy`; bias (V,), which is added before the cap;
        has_total, has_entropy, has_best, rank, rounded_to: as in `LossHead`.
    """
    name = "token_logprobs"
    head, tokens, kernel, rows = _arguments(name, x, w, **options)
    narrow, _ = int32_labels(rows.flat(labels), None)
    head = EntropyHead.of(head, narrow)
    stats: Statistics = jax.tree.map(rows.split_rows, statistics(head, name, tokens, kernel, narrow))
    return stats


def sum_of_any(
    value: Callable[..., jax.Array],
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    *coefficients: jax.Array,
    **options: Any,
) -> jax.Array:
    """The number sum(value(statistics, *coefficients)); its gradients are formed in the forward pass.

    Args:
      value: elementwise; it closes over no array.
      x, w, labels, options: as in `statistics_of_any`.
      coefficients: (...) float32, as the labels are, or ().
    """
    name = "linear_cross_entropy"
    head, tokens, kernel, rows = _arguments(name, x, w, **options)
    narrow, _ = int32_labels(rows.flat(labels), None)
    head = EntropyHead.of(ExponentialHead.of(head, tokens, kernel, None), narrow)
    flat = [rows.flat(y) if y.ndim else y for y in coefficients]
    weights = jnp.ones_like(narrow, jnp.float32)
    return weighted_sum(head, name, value, tokens, kernel, narrow, weights, *flat)


def _arguments(
    operator: str,
    x: jax.Array,
    w: jax.Array,
    *,
    transpose_w: bool,
    bias: jax.Array | None = None,
    soft_cap: float | jax.Array | None = None,
    **statistics: Any,
) -> HeadArguments:
    arguments = head_arguments(
        operator,
        x,
        w,
        None,
        soft_cap=soft_cap,
        transpose_w=transpose_w,
        chunk_bytes=None,
        dtype=None,
        implementation="auto",
    )
    arguments = arguments._replace(head=dataclasses.replace(arguments.head, **statistics))
    return arguments if bias is None else _with_bias(arguments, bias)


def _with_bias(arguments: HeadArguments, bias: jax.Array) -> HeadArguments:
    """The head with more of x's width: ones beside the bias, in as many parts as make it in the products' dtype."""
    head, tokens, kernel, rows = arguments
    h: Any = tokens.h
    wide, dtype = rows.replicated(bias).astype(jnp.float32), jnp.finfo(head.dtype)
    parts, left = list[jax.Array](), wide
    for _ in range(_BIAS_PARTS):
        part = jax.lax.stop_gradient(jax.lax.reduce_precision(left, dtype.nexp, dtype.nmant))
        parts.append(part)
        left = left - part
    # Its gradient is that of one of the parts, whose ones are exact.
    parts[0] = wide + jax.lax.stop_gradient(parts[0] - wide)
    b = jnp.stack([*parts, *[jnp.zeros_like(wide)] * (_BIAS_RANK - _BIAS_PARTS)])
    is_part = jnp.arange(_BIAS_RANK) < _BIAS_PARTS
    ones = jnp.ones_like(h[:, :1], head.dtype) * is_part.astype(head.dtype)
    (inner,) = vary(varying_axes(h, kernel.w, b), ones)
    low_rank = dataclasses.replace(head, chunk_bytes=min(head.chunk_bytes, CHUNK_BYTES_BESIDE_A_COPY))
    return HeadArguments(low_rank, tokens._replace(inner=inner), kernel._replace(b=b), rows)
