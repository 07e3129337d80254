"""Root-mean-square and layer normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from coda_jax.extend import in_row
from flax_layers.axis_metadata import parameter
from flax_layers.fused import fused


class _Norm(nnx.Module):
    """A norm over the last axis; products that read it apply it in their epilogues, where that moves fewer bytes."""

    num_features: int
    dtype: DTypeLike | None

    def _normalised(self, x: jax.Array) -> jax.Array:
        """The norm of x, which is of float32 or wider."""
        raise NotImplementedError

    @fused
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the rows of x (..., D).

        Raises:
          ValueError: x of another width.
        """
        x = jnp.asarray(x)
        if x.shape[-1] != self.num_features:
            raise ValueError(f"{type(self).__name__} over {self.num_features} features got an input of shape {x.shape}")
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return self._normalised(wide).astype(self.dtype or x.dtype)


class RMSNorm(_Norm):
    """Root-mean-square normalisation.

    y = x * rsqrt(mean(x * x, -1) + epsilon) * (scale_offset + scale)

    The statistic and the multiplications are float32, the result is rounded once.

    Args:
      num_features: D, the size of the last axis.
      epsilon: added to the mean of squares.
      dtype: of the result; default the input's.
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
        scale: jax.Array = self.scale[...]
        return scale.astype(jnp.float32) + self.scale_offset if self.scale_offset else scale

    def _normalised(self, x: jax.Array) -> jax.Array:
        rstd = lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return x * rstd * in_row(self.whole_scale, x)


class LayerNorm(_Norm):
    """Layer normalisation.

    y = (x - mean(x, -1)) * rsqrt(var(x, -1) + epsilon) * scale + bias

    The variance is that of centred values. The statistics and the multiplications are float32, the result is rounded
    once.

    Args:
      num_features: D, the size of the last axis.
      epsilon: added to the variance.
      use_bias: whether there is a bias.
      dtype: of the result; default the input's.
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

    def _normalised(self, x: jax.Array) -> jax.Array:
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        rstd = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.epsilon)
        y = centred * rstd * in_row(self.scale[...], x)
        return y if self.bias is None else y + in_row(self.bias[...], x)
