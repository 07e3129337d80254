"""A head with entropies that reads no logits for them: sums of the first product's epilogue give the entropies.

    S[m] = sum_v exp(y[m, v] - s)        W[m] = sum_v (y[m, v] - s) exp(y[m, v] - s)
    lse = s + log(S)        entropy = lse - sum_v p[v] y[v] = log(S) - W / S

with one number s near the logits. No maximum is needed where S is in float32's range. Rounding makes the entropy
uncertain by some 1e-7 of lse - s, as it does the logarithms of p from which the derivative comes.

The logits are kept for their cotangent alone, where gradients are formed too, in the dtype that the function rounds
them to.

A row whose S leaves 2^-60 to 2^110, within which W and the sum over devices are finite, is lost, W with it. Then all
statistics are computed again, from logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue import ReductionOp
from coda_jax.jaxprs.walk import unexpected
from coda_jax.lowering.on_devices import across
from coda_jax.operators.head.arrays import Kernel, Statistics, Tokens
from coda_jax.operators.head.logit_curve import LogitCurve
from coda_jax.operators.head.logit_shift import LEAST, MOST, near_logits
from coda_jax.operators.head.loss_head import LossHead
from coda_jax.primitives.dtypes import kept_dtype
from coda_jax.primitives.mesh_types import vary, varying_axes


@dataclasses.dataclass(frozen=True)
class EntropyHead(LossHead):
    """A `LossHead` of 16-bit products, one label a token, whose statistics have an entropy."""

    @classmethod
    def of(cls, head: LossHead, labels: jax.Array) -> LossHead:
        """The same head with sums; or the head itself, which reads logits: for float32 products, and several labels."""
        is_fit = head.has_entropy and labels.ndim == 1 and np.dtype(head.dtype).itemsize == 2
        return cls(**vars(head)) if is_fit else head

    def logit_head(self) -> LossHead:
        return LossHead(**vars(self))

    def statistics(self, tokens: Tokens, kernel: Kernel, labels: jax.Array, mask: jax.Array | None) -> Statistics:
        dtype = self._logits_dtype(labels) if self._compares else self.dtype
        sums, no_loss = self._shifted_by(tokens, kernel, labels, mask), self._no_loss(tokens, kernel)
        stats, is_lost = self._in_chunks(sums, tokens, kernel, labels, mask, dtype, no_loss)

        def by_logits() -> Statistics:
            return self.logit_head().statistics(tokens, kernel, labels, mask)

        return unexpected(is_lost.astype(jnp.int32), by_logits, stats)

    def values_and_gradients(
        self,
        value: Callable[..., jax.Array],
        tokens: Tokens,
        kernel: Kernel,
        labels: jax.Array,
        weights: jax.Array,
        *coefficients: jax.Array,
    ) -> Any:
        arrays: Any = tokens, kernel, labels, weights, *coefficients
        sums, no_loss = self._shifted_by(tokens, kernel, labels), self._no_loss(tokens, kernel)
        found, is_lost = self._in_chunks_with_gradients(sums, value, *arrays, is_lost=no_loss)
        is_lost = across(ReductionOp.MAX, is_lost.astype(jnp.int32), self.axes)

        def by_logits() -> Any:
            return self.logit_head().values_and_gradients(value, *arrays)

        return unexpected(is_lost, by_logits, found)

    def _no_loss(self, tokens: Tokens, kernel: Kernel) -> jax.Array:
        """False, which varies over the same mesh axes as a chunk's statistics."""
        axes = varying_axes(*jax.tree.leaves((tokens, kernel))) - set(self.axes)
        return vary(axes, jnp.zeros((), jnp.bool))[0]

    def _logits_dtype(self, labels: jax.Array) -> np.dtype:
        """The dtype of a chunk's logits: the one that the function rounds them to, where the head keeps such."""
        narrow = np.dtype(kept_dtype(self.dtype))
        return narrow if self.rounded_to == narrow else np.dtype(jnp.float32)

    def _shifted_by(self, tokens: Tokens, kernel: Kernel, labels: jax.Array, mask: jax.Array | None = None) -> Any:
        """`_shifted_sums` with one number near the logits of all tokens."""
        return partial(
            self._shifted_sums, near_logits(self, tokens, self._joined(kernel), self._shard_labels(labels), mask)
        )

    def _shifted_sums(
        self,
        shift: jax.Array,
        formed: list[jax.Array],
        w: jax.Array,
        labels: jax.Array,
        curve: LogitCurve,
        *,
        keep: bool,
    ) -> tuple[Statistics, jax.Array, jax.Array]:
        """The statistics, with `keep` the product in its `_logits_dtype`, and for each row whether it is lost."""
        keep = keep or self._compares

        def loss_entropy(acc: jax.Array, labels: jax.Array, shift: jax.Array, scale: Any, cap: Any) -> list[jax.Array]:
            y = curve.for_tile(scale, cap).of(acc)
            column = lax.broadcasted_iota(jnp.int32, y.shape, 1)
            e = jnp.exp(y - shift)
            if self.columns > self.vocabulary:
                e = jnp.where(column < self.vocabulary, e, 0.0)
            terms = [e, (y - shift) * e, jnp.where(column == labels, y, 0.0), *[y] * self.has_total]  # padding is 0
            return [*(jnp.sum(x, axis=1) for x in terms), *[acc] * keep]

        sums = self._multiply(
            formed,
            w,
            labels[:, None],
            shift,
            *curve.columns(),
            epilogue=loss_entropy,
            out_dtypes=[*[jnp.float32] * (3 + self.has_total), *[self._logits_dtype(labels)] * keep],
            transpose_b=self.transpose_w,
        )
        z = sums.pop() if keep else sums[0]
        is_large = across(ReductionOp.MAX, (sums[0] > MOST).astype(jnp.int32), self.axes) > 0  # on one device
        total, weighted, target, *all_columns = (across(ReductionOp.SUM, x, self.axes) for x in sums)
        lse = jnp.log(total)
        entropy = jnp.maximum(lse - weighted / total, 0.0)
        stats = Statistics(shift + lse, target, all_columns[0] if all_columns else None, entropy)
        return self._with_comparisons(stats, z, labels, curve), z, is_large | (total < LEAST)
