"""A projection of a norm, with bias: LayerNorm or RMSNorm, one product forward and two backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.operators import deferred_norm, layer_norm
from coda_jax.operators.layer_norm import Norm
from coda_jax.primitives.arguments import compute_dtype
from coda_jax.primitives.reverse_mode import differentiable

PROJECTION_NAME = "norm_projection"


def norm_projection(
    x: jax.Array,
    sumsq: jax.Array,
    scale: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    *,
    mean: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    epsilon: float,
    dtype: Any = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """z = norm(x) kernel + bias, and x itself.

        RMSNorm(x) = rstd * x * scale,                rstd = rsqrt(sumsq / D + epsilon)
        LayerNorm(x) = rstd * (x - mean) * scale + norm_bias       where mean is given

    The residual of the sub-layer should be the returned x: its cotangent is then added in the epilogue of the product
    that makes dx. The backward pass is two products and one elementwise pass over dz; see layer_norm.py. Kept for it
    are x, its statistics, and z (named "norm_projection" for `jax.checkpoint` policies).

    Args:
      x: (..., D).
      sumsq: (...,) float32, the row sums of x * x, or with mean those of (x - mean)^2, as `layer_statistics` gives
        them. Like mean it is a cache of a function of x and receives no gradient.
      scale: (D,), the norm's.
      kernel: (D, N).
      bias: (N,).
      mean: (...,) float32, the means of the rows of x; None for RMSNorm.
      norm_bias: (D,), LayerNorm's.
      epsilon: added to the mean of squares, or to the variance.
      dtype: compute dtype, and that of z; default the promotion of x and kernel.
      implementation: as in `gemm`.

    Returns:
      z (..., N), x (..., D).

    Raises:
      TypeError: an array or dtype that is not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, or norm_bias without mean.
    """
    width, rows = x.shape[-1], x.shape[:-1]
    features = kernel.shape[-1]
    norm = Norm(sumsq, scale, mean, norm_bias)
    arrays = {"kernel": (kernel, (width, features)), "bias": (bias, (features,))}
    layer_norm.check_arrays("norm_projection", x, norm, arrays)
    dtype = compute_dtype("norm_projection", dtype, x, kernel)

    def project(
        x: jax.Array, norm: Norm, kernel: jax.Array, bias: jax.Array | None
    ) -> tuple[jax.Array, layer_norm.Projection]:
        def norm_shift(z: jax.Array, shift: jax.Array | None) -> jax.Array:
            return z if shift is None else z + shift[None, :]

        (z,), made = layer_norm.multiply_normalized(
            x,
            norm,
            kernel,
            bias,
            epilogue=norm_shift,
            dtype=dtype,
            epsilon=epsilon,
            out_dtypes=[dtype],
            implementation=implementation,
        )
        return checkpoint_name(z, PROJECTION_NAME), made

    def run(x: jax.Array, norm: Norm, kernel: jax.Array, bias: jax.Array | None) -> list[jax.Array]:
        return [project(x, norm, kernel, bias)[0], x]

    def forward(x: jax.Array, norm: Norm, kernel: jax.Array, bias: jax.Array | None) -> tuple[list[jax.Array], Any]:
        z, made = project(x, norm, kernel, bias)
        return [z, x], (x, norm, kernel, bias, z, made.column_sums, made.shift)

    def backward(kept: Any, cotangents: list[jax.Array]) -> tuple[Any, ...]:
        x, norm, kernel, bias, z, column_sums, shift = kept
        dz, dresidual = cotangents[0].astype(jnp.float32), cotangents[1]
        z = z.astype(jnp.float32)
        mean, rstd = layer_norm.mean_and_rstd(x, norm, epsilon)
        sums = layer_norm.row_cotangents(
            layer_norm.rounded(deferred_norm.cotangent_factor(rstd, dtype) * dz, dtype),
            dz,
            z if shift is None else z - shift[None, :],
            layer_norm.multiplied_mean(mean, dtype),
            column_sums,
        )
        sums[0] = sums[0].astype(dtype)
        dshift = None if shift is None else jnp.sum(dz, axis=0)
        dx, dnorm, dkernel = layer_norm.backward(
            sums, x, norm, kernel, dshift, dresidual, epsilon=epsilon, implementation=implementation
        )
        return dx, dnorm, dkernel, layer_norm.bias_cotangent(dshift, bias)

    arguments = layer_norm.vary_alike(x.reshape(-1, width), norm.of_rows(), kernel, bias)
    z, same = differentiable("norm_projection", run, forward, backward)(*arguments)
    return z.reshape(*rows, features), same.reshape(x.shape)
