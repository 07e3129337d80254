"""Loss heads that read no logits: sums and exponentials of the first product's epilogue, shifted by one number.

    e[m, v] = exp(y[m, v] - s)        S[m] = sum_v e[m, v]        lse = s + log(S)

with one number s near the logits. No maximum is needed where S is in float32's range. `EntropyHead` has one more sum:

    W[m] = sum_v (y[m, v] - s) e[m, v]        entropy = lse - sum_v p[v] y[v] = log(S) - W / S

Rounding makes the entropy uncertain by some 1e-7 of lse - s, as it does the logarithms of p from which the derivative
comes. The logits are kept for their cotangent alone, where gradients are formed too.

`ExponentialHead` keeps e in their place: the logits' cotangent needs no pass over them, since it is, but for the
label's, a multiple of e in each row:

    dz[m, v] = p[m, v] dlse[m] + [v == labels[m]] dtarget[m] = f[m] e'[m, v]        f = exp(s - lse) dlse
    e'[m, v] = e[m, v]  but  e'[m, labels[m]] = exp(target - s) + dtarget / f
    dh = f (e' W^T)        dW = (f h)^T e'

so that both products read e': f scales the first one's rows, in its epilogue, and the second one's input h. bfloat16
has float32's range, and an exponential is as exact in it as the cotangent would be; a logit of 20 that is rounded to
bfloat16 makes its probability uncertain by 6 %.

A row whose S leaves 2^-60 to 2^110 has its largest logits more than 41 below s or 76 above it, and is lost: within,
exponentials are finite times each weight below 2^17, and so are W and the sum over devices. To `ExponentialHead` so is
a row with an S above 2^32 and an f below 2^-104, beside which small h are lost in f h, but not in the result; or with
an S below 2^-32 and an f above 2^104. (Other f of that size are of cotangents that are so themselves.) Where a row is
lost all chunks are computed again, from their logits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue import ReductionOp
from coda_jax.lowering.on_devices import across
from coda_jax.operators.head.arrays import ChunkArrays, Kernel, LogitCotangent, Statistics, Tokens
from coda_jax.operators.head.loss_head import LossHead
from coda_jax.operators.multiply import multiply
from coda_jax.primitives.dtypes import kept_dtype

_MOST = 2.0**110  # of a row's sum of exponentials: an exponent of 76, so that sums of it times a logit are finite too
_LEAST = 2.0**-60  # of a row's sum of exponentials: what float32 flushes to 0 is below 2^-49 of it, for 2^17 columns
_MOST_FACTOR = 2.0**104  # of a row's f, where its sum is small; the inverse is the least where it is large
_FAR = 32 * math.log(2)  # between a log-sum-exp and the shift, for a sum that is large or small
_MOST_BYTES = 13 << 28  # of a chunk's exponentials and dW, where nothing else is asked for


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

    def is_shifted(self, *, keep: bool = False) -> bool:
        return True

    def sums(self, arrays: ChunkArrays, *, keep: bool = False) -> tuple[Statistics, jax.Array, jax.Array | None]:
        keep, labels, curve = keep or self._compares, arrays.labels, arrays.curve

        def loss_entropy(acc: jax.Array, labels: jax.Array, shift: jax.Array, scale: Any, cap: Any) -> list[jax.Array]:
            y = curve.for_tile(scale, cap).of(acc)
            column = lax.broadcasted_iota(jnp.int32, y.shape, 1)
            e = jnp.exp(y - shift)
            if self.columns > self.vocabulary:
                e = jnp.where(column < self.vocabulary, e, 0.0)
            terms = [e, (y - shift) * e, jnp.where(column == labels, y, 0.0), *[y] * self.has_total]  # padding is 0
            return [*(jnp.sum(x, axis=1) for x in terms), *[acc] * keep]

        sums = multiply(
            arrays.concatenate(),
            arrays.w,
            labels[:, None],
            arrays.shift,
            *curve.columns(),
            epilogue=loss_entropy,
            out_dtypes=[*[jnp.float32] * (3 + self.has_total), *[self._logits_dtype(labels)] * keep],
            implementation=self.implementation,
            transpose_b=self.transpose_w,
        )
        z, on_shard = sums.pop() if keep else sums[0], sums[0]
        total, weighted, target, *all_columns = (across(ReductionOp.SUM, x, self.axes) for x in sums)
        lse = jnp.log(total)
        entropy = jnp.maximum(lse - weighted / total, 0.0)
        stats = Statistics(arrays.shift + lse, target, all_columns[0] if all_columns else None, entropy)
        is_lost = (on_shard > _MOST) | (total < _LEAST)
        return self._with_comparisons(stats, z, labels, curve), z, is_lost

    def _logits_dtype(self, labels: jax.Array) -> np.dtype:
        """The dtype of a chunk's logits: the one that the function rounds them to, where the head keeps such."""
        narrow = np.dtype(kept_dtype(self.dtype))
        return narrow if self.rounded_to == narrow else np.dtype(jnp.float32)

    def _chunk_dtype(self, labels: jax.Array, *, keep: bool = False) -> np.dtype:
        return self._logits_dtype(labels) if keep or self._compares else np.dtype(self.dtype)


