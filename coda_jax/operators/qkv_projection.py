"""Query, key and value of a pre-norm attention sub-layer, with rotary position embedding, as one chain of products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from coda_jax.operators import deferred_norm
from coda_jax.primitives.arguments import check_floats, compute_dtype
from coda_jax.primitives.mesh_types import vary, varying_axes
from coda_jax.primitives.reverse_mode import differentiable
from coda_jax.tiles.choose import takes_heads

NAMES = ("query_proj", "key_proj", "value_proj")  # MaxText's


def rotary(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the pairs (x[i], x[i + Dh/2]) of every head: [a, b] -> [a cos - b sin, b cos + a sin].

    The convention of Hugging Face's Llama. Computed in float32, rounded once.

    Args:
      x: (..., T, H, Dh).
      cos, sin: (..., T, Dh / 2) float32.

    Raises:
      TypeError: an array that is not bfloat16, float16 or float32.
    """
    check_floats("rotary", x=x, cos=cos, sin=sin)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (jnp.expand_dims(y[..., None, :], range(x.ndim - y.ndim - 1)) for y in (cos, sin))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _unit_heads(z: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """z (..., Dh) over its root mean square, and the reciprocal of that, float32."""
    z = z.astype(jnp.float32)
    rstd = jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + epsilon)
    return z * rstd, rstd


def _of_heads(scale: jax.Array, ndim: int) -> jax.Array:
    """scale (Dh,) float32 beside arrays (..., Dh) of so many axes."""
    return jnp.expand_dims(scale.astype(jnp.float32), range(ndim - 1))


