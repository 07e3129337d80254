"""What flows between sub-layers: the residual stream with its norm statistic, and a norm not yet applied."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike

from coda_jax.operators.deferred_norm import rms_rstd
from flax_layers import pytree


class _NotAnArray:
    """What is no array and has one: flax's own modules and jax.numpy, given it, say so."""

    x: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.x.dtype

    @property
    def ndim(self) -> int:
        return self.x.ndim

    def array(self) -> jax.Array:
        raise NotImplementedError

    def _refuse(self) -> NoReturn:
        raise TypeError(f"got a {type(self).__name__} of shape {self.shape} for an array: give its .array()")

    def __array__(self, *args: Any, **options: Any) -> NoReturn:
        """What NumPy and jnp.asarray ask for."""
        self._refuse()

    def __repr__(self) -> str:
        # Without values: JAX quotes it where it refuses a Stream.
        fields = (f"{field.name}={_described(getattr(self, field.name))}" for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(fields)}; its array is .array())"


class _NotAppliedNorm(_NotAnArray):
    @property
    def __jax_array__(self) -> NoReturn:
        """What all functions of JAX ask for; of a Stream array + stream would, before it asks for __radd__."""
        self._refuse()


def _described(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return repr(x)


class _StatisticKey(GetAttrKey):
    """Where a Stream has no statistic: JAX names this key where it was to have one."""

    def __str__(self) -> str:
        return f".{self.name} (absent: Stream.with_statistic() computes it)"


def _key(stream: Any, name: str) -> GetAttrKey:
    return _StatisticKey(name) if getattr(stream, name) is None else GetAttrKey(name)


@pytree.register(key=_key)
@dataclasses.dataclass(frozen=True, repr=False)
class Stream(_NotAnArray):
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

    def array(self) -> jax.Array:
        """x."""
        return self.x

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


@pytree.register(meta_fields=("epsilon",))
@dataclasses.dataclass(frozen=True, repr=False)
class Normalized(_NotAppliedNorm):
    """An RMS-normalised array that has not been formed: rsqrt(sumsq / D + epsilon) * x * scale, a pytree.

    The product that consumes it multiplies `scale` into its weight, where the weight is cast anyway, and `rstd`, one
    factor a row, into its accumulator: norm(x) w = rstd * (x (scale[:, None] * w)), after CODA (arXiv 2605.19269). x is
    multiplied as it is, in the product's compute dtype: float16 overflows where x does, beyond 65504.

    Attributes:
      x: (..., D).
      sumsq: (...,) float32, as in Stream.
      scale: (D,).
      epsilon: added to the mean of squares.
    """

    x: jax.Array
    sumsq: jax.Array
    scale: jax.Array
    epsilon: float

    def rstd(self) -> jax.Array:
        """rsqrt(sumsq / D + epsilon), (...,) float32; its gradient goes to x."""
        return rms_rstd(self.x, self.sumsq, self.epsilon)

    def array(self) -> jax.Array:
        """The normalised array itself, (..., D) in the dtype of x, for consumers that are not products."""
        y = self.rstd()[..., None] * self.x.astype(jnp.float32) * self.scale.astype(jnp.float32)
        return y.astype(self.x.dtype)


@pytree.register(meta_fields=("epsilon",))
@dataclasses.dataclass(frozen=True, repr=False)
class LayerNormalized(_NotAppliedNorm):
    """A layer-normalised array that has not been formed, a pytree.

    (x - mean) * rsqrt(sumsq / D + epsilon) * scale + bias. A product applies it in its epilogue, as it does a
    Normalized: norm(x) w = rstd * (x w' - mean * column_sums(w')) + bias w, w' = scale[:, None] * w.

    Attributes:
      x: (..., D).
      mean: (...,) float32, of the rows of x. Like sumsq a cache of a function of x: gradients go to x.
      sumsq: (...,) float32, the row sums of (x - mean)^2.
      scale: (D,).
      bias: (D,) or None.
      epsilon: added to the variance.
    """

    x: jax.Array
    mean: jax.Array
    sumsq: jax.Array
    scale: jax.Array
    bias: jax.Array | None
    epsilon: float

    def array(self) -> jax.Array:
        """The normalised array itself, (..., D) in the dtype of x, for consumers that are not products."""
        x = self.x.astype(jnp.float32)
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        rstd = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.epsilon)
        y = centred * rstd * self.scale.astype(jnp.float32)
        return (y if self.bias is None else y + self.bias.astype(jnp.float32)).astype(self.x.dtype)


Deferred = Normalized | LayerNormalized


def array(x: Any) -> Any:
    """The plain array behind a Stream or a norm not yet applied; anything else as it is."""
    return x.array() if isinstance(x, Stream | Deferred) else x


def layer_norm_arguments(x: Deferred) -> dict[str, Any]:
    """What the chains of `coda_jax` are told of a LayerNorm beside what an RMSNorm has too."""
    return {"mean": x.mean, "norm_bias": x.bias} if isinstance(x, LayerNormalized) else {}


def in_place_of(residual: Any, x: Deferred, passed: jax.Array) -> Any:
    """The residual, or where it is what x normalises the same array as the chain of x has passed it on.

    The residual's cotangent is then added to that of the norm in the epilogue of one product.
    """
    if array(residual) is not x.x:
        return residual
    return Stream(passed, residual.sumsq) if isinstance(residual, Stream) else passed
