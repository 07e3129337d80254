"""A loss head that keeps the exponentials of a chunk's logits: the logits' cotangent needs no pass over them.

    e[m, v] = exp(z[m, v] - s)        lse[m] = s + log(sum_v e[m, v])

with one number s near the logits. The first product's epilogue sums e and stores it. The cotangent is, but for the
label's, a multiple of it in each row:

    dz[m, v] = p[m, v] dlse[m] + [v == labels[m]] dtarget[m] = f[m] e'[m, v]        f = exp(s - lse) dlse
    e'[m, v] = e[m, v]  but  e'[m, labels[m]] = exp(target - s) + dtarget / f
    dh = f (e' W^T)        dW = (f h)^T e'

so that both products read e': f scales the first one's rows, in its epilogue, and the second one's input h. bfloat16
has float32's range, and an exponential is as exact in it as the cotangent would be; a logit of 20 that is rounded to
bfloat16 makes its probability uncertain by 6 %.

A row whose sum leaves 2^-60 to 2^110 has its largest logits more than 41 below s or 76 above it, and its exponentials
are lost: within, they are finite times each weight below 2^17. So is a row with a sum above 2^32 and an f below 2^-104,
beside which small h are lost in f h, but not in the result; or with a sum below 2^-32 and an f above 2^104. (Other f of
that size are of cotangents that are so themselves.) Then all chunks are computed again, from their logits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue import ReductionOp
from coda_jax.jaxprs.walk import unexpected
from coda_jax.lowering.on_devices import across
from coda_jax.operators.head.arrays import Kernel, Statistics, Tokens
from coda_jax.operators.head.chunks import Chunk, over_chunks
from coda_jax.operators.head.logit_shift import LEAST, MOST, near_logits
from coda_jax.operators.head.loss_head import LossHead
from coda_jax.primitives.mesh_types import vary, varying_axes

_MOST_FACTOR = 2.0**104  # of a row's f, where its sum is small; the inverse is the least where it is large
_FAR = 32 * math.log(2)  # between a log-sum-exp and the shift, for a sum that is large or small
_MOST_BYTES = 13 << 28  # of a chunk's exponentials and dW, where nothing else is asked for


@dataclasses.dataclass(frozen=True)
class ExponentialHead(LossHead):
    """A `LossHead` in bfloat16 of logits without cap and scale, whose statistics are lse and target."""

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

    def values_and_gradients(
        self,
        value: Callable[..., jax.Array],
        tokens: Tokens,
        kernel: Kernel,
        labels: jax.Array,
        weights: jax.Array,
        *coefficients: jax.Array,
    ) -> Any:
        w, columns = self._joined(kernel), self._shard_labels(labels)
        shift = near_logits(self, tokens, w, columns)

        def step(state: Any, chunk: Chunk) -> Any:
            (values, is_lost), dtokens, dkernel = state
            formed, chunk_labels = self.formed(tokens, chunk), chunk.of(columns)
            stats, e, is_row_lost = self._exponentials(formed, w, chunk_labels, shift)
            chunk_values, pullback = jax.vjp(value, stats, *map(chunk.of, coefficients))
            cotangents, *dcoefficients = pullback(chunk.of(weights))
            factor = jnp.exp(shift - stats.lse) * cotangents.lse
            added = jnp.where(cotangents.target == 0, 0.0, cotangents.target / factor)  # to the label's
            is_row_lost |= (jnp.abs(added) > MOST) | _is_out_of_range(factor, stats.lse - shift, cotangents.lse)
            rows, inside = lax.iota(jnp.int32, chunk_labels.shape[0]), self.has_column(chunk_labels)
            exact = (jnp.exp(stats.target - shift) + added).astype(e.dtype)
            e = e.at[rows, jnp.where(inside, chunk_labels, self.columns)].set(exact, mode="drop", unique_indices=True)
            gradients = self._products(e, [], formed, w, (dtokens, dkernel), chunk, factor=factor[:, None])
            values = jax.tree.map(chunk.put, values, [chunk_values, *dcoefficients])
            return (values, is_lost | jnp.any(is_row_lost)), *gradients

        size = self._chunk(labels.shape[0], self.dtype)
        no_value = self._no_statistics(tokens, kernel, labels).lse
        (is_lost,) = vary(varying_axes(*jax.tree.leaves((tokens, kernel))), jnp.zeros((), jnp.bool))
        state = (
            ([no_value] * (1 + len(coefficients)), is_lost),
            *self._no_gradients(tokens, kernel, is_single=size is None),
        )
        ((token_values, *dcoefficients), is_lost), dtokens, dkernel = over_chunks(step, state, labels.shape[0], size)
        is_lost = across(ReductionOp.MAX, is_lost.astype(jnp.int32), self.axes)

        def by_logits() -> Any:
            return self.logit_head().values_and_gradients(value, tokens, kernel, labels, weights, *coefficients)

        return unexpected(is_lost, by_logits, (token_values, tuple(dcoefficients), dtokens, self._unpadded(dkernel)))

    def _exponentials(
        self, formed: list[jax.Array], w: jax.Array, labels: jax.Array, shift: jax.Array
    ) -> tuple[Statistics, jax.Array, jax.Array]:
        """The statistics, e, and for each row whether it is lost."""

        def loss_exponentials(acc: jax.Array, labels: jax.Array, shift: jax.Array) -> list[jax.Array]:
            column = lax.broadcasted_iota(jnp.int32, acc.shape, 1)
            e = jnp.exp(acc - shift)
            if self.columns > self.vocabulary:
                e = jnp.where(column < self.vocabulary, e, 0.0)
            return [jnp.sum(e, axis=1), jnp.sum(jnp.where(column == labels, acc, 0.0), axis=1), e]

        total, target, e = self._multiply(
            formed,
            w,
            labels[:, None],
            shift,
            epilogue=loss_exponentials,
            out_dtypes=[jnp.float32, jnp.float32, self.dtype],
            transpose_b=self.transpose_w,
        )
        is_finite = total <= MOST  # on this shard of W; False for NaN
        total, target = (across(ReductionOp.SUM, x, self.axes) for x in (total, target))
        return Statistics(shift + jnp.log(total), target), e, ~(is_finite & (total >= LEAST))


def _is_out_of_range(factor: jax.Array, height: jax.Array, dlse: jax.Array) -> jax.Array:
    """Whether factor, exp(-height) dlse, loses what dlse holds, for each row."""
    is_small = (height > _FAR) & (jnp.abs(factor) < 1 / _MOST_FACTOR) & (dlse != 0)
    return is_small | ((height < -_FAR) & (jnp.abs(factor) > _MOST_FACTOR))
