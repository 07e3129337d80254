"""The products around a deferred norm with a mean to remove and biases, forward and backward.

RMSNorm is that of deferred_norm.py. LayerNorm, with the rows' mean and their sums of centred squares known:

    rstd[m] = rsqrt(sumsq[m] / D + epsilon),   sumsq[m] = sum_j (x[m, j] - mean[m])^2
    z = LayerNorm(x) W + b = rstd * (x W' - mean * cs) + shift
    W' = cast(scale[:, None] * W),   cs = column sums of the rounded W',   shift = norm_bias W + b

Backward, from dz, with t = cast(rstd * dz) and s[m] = sum_n dz[m, n] (z[m, n] - shift[n]):

    dx = t W'^T - (sum_n t cs) / D - (x - mean) * (rstd^2 s / D)  [+ the residual stream's own cotangent]
    G = x^T t - sum_m mean * t;   dW = scale[:, None] * G + norm_bias[:, None] * sum_m dz
    dscale[j] = sum_n W[j, n] G[j, n];   dnorm_bias[j] = sum_n W[j, n] sum_m dz[m, n];   db = sum_m dz

In float16 t = cast(dz), rstd multiplies the first product and G = ((x - mean) * rstd)^T t: see deferred_norm.py.

What is subtracted is what the products have added: cs sums the rounded W', and mean * t the rounded t. With the exact
ones the roundings, times mean / std, would stay.

x is multiplied as it is, its mean in it: a float32 stream that is rounded to 16 bits for the product loses the digits
that its mean takes. The epilogue of the product that makes x sees one tile of a row; so mean and sumsq are a pass of
their own over x.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.rounding import ROUNDED_DTYPES, round_to
from coda_jax.operators import deferred_norm
from coda_jax.primitives.arguments import check_floats
from coda_jax.primitives.mesh_types import vary, varying_axes
from coda_jax.primitives.reverse_mode import differentiable


class Norm(NamedTuple):
    """A norm that has not been applied: RMSNorm, or LayerNorm where mean is given.

    Attributes:
      sumsq: (M,) float32, row sums of x * x, or of (x - mean)^2.
      scale: (D,).
      mean: (M,) float32 or None.
      bias: (D,) or None; only beside a mean.
    """

    sumsq: jax.Array
    scale: jax.Array
    mean: jax.Array | None
    bias: jax.Array | None

    def of_rows(self) -> Norm:
        """The norm of x as (M, D), its statistics as (M,)."""
        mean = None if self.mean is None else self.mean.reshape(-1)
        return self._replace(sumsq=self.sumsq.reshape(-1), mean=mean)


class Projection(NamedTuple):
    """What the product with a normalised x needs of the parameters.

    Attributes:
      kernel: (D, N), W'.
      column_sums: (N,) float32, those of W' where there is a mean.
      shift: (N,) float32, what the two biases add to z.
    """

    kernel: jax.Array
    column_sums: jax.Array | None
    shift: jax.Array | None


def layer_statistics(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of the rows of x (..., D) and their sums of centred squares, (...,) float32; no gradient flows through.

    Raises:
      TypeError: x of another dtype than bfloat16, float16 and float32.
    """
    check_floats("layer_statistics", x=x)
    x = lax.stop_gradient(x).astype(jnp.float32)
    mean = jnp.mean(x, axis=-1)
    return mean, jnp.sum(jnp.square(x - mean[..., None]), axis=-1)


def check_arrays(
    name: str, x: jax.Array, norm: Norm, arrays: dict[str, tuple[jax.Array | None, tuple[int, ...]]]
) -> None:
    """As `deferred_norm.check_arrays`, of the norm's arrays and others; and a norm_bias without a mean is refused."""
    rows, width = x.shape[:-1], x.shape[-1:]
    norms: dict[str, tuple[jax.Array | None, tuple[int, ...]]] = {
        "sumsq": (norm.sumsq, rows),
        "mean": (norm.mean, rows),
        "scale": (norm.scale, width),
        "norm_bias": (norm.bias, width),
    }
    deferred_norm.check_arrays(name, x, norms | arrays)
    if norm.mean is None and norm.bias is not None:
        raise ValueError(f"{name}: norm_bias is LayerNorm's, which also needs mean=; without mean the norm is RMSNorm")


def vary_alike(*trees: Any) -> list[Any]:
    """The trees of arrays, all varying over the same manual mesh axes."""
    leaves, structure = jax.tree.flatten(list(trees))
    return jax.tree.unflatten(structure, vary(varying_axes(*leaves), *leaves))


