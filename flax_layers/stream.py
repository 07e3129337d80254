"""What flows between sub-layers: the residual stream with its norm statistic, and a norm not yet applied."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_rstd(x: jax.Array, sumsq: jax.Array, eps: float) -> jax.Array:
    """Reciprocal root mean square of the rows of x, from their known sums of squares.

    rstd = rsqrt(sumsq / D + eps)

    Args:
      x: (..., D). Only its shape is used going forward; the gradient goes to it.
      sumsq: (...,) float32, the row sums of x * x. It is a cache of a function of x and so receives no gradient.
      eps: added to the mean of squares.

    Returns:
      (...,) float32. The cotangent of x is -x * drstd * rstd**3 / D.
    """
    return lax.rsqrt(sumsq / x.shape[-1] + eps)


def _rms_rstd_fwd(x: jax.Array, sumsq: jax.Array, eps: float) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    rstd = rms_rstd(x, sumsq, eps)
    return rstd, (x, rstd)


def _rms_rstd_bwd(eps: float, saved: tuple[jax.Array, jax.Array], drstd: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, rstd = saved
    factor = -drstd * rstd**3 / x.shape[-1]
    return (factor[..., None] * x.astype(jnp.float32)).astype(x.dtype), jnp.zeros_like(rstd)


rms_rstd.defvjp(_rms_rstd_fwd, _rms_rstd_bwd)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """The residual stream and the row sums of its squares, a pytree.

    The product that makes `x` sums its squares in the epilogue, from the values before they are rounded, so the norm
    that follows needs no pass over `x`. `sumsq` is a cache of a function of `x`, not an independent variable: norms
    differentiate through `x`, and a gradient taken through `sumsq` is zero.

    Fields are read-only. Arithmetic and `astype` give a Stream without the statistic; a norm computes it when it is
    missing.

    Attributes:
      x: (..., D).
      sumsq: (...,) float32, or None when it is not known.
    """

    x: jax.Array
    sumsq: jax.Array | None = None

    @classmethod
    def of(cls, x: jax.Array | Stream) -> Stream:
        """The array as a Stream without statistic; a Stream as it is. See `with_statistic` for a carry of scan."""
        return x if isinstance(x, Stream) else cls(x)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.x.dtype

    @property
    def ndim(self) -> int:
        return self.x.ndim

    def astype(self, dtype: DTypeLike) -> Stream:
        return Stream(self.x.astype(dtype))

    def __add__(self, other: Any) -> Stream:
        return Stream(self.x + array(other))

    def __sub__(self, other: Any) -> Stream:
        return Stream(self.x - array(other))

    def __rsub__(self, other: Any) -> Stream:
        return Stream(array(other) - self.x)

    def __mul__(self, other: Any) -> Stream:
        return Stream(self.x * array(other))

    def __truediv__(self, other: Any) -> Stream:
        return Stream(self.x / array(other))

    def __neg__(self) -> Stream:
        return Stream(-self.x)

    __radd__ = __add__
    __rmul__ = __mul__
    __array_ufunc__ = None  # numpy_array + stream comes here too

    def with_statistic(self) -> Stream:
        """The Stream with its statistic, computed if it is missing: what `scan` needs of a carry."""
        if self.sumsq is not None:
            return self
        return Stream(self.x, jnp.sum(jnp.square(lax.stop_gradient(self.x).astype(jnp.float32)), axis=-1))

    def rstd(self, eps: float) -> jax.Array:
        """rsqrt(mean(x * x) + eps) of every row, (...,) float32; its gradient goes to x."""
        sumsq = self.with_statistic().sumsq
        assert sumsq is not None
        return rms_rstd(self.x, sumsq, eps)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normalized:
    """An RMS-normalised array that has not been formed: rstd * x * scale, a pytree.

    The product that consumes it multiplies `scale` into its weight, where the weight is cast anyway, and `rstd`, one
    factor a row, into its accumulator: norm(x) w = rstd * (x (scale[:, None] * w)), after CODA (arXiv 2605.19269). x is
    multiplied as it is, in the product's compute dtype: float16 overflows where x does, beyond 65504.

    Attributes:
      x: (..., D).
      rstd: (...,) float32.
      scale: (D,).
    """

    x: jax.Array
    rstd: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.x.dtype

    def array(self) -> jax.Array:
        """The normalised array itself, (..., D) in the dtype of x, for consumers that are not products."""
        y = self.rstd[..., None] * self.x.astype(jnp.float32) * self.scale.astype(jnp.float32)
        return y.astype(self.x.dtype)


def array(x: Any) -> Any:
    """The plain array behind a Stream or a Normalized; anything else as it is."""
    if isinstance(x, Stream):
        return x.x
    return x.array() if isinstance(x, Normalized) else x
