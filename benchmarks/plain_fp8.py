"""The products of a plain Llama in fp8, as XLA multiplies them: with constant scales, and with Flax's delayed ones.

Constant scales are a lower bound on the time of every recipe, for no maximum is taken. Flax's are those of its
`fp8_ops.Fp8DirectDotGeneralOp`. Factors are e4m3 and cotangents e5m2 in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen import fp8_ops
from jax import lax

from benchmarks.plain_llama import Multiply, multiplied

PRODUCTS = ("q", "k", "v", "out", "gate", "up", "down")  # of a layer, by the names of plain_llama
HISTORY = 1024  # steps, Flax's own number
X_SCALE, W_SCALE = 2.0**4, 2.0**9  # for inputs near 1, and Llama's initial weights
DY_SCALE = 2.0**12  # a token, for cotangents of a mean over tokens


def with_constant_scales(x: jax.Array, p: Mapping[str, Any], name: str) -> jax.Array:
    """x (..., K) @ p[name] (K, N), in the dtype of x."""
    return _scaled(x.reshape(-1, x.shape[-1]), p[name].astype(x.dtype)).reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _scaled(x: jax.Array, w: jax.Array) -> jax.Array:
    return _forward(x, w)[0]


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    x8, w8 = _rounded(x, X_SCALE, jnp.float8_e4m3fn), _rounded(w, W_SCALE, jnp.float8_e4m3fn)
    return _product(x8, w8, ((1,), (0,)), X_SCALE * W_SCALE, x.dtype), (x8, w8)


def _backward(kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x8, w8 = kept
    dy_scale = DY_SCALE * dy.shape[0]
    dy8 = _rounded(dy, dy_scale, jnp.float8_e5m2)
    dx = _product(dy8, w8, ((1,), (1,)), dy_scale * W_SCALE, dy.dtype)
    return dx, _product(x8, dy8, ((0,), (0,)), X_SCALE * dy_scale, dy.dtype)


_scaled.defvjp(_forward, _backward)


def _rounded(x: jax.Array, scale: float, dtype: Any) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) * scale, -largest, largest).astype(dtype)


def _product(a: jax.Array, b: jax.Array, axes: Any, scale: float, dtype: Any) -> jax.Array:
    return lax.dot_general(a, b, (axes, ((), ())), preferred_element_type=dtype) * jnp.asarray(1 / scale, dtype)


def with_flax_scales(x: jax.Array, p: Mapping[str, Any], name: str) -> jax.Array:
    """The same; p["fp8"][name] are the scales and histories of Flax, as `flax_state` makes them."""
    w, of = p[name].astype(x.dtype), p["fp8"][name]
    axes = (((x.ndim - 1,), (0,)), ((), ()))
    y: jax.Array = fp8_ops.fp8_scaled_dot_general(
        x, w, axes, preferred_element_type=x.dtype, quantize_compute_type=x.dtype, **of
    )
    return y


def flax_state() -> dict[str, dict[str, jax.Array]]:
    """The scales and histories of a layer before its first step. Their gradients are those of the next step."""
    ones, zeros = jnp.ones(1), jnp.zeros(HISTORY)
    factors = ("lhs", "rhs", "grad")
    scales = {f"{x}_scale": ones for x in factors} | {f"{x}_amax_history": zeros for x in factors}
    return {name: dict(scales) for name in PRODUCTS}


# The `multiply` of `plain_llama`, by `Variant.fp8`.
MULTIPLICATIONS: dict[str | None, Multiply] = {
    None: multiplied,
    "constant": with_constant_scales,
    "flax": with_flax_scales,
}
