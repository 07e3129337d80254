"""Rounding to the 16-bit floating types in a form that XLA keeps.

XLA may drop a float32 -> bfloat16 -> float32 pair of conversions (it counts as excess precision). An epilogue's
explicit astype has to round on every platform, so the rounding is written out in float32 arithmetic before it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """x (any shape, float32) rounded to the nearest bfloat16 or float16, ties to even; the result has that dtype.

    Its derivative is that of astype: the tangent is converted to `dtype`.
    """
    if dtype == jnp.bfloat16:
        return lax.convert_element_type(lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), dtype)
    # reduce_precision flushes what is subnormal in the narrow type. Below 2^-14 float16 is a fixed-point grid of 2^-24,
    # the grid that float32 itself has at 0.75.
    subnormal = (x + jnp.float32(0.75)) - jnp.float32(0.75)
    normal = lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)
    return lax.convert_element_type(jnp.where(jnp.abs(x) < 2.0**-14, jnp.copysign(subnormal, x), normal), dtype)


@round_to.defjvp
def _round_to_jvp(
    dtype: np.dtype, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return round_to(x, dtype), lax.convert_element_type(dx, dtype)
