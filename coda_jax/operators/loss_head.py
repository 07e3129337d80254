"""Softmax cross-entropy of a projection, a chunk of tokens at a time: its sums over the vocabulary, and its gradient.

z = h W,  capped: c tanh(z / c)        lse[m] = log(sum_v exp(z[m, v]))        target[m] = z[m, labels[m]]
loss[m] = lse - (1 - s) target - s mean_v z + zeta lse^2
dz[m, v] = weights[m] ((1 + 2 zeta lse) exp(z - lse) - (1 - s) [v == labels[m]] - s / V) (1 - (z / c)^2)
dh = dz W^T;   dW = h^T dz
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue import ReductionOp, logsumexp
from coda_jax.epilogue.values import same_size
from coda_jax.operators.deferred_norm import DeferredNorm
from coda_jax.operators.norm_products import multiply
from coda_jax.primitives.gemm_primitive import kept_dtype
from coda_jax.primitives.mesh_types import vary, varying_axes
from coda_jax.primitives.partitioned import across

Hidden = DeferredNorm | jax.Array  # what is projected: a norm of x, or x as it is


@dataclasses.dataclass(frozen=True)
class LossHead:
    """What a loss is beside its arrays.

    Attributes:
      vocabulary: V, of W as it is given: a device's part where W is cut.
      columns: of a chunk's logits: V, or more where rows of V elements cannot be addressed.
      total: the whole V.
      axes: the manual mesh axes that cut W's vocabulary; the sums over it are finished over them.
      chunk_bytes: the most that a chunk's logits take, if more than 128 tokens fit.
      transpose_w: whether W is stored (V, D) and not (D, V).
      label_smoothing, z_loss, soft_cap: s, zeta, c above.
      dtype: of the products' inputs; the chunk's logits are kept in its `kept_dtype`.
      implementation: as in `gemm`.
    """

    vocabulary: int
    columns: int
    chunk_bytes: int
    transpose_w: bool
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    dtype: Any
    implementation: str
    total: int
    axes: tuple[str, ...] = ()

    def of_part(self, axes: tuple[str, ...], parts: int) -> LossHead:
        """The same where mesh axes of so many devices cut W's vocabulary."""
        vocabulary = self.vocabulary // parts
        return dataclasses.replace(
            self, vocabulary=vocabulary, columns=columns_of(vocabulary, self.dtype), axes=(*self.axes, *axes)
        )

    def losses(self, h: Hidden, w: jax.Array, labels: jax.Array) -> jax.Array:
        """The loss of every token, (M,) float32, from h (M, D) and labels (M,) int32."""
        w, labels = self._padded(w), self._of_part(labels)

        def step(losses: jax.Array, start: Any, size: Any) -> jax.Array:
            sums = self._sums(self._formed(h, start, size), w, _rows(labels, start, size))
            return _put(losses, self._loss(*sums), start)

        return self._over_chunks(step, _zeros_like(_array(h), h.shape[:1], jnp.float32))

    def losses_and_gradients(
        self, h: Hidden, w: jax.Array, labels: jax.Array, weights: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`losses`, and the cotangents of what is projected, in x's dtype, and of w, float32."""
        w, x, labels = self._padded(w), _array(h), self._of_part(labels)
        rows, width = x.shape
        single = self._chunk(rows) is None
        dw_shape = (self.columns, width) if self.transpose_w else (width, self.columns)

        def step(state: tuple[jax.Array, jax.Array, Any], start: Any, size: Any) -> tuple[jax.Array, jax.Array, Any]:
            losses, dh, dw = state
            formed, given = self._formed(h, start, size), _rows(labels, start, size)
            *sums, z = self._sums(formed, w, given, keep=True)
            losses = _put(losses, self._loss(*sums), start)
            dz = self._dlogits(z, sums[0], sums[1], given, _rows(weights, start, size))
            (part,) = self._multiply(dz, w, out_dtypes=[x.dtype], transpose_b=not self.transpose_w)
            a, b = (dz, formed) if self.transpose_w else (formed, dz)
            if dw is None:
                (dw,) = self._multiply(a, b, out_dtypes=[jnp.float32], transpose_a=True)
            else:
                (dw,) = self._multiply(
                    a,
                    b,
                    dw,
                    epilogue=accumulate,
                    out_dtypes=[jnp.float32],
                    transpose_a=True,
                    input_output_aliases=((0, 0),),
                )
            return losses, _put(dh, part, start), dw

        state = (
            _zeros_like(x, (rows,), jnp.float32),
            _zeros_like(x, x.shape, x.dtype),
            None if single else _zeros_like(x, dw_shape, jnp.float32),
        )
        losses, dh, dw = self._over_chunks(step, state)
        if self.columns > self.vocabulary:
            dw = dw[: self.vocabulary] if self.transpose_w else dw[:, : self.vocabulary]
        return losses, lax.psum(dh, self.axes) if self.axes else dh, dw

    def normalize(self, h: Hidden) -> jax.Array:
        """The norm of x in float32; x itself where there is no norm."""
        return dataclasses.replace(h, x=h.x.astype(jnp.float32)).array() if isinstance(h, DeferredNorm) else h

    def _formed(self, h: Hidden, start: Any, size: Any) -> jax.Array:
        """What is projected of the chunk's tokens."""
        if isinstance(h, DeferredNorm):
            mean = None if h.mean is None else _rows(h.mean, start, size)
            h = dataclasses.replace(h, x=_rows(h.x, start, size), sumsq=_rows(h.sumsq, start, size), mean=mean)
        else:
            h = _rows(h, start, size)
        return self.normalize(h).astype(self.dtype)

    def _padded(self, w: jax.Array) -> jax.Array:
        more = self.columns - self.vocabulary
        w = w.astype(self.dtype)
        return jnp.pad(w, ((0, more), (0, 0)) if self.transpose_w else ((0, 0), (0, more))) if more else w

    def _of_part(self, labels: jax.Array) -> jax.Array:
        """Labels as columns of this part of W; those of other parts are none of its columns, or padding."""
        return labels - lax.axis_index(self.axes) * self.vocabulary if self.axes else labels

    def _sums(self, h: jax.Array, w: jax.Array, labels: jax.Array, *, keep: bool = False) -> list[jax.Array]:
        """lse, target, with smoothing the sum over the vocabulary, and with `keep` the rounded h W."""

        def loss_sums(acc: jax.Array, labels: jax.Array) -> list[jax.Array]:
            z = self._capped(acc)
            column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
            among = z if self.columns == self.vocabulary else jnp.where(column < self.vocabulary, z, -jnp.inf)
            outputs = [logsumexp(among, axis=1), jnp.sum(jnp.where(column == labels, z, 0.0), axis=1)]
            if self.label_smoothing:
                outputs.append(jnp.sum(z, axis=1))  # padding is 0
            return [*outputs, acc] if keep else outputs

        dtypes = [jnp.float32] * (2 + bool(self.label_smoothing)) + [kept_dtype(self.dtype)] * keep
        lse, *sums = self._multiply(
            h, w, labels[:, None], epilogue=loss_sums, out_dtypes=dtypes, transpose_b=self.transpose_w
        )
        kept = [sums.pop()] if keep else []
        finished = [across(ReductionOp.SUM, x, self.axes) for x in sums]
        return [across(ReductionOp.LOGSUMEXP, lse, self.axes), *finished, *kept]

    def _capped(self, z: jax.Array) -> jax.Array:
        return z if self.soft_cap is None else self.soft_cap * jnp.tanh(z / self.soft_cap)

    def _loss(self, lse: jax.Array, target: jax.Array, *total: jax.Array) -> jax.Array:
        loss = lse - (1 - self.label_smoothing) * target
        if self.z_loss:
            loss += self.z_loss * lse * lse
        return loss - self.label_smoothing / self.total * total[0] if total else loss

    def _dlogits(
        self, z: jax.Array, lse: jax.Array, target: jax.Array, labels: jax.Array, weights: jax.Array
    ) -> jax.Array:
        """dz of the chunk, rounded. The label's own logit is the exact one: its cotangent is often a difference.

        What depends on the row alone stays out of the pass over the chunk.
        """
        lse, target, labels, weights = (y[:, None] for y in (lse, target, labels, weights))
        scale = weights * (1 + 2 * self.z_loss * lse)
        smoothing = weights * (self.label_smoothing / self.total)

        def cotangent(capped: jax.Array) -> jax.Array:  # of a logit that is not the label's
            dz = scale * jnp.exp(capped - lse)
            return dz - smoothing if self.label_smoothing else dz

        def through_cap(dz: jax.Array, capped: jax.Array) -> jax.Array:
            return dz if self.soft_cap is None else dz * (1 - jnp.square(capped / self.soft_cap))

        column = lax.broadcasted_iota(jnp.int32, z.shape, 1)
        capped = self._capped(z.astype(jnp.float32))
        of_label = through_cap(cotangent(target) - weights * (1 - self.label_smoothing), target)
        dz = jnp.where(column == labels, of_label, through_cap(cotangent(capped), capped))
        if self.columns > self.vocabulary:
            dz = jnp.where(column < self.vocabulary, dz, 0.0)
        return dz.astype(self.dtype)

    def _multiply(self, *arrays: jax.Array, **options: Any) -> list[jax.Array]:
        return multiply(*arrays, implementation=self.implementation, **options)

    def _over_chunks(self, step: Callable[[Any, Any, Any], Any], state: Any) -> Any:
        """step(state, first row, number of rows) for all chunks, the last of which may be shorter."""
        rows = jax.tree.leaves(state)[0].shape[0]
        chunk = self._chunk(rows)
        if chunk is None:
            return step(state, 0, rows)
        state = lax.fori_loop(0, rows // chunk, lambda i, state: step(state, i * chunk, chunk), state)
        return step(state, rows // chunk * chunk, rows % chunk) if rows % chunk else state

    def _chunk(self, rows: Any) -> int | None:
        """Tokens of a chunk, a multiple of 128, chunks of about one size; None if all tokens are one chunk."""
        most = max(self.chunk_bytes // (self.columns * kept_dtype(self.dtype).itemsize) // 128 * 128, 128)
        if not isinstance(rows, int) or rows <= most:
            return None
        return round_up(-(-rows // -(-rows // most)), 128)


def columns_of(vocabulary: int, dtype: Any) -> int:
    """Columns of the logits: the vocabulary, or a multiple of 128 where rows of it cannot be addressed."""
    return vocabulary if np.dtype(dtype).itemsize > 2 or vocabulary % 8 == 0 else round_up(vocabulary, 128)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def accumulate(acc: jax.Array, total: jax.Array) -> jax.Array:
    return acc + total


def _array(h: Hidden) -> jax.Array:
    return h.x if isinstance(h, DeferredNorm) else h


def _zeros_like(x: jax.Array, shape: tuple[Any, ...], dtype: Any) -> jax.Array:
    """Zeros that vary over the mesh axes that x varies over, as what a loop puts in their place does."""
    return vary(varying_axes(x), jnp.zeros(shape, dtype))[0]


def _rows(x: jax.Array, start: Any, size: Any) -> jax.Array:
    return x if same_size(size, x.shape[0]) else lax.dynamic_slice_in_dim(x, start, size)


def _put(rows: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    whole = same_size(part.shape[0], rows.shape[0])
    return part if whole else lax.dynamic_update_slice_in_dim(rows, part, start, 0)
