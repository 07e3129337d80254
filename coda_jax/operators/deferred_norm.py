"""The products around a deferred RMSNorm, forward and backward; after CODA (arXiv 2605.19269).

    rstd[m] = rsqrt(sumsq[m] / D + epsilon)
    z = norm(x) W = rstd * (x W'),    W' = scale[:, None] * W, folded where W is cast

Backward, from dz, with t = rstd * dz and s[m] = sum_n dz[m, n] z[m, n], which the maker of dz has at hand:

    dx = t W'^T - x * (rstd^2 s / D)  [+ the residual stream's own cotangent]
    G = x^T t;   dW = scale[:, None] * G;   dscale[j] = sum_n W[j, n] G[j, n]

The pass over rows that the norm's gradient is known for happens in the epilogues: of what makes t, and of t W'^T.

In float16 rstd, 5e-5 for a stream of 2e4, would take t out of the range where it has all its digits, and the kernel's
gradient with it. There t = dz, as in the formula written in float16, dx = rstd * t W'^T - ..., and G = norm(x)^T t with
the normalised x formed in a pass of its own.

What of it is float16 and may overflow, beyond 65504: x itself, the cotangents as in any float16 program, and z, whose
absolute value is below sqrt(D) times the norm of a column of W'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.primitives.arguments import check_floats
from coda_jax.primitives.mesh_types import explicit_sharding
from coda_jax.primitives.product import Options, product
from coda_jax.primitives.reverse_mode import differentiable


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

    def run(x: jax.Array, sumsq: jax.Array) -> jax.Array:
        return lax.rsqrt(sumsq / x.shape[-1] + float(eps))

    def forward(x: jax.Array, sumsq: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        rstd = rms_rstd(x, sumsq, eps)
        return rstd, (x, rstd)

    return differentiable("the deferred norm", run, forward, _rms_rstd_backward)(x, sumsq)


def _rms_rstd_backward(saved: tuple[jax.Array, jax.Array], drstd: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, rstd = saved
    factor = -drstd * rstd**3 / x.shape[-1]
    return (factor[..., None] * x.astype(jnp.float32)).astype(x.dtype), jnp.zeros_like(rstd)


def check_arrays(name: str, x: jax.Array, arrays: Mapping[str, tuple[jax.Array | None, tuple[int, ...]]]) -> None:
    """Raises where an array that is given has another shape than the one beside it, or it or x a dtype not taken."""
    check_floats(name, x=x, **{argument: array for argument, (array, _) in arrays.items()})
    for argument, (array, shape) in arrays.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: {argument} has shape {array.shape}; beside x {x.shape} it must be {shape}")


def fold(scale: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """W' (D, N) in the compute dtype; multiplied in float32 and rounded once."""
    return (scale.astype(jnp.float32)[:, None] * kernel.astype(jnp.float32)).astype(dtype)


def fold_again(scale: jax.Array, kernel: jax.Array, dtype: Any) -> jax.Array:
    """The same for a backward pass, made anew: XLA would keep the forward's alive, a copy of all weights."""
    scale, kernel = lax.optimization_barrier((scale, kernel))
    return fold(scale, kernel, dtype)


def multiply(
    a: jax.Array,
    b: jax.Array,
    *operands: jax.Array,
    epilogue: Callable[..., Any] | None = None,
    out_dtypes: Sequence[Any],
    implementation: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    like: jax.Array | None = None,
) -> list[jax.Array]:
    """The flat outputs of epilogue(a @ b, *operands) in these dtypes, sharded as `like` over explicit mesh axes."""
    options = Options(
        transpose_a,
        transpose_b,
        implementation=implementation,
        out_sharding=None if like is None else explicit_sharding(like),
    )
    dtypes = [np.dtype(dtype) for dtype in out_dtypes]
    return product(a, b, operands, epilogue, lambda _: dtypes, options)[0]


def row_scale(acc: jax.Array, rstd: jax.Array) -> jax.Array:
    """Epilogue: the deferred norm's row factor."""
    return acc * rstd


def add_residual_sumsq(acc: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Epilogue: y = acc + x and the row sums of y * y."""
    y = acc + x
    # The norm that reads the sums differentiates through y; with the gradient stopped here the epilogue is linear in
    # acc, and so keeps nothing for the backward pass.
    z = jax.lax.stop_gradient(y)
    return y, jnp.sum(z * z, axis=1)


def cotangent_factor(rstd: jax.Array, dtype: Any) -> jax.Array:
    """What dz is multiplied with to make t: rstd, but 1 in float16."""
    return jnp.ones_like(rstd, shape=()) if dtype == jnp.float16 else rstd


def accumulator_factor(rstd: jax.Array, dtype: Any) -> tuple[jax.Array, ...]:
    """The rest of rstd, for t W'^T: nothing, but rstd in float16."""
    return (rstd,) if dtype == jnp.float16 else ()


def factored_input(x: jax.Array, rstd: jax.Array, dtype: Any, mean: jax.Array | None = None) -> jax.Array:
    """What is multiplied with t to make G: x, but in float16 normalised, and where it has a mean without that."""
    if dtype != jnp.float16:
        return x.astype(dtype)
    wide = x.astype(jnp.float32)
    return (rstd * (wide if mean is None else wide - mean)).astype(dtype)


def norm_backward(acc: jax.Array, x: jax.Array, factor: jax.Array, dresidual: jax.Array, *rstd: jax.Array) -> jax.Array:
    """Epilogue of t W'^T: the norm's own term and the residual's cotangent, added before the one rounding."""
    return scaled(acc, *rstd) - x * factor + dresidual


def scaled(acc: jax.Array, *rstd: jax.Array) -> jax.Array:
    """acc times what `accumulator_factor` gives."""
    return acc * rstd[0] if rstd else acc


def scale_backward(acc: jax.Array, kernel: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Epilogue of x^T t: the cotangents of the kernel, and of the scale as row sums."""
    return acc * scale, jnp.sum(acc * kernel, axis=1)


def backward(
    t: jax.Array,
    s: jax.Array,
    x: jax.Array,
    rstd: jax.Array,
    scale: jax.Array,
    kernel: jax.Array,
    dresidual: jax.Array,
    *,
    implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of x, scale and kernel through z = norm(x) kernel, and through x itself where dresidual is.

    Args:
      t: (M, N) in the compute dtype, `cotangent_factor` times dz.
      s: (M,) float32, row sums of dz * z.
      x: (M, D).
      rstd: (M, 1) float32.
      scale: (D,).
      kernel: (D, N).
      dresidual: (M, D), added to dx.
    """
    factor = jnp.square(rstd) * (s[:, None] / x.shape[1])
    (dx,) = multiply(
        t,
        fold_again(scale, kernel, t.dtype),
        x,
        factor,
        dresidual,
        *accumulator_factor(rstd, t.dtype),
        epilogue=norm_backward,
        out_dtypes=[x.dtype],
        implementation=implementation,
        transpose_b=True,
        like=x,
    )
    dkernel, dscale = multiply(
        factored_input(x, rstd, t.dtype),
        t,
        kernel,
        scale[:, None],
        epilogue=scale_backward,
        out_dtypes=[kernel.dtype, jnp.float32],
        implementation=implementation,
        transpose_a=True,
        like=kernel,
    )
    return dx, dscale.astype(scale.dtype), dkernel
