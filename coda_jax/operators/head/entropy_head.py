"""A head with entropies that reads no logits: sums of the first product's epilogue give the entropies.

    S[m] = sum_v exp(y[m, v] - s)        W[m] = sum_v (y[m, v] - s) exp(y[m, v] - s)
    lse = s + log(S)        entropy = lse - sum_v p[v] y[v] = log(S) - W / S

with one number s near the logits. No maximum is needed where S is in float32's range. Rounding makes the entropy
uncertain by some 1e-7 of lse - s, as it does the logarithms of p from which the derivative comes.

A row whose S leaves 2^-60 to 2^110, within which W and the sum over devices are finite, is lost, W with it. Then all
statistics are computed again, from logits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue import ReductionOp
from coda_jax.jaxprs.walk import unexpected
from coda_jax.lowering.on_devices import across
from coda_jax.operators.head.arrays import Kernel, Statistics, Tokens
from coda_jax.operators.head.chunks import Chunk, over_chunks
from coda_jax.operators.head.logit_curve import LogitCurve
from coda_jax.operators.head.logit_shift import LEAST, MOST, near_logits
from coda_jax.operators.head.loss_head import LossHead
from coda_jax.primitives.mesh_types import vary, varying_axes


@dataclasses.dataclass(frozen=True)
class EntropyHead(LossHead):
    """A `LossHead` of 16-bit products, one label a token, whose statistics are lse, target and entropy."""

    @classmethod
    def of(cls, head: LossHead, labels: jax.Array) -> LossHead:
        """The same head with sums; or the head itself, which reads logits: for float32 products, and several labels."""
        is_fit = head.has_entropy and not head.has_total and labels.ndim == 1
        return cls(**vars(head)) if is_fit and np.dtype(head.dtype).itemsize == 2 else head

    def statistics(self, tokens: Tokens, kernel: Kernel, labels: jax.Array, mask: jax.Array | None) -> Statistics:
        w, columns = self._joined(kernel), self._shard_labels(labels)
        shift = near_logits(self, tokens, w, columns, mask)

        def step(state: tuple[Statistics, jax.Array], chunk: Chunk) -> tuple[Statistics, jax.Array]:
            stats, is_lost = state
            chunk_stats, is_row_lost = self._shifted_sums(
                self.formed(tokens, chunk), w, chunk.of(columns), self.curve(tokens, chunk), shift
            )
            return jax.tree.map(chunk.put, stats, chunk_stats), is_lost | jnp.any(is_row_lost)

        (is_lost,) = vary(varying_axes(*jax.tree.leaves((tokens, kernel))) - set(self.axes), jnp.zeros((), jnp.bool))
        state = self._no_statistics(tokens, kernel, labels), is_lost
        size = self._chunk(labels.shape[0], self.dtype)
        stats, is_lost = over_chunks(step, state, labels.shape[0], size, mask, all_chunks=self.all_chunks)

        def by_logits() -> Statistics:
            return LossHead.statistics(self, tokens, kernel, labels, mask)

        return unexpected(is_lost.astype(jnp.int32), by_logits, stats)

    def _shifted_sums(
        self, formed: list[jax.Array], w: jax.Array, labels: jax.Array, curve: LogitCurve, shift: jax.Array
    ) -> tuple[Statistics, jax.Array]:
        """The statistics, and for each row whether it is lost."""

        def loss_entropy(acc: jax.Array, labels: jax.Array, shift: jax.Array, scale: Any, cap: Any) -> list[jax.Array]:
            y = curve.for_tile(scale, cap).of(acc)
            column = lax.broadcasted_iota(jnp.int32, y.shape, 1)
            e = jnp.exp(y - shift)
            if self.columns > self.vocabulary:
                e = jnp.where(column < self.vocabulary, e, 0.0)
            return [jnp.sum(x, axis=1) for x in (e, (y - shift) * e, jnp.where(column == labels, y, 0.0))]

        sums = self._multiply(
            formed,
            w,
            labels[:, None],
            shift,
            *curve.columns(),
            epilogue=loss_entropy,
            out_dtypes=[jnp.float32] * 3,
            transpose_b=self.transpose_w,
        )
        is_large = across(ReductionOp.MAX, (sums[0] > MOST).astype(jnp.int32), self.axes) > 0  # on one device
        total, weighted, target = (across(ReductionOp.SUM, x, self.axes) for x in sums)
        lse = jnp.log(total)
        entropy = jnp.maximum(lse - weighted / total, 0.0)
        return Statistics(shift + lse, target, None, entropy), is_large | (total < LEAST)
