"""The product under every module, whose input may be a norm that is not applied yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax import DeferredNorm, Stream
from coda_jax.extend import array, hide_frames, scaled_weight, spec_of_sum

for library in (__file__, flax.__file__):  # a warning names the line that called the layer, or the model
    hide_frames(library)


def add_bias(acc: jax.Array, bias: jax.Array) -> jax.Array:
    """Epilogue: y = acc + bias."""
    return acc + bias


def project(
    x: jax.Array | Stream | DeferredNorm | coda.Value,
    kernel: jax.Array,
    *operands: Any,
    epilogue: Callable[..., Any] | None = None,
    dtype: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
    transpose_b: bool = False,
) -> Any:
    """epilogue(x @ kernel, *operands); an RMSNorm x is applied in the epilogue, and a `coda.Value` gives a map.

    For an RMSNorm the accumulator is rstd * (x.x @ (x.scale[:, None] * kernel)). The scale is always folded into the
    kernel, in the pass that casts it to the compute dtype; with float32 parameters that pass is needed anyway. A
    LayerNorm is applied before the product.

    Args:
      x: (..., M, K).
      kernel: (K, N), or (N, K) with transpose_b.
      *operands: further operands of the epilogue, see `coda_jax.gemm`.
      epilogue: f(acc, *operands), see `coda_jax.gemm`; default the product itself.
      dtype: dtype of the product's inputs; default the promotion of x and kernel.
      out_dtype: dtype of tile outputs; default dtype.
      transpose_b: whether kernel is (N, K).

    Returns:
      What epilogue returns, with the leading axes of x.

    Raises:
      ValueError: x has no rows, or not K features.
    """
    if isinstance(x, coda.Value):
        z = x @ (x._trace.value(kernel).T if transpose_b else kernel)
        return z if epilogue is None else z.map(epilogue, *operands)
    norm = x if isinstance(x, DeferredNorm) and x.mean is None else None
    source = array(x) if norm is None else norm.x
    features = kernel.shape[1 if transpose_b else 0]
    if jnp.ndim(source) < 2 or source.shape[-1] != features:
        raise ValueError(
            f"a product over {features} features wants (..., M, {features}), got shape {jnp.shape(source)}"
        )
    dtype = dtype or jnp.result_type(source, kernel)
    if norm is not None:
        kernel = scaled_weight(norm.scale, kernel, dtype, transpose=transpose_b)
        operands, epilogue = (norm.rstd()[..., None], *operands), _after_row_scale(epilogue)
    return coda.gemm(
        source.astype(dtype),
        kernel.astype(dtype),
        *operands,
        epilogue=epilogue,
        out_dtype=out_dtype,
        transpose_b=transpose_b,
        out_sharding=spec_of_sum(source, kernel, *operands, transpose_b=transpose_b),
    )


def _after_row_scale(epilogue: Callable[..., Any] | None) -> Callable[..., Any]:
    def row_scale(acc: jax.Array, rstd: jax.Array, *operands: jax.Array) -> Any:
        y = acc * rstd
        return y if epilogue is None else epilogue(y, *operands)

    if epilogue is not None:
        row_scale.__name__ = f"row_scale_{epilogue.__name__}"
    return row_scale
