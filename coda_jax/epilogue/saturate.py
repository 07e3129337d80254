"""Rounding to a float of 8 bits that saturates at its largest value: a JAX primitive of its own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from coda_jax.epilogue.dtypes import FLOATS, FLOATS_OF_8_BITS, listed
from coda_jax.epilogue.rounding import round_to

saturate_p = jex_core.Primitive("saturate")


def saturate(x: jax.Array, dtype: Any) -> jax.Array:
    """x clipped to the finite range of `dtype` and rounded to the nearest value of it, ties to even; NaN stays NaN.

        clip(x, -max, max).astype(dtype);   max = 448 of float8_e4m3fn, 57344 of float8_e5m2

    An ordinary JAX function; in an epilogue one instruction. `x.astype(dtype)` differs beyond the range: there it is
    NaN in float8_e4m3fn, and infinite in float8_e5m2.

    Args:
      x: any shape, bfloat16, float16 or float32.
      dtype: float8_e4m3fn or float8_e5m2.

    Returns:
      An array of the shape of x, in `dtype`. Its derivative is that of the clip: the cotangent, converted to the dtype
      of x, where -max <= x <= max, and 0 elsewhere.

    Raises:
      TypeError: x or `dtype` is none of these.
    """
    target = np.dtype(dtype)
    if target.name not in FLOATS_OF_8_BITS:
        raise TypeError(f"saturate: dtype = {target}; it must be {listed(FLOATS_OF_8_BITS)}")
    if not hasattr(x, "dtype") or np.dtype(x.dtype).name not in FLOATS:
        raise TypeError(f"saturate: x is {getattr(x, 'dtype', type(x).__name__)}; it must be {listed(FLOATS)}")
    out: jax.Array = saturate_p.bind(jnp.asarray(x), dtype=target)
    return out


def _largest(dtype: np.dtype) -> float:
    return float(jnp.finfo(dtype).max)


def saturated_in_memory(x: jax.Array, dtype: Any) -> jax.Array:
    """`saturate` for a result that is written to memory: the program that computes it does not widen it again.

    A GPU then rounds by its conversion instruction. With the arithmetic of `round_to`, XLA would transpose several
    float32 intermediates to make a transposed copy.
    """
    out: jax.Array = saturate_p.bind(x, dtype=np.dtype(dtype), in_memory=True)
    return out


def _with_xla(x: jax.Array, *, dtype: np.dtype, in_memory: bool = False) -> jax.Array:
    del in_memory
    return round_to(_clipped(x, dtype), dtype)


def _with_cuda(x: jax.Array, *, dtype: np.dtype, in_memory: bool = False) -> jax.Array:
    return _clipped(x, dtype).astype(dtype) if in_memory else _with_xla(x, dtype=dtype)


def _clipped(x: jax.Array, dtype: np.dtype) -> jax.Array:
    largest = _largest(dtype)
    return jnp.clip(x.astype(jnp.float32), -largest, largest)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, dtype: np.dtype, **params: Any) -> tuple[Any, Any]:
    (x,), (dx,) = primals, tangents
    out = saturate_p.bind(x, dtype=dtype, **params)
    is_inside = jnp.abs(x) <= jnp.asarray(_largest(dtype), x.dtype)
    return out, jnp.where(is_inside, dx, jnp.zeros_like(dx)).astype(dtype)


def _batch(arguments: Sequence[Any], dimensions: Sequence[int], **params: Any) -> tuple[Any, int]:
    return saturate_p.bind(arguments[0], **params), dimensions[0]


@saturate_p.def_abstract_eval
def _type(x: Any, *, dtype: np.dtype, **_: Any) -> Any:
    return jax.make_jaxpr(lambda x: _with_xla(x, dtype=dtype))(x).out_avals[0]


saturate_p.def_impl(jax.jit(_with_xla, static_argnames=("dtype", "in_memory")))
mlir.register_lowering(saturate_p, mlir.lower_fun(_with_xla, multiple_results=False))
mlir.register_lowering(saturate_p, mlir.lower_fun(_with_cuda, multiple_results=False), platform="cuda")
ad.primitive_jvps[saturate_p] = _jvp
batching.primitive_batchers[saturate_p] = _batch
