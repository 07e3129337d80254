"""Query, key and value of a pre-norm attention sub-layer, with rotary position embedding, as one chain of products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.primitives import deferred_norm
from coda_jax.primitives.config import takes_heads
from coda_jax.primitives.mesh_types import vary, varying_axes

NAMES = ("query_proj", "key_proj", "value_proj")  # MaxText's


def rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x[i], x[i + Dh/2]) of every head: [a, b] -> [a cos - b sin, b cos + a sin].

    The convention of Hugging Face's Llama. Computed in float32, rounded once.

    Args:
      x: (..., T, H, Dh).
      cos, sin: (..., T, Dh / 2) float32.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def qkv_projection(
    x: jax.Array,
    sumsq: jax.Array,
    scale: jax.Array,
    kernel: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    epsilon: float,
    dtype: Any = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, k, v = split(RMSNorm(x) kernel) with rotary(q) and rotary(k), and x itself.

    It is one product, whose epilogue scales the rows, turns the heads and stores q, k and v apart; heads of other sizes
    than 32, 64 and 128 are turned by XLA after it. The backward pass is two products and one elementwise pass over dq,
    dk, dv. Kept for it are x, sumsq and q, k, v as attention takes them: a rotation keeps sum(z dz), so z before it is
    not needed; see deferred_norm.py. They are named "query_proj", "key_proj" and "value_proj" for `jax.checkpoint`
    policies. The residual of the sub-layer should be the returned x: its cotangent is then added in the epilogue of the
    product that makes dx.

    Args:
      x: (..., T, D), the residual stream.
      sumsq: (..., T) float32, the row sums of x * x. It is a cache of a function of x and receives no gradient.
      scale: (D,), the norm's.
      kernel: (D, (H + 2 Hkv) Dh): query heads, then key heads, then value heads.
      cos, sin: (T, Dh / 2) or (..., T, Dh / 2) float32, as `rotary` takes them. They receive no gradient.
      num_heads, num_kv_heads: H, Hkv.
      epsilon: added to the mean of squares.
      dtype: compute dtype, and that of q, k and v; default the promotion of x and kernel.
      implementation: as in `gemm`.

    Returns:
      q (..., T, H, Dh), k and v (..., T, Hkv, Dh), x (..., T, D).

    Raises:
      ValueError: shapes that do not fit.
    """
    width, heads = x.shape[-1], num_heads + 2 * num_kv_heads
    head_dim = kernel.shape[-1] // heads
    for name, array, shape in (
        ("sumsq", sumsq, x.shape[:-1]),
        ("scale", scale, (width,)),
        ("kernel", kernel, (width, heads * head_dim)),
    ):
        if array.shape != shape:
            raise ValueError(f"qkv_projection: {name} has shape {array.shape}; beside x {x.shape} it must be {shape}")
    dtype = jnp.dtype(dtype or jnp.result_type(x, kernel))
    rows = x.shape[:-1]

    ends = [num_heads * head_dim, (num_heads + num_kv_heads) * head_dim]
    in_epilogue = takes_heads(head_dim)

    def in_heads(y: jax.Array) -> jax.Array:  # one axis at a time, for explicit meshes
        return y.reshape(*rows, y.shape[-1]).reshape(*rows, y.shape[-1] // head_dim, head_dim)

    def turned(y: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        return rotary(y.reshape(y.shape[0], y.shape[1] // head_dim, head_dim), cos, sin).reshape(y.shape)

    def row_scale_split(acc: jax.Array, rstd: jax.Array) -> list[jax.Array]:
        return jnp.split(acc * rstd, ends, axis=1)

    def row_scale_rotary(acc: jax.Array, rstd: jax.Array, cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
        q, k, v = row_scale_split(acc, rstd)
        return [turned(q, cos, sin), turned(k, cos, sin), v]

    def of_rows(table: jax.Array) -> jax.Array:
        return jnp.broadcast_to(table, (*rows, table.shape[-1])).reshape(-1, table.shape[-1])

    def project(
        x: jax.Array, sumsq: jax.Array, scale: jax.Array, kernel: jax.Array, cos: jax.Array, sin: jax.Array
    ) -> list[jax.Array]:
        q, k, v = map(
            in_heads,
            deferred_norm.multiply(
                x.reshape(-1, width).astype(dtype),
                deferred_norm.fold(scale, kernel, dtype),
                deferred_norm.rms_rstd(x, sumsq, epsilon).reshape(-1)[:, None],
                *(map(of_rows, (cos, sin)) if in_epilogue else ()),
                epilogue=row_scale_rotary if in_epilogue else row_scale_split,
                out_dtypes=[dtype] * 3,
                implementation=implementation,
            ),
        )
        return [q, k, v] if in_epilogue else [rotary(q, cos, sin), rotary(k, cos, sin), v]

    @jax.custom_vjp
    def run(*arguments: jax.Array) -> list[jax.Array]:
        return [*project(*arguments), arguments[0]]

    def forward(*arguments: jax.Array) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
        qkv = [checkpoint_name(y, name) for y, name in zip(project(*arguments), NAMES, strict=True)]
        return [*qkv, arguments[0]], (*arguments, *qkv)

    def backward(kept: tuple[jax.Array, ...], cotangents: list[jax.Array]) -> tuple[jax.Array | None, ...]:
        x, sumsq, scale, kernel, cos, sin, *qkv = kept
        *dqkv, dresidual = cotangents
        wide = [dy.astype(jnp.float32) for dy in dqkv]
        products = [jnp.sum(y.astype(jnp.float32) * dy, axis=(-2, -1)) for y, dy in zip(qkv, wide, strict=True)]
        s = products[0] + products[1] + products[2]
        dz = [rotary(wide[0], cos, -sin), rotary(wide[1], cos, -sin), wide[2]]
        rstd = deferred_norm.rms_rstd(x, sumsq, epsilon).reshape(-1)[:, None]
        packed = jnp.concatenate(dz, axis=-2).reshape(*rows, kernel.shape[1]).reshape(-1, kernel.shape[1])
        t = (rstd * packed).astype(dtype)
        dx, dscale, dkernel = deferred_norm.backward(
            t,
            s.reshape(-1),
            x.reshape(-1, width),
            rstd,
            scale,
            kernel,
            dresidual.reshape(-1, width),
            implementation=implementation,
        )
        return dx.reshape(x.shape), jnp.zeros_like(sumsq), dscale, dkernel, jnp.zeros_like(cos), jnp.zeros_like(sin)

    run.defvjp(forward, backward)
    arguments = (x, sumsq, scale, kernel, cos, sin)
    q, k, v, x = run(*vary(varying_axes(*arguments), *arguments))
    return q, k, v, x