@dataclasses.dataclass(frozen=True)
class ExponentialHead(LossHead):
    """A `LossHead` in bfloat16 of logits without cap and scale, whose statistics are lse and target.

    It is a `LossHead` where nothing is kept.
    """

    @classmethod
    def of(cls, head: LossHead, tokens: Tokens, kernel: Kernel, chunk_bytes: int | None) -> LossHead:
        """The same head with kept exponentials, or the head itself where its cotangent has another form.

        Args:
          chunk_bytes: as it was asked for. By default exponentials may take 1.6 times what dW takes in float32, to
            which each chunk is added: with D = 2560, 8192 tokens, whose three products take 25 times as long as reading
            and writing dW does. Both together take 3.25 GiB at most, if that leaves the exponentials what logits have.
        """
        is_plain = head.soft_cap is None and tokens.cap is None and tokens.scale is None
        has_more = head.has_total or head.has_entropy or head.has_best or head.rank
        if head.dtype != jnp.bfloat16 or not is_plain or has_more:
            return head
        if chunk_bytes is None:
            gradient_bytes = 4 * head.columns * sum(x.size // head.vocabulary for x in kernel if x is not None)
            chunk_bytes = max(head.chunk_bytes, min(int(1.6 * gradient_bytes), _MOST_BYTES - gradient_bytes))
        return cls(**{**vars(head), "chunk_bytes": chunk_bytes})

    def logit_head(self) -> LossHead:
        """The head that keeps logits and their cotangent: half as many tokens take the memory of a chunk."""
        return LossHead(**{**vars(self), "chunk_bytes": max(self.chunk_bytes // 2, 1)})

    def is_shifted(self, *, keep: bool = False) -> bool:
        return keep

    def sums(self, arrays: ChunkArrays, *, keep: bool = False) -> tuple[Statistics, jax.Array, jax.Array | None]:
        if not keep:
            return super().sums(arrays)

        def loss_exponentials(acc: jax.Array, labels: jax.Array, shift: jax.Array) -> list[jax.Array]:
            column = lax.broadcasted_iota(jnp.int32, acc.shape, 1)
            e = jnp.exp(acc - shift)
            if self.columns > self.vocabulary:
                e = jnp.where(column < self.vocabulary, e, 0.0)
            return [jnp.sum(e, axis=1), jnp.sum(jnp.where(column == labels, acc, 0.0), axis=1), e]

        total, target, e = multiply(
            arrays.concatenate(),
            arrays.w,
            arrays.labels[:, None],
            arrays.shift,
            epilogue=loss_exponentials,
            out_dtypes=[jnp.float32, jnp.float32, self.dtype],
            implementation=self.implementation,
            transpose_b=self.transpose_w,
        )
        is_finite = total <= _MOST  # on this shard of W; False for NaN
        total, target = (across(ReductionOp.SUM, x, self.axes) for x in (total, target))
        return Statistics(arrays.shift + jnp.log(total), target), e, ~(is_finite & (total >= _LEAST))

    def cotangent(
        self, kept: jax.Array, arrays: ChunkArrays, stats: Statistics, cotangents: Statistics
    ) -> LogitCotangent:
        shift, labels = arrays.shift, arrays.labels
        factor = jnp.exp(shift - stats.lse) * cotangents.lse
        added = jnp.where(cotangents.target == 0, 0.0, cotangents.target / factor)  # to the label's
        exact = (jnp.exp(stats.target - shift) + added).astype(kept.dtype)
        rows = lax.iota(jnp.int32, labels.shape[0])
        columns = jnp.where(self.has_column(labels), labels, self.columns)
        e = kept.at[rows, columns].set(exact, mode="drop", unique_indices=True)
        is_lost = (jnp.abs(added) > _MOST) | _is_out_of_range(factor, stats.lse - shift, cotangents.lse)
        return LogitCotangent(e, [], factor[:, None], is_lost)


def _is_out_of_range(factor: jax.Array, height: jax.Array, dlse: jax.Array) -> jax.Array:
    """Whether factor, exp(-height) dlse, loses what dlse holds, for each row."""
    is_small = (height > _FAR) & (jnp.abs(factor) < 1 / _MOST_FACTOR) & (dlse != 0)
    return is_small | ((height < -_FAR) & (jnp.abs(factor) > _MOST_FACTOR))
