"""Log-probabilities of tokens under a language model, and its entropies, without an array of all logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue.dtypes import BOOL
from coda_jax.operators.deferred_norm import DeferredNorm
from coda_jax.operators.head.arguments import (
    LowRank,
    array_of,
    check_head,
    check_options,
    head_arguments,
    known_labels,
)
from coda_jax.operators.head.shifted_heads import EntropyHead
from coda_jax.operators.head.statistics import statistics
from coda_jax.primitives.dtypes import check_dtype

_NAME = "token_logprobs"


def token_logprobs(
    x: jax.Array | DeferredNorm,
    w: jax.Array,
    labels: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    entropy: bool = False,
    mask: jax.Array | None = None,
    low_rank: LowRank | None = None,
    ignore_index: int | None = -100,
    soft_cap: float | jax.Array | None = None,
    transpose_w: bool = False,
    chunk_bytes: int | None = None,
    dtype: Any = None,
    implementation: str = "auto",
) -> Any:
    """log(softmax(x w / T)[labels]) of every token, without an array of all logits; x may be a norm.

        z = x w,  or soft_cap * tanh(that / soft_cap)        p = softmax(z / T)
        logprob[m] = z[m, labels[m]] / T - log(sum_v exp(z[m, v] / T))        entropy[m] = -sum_v p[m, v] log(p[m, v])

    Both are differentiable in x, w, low_rank, and a temperature or soft_cap that is an array, in reverse mode, to any
    order:

        dlogprob/dz[v] = ([v == label] - p[v]) / T        dentropy/dz[v] = -p[v] (log(p[v]) + entropy) / T

    Tokens are worked on in chunks. A chunk is one product, whose epilogue gives the log-sum-exp, the label's logit and
    the entropy; logits never exist. For k labels a token, and for the entropy of float32 products, the chunk's logits
    are stored for a moment, in float32, and read once more. All tokens' logits are computed again so if a sum of an
    entropy leaves float32's range, as for a log-sum-exp 41 below or 76 above the labels' mean logit. Kept for the
    backward pass are x, w and some numbers a token. It makes three products a chunk: the logits again, whose epilogue
    turns them into their cotangent, and two that make the chunk's dx and add to dw in place, in float32.

    A mask compacts: the tokens that it keeps are brought together, and as many chunks are worked on as they fill,
    forward and backward, none if there are none. Shapes are static, the number of chunks is not. Over a mesh each
    device brings its own tokens together, so that the one with the most decides how long it takes. The second
    derivative works on all chunks.

    Args:
      x, w, transpose_w, soft_cap, chunk_bytes, dtype, implementation: as in `linear_cross_entropy`; so are meshes.
      labels: (...) integers from 0 to V - 1, or ignore_index; or (..., k), k labels of every token, as the most
        probable ones of a teacher. For any other label log-probability and gradient are NaN.
      temperature: T, a positive number, or an array, () or (...); where an array is 0 or less, or NaN, results and
        gradients are NaN. Gradients go to an array.
      entropy: whether the entropy is returned too.
      mask: (...) bool, of the tokens; False gives 0 and no gradient, whatever x and labels are there. None: all.
      low_rank: A (D, r) and B (r, V), of z = x w + (x A) B, as in `linear_cross_entropy`.
      ignore_index: labels whose log-probability is 0 (x must be finite all the same); so is the entropy of a token
        with no other label. None: there is none. `mask=labels != ignore_index` spares their work.

    Returns:
      Log-probabilities, float32, of the shape of labels; with `entropy` a pair of them and of the entropies, (...).

    Raises:
      TypeError: labels that are no integers, a mask that is not bool, or a floating array or dtype that is not
        bfloat16, float16 or float32.
      ValueError: shapes that do not fit, or an option out of its range.

    Numerics: all logits come from the float32 accumulator and are never rounded, but their cotangents are, to the
    compute dtype. Gradients of float32 arrays are not. The entropy of 16-bit products has an absolute error of some
    1e-7 times the distance of the log-sum-exp from the labels' mean logit. Results are the same bits in every run.
    Source: the derivative of the softmax; the order of the products is in loss_head.py.
    """
    _check(x, w, labels, temperature, mask, low_rank, transpose_w)
    is_number = isinstance(temperature, int | float | np.number)
    check_options(
        _NAME,
        ("temperature", temperature, bool(not is_number or 0 < temperature < jnp.inf), "a positive number or an array"),
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
    head = dataclasses.replace(head, has_entropy=bool(entropy), scale_has_gradient=not is_number)
    candidates = labels.shape[len(rows.sizes) :]
    labels, ignored, unknown = known_labels(rows.flat(labels), head.vocabulary, ignore_index)
    if not is_number or temperature != 1:
        scale = _inverse(temperature)
        tokens = tokens._replace(scale=rows.flat(scale) if scale.ndim else scale)
    kept = None if mask is None else rows.flat(mask)
    stats = statistics(EntropyHead.of(head, labels), _NAME, tokens, kernel, labels, kept)

    lse = stats.lse[:, None] if candidates else stats.lse
    logprobs = jnp.where(ignored, 0.0, jnp.where(unknown, jnp.nan, 1.0)) * (stats.target - lse)
    if kept is not None:
        logprobs = jnp.where(kept[:, None] if candidates else kept, logprobs, 0.0)
    logprobs = rows.split_rows(logprobs)
    if not entropy:
        return logprobs
    counts = ~(jnp.all(ignored, axis=1) if candidates else ignored)
    if kept is not None:
        counts &= kept
    return logprobs, rows.split_rows(jnp.where(counts, stats.entropy, 0.0))


def _inverse(temperature: float | jax.Array) -> jax.Array:
    """1 / T, float32; NaN where T is not positive."""
    wide = jnp.asarray(temperature).astype(jnp.float32)
    fits = wide > 0
    return jnp.where(fits, 1 / jnp.where(fits, wide, 1.0), jnp.nan)


def _check(
    x: jax.Array | DeferredNorm,
    w: jax.Array,
    labels: jax.Array,
    temperature: float | jax.Array,
    mask: jax.Array | None,
    low_rank: LowRank | None,
    transpose_w: bool,
) -> None:
    check_head(_NAME, x, w, labels, low_rank, transpose_w=transpose_w)
    shape = array_of(x).shape
    lead = shape[:-1]
    if labels.shape != lead and (labels.shape[:-1] != lead or labels.ndim == 0 or labels.shape[-1] == 0):
        raise ValueError(
            f"{_NAME}: labels has shape {labels.shape}; beside x {shape} it must be {lead}, or {(*lead, 'k')} with k "
            "labels of every token"
        )
    if not isinstance(temperature, int | float | np.number):
        check_dtype(_NAME, "temperature", temperature)
        if temperature.shape not in ((), lead):
            raise ValueError(
                f"{_NAME}: temperature has shape {temperature.shape}; beside x {shape} it must be () or {lead}"
            )
    if mask is not None:
        check_dtype(_NAME, "mask", mask, [BOOL])
        if mask.shape != lead:
            raise ValueError(f"{_NAME}: mask has shape {mask.shape}; beside x {shape} it must be {lead}")
