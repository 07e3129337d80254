"""A projection of a norm, with bias: one product forward and two backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.operators import norm_products
from coda_jax.operators.deferred_norm import DeferredNorm, check_arrays, mean_and_rstd, width_of
from coda_jax.primitives.arguments import resolve_dtype
from coda_jax.primitives.reverse_mode import differentiable

PROJECTION_NAME = "norm_projection"


def norm_projection(
    norm: DeferredNorm,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    dtype: Any = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """z = norm(x) w + bias, and x itself.

    The residual of the sub-layer should be the returned x: its cotangent is then added in the epilogue of the product
    that makes dx. The backward pass is two products and one elementwise pass over dz; see norm_products.py. Kept for it
    are x, its statistics, and z (named "norm_projection" for `jax.checkpoint` policies).

    Args:
      norm: of x (..., D).
      w: (D, N).
      bias: (N,).
      dtype: compute dtype, and that of z; default the promotion of x and w.
      implementation: as in `gemm`.

    Returns:
      z (..., N), x (..., D).

    Raises:
      TypeError: norm is no DeferredNorm, or an array or dtype not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, or a norm with a bias and no mean.
    """
    width = width_of("norm_projection", norm)
    check_arrays("norm_projection", norm, {"w": (w, (width, w.shape[-1])), "bias": (bias, w.shape[-1:])})
    dtype = resolve_dtype("norm_projection", dtype, norm.x, w)

    def project(
        norm: DeferredNorm, w: jax.Array, bias: jax.Array | None
    ) -> tuple[jax.Array, norm_products.FoldedWeight]:
        def norm_shift(u: jax.Array, shift: jax.Array | None) -> jax.Array:
            return u if shift is None else u + shift[None, :]

        (z,), weight = norm_products.multiply_normalized(
            norm, w, bias, epilogue=norm_shift, dtype=dtype, out_dtypes=[dtype], implementation=implementation
        )
        return checkpoint_name(z, PROJECTION_NAME), weight

    def run(norm: DeferredNorm, w: jax.Array, bias: jax.Array | None) -> list[jax.Array]:
        return [project(norm, w, bias)[0], norm.x]

    def forward(norm: DeferredNorm, w: jax.Array, bias: jax.Array | None) -> tuple[list[jax.Array], Any]:
        z, weight = project(norm, w, bias)
        return [z, norm.x], (norm, w, bias, z, weight.column_sums, weight.shift)

    def backward(kept: Any, outputs: list[jax.Array]) -> tuple[Any, ...]:
        norm, w, bias, z, column_sums, shift = kept
        dz, dresidual = outputs[0].astype(jnp.float32), outputs[1]
        z = z.astype(jnp.float32)
        mean, rstd = mean_and_rstd(norm)
        of_z = norm_products.cotangents(
            dz,
            z if shift is None else z - norm_products.in_row(shift, z),
            norm_products.scale_of_t(rstd, dtype),
            norm_products.mean_in_x(mean, dtype),
            column_sums,
            lambda t: norm_products.rounded(t, dtype),
        )
        of_z = of_z._replace(t=of_z.t.astype(dtype))
        dshift = None if shift is None else jnp.sum(dz, axis=range(dz.ndim - 1))
        dnorm, dw = norm_products.backward(of_z, norm, w, dshift, dresidual, implementation=implementation)
        return dnorm, dw, norm_products.bias_cotangent(dshift, bias)

    arguments = norm_products.vary_alike(norm, w, bias)
    z, x = differentiable("norm_projection", run, forward, backward)(*arguments)
    return z, x
