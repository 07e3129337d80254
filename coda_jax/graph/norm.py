"""A norm in a graph: not applied where products read it, whose epilogues scale, and a map where anything else does.

    norm(x) w = u + shift,   u = rstd (x W' - mean cs)
    W' = scale[:, None] w,   cs = column sums of the rounded W',   shift = sum_d bias[d] w[d, :]

Backward passes are derived, but for three roundings and one reuse that no derivative gives: the statistics are known,
and their gradients go to x; the sum that rstd's needs is made of u, which is kept, and not of the product; cs has the
rounded W', and its sum the rounded t = rstd du, as they are multiplied. `operators/norm_products.py` says why.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import has_narrow_range
from coda_jax.epilogue.rounding import rounded
from coda_jax.graph.values import Product, Value, mapped


@dataclasses.dataclass(frozen=True)
class NormValues:
    """RMSNorm of x, or LayerNorm where there is a mean: values of a graph.

    Attributes:
      x: (M, D).
      rstd: (M, 1).
      scale: (D,).
      mean: (M, 1) or None.
      bias: (D,) or None.
      dtype: of the products' factors.
    """

    x: Value
    rstd: Value
    scale: Value
    mean: Value | None
    bias: Value | None
    dtype: Any

    def product(self, w: Value) -> Value:
        """norm(x) w for w (D, N); the products of a narrow range are of the norm applied."""
        if has_narrow_range(self.dtype):
            return Product(self.applied(), w)
        column = mapped(_as_column, self.scale)
        weight = mapped(jnp.multiply, column, w)
        acc = Product(self.x, weight)
        if self.mean is None:
            return mapped(jnp.multiply, acc, self.rstd, pullback=_scaled_backward, takes_inner=True)
        sums = mapped(_Centring(self.dtype).column_sums, weight)
        u = mapped(_centred, acc, self.rstd, self.mean, sums, pullback=_Centring(self.dtype).backward)
        if self.bias is None:
            return u
        shift = mapped(_sum_of_rows, mapped(_as_column, self.bias), w)
        z: Value = mapped(lambda u, shift: u + shift[None, :], u, shift)
        u.undone = z, lambda: mapped(lambda z, shift: z - shift[None, :], z.recovered or z, shift)
        return z

    def applied(self) -> Value:
        """The normalised array, (M, D)."""
        y: Value
        if self.mean is None:
            y = mapped(lambda x, rstd, scale: x * rstd * scale[None, :], self.x, self.rstd, self.scale)
        else:
            y = mapped(
                lambda x, mean, rstd, scale: (x - mean) * rstd * scale[None, :],
                self.x,
                self.mean,
                self.rstd,
                self.scale,
            )
        return y if self.bias is None else mapped(lambda y, bias: y + bias[None, :], y, self.bias)


def rms_norm(x: Value, sumsq: Value | None, scale: Value, epsilon: float, dtype: Any) -> NormValues:
    """RMSNorm of x (M, D); sumsq (M, 1), the row sums of its squares, where they are known."""
    width, sums = x.shape[1], sum_of_squares(x) if sumsq is None else sumsq
    rstd = mapped(
        lambda x, sums: lax.rsqrt(sums / width + epsilon),
        x,
        sums,
        pullback=lambda rstd, x, sums, d: (x * -(d * rstd**3 / width), None),
    )
    return NormValues(x, rstd, scale, None, None, np.dtype(dtype))


def layer_norm(x: Value, scale: Value, bias: Value | None, epsilon: float, dtype: Any) -> NormValues:
    """LayerNorm of x (M, D); its variance is that of centred values."""
    width = x.shape[1]
    known = mapped(lambda x: jnp.mean(lax.stop_gradient(x), axis=1, keepdims=True), x)
    centred = lambda x, mean: jnp.sum(jnp.square(lax.stop_gradient(x) - mean), axis=1, keepdims=True)  # noqa: E731
    sums = mapped(centred, x, known)
    mean = mapped(
        lambda x, mean: mean,
        x,
        known,
        pullback=lambda _, x, mean, d: (jnp.broadcast_to(d / width, x.shape), None),
    )
    rstd = mapped(
        lambda x, mean, sums: lax.rsqrt(sums / width + epsilon),
        x,
        mean,
        sums,
        pullback=lambda rstd, x, mean, sums, d: ((x - mean) * -(d * rstd**3 / width), None, None),
    )
    return NormValues(x, rstd, scale, mean, bias, np.dtype(dtype))


def sum_of_squares(x: Value) -> Value:
    """(M, 1), the row sums of x * x: a cache of a function of x, which has no cotangent of its own."""
    sums: Value = mapped(lambda x: jnp.sum(jnp.square(lax.stop_gradient(x)), axis=1, keepdims=True), x)
    return sums


def _as_column(vector: jax.Array) -> jax.Array:
    return vector[:, None]


def _sum_of_rows(column: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(column * w, axis=0)


def _scaled_backward(
    u: jax.Array, acc: jax.Array, rstd: jax.Array, du: jax.Array, inner: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return rstd * du, inner / rstd


def _centred(acc: jax.Array, rstd: jax.Array, mean: jax.Array, sums: jax.Array) -> jax.Array:
    return (acc - mean * sums[None, :]) * rstd


@dataclasses.dataclass(frozen=True)
class _Centring:
    """What subtracts a mean as the products have added it: with both factors rounded to the dtype."""

    dtype: Any

    @property
    def __name__(self) -> str:
        return "centring"

    def column_sums(self, weight: jax.Array) -> jax.Array:
        """Of the rounded weight; their derivative is that of sums which round nothing."""
        return jnp.sum(weight + lax.stop_gradient(rounded(weight, self.dtype) - weight), axis=0)

    def backward(
        self, u: jax.Array, acc: jax.Array, rstd: jax.Array, mean: jax.Array, sums: jax.Array, du: jax.Array
    ) -> tuple[jax.Array, ...]:
        t = (rstd * du).astype(self.dtype).astype(jnp.float32)
        of_rstd = jnp.sum(du * u, axis=1, keepdims=True) / rstd
        return t, of_rstd, -jnp.sum(t * sums[None, :], axis=1, keepdims=True), -jnp.sum(t * mean, axis=0)
