"""The router's product: float32 logits, of bfloat16 rows on tensor cores.

A float32 product at full precision leaves a GPU's tensor cores idle. But a bfloat16 row is exact as it is, and a
float32 number is the sum of three bfloat16 numbers, each of which rounds what those before it left:

    kernel = k0 + k1 + k2,   x @ kernel = x @ k0 + x @ k1 + x @ k2

So three products of bfloat16 numbers that are summed in float32, concatenated as one product of 3 E columns, are the
float32 product but for the order of its sums. In the backward pass the kernel's gradient is made in the same way, from
three parts of the logits' cotangent; that of x, which is rounded to bfloat16, from two parts of each factor.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.extend import explicit_sharding, vary, varying_axes


def router_logits(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x @ kernel in float32, x (..., D) and kernel (D, E) of any dtypes."""
    are_explicit = explicit_sharding(x) is not None or explicit_sharding(kernel) is not None
    if x.dtype == jnp.bfloat16 and kernel.dtype in (jnp.bfloat16, jnp.float32) and not are_explicit:
        return _in_parts(*vary(varying_axes(x, kernel), x, kernel))
    wide = jnp.promote_types(jnp.promote_types(x.dtype, kernel.dtype), jnp.float32)
    return jnp.dot(x.astype(wide), kernel.astype(wide), precision=lax.Precision.HIGHEST)


def parts(x: jax.Array, count: int) -> list[jax.Array]:
    """The bfloat16 arrays, `count` or x alone, whose sum is float32 x, up to last bits with fewer than three."""
    if x.dtype == jnp.bfloat16:
        return [x]
    summands = []
    for _ in range(count):
        rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # a cast and back may be dropped
        summands.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    return summands


@jax.custom_vjp
def _in_parts(x: jax.Array, kernel: jax.Array) -> jax.Array:
    summands = parts(kernel, 3)
    return _summed(jnp.dot(x, jnp.concatenate(summands, axis=1), preferred_element_type=jnp.float32), len(summands))


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _in_parts(x, kernel), (x, kernel)


def _backward(kept: tuple[jax.Array, jax.Array], dlogits: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    (d0, d1, d2), (k0, *more) = parts(dlogits, 3), parts(kernel, 2)
    pairs = [(d0, k0), (d1, k0), *((d0, k) for k in more)]
    left, right = (jnp.concatenate(side, axis=-1) for side in zip(*pairs, strict=True))
    dx = jnp.dot(left, right.T, preferred_element_type=jnp.float32).astype(x.dtype)
    columns = jnp.concatenate((d0, d1, d2), axis=-1)
    rows = tuple(range(x.ndim - 1))
    dkernel = lax.dot_general(x, columns, ((rows, rows), ((), ())), preferred_element_type=jnp.float32)
    return dx, _summed(dkernel, 3).astype(kernel.dtype)


_in_parts.defvjp(_forward, _backward)


def _summed(products: jax.Array, count: int) -> jax.Array:
    """The sum of concatenated products (..., count E), the smallest first."""
    first, *rest = jnp.split(products, count, axis=-1)
    for product in reversed(rest[:-1]):
        rest[-1] = rest[-1] + product
    return first + rest[-1] if rest else first