def _unit_heads_backward(z: jax.Array, scale: jax.Array, dy: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """Cotangents of z (..., Dh) and scale (Dh,) through y = _unit_heads(z) * scale, float32."""
    unit, rstd = _unit_heads(z, epsilon)
    dunit = dy * _of_heads(scale, dy.ndim)
    dz = rstd * (dunit - unit * jnp.mean(unit * dunit, axis=-1, keepdims=True))
    return dz, jnp.sum(unit * dy, axis=range(dy.ndim - 1))


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
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    qk_epsilon: float | None = None,
    dtype: Any = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """q, k, v = split(RMSNorm(x) kernel) with rotary(q) and rotary(k), and x itself.

    With q_scale and k_scale every head of q and k is normalised before it is turned, as in Qwen3:

        q = rotary(z * rsqrt(mean(z * z over the head) + qk_epsilon) * q_scale)

    It is one product, whose epilogue scales the rows, normalises and turns the heads and stores q, k and v apart; with
    heads of other sizes than 32, 64, 96, 128, 192 and 256 XLA does so after it. The backward pass is two products and
    one elementwise pass over dq, dk, dv. Kept for it are x, sumsq and q, k, v as attention takes them: a rotation keeps
    sum(z dz), so z before it is not needed; see deferred_norm.py. A norm does not keep it: then the same product also
    stores q and k as they are before their norms. All are named "query_proj", "key_proj" and "value_proj" for
    `jax.checkpoint` policies.
    The residual of the sub-layer should be the returned x: its cotangent is then added in the epilogue of the
    product that makes dx.

    Args:
      x: (..., T, D), the residual stream.
      sumsq: (..., T) float32, the row sums of x * x. It is a cache of a function of x and receives no gradient.
      scale: (D,), the norm's.
      kernel: (D, (H + 2 Hkv) Dh): query heads, then key heads, then value heads.
      cos, sin: (T, Dh / 2) or (..., T, Dh / 2) float32, as `rotary` takes them. They receive no gradient.
      num_heads, num_kv_heads: H, Hkv.
      epsilon: added to the mean of squares.
      q_scale, k_scale: (Dh,), of the norms of the heads of q and of k; None, both, for no such norms.
      qk_epsilon: added to their means of squares; default epsilon.
      dtype: compute dtype, and that of q, k and v; default the promotion of x and kernel.
      implementation: as in `gemm`.

    Returns:
      q (..., T, H, Dh), k and v (..., T, Hkv, Dh), x (..., T, D).

    Raises:
      TypeError: an array or dtype that is not bfloat16, float16 or float32.
      ValueError: shapes that do not fit, or one of q_scale and k_scale without the other.
    """
    check_floats("qkv_projection", cos=cos, sin=sin, q_scale=q_scale, k_scale=k_scale)
    width, heads = x.shape[-1], num_heads + 2 * num_kv_heads
    head_dim = kernel.shape[-1] // heads
    deferred_norm.check_arrays(
        "qkv_projection",
        x,
        {
            "sumsq": (sumsq, x.shape[:-1]),
            "scale": (scale, (width,)),
            "kernel": (kernel, (width, heads * head_dim)),
        },
    )
    if (q_scale is None) != (k_scale is None):
        missing = "q_scale" if q_scale is None else "k_scale"
        raise ValueError(f"qkv_projection: {missing} is None; q and k are both normalised over their heads, or neither")
    scales = () if q_scale is None or k_scale is None else (q_scale, k_scale)
    for name, array in zip(("q_scale", "k_scale"), scales, strict=False):
        if array.shape != (head_dim,):
            raise ValueError(
                f"qkv_projection: {name} has shape {array.shape}; with heads of {head_dim} it must be {(head_dim,)}"
            )
    of_heads = float(epsilon if qk_epsilon is None else qk_epsilon)
    dtype = compute_dtype("qkv_projection", dtype, x, kernel)
    rows = x.shape[:-1]

    ends = [num_heads * head_dim, (num_heads + num_kv_heads) * head_dim]
    in_epilogue = takes_heads(head_dim)

    def in_heads(y: jax.Array) -> jax.Array:  # one axis at a time, for explicit meshes
        return y.reshape(*rows, y.shape[-1]).reshape(*rows, y.shape[-1] // head_dim, head_dim)

    def turned(z: jax.Array, cos: jax.Array, sin: jax.Array, scale: jax.Array | None = None) -> jax.Array:
        """z (..., H, Dh), normalised where there is a scale."""
        y = z if scale is None else _unit_heads(z, of_heads)[0] * _of_heads(scale, z.ndim)
        return rotary(y, cos, sin).astype(z.dtype)

    def turned_columns(z: jax.Array, cos: jax.Array, sin: jax.Array, *scale: jax.Array) -> jax.Array:
        heads = z.reshape(z.shape[0], z.shape[1] // head_dim, head_dim)
        cos, sin = (jnp.tile(table, (z.shape[0] // table.shape[0], 1)) for table in (cos, sin))
        return turned(heads, cos, sin, *scale).reshape(z.shape)

    def row_scale_split(acc: jax.Array, rstd: jax.Array) -> list[jax.Array]:
        return jnp.split(acc * rstd, ends, axis=1)

    def row_scale_rotary(acc: jax.Array, rstd: jax.Array, cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
        q, k, v = row_scale_split(acc, rstd)
        return [turned_columns(q, cos, sin), turned_columns(k, cos, sin), v]

    def row_scale_norm_rotary(
        acc: jax.Array, rstd: jax.Array, cos: jax.Array, sin: jax.Array, q_scale: jax.Array, k_scale: jax.Array
    ) -> list[jax.Array]:
        q, k, v = row_scale_split(acc, rstd)
        return [turned_columns(q, cos, sin, q_scale), turned_columns(k, cos, sin, k_scale), v]

    def row_scale_norm_rotary_kept(acc: jax.Array, rstd: jax.Array, *of_heads: jax.Array) -> list[jax.Array]:
        return [*row_scale_norm_rotary(acc, rstd, *of_heads), *row_scale_split(acc, rstd)[:2]]

    def of_rows(table: jax.Array) -> jax.Array:
        """A table for the product's rows: (T, Dh / 2) as it is, which the epilogue repeats."""
        if table.ndim == 2 and isinstance(table.shape[0], int) and table.shape[0] in (1, rows[-1]):
            return table
        return jnp.broadcast_to(table, (*rows, table.shape[-1])).reshape(-1, table.shape[-1])

    def project(is_kept: bool, *arguments: jax.Array) -> list[jax.Array]:
        """q, k and v, and where they are normalised and that is kept, q and k before their norms."""
        x, sumsq, scale, kernel, cos, sin, *scales = arguments
        epilogue: Callable[..., list[jax.Array]] = row_scale_split
        if in_epilogue and scales:
            epilogue = row_scale_norm_rotary_kept if is_kept else row_scale_norm_rotary
        elif in_epilogue:
            epilogue = row_scale_rotary
        outputs = deferred_norm.multiply(
            x.reshape(-1, width).astype(dtype),
            deferred_norm.fold(scale, kernel, dtype),
            deferred_norm.rms_rstd(x, sumsq, epsilon).reshape(-1)[:, None],
            *((*map(of_rows, (cos, sin)), *scales) if in_epilogue else ()),
            epilogue=epilogue,
            out_dtypes=[dtype] * (5 if epilogue is row_scale_norm_rotary_kept else 3),
            implementation=implementation,
        )
        q, k, v, *before = map(in_heads, outputs)
        if in_epilogue:
            return [q, k, v, *before]
        q_scale, k_scale = scales or (None, None)
        return [turned(q, cos, sin, q_scale), turned(k, cos, sin, k_scale), v, *((q, k) if scales and is_kept else ())]

    def run(*arguments: jax.Array) -> list[jax.Array]:
        return [*project(False, *arguments), arguments[0]]

    def forward(*arguments: jax.Array) -> tuple[list[jax.Array], tuple[Any, ...]]:
        made = project(True, *arguments)
        q, k, v, *before = (checkpoint_name(y, name) for y, name in zip(made, NAMES + NAMES[:2], strict=False))
        return [q, k, v, arguments[0]], (arguments, (*before, v) if before else (q, k, v))

    def backward(kept: tuple[Any, ...], cotangents: list[jax.Array]) -> tuple[jax.Array, ...]:
        (x, sumsq, scale, kernel, cos, sin, *scales), zs = kept
        *dqkv, dresidual = cotangents
        wide = [dy.astype(jnp.float32) for dy in dqkv]
        dz = [rotary(wide[0], cos, -sin), rotary(wide[1], cos, -sin), wide[2]]
        dscales: list[jax.Array] = []
        if scales:
            for i, scale_of_heads in enumerate(scales):
                dz[i], dscale_of_heads = _unit_heads_backward(zs[i], scale_of_heads, dz[i], of_heads)
                dscales.append(dscale_of_heads.astype(scale_of_heads.dtype))
        pairs = zip(zs, dz if scales else wide, strict=True)
        products = [jnp.sum(y.astype(jnp.float32) * dy, axis=(-2, -1)) for y, dy in pairs]
        s = products[0] + products[1] + products[2]
        rstd = deferred_norm.rms_rstd(x, sumsq, epsilon).reshape(-1)[:, None]
        packed = jnp.concatenate(dz, axis=-2).reshape(*rows, kernel.shape[1]).reshape(-1, kernel.shape[1])
        t = (deferred_norm.cotangent_factor(rstd, dtype) * packed).astype(dtype)
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
        nothing = (jnp.zeros_like(cos), jnp.zeros_like(sin))
        return (dx.reshape(x.shape), jnp.zeros_like(sumsq), dscale, dkernel, *nothing, *dscales)

    arguments = (x, sumsq, scale, kernel, cos, sin, *scales)
    chain = differentiable("qkv_projection", run, forward, backward)
    q, k, v, x = chain(*vary(varying_axes(*arguments), *arguments))
    return q, k, v, x
