"""Root-mean-square and layer normalisation."""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax import DeferredNorm, Stream
from flax_layers.axis_metadata import parameter


class _Norm(nnx.Module):
    """A norm that is left to the next product where that can apply it, and formed elsewhere."""

    num_features: int
    dtype: DTypeLike | None

    def _deferred(self, x: Any) -> Any:
        raise NotImplementedError

    @overload
    def __call__(self, x: Stream) -> DeferredNorm: ...
    @overload
    def __call__(self, x: jax.Array) -> jax.Array: ...
    @overload
    def __call__(self, x: coda.Value) -> coda.Value: ...
    def __call__(self, x: jax.Array | Stream | coda.Value) -> Any:
        """Normalises the rows of x (..., D); for a `coda.Value`, or a Stream of one, the result is a value.

        Raises:
          TypeError: a norm not yet applied, which is normalised already.
          ValueError: x of another width.
        """
        name = type(self).__name__
        if isinstance(x, DeferredNorm):
            raise TypeError(f"{name} got a DeferredNorm: it is normalised already; x.array() forms it")
        if x.shape[-1] != self.num_features:
            raise ValueError(f"{name} over {self.num_features} features got an input of shape {x.shape}")
        y = self._deferred(x)
        return y if isinstance(x, Stream | coda.Value) else y.array().astype(self.dtype or x.dtype)


class RMSNorm(_Norm):
    """Root-mean-square normalisation, left to the next product where it can be.

    y = x * rsqrt(mean(x * x, -1) + epsilon) * (scale_offset + scale)

    Given a Stream it returns a DeferredNorm, which the next module's product applies in its epilogue; given an array it
    returns the normalised array. The statistic and the multiplications are float32, the result is rounded once.

    Args:
      num_features: D, the size of the last axis.
      epsilon: added to the mean of squares.
      dtype: dtype of a plain result; default the input's.
      param_dtype: storage dtype of `scale`.
      scale_init: initialiser of `scale` (D,); default constant(1 - scale_offset).
      scale_offset: added to `scale` in float32; 1 as in Gemma, whose scales are learned as distances from 1.
      rngs: source of keys.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scale_init: nnx.Initializer | None = None,
        scale_offset: float = 0.0,
        rngs: nnx.Rngs,
    ):
        scale_init = scale_init or nnx.initializers.constant(1 - scale_offset)
        self.scale = parameter(scale_init(rngs.params(), (num_features,), param_dtype), "norm")
        self.num_features = num_features
        self.epsilon = epsilon
        self.scale_offset = scale_offset
        self.dtype = dtype

    @property
    def whole_scale(self) -> jax.Array:
        """scale_offset + scale, (D,)."""
        scale: Any = self.scale[...]
        if self.scale_offset:
            wide = scale if isinstance(scale, coda.Value) else scale.astype(jnp.float32)
            scale = wide + self.scale_offset
        result: jax.Array = scale
        return result

    def _deferred(self, x: Any) -> Any:
        return coda.rms_norm(x, self.whole_scale, epsilon=self.epsilon)


class LayerNorm(_Norm):
    """Layer normalisation, left to the next product where it can be.

    y = (x - mean(x, -1)) * rsqrt(var(x, -1) + epsilon) * scale + bias

    Given a Stream it returns a DeferredNorm, which the next module's product applies in its epilogue; given an array
    it returns the normalised array. The variance is that of centred values. The statistics are one pass over x: no
    tile of the product that makes x has an entire row.

    Args:
      num_features: D, the size of the last axis.
      epsilon: added to the variance.
      use_bias: whether there is a bias.
      dtype: dtype of a plain result; default the input's.
      param_dtype: storage dtype of `scale` and `bias`.
      scale_init, bias_init: initialisers of `scale` (D,) and `bias` (D,).
      rngs: source of keys.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scale_init: nnx.Initializer = nnx.initializers.ones,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        rngs: nnx.Rngs,
    ):
        self.scale = parameter(scale_init(rngs.params(), (num_features,), param_dtype), "norm")
        self.bias = (
            parameter(bias_init(rngs.params(), (num_features,), param_dtype), "norm") if use_bias else nnx.data(None)
        )
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype

    def _deferred(self, x: Any) -> Any:
        bias = None if self.bias is None else self.bias[...]
        return coda.layer_norm(x, self.scale[...], bias, epsilon=self.epsilon)
