"""The head under a loss and under log-probabilities: sums over a projection's logits, a chunk of tokens at a time.

z = h W  or, beside a low-rank delta, h W + u B        y = z / T  or, capped,  c tanh(z / c) / T

The statistics of each token's y are, with p[v] = exp(y[v] - lse):

    lse = log(sum_v exp(y[v]))        target = y[labels]        total = sum_v y[v]
    entropy = -sum_v p[v] log(p[v]) = lse - sum_v p[v] y[v]

A loss or a log-probability is elementwise in them, and has JAX's own derivative. That of the statistics is

    dlse/dy[v] = p[v]      dtarget/dy[v] = [v == labels]      dtotal/dy[v] = 1
    dentropy/dy[v] = -p[v] (log(p[v]) + entropy)

so from their cotangents, dlse, dtarget and so on,

    dy[v] = p[v] (dlse - dentropy (y[v] - lse + entropy)) + [v == labels] dtarget + dtotal
    dz = dy / T (1 - (capped / c)^2)      d(1/T) = sum_v dy[v] capped[v]      dc as `LogitCurve.cap_terms` says
    dh = dz W^T      dW = h^T dz      du = dz B^T      dB = u^T dz
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue import ReductionOp, logsumexp
from coda_jax.jaxprs.walk import with_fallback
from coda_jax.lowering.on_devices import across
from coda_jax.operators.deferred_norm import DeferredNorm
from coda_jax.operators.head.arrays import (
    ChunkArrays,
    CotangentColumns,
    Hidden,
    Kernel,
    LogitCotangent,
    LogitCurve,
    Statistics,
    Tokens,
)
from coda_jax.operators.head.chunks import Chunk, chunk_size, columns_of, over_chunks
from coda_jax.operators.multiply import accumulate, multiply, scale_rows
from coda_jax.primitives.dtypes import kept_dtype
from coda_jax.primitives.mesh_types import vary, varying_axes

_FLOAT32 = np.dtype(jnp.float32)
_SAMPLE = 128  # tokens whose targets say where the logits are


@dataclasses.dataclass(frozen=True)
class LossHead:
    """The sizes and settings of a head, beside its arrays.

    Attributes:
      vocabulary: V, of the W that is passed: a device's shard where W is sharded.
      columns: of a chunk's logits: V, or more where rows of V elements cannot be addressed.
      axes: the manual mesh axes that shard W's vocabulary; the sums over it are finished over them.
      chunk_bytes: the most that a chunk's logits take, if more than 128 tokens fit.
      transpose_w: whether W is stored (V, D) and not (D, V).
      soft_cap: c above where it is a number.
      has_total, has_entropy, has_best: which statistics there are beside lse and target.
      rank: the comparison of the logits that are counted with the label's, as "gt"; empty where none are.
      rounded_to: the dtype of the logits that are compared with one another, and that are kept beside an entropy.
      scale_has_gradient: whether 1 / T is differentiated.
      all_chunks: whether also those chunks are worked on that a mask leaves empty: then the loop can be differentiated.
      dtype: of the products' inputs.
      implementation: as in `gemm`.
    """

    vocabulary: int
    columns: int
    chunk_bytes: int
    transpose_w: bool
    dtype: Any
    implementation: str
    soft_cap: float | None = None
    has_total: bool = False
    has_entropy: bool = False
    has_best: bool = False
    rank: str = ""
    rounded_to: np.dtype = _FLOAT32
    scale_has_gradient: bool = False
    all_chunks: bool = False
    axes: tuple[str, ...] = ()

    def on_shard(self, axes: tuple[str, ...], shards: int) -> LossHead:
        """The same head for one shard of W, where mesh axes divide its vocabulary into so many shards."""
        vocabulary = self.vocabulary // shards
        return dataclasses.replace(
            self, vocabulary=vocabulary, columns=columns_of(vocabulary, self.dtype), axes=(*self.axes, *axes)
        )

    def logit_head(self) -> LossHead:
        """The head of the same results that keeps logits, none of whose rows is lost: JAX can differentiate it."""
        return self

    def statistics(self, tokens: Tokens, kernel: Kernel, labels: jax.Array, mask: jax.Array | None) -> Statistics:
        """The statistics of every token, 0 where the mask is false.

        Args:
          tokens, kernel: arrays.
          labels: (M,) or (M, k) int32.
          mask: (M,) bool, or None.
        """
        w, columns = self._join_kernel(kernel), self._shard_labels(labels)
        shift = self._near_logits(tokens, w, columns, mask) if self.is_shifted() else None

        def step(state: tuple[Statistics, Any], chunk: Chunk) -> tuple[Statistics, Any]:
            stats, is_lost = state
            found, _, is_row_lost = self.sums(self.arrays(tokens, w, columns, chunk, shift))
            return jax.tree.map(chunk.put, stats, found), _or_any(is_lost, is_row_lost)

        size = self._chunk(labels.shape[0], self._chunk_dtype(labels))
        state = self._no_statistics(tokens, kernel, labels), self._no_loss(shift, tokens, kernel)
        stats, is_lost = over_chunks(step, state, labels.shape[0], size, mask, all_chunks=self.all_chunks)
        if shift is None:
            return stats
        again = partial(LossHead.statistics, self.logit_head(), tokens, kernel, labels, mask)
        return with_fallback(self._on_any_shard(is_lost), again, stats)

    def values_and_gradients(
        self,
        tokens: Tokens,
        kernel: Kernel,
        labels: jax.Array,
        weights: jax.Array,
        *coefficients: jax.Array,
        value: Callable[..., jax.Array],
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[Tokens, Kernel]]:
        """value(statistics, *coefficients) of every token, (M,), and cotangents of their sum with weights (M,).

        The cotangents are those of the coefficients, (M,) each, and those that `pullback` gives.
        """
        w, columns = self._join_kernel(kernel), self._shard_labels(labels)
        shift = self._near_logits(tokens, w, columns) if self.is_shifted(keep=True) else None

        def step(state: Any, chunk: Chunk) -> Any:
            values, is_lost, gradients = state
            arrays = self.arrays(tokens, w, columns, chunk, shift)
            stats, kept, is_row_lost = self.sums(arrays, keep=True)
            chunk_values, pullback = jax.vjp(value, stats, *map(chunk.of, coefficients))
            cotangents, *dcoefficients = pullback(chunk.of(weights))
            cotangent = self.cotangent(kept, arrays, stats, cotangents)
            values = jax.tree.map(chunk.put, values, [chunk_values, *dcoefficients])
            is_lost = _or_any(is_lost, is_row_lost, cotangent.is_lost)
            return values, is_lost, self._products(cotangent, arrays, gradients, chunk)

        size = self._chunk(labels.shape[0], self._chunk_dtype(labels, keep=True))
        values = [self._no_statistics(tokens, kernel, labels).lse] * (1 + len(coefficients))
        gradients = self._no_gradients(tokens, kernel, is_single=size is None)
        state = values, self._no_loss(shift, tokens, kernel), gradients
        values, is_lost, (dtokens, dkernel) = over_chunks(step, state, labels.shape[0], size)
        found = values[0], tuple(values[1:]), (dtokens, self._unpadded(dkernel))
        if shift is None:
            return found
        arguments: Any = tokens, kernel, labels, weights, *coefficients
        again = partial(LossHead.values_and_gradients, self.logit_head(), *arguments, value=value)
        return with_fallback(self._on_any_shard(is_lost), again, found)

    def pullback(
        self,
        tokens: Tokens,
        kernel: Kernel,
        labels: jax.Array,
        mask: jax.Array | None,
        stats: Statistics,
        cotangents: Statistics,
    ) -> tuple[Tokens, Kernel]:
        """The cotangents of tokens and kernel, from the statistics and their cotangents; logits are computed again.

        That of h is in x's dtype, those of the kernel are float32. Where W is sharded those of the tokens are terms of
        a sum over the devices.
        """
        w, columns = self._join_kernel(kernel), self._shard_labels(labels)

        def step(gradients: tuple[Tokens, Kernel], chunk: Chunk) -> tuple[Tokens, Kernel]:
            arrays = self.arrays(tokens, w, columns, chunk)
            curve = arrays.curve
            chunk_stats, chunk_cotangents = jax.tree.map(chunk.of, stats), jax.tree.map(chunk.or_zeros, cotangents)

            def loss_cotangent(acc: jax.Array, *columns: Any) -> list[jax.Array]:
                of_tile = CotangentColumns(*columns)
                tile_curve = curve.for_tile(of_tile.scale, of_tile.cap)
                return self._dlogits(tile_curve, tile_curve.capped(acc), of_tile)

            dz, *drows = multiply(
                arrays.concatenate(),
                w,
                *CotangentColumns.of(arrays, chunk_stats, chunk_cotangents),
                epilogue=loss_cotangent,
                out_dtypes=[self.dtype, *[jnp.float32] * (self.scale_has_gradient + curve.has_cap_column)],
                implementation=self.implementation,
                transpose_b=self.transpose_w,
            )
            if labels.ndim > 1:
                dz, drows = self._with_candidates(dz, drows, arrays, chunk_stats, chunk_cotangents)
            return self._products(LogitCotangent(dz, drows), arrays, gradients, chunk)

        size = self._chunk(labels.shape[0], self.dtype)
        state = self._no_gradients(tokens, kernel, is_single=mask is None and size is None)
        dtokens, dkernel = over_chunks(step, state, labels.shape[0], size, mask, all_chunks=self.all_chunks)
        return dtokens, self._unpadded(dkernel)

    def normalize(self, h: Hidden) -> jax.Array:
        """The norm of x in float32; x itself where there is no norm."""
        return h.with_array(h.x.astype(jnp.float32)).array() if isinstance(h, DeferredNorm) else h

    # ---- one chunk

    def is_shifted(self, *, keep: bool = False) -> bool:
        """Whether `sums` shifts exponentials by one number, not each row's by its largest logit; rows may be lost then.

        Args:
          keep: as in `sums`.
        """
        return False

    def sums(self, arrays: ChunkArrays, *, keep: bool = False) -> tuple[Statistics, jax.Array, jax.Array | None]:
        """The statistics of a chunk; with `keep` what `cotangent` reads; and for each row whether it is lost, or None.

        Here the product is kept, in its `_logits_dtype`. The entropy, the largest logit, the label's rank and several
        labels a token are read from it: an epilogue's sum over a tile does not know the log-sum-exp of all tiles that
        sum_v exp(y - lse) y needs. `EntropyHead` guesses it.
        """
        labels, curve = arrays.labels, arrays.curve
        is_one = labels.ndim == 1
        keep = keep or self._reads_logits(labels) or self._compares

        def loss_sums(acc: jax.Array, labels: Any, scale: Any, cap: Any) -> list[jax.Array]:
            y = curve.for_tile(scale, cap).of(acc)
            column = lax.broadcasted_iota(jnp.int32, y.shape, 1)
            among = y if self.columns == self.vocabulary else jnp.where(column < self.vocabulary, y, -jnp.inf)
            outputs = [logsumexp(among, axis=1)]
            if labels is not None:
                outputs.append(jnp.sum(jnp.where(column == labels, y, 0.0), axis=1))
            if self.has_total:
                outputs.append(jnp.sum(y, axis=1))  # padding is 0
            return [*outputs, acc] if keep else outputs

        lse, *sums = multiply(
            arrays.concatenate(),
            arrays.w,
            labels[:, None] if is_one else None,
            *curve.columns(),
            epilogue=loss_sums,
            out_dtypes=[jnp.float32] * (1 + is_one + self.has_total) + [self._logits_dtype(labels)] * keep,
            implementation=self.implementation,
            transpose_b=self.transpose_w,
        )
        z = sums.pop() if keep else lse
        lse = across(ReductionOp.LOGSUMEXP, lse, self.axes)
        if not is_one:
            sums = [self._candidates(z, labels, curve), *sums]
        target, *total = (across(ReductionOp.SUM, x, self.axes) for x in sums)
        entropy = self._entropy(z, lse, curve) if self.has_entropy else None
        stats = Statistics(lse, target, total[0] if total else None, entropy)
        return self._with_comparisons(stats, z, labels, curve), z, None

    def cotangent(
        self, kept: jax.Array, arrays: ChunkArrays, stats: Statistics, cotangents: Statistics
    ) -> LogitCotangent:
        """The cotangent of a chunk's z from what `sums` keeps, the statistics and their cotangents."""
        curve = arrays.curve
        # The label's own logit is the exact one: its cotangent is often a difference.
        is_label = lax.broadcasted_iota(jnp.int32, kept.shape, 1) == arrays.labels[:, None]
        target = curve.unscaled(stats.target[:, None])
        capped = jnp.where(is_label, target, curve.capped(kept.astype(jnp.float32)))
        dz, *drows = self._dlogits(curve, capped, CotangentColumns.of(arrays, stats, cotangents))
        return LogitCotangent(dz.astype(self.dtype), drows)

    def has_column(self, labels: jax.Array) -> jax.Array:
        """Whether each label is a column of this shard of W."""
        return (labels >= 0) & (labels < self.vocabulary)

    def arrays(
        self, tokens: Tokens, w: jax.Array, labels: jax.Array, chunk: Chunk, shift: jax.Array | None = None
    ) -> ChunkArrays:
        """The arrays of a chunk; w, labels and shift as `ChunkArrays` has them, the labels those of all tokens."""
        h: Hidden
        if isinstance(tokens.h, DeferredNorm):
            rows = {name: chunk.of(getattr(tokens.h, name)) for name in ("x", "sumsq", "mean")}
            h = dataclasses.replace(tokens.h, **rows)
        else:
            h = chunk.of(tokens.h)
        formed = [self.normalize(h).astype(self.dtype)]
        if tokens.inner is not None:
            formed.append(chunk.of(tokens.inner).astype(self.dtype))
        scale, cap = (None if x is None else chunk.of(x)[:, None] for x in (tokens.scale, tokens.cap))
        curve = LogitCurve(scale, self.soft_cap if cap is None else cap)
        return ChunkArrays(formed, w, chunk.of(labels), curve, shift)

    def _near_logits(self, tokens: Tokens, w: jax.Array, labels: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The mean of some tokens' targets, (), in a trained model a little below their log-sum-exps.

        It has no gradient. Arguments as in `arrays`; tokens that the mask does not keep may hold anything.
        """
        count = labels.shape[0]
        if isinstance(count, int) and count == 0:
            return jnp.zeros((), jnp.float32)
        places = lax.iota(jnp.int32, _SAMPLE) * ((count + _SAMPLE - 1) // _SAMPLE)
        sampled = Chunk(0, _SAMPLE, places)  # behind the last token the first again
        arrays = self.arrays(tokens, w, labels, sampled)
        picked = jnp.take(w, jnp.clip(arrays.labels, 0, self.vocabulary - 1), axis=0 if self.transpose_w else 1)
        equation = "mk,mk->m" if self.transpose_w else "mk,km->m"
        z = jnp.einsum(equation, arrays.concatenate().astype(jnp.float32), picked.astype(jnp.float32))
        targets = arrays.curve.of(z[:, None])[:, 0]
        is_target = self.has_column(arrays.labels) & jnp.isfinite(targets) & (places < count)
        if mask is not None:
            is_target &= sampled.of(mask)
        total, num_targets = (
            across(ReductionOp.SUM, jnp.sum(x), self.axes) for x in (jnp.where(is_target, targets, 0.0), is_target)
        )
        shift = total / jnp.maximum(num_targets, 1)
        return lax.stop_gradient(jnp.where(jnp.isfinite(shift), shift, 0.0))

    @property
    def _compares(self) -> bool:
        """Whether logits are compared with one another."""
        return self.has_best or bool(self.rank)

    def _with_comparisons(self, stats: Statistics, z: jax.Array, labels: jax.Array, curve: LogitCurve) -> Statistics:
        """The statistics with those of compared logits; z as it is kept."""
        if not self._compares:
            return stats
        if self.rounded_to.itemsize < z.dtype.itemsize:
            z = lax.reduce_precision(z, jnp.finfo(self.rounded_to).nexp, jnp.finfo(self.rounded_to).nmant)
        best = self._best(z, curve) if self.has_best else None
        return stats._replace(best=best, rank=self._rank(z, labels, curve) if self.rank else None)

    def _candidates(self, z: jax.Array, labels: jax.Array, curve: LogitCurve) -> jax.Array:
        """The logits of labels (m, k); 0 for those on another shard of W."""
        inside = self.has_column(labels)
        picked = jnp.take_along_axis(z, jnp.where(inside, labels, 0), axis=1)
        return jnp.where(inside, curve.of(picked), 0.0)

    def _best(self, z: jax.Array, curve: LogitCurve) -> jax.Array:
        """The column of each token's largest logit, as float32, which holds all numbers below 2^24."""
        y = jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 1) < self.vocabulary, curve.of(z), -jnp.inf)
        largest, column = jnp.max(y, axis=1), jnp.argmax(y, axis=1).astype(jnp.int32)
        if self.axes:
            column += lax.axis_index(self.axes) * self.vocabulary
            is_largest = largest == across(ReductionOp.MAX, largest, self.axes)
            column = across(ReductionOp.MIN, jnp.where(is_largest, column, jnp.iinfo(jnp.int32).max), self.axes)
        return column.astype(jnp.float32)

    def _rank(self, z: jax.Array, labels: jax.Array, curve: LogitCurve) -> jax.Array:
        """The number of each token's logits that compare so with the label's, as float32; 0 of it in no column."""
        own = across(ReductionOp.SUM, self._candidates(z, labels[:, None], curve), self.axes)
        is_known = across(ReductionOp.SUM, self.has_column(labels).astype(jnp.int32), self.axes) > 0
        compare = {"gt": lax.gt, "ge": lax.ge, "lt": lax.lt, "le": lax.le}[self.rank]
        y = curve.of(z).astype(jnp.float32)
        counts = compare(y, jnp.broadcast_to(own.astype(jnp.float32), y.shape)) & is_known[:, None]
        if self.columns > self.vocabulary:
            counts &= lax.broadcasted_iota(jnp.int32, z.shape, 1) < self.vocabulary
        rank: jax.Array = across(ReductionOp.SUM, jnp.sum(counts, axis=1, dtype=jnp.int32), self.axes)
        return rank.astype(jnp.float32)

    def _entropy(self, z: jax.Array, lse: jax.Array, curve: LogitCurve) -> jax.Array:
        """-sum p log(p), in one pass over the chunk; lse is only a shift, whose rounding does not change p."""
        logp = curve.of(z) - lse[:, None]
        if self.columns > self.vocabulary:
            logp = jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 1) < self.vocabulary, logp, -1e4)
        p = jnp.exp(logp)
        mass, weighted = (across(ReductionOp.SUM, jnp.sum(x, axis=1), self.axes) for x in (p, p * logp))
        return jnp.log(mass) - weighted / mass

    def _dlogits(self, curve: LogitCurve, capped: jax.Array, columns: CotangentColumns) -> list[jax.Array]:
        """dz and `_row_cotangents`."""
        labels, _, lse, entropy, dlse, dtarget, dtotal, dentropy, _ = columns
        logp = curve.scaled(capped) - lse
        dy = jnp.exp(logp) * (dlse if dentropy is None else dlse - dentropy * (logp + entropy))
        column = lax.broadcasted_iota(jnp.int32, capped.shape, 1)
        if labels is not None:
            dy = jnp.where(column == labels, dy + dtarget, dy)
        if dtotal is not None:
            dy = dy + dtotal
        if self.columns > self.vocabulary:
            dy = jnp.where(column < self.vocabulary, dy, 0.0)
        return [curve.through(dy, capped), *self._row_cotangents(dy, capped, curve)]

    def _row_cotangents(self, dy: jax.Array, capped: jax.Array, curve: LogitCurve) -> list[jax.Array]:
        """The row sums d(1/T) and dc, each if it is asked for."""
        d_scale = [jnp.sum(dy * capped, axis=1)] if self.scale_has_gradient else []
        return [*d_scale, jnp.sum(curve.cap_terms(dy, capped), axis=1)] if curve.has_cap_column else d_scale

    def _with_candidates(
        self,
        dz: jax.Array,
        drows: list[jax.Array],
        arrays: ChunkArrays,
        stats: Statistics,
        cotangents: Statistics,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """dz and the row sums, with the terms of the targets of labels (m, k) added."""
        labels, curve = arrays.labels, arrays.curve
        capped = curve.unscaled(stats.target)
        inside = self.has_column(labels)
        added = jnp.where(inside, cotangents.target, 0.0)
        drows = [total + more for total, more in zip(drows, self._row_cotangents(added, capped, curve), strict=True)]
        added = curve.through(added, capped)
        # A label that a token has twice is added to once, so that no order of additions shows in the bits.
        same = labels[:, :, None] == labels[:, None, :]
        is_first = ~jnp.any(jnp.tril(same, -1), axis=2)
        added = jnp.where(is_first, jnp.sum(jnp.where(same, added[:, None, :], 0.0), axis=2), 0.0)
        rows = lax.broadcasted_iota(jnp.int32, labels.shape, 0)
        return dz.at[rows, jnp.where(inside, labels, 0)].add(added.astype(dz.dtype)), drows

    def _products(
        self, cotangent: LogitCotangent, arrays: ChunkArrays, gradients: tuple[Tokens, Kernel], chunk: Chunk
    ) -> tuple[Tokens, Kernel]:
        """The gradients with the chunk's: dz [W; B]^T in its rows; h^T dz, and u^T dz, added in place."""
        (dtokens, dkernel), formed, (dz, drows, factor, _) = gradients, arrays.formed, cotangent
        options: dict[str, Any] = {"implementation": self.implementation}
        (dh,) = multiply(
            dz,
            arrays.w,
            *([] if factor is None else [factor]),
            epilogue=None if factor is None else scale_rows,
            out_dtypes=[dtokens.h.dtype],
            transpose_b=not self.transpose_w,
            **options,
        )
        if factor is not None:
            formed = [(factor * x.astype(jnp.float32)).astype(self.dtype) for x in formed]
        dinner = None
        if dtokens.inner is not None:
            dh, dinner = jnp.split(dh, [dtokens.h.shape[-1]], axis=1)
            dinner = dinner.astype(dtokens.inner.dtype)
        remaining = iter(drows)
        dscale, dcap = (None if x is None else next(remaining) for x in (dtokens.scale, dtokens.cap))
        dtokens = jax.tree.map(chunk.put, dtokens, Tokens(dh, dinner, dscale, dcap))
        options |= {"out_dtypes": [jnp.float32], "transpose_a": True}
        is_only = dkernel.w is None  # then there is nothing to add to
        if not is_only:
            options |= {"epilogue": accumulate, "input_output_aliases": ((0, 0),)}
        summed = []
        for i, x in enumerate(formed):
            a, b = (dz, x) if i == 0 and self.transpose_w else (x, dz)
            summed += multiply(a, b, *([] if is_only else [dkernel[i]]), **options)
        return dtokens, Kernel(*summed)

    # ---- all chunks

    def _chunk(self, rows: Any, dtype: Any) -> int | None:
        return chunk_size(rows, self.columns * np.dtype(dtype).itemsize, self.chunk_bytes)

    def _no_loss(self, shift: jax.Array | None, tokens: Tokens, kernel: Kernel) -> jax.Array | None:
        """False, which varies over the same mesh axes as a chunk's products; None where nothing can be lost."""
        axes = varying_axes(*jax.tree.leaves((tokens, kernel)))
        return None if shift is None else vary(axes, jnp.zeros((), jnp.bool))[0]

    def _on_any_shard(self, is_lost: jax.Array) -> jax.Array:
        return across(ReductionOp.MAX, is_lost.astype(jnp.int32), self.axes)

    def _chunk_dtype(self, labels: jax.Array, *, keep: bool = False) -> np.dtype:
        """The dtype of what the tokens of a chunk are counted by: its largest array."""
        return self._logits_dtype(labels)

    def _reads_logits(self, labels: jax.Array) -> bool:
        return self.has_entropy or labels.ndim > 1

    def _logits_dtype(self, labels: jax.Array) -> np.dtype:
        """The dtype of a chunk's logits: float32 where a sum is read from them, not only their cotangent."""
        narrow = np.dtype(kept_dtype(self.dtype))
        is_wide = self._reads_logits(labels) or (self._compares and self.rounded_to != narrow)
        return _FLOAT32 if is_wide else narrow

    def _join_kernel(self, kernel: Kernel) -> jax.Array:
        """[W; B] in the compute dtype, padded."""
        w = kernel.w.astype(self.dtype)
        if kernel.b is not None:
            b = kernel.b.astype(self.dtype)
            w = jnp.concatenate([w, b.T], axis=1) if self.transpose_w else jnp.concatenate([w, b], axis=0)
        more = self.columns - self.vocabulary
        return jnp.pad(w, ((0, more), (0, 0)) if self.transpose_w else ((0, 0), (0, more))) if more else w

    def _unpadded(self, dkernel: Kernel) -> Kernel:
        if self.columns == self.vocabulary:
            return dkernel
        dw = dkernel.w[: self.vocabulary] if self.transpose_w else dkernel.w[:, : self.vocabulary]
        return Kernel(dw, None if dkernel.b is None else dkernel.b[:, : self.vocabulary])

    def _shard_labels(self, labels: jax.Array) -> jax.Array:
        """Labels as columns of this shard of W; those of other shards are outside of its columns, or padding."""
        return labels - lax.axis_index(self.axes) * self.vocabulary if self.axes else labels

    def _no_statistics(self, tokens: Tokens, kernel: Kernel, labels: jax.Array) -> Statistics:
        """Zeros that vary over the same mesh axes as a chunk's statistics: not over those that shard W."""
        axes = varying_axes(*jax.tree.leaves((tokens, kernel))) - set(self.axes)
        rows, target = (vary(axes, jnp.zeros(shape, jnp.float32))[0] for shape in (labels.shape[:1], labels.shape))
        has_more = (self.has_total, self.has_entropy, self.has_best, bool(self.rank))
        return Statistics(rows, target, *(rows if is_asked else None for is_asked in has_more))

    def _no_gradients(self, tokens: Tokens, kernel: Kernel, *, is_single: bool) -> tuple[Tokens, Kernel]:
        axes = varying_axes(*jax.tree.leaves((tokens, kernel)))

        def zeros(shape: tuple[Any, ...], dtype: Any) -> jax.Array:
            return vary(axes, jnp.zeros(shape, dtype))[0]

        x = tokens.x
        dscale, dcap = (
            zeros(x.shape[:1], jnp.float32) if is_asked else None
            for is_asked in (self.scale_has_gradient, tokens.cap is not None)
        )
        dinner = None if tokens.inner is None else zeros(tokens.inner.shape, tokens.inner.dtype)
        dtokens = Tokens(zeros(x.shape, x.dtype), dinner, dscale, dcap)
        if is_single:
            return dtokens, Kernel(None, None)  # type: ignore[arg-type]
        width, columns = x.shape[-1], self.columns
        dw = zeros((columns, width) if self.transpose_w else (width, columns), jnp.float32)
        db = None if kernel.b is None else zeros((kernel.b.shape[0], columns), jnp.float32)
        return dtokens, Kernel(dw, db)


def _or_any(is_lost: Any, *flags: jax.Array | None) -> Any:
    """Whether anything is lost, (), or one of the rows that the flags are of; None where nothing can be."""
    rows = [x for x in flags if x is not None]
    return is_lost | jnp.any(functools.reduce(operator.or_, rows)) if rows else is_lost
