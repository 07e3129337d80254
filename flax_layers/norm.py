"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_layers.stream import Normalized, Stream


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation, left to the next product where it can be.

    y = x * rsqrt(mean(x * x, -1) + epsilon) * scale

    Given a Stream it returns a Normalized, which the next module's product applies in its epilogue; given an array it
    returns the normalised array. The statistic and the multiplications are float32, the result is rounded once.

    Args:
      num_features: D, the size of the last axis.
      epsilon: added to the mean of squares.
      dtype: dtype of a plain result; default the input's.
      param_dtype: storage dtype of `scale`.
      scale_init: initialiser of `scale` (D,).
      rngs: source of keys.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scale_init: nnx.Initializer = nnx.initializers.ones,
        rngs: nnx.Rngs,
    ):
        self.scale = nnx.Param(scale_init(rngs.params(), (num_features,), param_dtype))
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype

    @overload
    def __call__(self, x: Stream) -> Normalized: ...
    @overload
    def __call__(self, x: jax.Array) -> jax.Array: ...
    def __call__(self, x: jax.Array | Stream) -> jax.Array | Normalized:
        """Normalises the rows of x (..., D).

        Raises:
          TypeError: a Normalized, which is normalised already.
          ValueError: x of another width.
        """
        if isinstance(x, Normalized):
            raise TypeError("RMSNorm got a Normalized: it is normalised already; x.array() forms it")
        if x.shape[-1] != self.num_features:
            raise ValueError(f"RMSNorm over {self.num_features} features got an input of shape {x.shape}")
        stream = Stream.of(x).with_statistic()
        assert stream.sumsq is not None
        y = Normalized(stream.x, stream.sumsq, self.scale[...], self.epsilon)
        if isinstance(x, Stream):
            return y
        return y.array().astype(self.dtype or x.dtype)
