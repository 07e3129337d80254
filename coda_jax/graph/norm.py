"""Norms in a graph; after CODA (arXiv 2605.19269). An RMSNorm is not applied where products read it:

    rstd[m] = rsqrt(sumsq[m] / D + epsilon),   sumsq[m] = sum_j x[m, j]^2
    z = norm(x) W = u = rstd * (x W'),   W' = scale[:, None] * W

The backward pass states two things, which no derivative gives: the statistic is known, and its gradient goes to x; the
sum that rstd's gradient needs is computed from u, which is kept, not from x W'. With t = rstd * dz the rest is derived:

    s[m] = sum_n dz[m, n] u[m, n]                       in the epilogue that makes dz
    dx = t W'^T - x * (rstd^2 s / D)                    in that of t W'^T, with other cotangents of x
    G = x^T t,   dW = scale[:, None] * G,   dscale[j] = sum_n W[j, n] G[j, n]

So the gradient needs no pass over rows of its own. Where dz is a linear map's cotangent, as a rotation's, s is computed
from that map's results.

A LayerNorm is applied, in a pass. Otherwise columns of its cotangent would be summed twice, and rows twice: on an H100
`mlp` with it takes 5438 us so, and 5099 with the norm applied, (16384, 2048) through 8192; `norm_projection` onto 6144
columns 2352 and 2126. Products of float16 read an applied RMSNorm too: an rstd of 5e-5, for a stream of 2e4, would make
t smaller than float16's normal numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import has_narrow_range
from coda_jax.graph.values import Map, Product, Value, make_map


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

    @property
    def is_applied(self) -> bool:
        """True if products read the normalised array: for a LayerNorm, and for products of a narrow range."""
        return self.mean is not None or has_narrow_range(self.dtype)

    def product(self, w: Value, times: Callable[[Value, Value], Value] = Product) -> Value:
        """norm(x) w for w (D, N), by a product of two values."""
        if self.is_applied:
            return times(self.applied, w)
        is_kept = isinstance(w, Map) and w.is_weight
        weight = w.inputs[0] if is_kept else w
        scaled_weight = make_map(
            jnp.multiply, make_map(_as_column, self.scale, derived="scale"), weight, derived="scale"
        )
        scaled_weight.is_factor = is_kept  # in the weight's place
        acc = times(self.x, scaled_weight)
        scaled: Value = make_map(
            jnp.multiply, acc, self.rstd, pullback=scaled_backward, takes_inner=True, derived="rms_norm"
        )
        return scaled

    @functools.cached_property
    def applied(self) -> Value:
        """The normalised array, (M, D)."""
        y: Value
        if self.mean is None:
            y = make_map(_of_rms, self.x, self.rstd, self.scale, derived="rms_norm")
        else:
            y = make_map(_of_centred, self.x, self.mean, self.rstd, self.scale, derived="layer_norm")
        return (
            y if self.bias is None else make_map(lambda y, bias: y + bias[None, :], y, self.bias, derived="layer_norm")
        )


def rms_norm(x: Value, sumsq: Value | None, scale: Value, epsilon: float, dtype: Any) -> NormValues:
    """RMSNorm of x (M, D); sumsq (M, 1), the row sums of its squares, where they are known."""
    width, sums = x.shape[1], sum_of_squares(x) if sumsq is None else sumsq
    rstd = make_map(
        lambda x, sums: lax.rsqrt(sums / width + epsilon),
        x,
        sums,
        pullback=lambda rstd, x, sums, d: (x * -(d * rstd**3 / width), None),
        derived="rstd",
    )
    return NormValues(x, rstd, scale, None, None, np.dtype(dtype))


def layer_norm(x: Value, scale: Value, bias: Value | None, epsilon: float, dtype: Any) -> NormValues:
    """LayerNorm of x (M, D); its variance is that of centred values."""
    width = x.shape[1]
    known = make_map(lambda x: jnp.mean(lax.stop_gradient(x), axis=1, keepdims=True), x, derived="mean")
    centred = lambda x, mean: jnp.sum(jnp.square(lax.stop_gradient(x) - mean), axis=1, keepdims=True)  # noqa: E731
    sums = make_map(centred, x, known, derived="sum of squares")
    mean = make_map(
        lambda x, mean: mean,
        x,
        known,
        pullback=lambda _, x, mean, d: (jnp.broadcast_to(d / width, x.shape), None),
        derived="mean",
    )
    rstd = make_map(
        lambda x, mean, sums: lax.rsqrt(sums / width + epsilon),
        x,
        mean,
        sums,
        pullback=lambda rstd, x, mean, sums, d: ((x - mean) * -(d * rstd**3 / width), None, None),
        derived="rstd",
    )
    return NormValues(x, rstd, scale, mean, bias, np.dtype(dtype))


def sum_of_squares(x: Value, *, is_column: bool = True) -> Value:
    """(M, 1) or (M,), the row sums of x * x: a cache of a function of x, which has no cotangent of its own."""

    def squares(x: jax.Array) -> jax.Array:
        x = lax.stop_gradient(x)
        return jnp.sum(x * x, axis=1, keepdims=is_column)

    sums: Value = make_map(squares, x, derived="sum of squares")
    return sums


def _as_column(vector: jax.Array) -> jax.Array:
    return vector[:, None]


def _of_rms(x: jax.Array, rstd: jax.Array, scale: jax.Array) -> jax.Array:
    return x * rstd * scale[None, :]


def _of_centred(x: jax.Array, mean: jax.Array, rstd: jax.Array, scale: jax.Array) -> jax.Array:
    return (x - mean) * rstd * scale[None, :]


def scaled_backward(
    u: jax.Array, acc: jax.Array, rstd: jax.Array, du: jax.Array, inner: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return rstd * du, inner / rstd
