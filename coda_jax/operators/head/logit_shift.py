"""One number near the logits of a head, so that float32 holds sums of exponentials whose shift it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue import ReductionOp
from coda_jax.lowering.on_devices import across
from coda_jax.operators.head.arrays import Tokens
from coda_jax.operators.head.chunks import Chunk
from coda_jax.operators.head.loss_head import LossHead

MOST = 2.0**110  # of a row's sum of exponentials: an exponent of 76, so that sums of it times a logit are finite too
LEAST = 2.0**-60  # of a row's sum of exponentials: what float32 flushes to 0 is below 2^-49 of it, for 2^17 columns
_SAMPLE = 128  # rows whose targets say where the logits are


def near_logits(
    head: LossHead, tokens: Tokens, w: jax.Array, labels: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """The mean of some tokens' targets, (), in a trained model a little below their log-sum-exps; it has no gradient.

    Args:
      w: [W; B], as a head's products read it.
      labels: (M,), as columns of this shard of W.
      mask: (M,) bool, or None. Tokens that it does not keep may hold anything.
    """
    count = labels.shape[0]
    if isinstance(count, int) and count == 0:
        return jnp.zeros((), jnp.float32)
    places = lax.iota(jnp.int32, _SAMPLE) * ((count + _SAMPLE - 1) // _SAMPLE)
    rows = Chunk(0, _SAMPLE, places)  # behind the last token the first again
    formed, row_labels = head.formed(tokens, rows), rows.of(labels)
    h = jnp.concatenate(formed, axis=1)
    picked = jnp.take(w, jnp.clip(row_labels, 0, head.vocabulary - 1), axis=0 if head.transpose_w else 1)
    equation = "mk,mk->m" if head.transpose_w else "mk,km->m"
    z = jnp.einsum(equation, h.astype(jnp.float32), picked.astype(jnp.float32))
    targets = head.curve(tokens, rows).of(z[:, None])[:, 0]
    is_target = head.has_column(row_labels) & jnp.isfinite(targets) & (places < count)
    if mask is not None:
        is_target &= rows.of(mask)
    total, num_targets = (
        across(ReductionOp.SUM, jnp.sum(x), head.axes) for x in (jnp.where(is_target, targets, 0.0), is_target)
    )
    shift = total / jnp.maximum(num_targets, 1)
    return lax.stop_gradient(jnp.where(jnp.isfinite(shift), shift, 0.0))
