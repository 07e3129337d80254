"""The feed-forward sub-layer of a pre-norm block, without a gate, as one chain of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.operators import deferred_norm, layer_norm
from coda_jax.operators.layer_norm import Norm
from coda_jax.primitives.arguments import compute_dtype
from coda_jax.primitives.reverse_mode import differentiable

PREACTIVATION_NAME = "mlpwi"  # MaxText's


class Weights(NamedTuple):
    up: jax.Array
    down: jax.Array
    up_bias: jax.Array | None
    down_bias: jax.Array | None


def mlp(
    x: jax.Array,
    sumsq: jax.Array,
    scale: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    mean: jax.Array | None = None,
    norm_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    epsilon: float,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
    dtype: Any = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array | None]:
    """x + activation(norm(x) up + up_bias) down + down_bias, and for RMSNorm the row sums of its squares.

        z = norm(x) up + up_bias                              one product
        y = x + activation(z) down + down_bias                one product, which for RMSNorm also sums y * y

    The norm is RMSNorm, or LayerNorm where mean is given, as in `norm_projection`. The backward pass is four products.
    The one that makes the cotangent of the hidden activation computes that activation again from z, and goes on to
    t = rstd * dz and all sums of it in its epilogue; see layer_norm.py for the others. Kept for it are x, its
    statistics, and z without what the biases add (named "mlpwi" for `jax.checkpoint` policies), rounded to the compute
    dtype.

    Args:
      x: (..., D), the residual stream.
      sumsq: (...,) float32, the row sums of x * x, or with mean those of (x - mean)^2, as `layer_statistics` gives
        them. Like mean it is a cache of a function of x and receives no gradient.
      scale: (D,), the norm's.
      up: (D, F).
      down: (F, D).
      mean: (...,) float32, the means of the rows of x; None for RMSNorm.
      norm_bias: (D,), LayerNorm's.
      up_bias: (F,).
      down_bias: (D,).
      epsilon: added to the mean of squares, or to the variance.
      activation: a function, elementwise, of float32 arrays. It may close over arrays, but not over what is
        differentiated.
      dtype: compute dtype, of the products' inputs; default the promotion of x and up.
      implementation: as in `gemm`.

    Returns:
      y (..., D) in x's dtype; its row sums of squares (...,) float32, through which no gradient flows, or with mean
      None: LayerNorm's statistic needs the whole row.

    Raises:
      TypeError: activation is no function, or an array or dtype is not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, or norm_bias without mean.
    """
    if not callable(activation):
        raise TypeError(f"mlp: activation = {activation!r}; it must be a function")
    width, rows, features = x.shape[-1], x.shape[:-1], down.shape[0]
    norm = Norm(sumsq, scale, mean, norm_bias)
    layer_norm.check_arrays(
        "mlp",
        x,
        norm,
        {
            "up": (up, (width, features)),
            "down": (down, (features, width)),
            "up_bias": (up_bias, (features,)),
            "down_bias": (down_bias, (width,)),
        },
    )
    dtype = compute_dtype("mlp", dtype, x, up)

    def multiply(*arrays: Any, **options: Any) -> list[jax.Array]:
        return layer_norm.multiply(*arrays, implementation=implementation, **options)

    def activated(z: jax.Array, shift: jax.Array | None) -> jax.Array:
        return activation(z if shift is None else z + shift[None, :])

    def activation_backward(
        acc: jax.Array, z: jax.Array, factor: jax.Array, mean: Any, column_sums: Any, shift: Any
    ) -> list[jax.Array]:
        hidden, pullback = jax.vjp(lambda z: activated(z, shift), z)
        (dz,) = pullback(acc)
        t = (factor * dz).astype(dtype).astype(jnp.float32)
        sums = layer_norm.row_cotangents(t, dz, z, mean, column_sums)
        return [hidden, *sums] if shift is None else [hidden, *sums, jnp.sum(dz, axis=0)]

    def up_projection(x: jax.Array, norm: Norm, weights: Weights, *, keep: bool) -> tuple[list[jax.Array], Any]:
        def norm_activation(z: jax.Array, shift: jax.Array | None) -> Any:
            hidden = activated(z, shift)
            return (z, hidden) if keep else hidden

        return layer_norm.multiply_normalized(
            x,
            norm,
            weights.up,
            weights.up_bias,
            epilogue=norm_activation,
            dtype=dtype,
            epsilon=epsilon,
            out_dtypes=[dtype] * (1 + keep),
            implementation=implementation,
        )

    def down_projection(hidden: jax.Array, x: jax.Array, norm: Norm, weights: Weights) -> list[jax.Array]:
        def add_residual(acc: jax.Array, x: jax.Array, bias: Any) -> Any:
            y = acc if bias is None else acc + bias[None, :]
            return y + x if norm.mean is not None else deferred_norm.add_residual_sumsq(y, x)

        return multiply(
            hidden,
            weights.down.astype(dtype),
            x,
            weights.down_bias,
            epilogue=add_residual,
            out_dtypes=[x.dtype] if norm.mean is not None else [x.dtype, jnp.float32],
            like=x,
        )

    def run(x: jax.Array, norm: Norm, weights: Weights) -> list[jax.Array]:
        (hidden,), _ = up_projection(x, norm, weights, keep=False)
        return down_projection(hidden, x, norm, weights)

    def forward(x: jax.Array, norm: Norm, weights: Weights) -> tuple[list[jax.Array], Any]:
        (z, hidden), made = up_projection(x, norm, weights, keep=True)
        z = checkpoint_name(z, PREACTIVATION_NAME)
        return down_projection(hidden, x, norm, weights), (x, norm, weights, z, made.column_sums, made.shift)

    def backward(kept: Any, cotangents: list[jax.Array]) -> tuple[Any, ...]:
        x, norm, weights, z, column_sums, shift = kept
        dy = cotangents[0]
        mean, rstd = layer_norm.mean_and_rstd(x, norm, epsilon)
        mean = layer_norm.multiplied_mean(mean, dtype)
        dout = dy.astype(dtype)
        hidden, *sums = multiply(
            dout,
            weights.down.astype(dtype),
            z,
            deferred_norm.cotangent_factor(rstd, dtype),
            mean,
            column_sums,
            shift,
            epilogue=activation_backward,
            out_dtypes=[dtype, dtype] + [jnp.float32] * (1 + sum(x is not None for x in (column_sums, mean, shift))),
            transpose_b=True,
        )
        dshift = None if shift is None else sums.pop()
        (ddown,) = deferred_norm.multiply(
            hidden,
            dout,
            out_dtypes=[weights.down.dtype],
            implementation=implementation,
            transpose_a=True,
            like=weights.down,
        )
        dx, dnorm, dup = layer_norm.backward(
            sums, x, norm, weights.up, dshift, dy, epsilon=epsilon, implementation=implementation
        )
        dup_bias = layer_norm.bias_cotangent(dshift, weights.up_bias)
        # A pass over dy: the product that made it belongs to someone else.
        ddown_bias = layer_norm.bias_cotangent(jnp.sum(dy.astype(jnp.float32), axis=0), weights.down_bias)
        return dx, dnorm, Weights(dup, ddown, dup_bias, ddown_bias)

    arguments = layer_norm.vary_alike(x.reshape(-1, width), norm.of_rows(), Weights(up, down, up_bias, down_bias))
    y, *squares = differentiable("mlp", run, forward, backward)(*arguments)
    return y.reshape(x.shape), squares[0].reshape(rows) if squares else None
