"""The gated feed-forward sub-layer of a pre-norm block as one chain of products."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.operators import deferred_norm
from coda_jax.primitives.arguments import compute_dtype
from coda_jax.primitives.mesh_types import vary, varying_axes
from coda_jax.primitives.reverse_mode import differentiable

PREACTIVATION_NAME = "mlpwi"  # MaxText's

Activation = Callable[[jax.Array], jax.Array]


def gated(z: jax.Array, activation: Activation) -> jax.Array:
    """activation(gate) * up, the halves of z."""
    gate, up = jnp.split(z, 2, axis=1)
    return activation(gate) * up


def row_scale_gated(acc: jax.Array, rstd: jax.Array, *, activation: Activation, keep: bool) -> Any:
    """Epilogue: z = rstd * acc, if it is to be kept, and its gated activation."""
    z = acc * rstd
    return (z, gated(z, activation)) if keep else gated(z, activation)


def gated_backward(
    acc: jax.Array, z: jax.Array, factor: jax.Array, *, activation: Activation
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Epilogue of the hidden activation's cotangent: t, the activation again, and the row sums of dz * z."""
    hidden, pullback = jax.vjp(functools.partial(gated, activation=activation), z)
    (dz,) = pullback(acc)
    return factor * dz, hidden, jnp.sum(dz * z, axis=1)


def gated_mlp(
    x: jax.Array,
    sumsq: jax.Array,
    scale: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    epsilon: float,
    activation: Activation = jax.nn.silu,
    dtype: Any = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """x + MLP(RMSNorm(x)), and the row sums of its squares for the next norm.

        z = rstd * (x W'),  gate, up = z[:, :F], z[:, F:]        one product
        y = x + (activation(gate) * up) down                     one product, which also sums y * y

    The backward pass is four products. The one that makes the cotangent of the hidden activation computes that
    activation again from z, and goes on to t = rstd * dz in its epilogue; see deferred_norm.py for the others. Kept
    for it are x, sumsq and z (named "mlpwi" for `jax.checkpoint` policies), rounded to the compute dtype.

    Args:
      x: (..., D), the residual stream.
      sumsq: (...,) float32, the row sums of x * x. It is a cache of a function of x and receives no gradient.
      scale: (D,), the norm's.
      gate_up: (D, 2F), F a multiple of 8: gate in the first half, up in the second.
      down: (F, D).
      epsilon: added to the mean of squares.
      activation: a function, elementwise, of float32 arrays. It may close over arrays, but not over what is
        differentiated.
      dtype: compute dtype, of the products' inputs; default the promotion of x and gate_up.
      implementation: as in `gemm`.

    Returns:
      y (..., D) in x's dtype; its row sums of squares (...,) float32, through which no gradient flows.

    Raises:
      TypeError: activation is no function, or an array or dtype is not bfloat16, float16 or float32.
      ValueError: shapes that do not fit.
    """
    if not callable(activation):
        raise TypeError(f"gated_mlp: activation = {activation!r}; it must be a function")
    width, features = x.shape[-1], down.shape[0]
    deferred_norm.check_arrays(
        "gated_mlp",
        x,
        {
            "sumsq": (sumsq, x.shape[:-1]),
            "scale": (scale, (width,)),
            "gate_up": (gate_up, (width, 2 * features)),
            "down": (down, (features, width)),
        },
    )
    dtype = compute_dtype("gated_mlp", dtype, x, gate_up)

    def multiply(*arrays: jax.Array, **options: Any) -> list[jax.Array]:
        return deferred_norm.multiply(*arrays, implementation=implementation, **options)

    def up_projection(
        x: jax.Array, sumsq: jax.Array, scale: jax.Array, gate_up: jax.Array, *, keep: bool
    ) -> list[jax.Array]:
        return multiply(
            x.astype(dtype),
            deferred_norm.fold(scale, gate_up, dtype),
            deferred_norm.rms_rstd(x, sumsq, epsilon)[:, None],
            epilogue=functools.partial(row_scale_gated, activation=activation, keep=keep),
            out_dtypes=[dtype] * (1 + keep),
        )

    def down_projection(hidden: jax.Array, down: jax.Array, x: jax.Array) -> list[jax.Array]:
        return multiply(
            hidden,
            down.astype(dtype),
            x,
            epilogue=deferred_norm.add_residual_sumsq,
            out_dtypes=[x.dtype, jnp.float32],
            like=x,
        )

    def run(x: jax.Array, sumsq: jax.Array, scale: jax.Array, gate_up: jax.Array, down: jax.Array) -> list[jax.Array]:
        (hidden,) = up_projection(x, sumsq, scale, gate_up, keep=False)
        return down_projection(hidden, down, x)

    def forward(
        x: jax.Array, sumsq: jax.Array, scale: jax.Array, gate_up: jax.Array, down: jax.Array
    ) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        z, hidden = up_projection(x, sumsq, scale, gate_up, keep=True)
        z = checkpoint_name(z, PREACTIVATION_NAME)
        return down_projection(hidden, down, x), (x, sumsq, scale, gate_up, down, z)

    def backward(kept: tuple[jax.Array, ...], cotangents: list[jax.Array]) -> tuple[jax.Array, ...]:
        x, sumsq, scale, gate_up, down, z = kept
        dy, _ = cotangents
        rstd = deferred_norm.rms_rstd(x, sumsq, epsilon)[:, None]
        dout = dy.astype(dtype)
        t, hidden, s = multiply(
            dout,
            down.astype(dtype),
            z,
            deferred_norm.cotangent_factor(rstd, dtype),
            epilogue=functools.partial(gated_backward, activation=activation),
            out_dtypes=[dtype, dtype, jnp.float32],
            transpose_b=True,
        )
        (ddown,) = multiply(hidden, dout, out_dtypes=[down.dtype], transpose_a=True, like=down)
        dx, dscale, dgate_up = deferred_norm.backward(t, s, x, rstd, scale, gate_up, dy, implementation=implementation)
        return dx, jnp.zeros_like(sumsq), dscale, dgate_up, ddown

    axes = varying_axes(x, sumsq, scale, gate_up, down)
    arguments = vary(axes, x.reshape(-1, width), sumsq.reshape(-1), scale, gate_up, down)
    y, squares = differentiable("gated_mlp", run, forward, backward)(*arguments)
    return y.reshape(x.shape), squares.reshape(sumsq.shape)