def layer_mean_and_rstd(x: jax.Array, mean: jax.Array, sumsq: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """mean (M, 1) and rsqrt(sumsq / D + eps), known, as the functions of x (M, D) that they are: as `rms_rstd`."""

    def run(x: jax.Array, mean: jax.Array, sumsq: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mean, lax.rsqrt(sumsq / x.shape[1] + float(eps))

    def forward(
        x: jax.Array, mean: jax.Array, sumsq: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        mean, rstd = layer_mean_and_rstd(x, mean, sumsq, eps)
        return (mean, rstd), (x, mean, rstd)

    return differentiable("the deferred norm", run, forward, _mean_and_rstd_backward)(x, mean, sumsq)


def _mean_and_rstd_backward(
    kept: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, ...]:
    (x, mean, rstd), (dmean, drstd) = kept, cotangents
    dx = (dmean - (x.astype(jnp.float32) - mean) * (drstd * rstd**3)) / x.shape[1]
    return dx.astype(x.dtype), jnp.zeros_like(mean), jnp.zeros_like(rstd)


def mean_and_rstd(x: jax.Array, norm: Norm, epsilon: float) -> tuple[jax.Array | None, jax.Array]:
    """Of the rows of x (M, D), each (M, 1) float32, the mean None for RMSNorm; their gradients go to x."""
    if norm.mean is None:
        return None, deferred_norm.rms_rstd(x, norm.sumsq, epsilon)[:, None]
    return layer_mean_and_rstd(x, norm.mean[:, None], norm.sumsq[:, None], epsilon)


def column(x: jax.Array | None) -> jax.Array | None:
    """(M,) as a column vector."""
    return None if x is None else x[:, None]


def projection(norm: Norm, kernel: jax.Array, bias: jax.Array | None, dtype: Any) -> Projection:
    """W', its column sums and the shift, each one reduction in the pass that casts the kernel (D, N)."""
    folded = deferred_norm.fold(norm.scale, kernel, dtype)
    sums = None
    if norm.mean is not None:
        sums = jnp.sum(rounded(folded.astype(jnp.float32), dtype), axis=0)
    shift = None if bias is None else bias.astype(jnp.float32)
    if norm.bias is not None:
        of_norm = jnp.sum(norm.bias.astype(jnp.float32)[:, None] * kernel.astype(jnp.float32), axis=0)
        shift = of_norm if shift is None else of_norm + shift
    return Projection(folded, sums, shift)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Float32 values rounded to `dtype`, still float32; XLA may drop a pair of conversions, but not this."""
    dtype = np.dtype(dtype)
    return round_to(x, dtype).astype(jnp.float32) if dtype in ROUNDED_DTYPES else x


def bias_cotangent(dz_sums: jax.Array | None, bias: jax.Array | None) -> jax.Array | None:
    """Column sums of dz as the cotangent of a bias, if there is one."""
    return None if bias is None or dz_sums is None else dz_sums.astype(bias.dtype)


def multiply(a: jax.Array, b: jax.Array, *operands: jax.Array | None, epilogue: Any, **options: Any) -> list[jax.Array]:
    """deferred_norm.multiply whose epilogue gets the operands that are None as None."""
    present = [x is not None for x in operands]

    def given(acc: jax.Array, *arrays: jax.Array) -> Any:
        remaining = iter(arrays)
        return epilogue(acc, *(next(remaining) if is_present else None for is_present in present))

    given.__name__ = epilogue.__name__
    return deferred_norm.multiply(a, b, *(x for x in operands if x is not None), epilogue=given, **options)


def multiply_normalized(
    x: jax.Array,
    norm: Norm,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    epilogue: Any,
    dtype: Any,
    epsilon: float,
    **options: Any,
) -> tuple[list[jax.Array], Projection]:
    """The product x W', whose `epilogue` is given z - shift and the shift (N,) or None; and what it took of the kernel.

    Args:
      x: (M, D).
      norm, kernel, bias: z is norm(x) kernel + bias.
      dtype: compute dtype.
      **options: of `deferred_norm.multiply`.
    """

    def of_normalized(acc: jax.Array, rstd: Any, mean: Any, column_sums: Any, shift: Any) -> Any:
        return epilogue(rstd * (acc if mean is None else acc - mean * column_sums[None, :]), shift)

    of_normalized.__name__ = epilogue.__name__
    mean, rstd = mean_and_rstd(x, norm, epsilon)
    made = projection(norm, kernel, bias, dtype)
    arrays = multiply(
        x.astype(dtype), made.kernel, rstd, mean, made.column_sums, made.shift, epilogue=of_normalized, **options
    )
    return arrays, made


def row_cotangents(
    t: jax.Array, dz: jax.Array, z: jax.Array, mean: jax.Array | None, column_sums: Any
) -> list[jax.Array]:
    """What `backward` takes of t, rounded, and of dz and z - shift (M, N): sums along rows and columns.

    t itself, s, and of a LayerNorm sum_n t cs and, where x is multiplied with its mean in it, sum_m mean * t.
    """
    sums = [t, jnp.sum(dz * z, axis=1)]
    if column_sums is not None:
        sums.append(jnp.sum(t * column_sums[None, :], axis=1))
    return sums if mean is None else [*sums, jnp.sum(mean * t, axis=0)]


def multiplied_mean(mean: jax.Array | None, dtype: Any) -> jax.Array | None:
    """The mean that is in x where x is multiplied with t: not in float16."""
    return None if dtype == jnp.float16 else mean


def layer_norm_backward(
    acc: jax.Array, x: jax.Array, mean: jax.Array, factor: jax.Array, drift: jax.Array, dresidual: Any, *rstd: jax.Array
) -> jax.Array:
    """Epilogue of t W'^T: the norm's own terms and the residual's cotangent, added before the one rounding."""
    return deferred_norm.scaled(acc - drift, *rstd) - (x - mean) * factor + dresidual


def kernel_backward(
    acc: jax.Array, kernel: jax.Array, scale: jax.Array, mean_t: Any, bias: jax.Array | None, dshift: Any
) -> list[jax.Array]:
    """Epilogue of x^T t: the cotangents of the kernel, and of the norm's parameters as row sums."""
    g = acc if mean_t is None else acc - mean_t[None, :]
    if bias is None:
        return [g * scale, jnp.sum(g * kernel, axis=1)]
    dshift = dshift[None, :]
    return [g * scale + bias * dshift, jnp.sum(g * kernel, axis=1), jnp.sum(kernel * dshift, axis=1)]


def backward(
    cotangents: list[jax.Array],
    x: jax.Array,
    norm: Norm,
    kernel: jax.Array,
    dshift: jax.Array | None,
    dresidual: jax.Array,
    *,
    epsilon: float,
    implementation: str,
) -> tuple[jax.Array, Norm, jax.Array]:
    """Cotangents of x, of the norm and of the kernel through z, and through x itself where dresidual is.

    Args:
      cotangents: what `row_cotangents` gives, t in the compute dtype.
      x: (M, D).
      norm, kernel: as going forward.
      dshift: (N,) float32, column sums of dz; needed where the norm has a bias.
      dresidual: (M, D), added to dx.
    """
    t, s, *centring = cotangents
    mean, rstd = mean_and_rstd(x, norm, epsilon)
    if norm.mean is None:
        dx, dscale, dkernel = deferred_norm.backward(
            t, s, x, rstd, norm.scale, kernel, dresidual, implementation=implementation
        )
        return dx, Norm(jnp.zeros_like(norm.sumsq), dscale, None, None), dkernel
    t_sums, *mean_t = centring
    (dx,) = multiply(
        t,
        deferred_norm.fold_again(norm.scale, kernel, t.dtype),
        x,
        mean,
        jnp.square(rstd) * (s[:, None] / x.shape[1]),
        t_sums[:, None] / x.shape[1],
        dresidual,
        *deferred_norm.accumulator_factor(rstd, t.dtype),
        epilogue=layer_norm_backward,
        out_dtypes=[x.dtype],
        implementation=implementation,
        transpose_b=True,
        like=x,
    )
    dkernel, dscale, *dbias = multiply(
        deferred_norm.factored_input(x, rstd, t.dtype, mean),
        t,
        kernel,
        norm.scale[:, None],
        mean_t[0] if mean_t else None,
        column(norm.bias),
        None if norm.bias is None else dshift,
        epilogue=kernel_backward,
        out_dtypes=[kernel.dtype, jnp.float32] + [jnp.float32] * (norm.bias is not None),
        implementation=implementation,
        transpose_a=True,
        like=kernel,
    )
    dnorm = Norm(
        jnp.zeros_like(norm.sumsq),
        dscale.astype(norm.scale.dtype),
        jnp.zeros_like(norm.mean),
        None if norm.bias is None else dbias[0].astype(norm.bias.dtype),
    )
    return dx, dnorm, dkernel
