"""Log-probabilities and their sum for labels of which some are in no column: these have a logit of 0.

    logprob[m] = sum_v [v == labels[m]] z[m, v] - log(sum_v exp(z[m, v]))

as the sum over a one-hot array has it, in value and gradient. `coda.fuse` finds losses of this form, and makes others
of it; the public operators have NaN there.
"""

from __future__ import annotations

import jax

from coda_jax.operators.head.arguments import HeadArguments, head_arguments, int32_labels
from coda_jax.operators.head.arrays import Statistics
from coda_jax.operators.head.exponential_head import ExponentialHead
from coda_jax.operators.head.statistics import statistics, weighted_sum


def logprobs_of_any(x: jax.Array, w: jax.Array, labels: jax.Array, *, transpose_w: bool) -> jax.Array:
    """The log-probability of every token, (...) float32, of x (..., D), w (D, V) or (V, D) and labels (...)."""
    name = "token_logprobs"
    head, tokens, kernel, rows = _arguments(name, x, w, transpose_w)
    narrow, _ = int32_labels(rows.flat(labels), None)
    stats = statistics(head, name, tokens, kernel, narrow)
    return rows.apart(stats.target - stats.lse)


def loss_sum_of_any(
    x: jax.Array, w: jax.Array, labels: jax.Array, weights: jax.Array, *, transpose_w: bool
) -> jax.Array:
    """The number -sum(weights * logprob); its gradients are formed in the forward pass."""
    name = "linear_cross_entropy"
    head, tokens, kernel, rows = _arguments(name, x, w, transpose_w)
    head = ExponentialHead.of(head, tokens, kernel, None)
    narrow, _ = int32_labels(rows.flat(labels), None)
    return weighted_sum(head, name, _loss, tokens, kernel, narrow, rows.flat(weights))


def _loss(stats: Statistics) -> jax.Array:
    loss: jax.Array = stats.lse - stats.target
    return loss


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
