"""Rounding to the floating types of 16 and of 8 bits in a form that XLA keeps.

XLA may drop a float32 -> bfloat16 -> float32 pair of conversions (it counts as excess precision). An epilogue's
explicit astype has to round on every platform, so the rounding is written out in float32 arithmetic before it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import is_of_8_bits, is_rounded


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """x (any shape, float32) rounded to the nearest value of `dtype`, a float of 16 or 8 bits, ties to even.

    The result has this dtype. Beyond its range it is infinite, or NaN for float8_e4m3fn, which has no infinity.

    The derivative is that of astype: the tangent is converted to `dtype`.
    """
    if dtype == jnp.bfloat16:
        return lax.convert_element_type(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), dtype)
    if dtype.itemsize == 1:
        return lax.convert_element_type(_rounded_to_8_bits(x, dtype), dtype)
    # reduce_precision flushes subnormal values of the narrow type. Below 2^-14, float16 is a fixed-point grid of 2^-24,
    # the grid that float32 has at 0.75.
    subnormal = (x + jnp.float32(0.75)) - jnp.float32(0.75)
    normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
    return lax.convert_element_type(jnp.where(jnp.abs(x) < 2.0**-14, jnp.copysign(subnormal, x), normal), dtype)


def _rounded_to_8_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """x rounded to a value of `dtype`, in float32; `reduce_precision` only supports the exponents of IEEE formats."""
    info = jnp.finfo(dtype)
    with np.errstate(invalid="ignore"):
        beyond = np.float32(np.float32(np.inf).astype(dtype))
    grid = jnp.float32(1.5 * 2.0**23 * float(info.smallest_subnormal))  # here float32 is as coarse as the subnormals
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=info.nmant)
    rounded = jnp.where(jnp.abs(x) < float(info.smallest_normal), jnp.copysign((x + grid) - grid, x), normal)
    return jnp.where(jnp.abs(rounded) > float(info.max), jnp.copysign(beyond, x), rounded)


def stored(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """x as a result of `dtype`. XLA may keep a 16-bit result unrounded for later operations, but not an 8-bit one."""
    if is_of_8_bits(dtype) and x.dtype != dtype:
        return round_to(lax.convert_element_type(x, jnp.float32), np.dtype(dtype))
    return lax.convert_element_type(x, dtype)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Float32 values rounded to `dtype`, still float32. XLA does not drop this, as it may a pair of conversions."""
    dtype = np.dtype(dtype)
    return round_to(x, dtype).astype(jnp.float32) if is_rounded(dtype) else x


@round_to.defjvp
def _round_to_jvp(
    dtype: np.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return round_to(x, dtype), lax.convert_element_type(dx, dtype)
