"""Products that train in fp8: both factors and the cotangent are quantised, each by one scale.

`matmul` replaces `jnp.matmul`, and `DotGeneral` replaces `jax.lax.dot_general` in a Flax layer. Their three products,
of the result and of both gradients, have factors of eight bits. Each copy that these need is made by a pass, for a
single product does not know the operations before and after it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import FLOAT32, FLOATS_OF_8_BITS, listed
from coda_jax.epilogue.saturate import saturated_in_memory
from coda_jax.graph.rounded import LEAST_AMAX, largest
from coda_jax.primitives import gemm
from coda_jax.primitives.call_arguments import check_implementation
from coda_jax.primitives.dtypes import check_floats
from coda_jax.primitives.mesh_types import vary, varying_axes


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    x_scale: Any = None,
    w_scale: Any = None,
    gradient_scale: Any = None,
    dtype: Any = jnp.float8_e4m3fn,
    gradient_dtype: Any = jnp.float8_e4m3fn,
    out_dtype: Any = None,
    implementation: str = "auto",
) -> jax.Array:
    """x w, with both factors and, in the backward pass, the result's cotangent rounded to fp8.

        q(x) = saturate(x s_x, dtype), s_x = largest / max |x|     largest: of the dtype, 448 in e4m3, 57344 in e5m2
        y = (q(x) q(w)) / (s_x s_w)
        dx = (q(dy) q(w)^T) / (s_dy s_w),  dw = (q(x)^T q(dy)) / (s_x s_dy)

    This is current scaling, a scale a tensor (arXiv 2209.05433, section 3.2, with the scale of the tensor itself). The
    derivative treats rounding as the identity, and ignores the clipping and the scales. Sums are float32.
    Kept for the backward pass are q(x) and q(w): a byte an element.

    Args:
      x: (..., K) bfloat16, float16 or float32.
      w: (K, N) of such a dtype. K, N and the product of the leading axes of x are multiples of 16 for the kernel.
      x_scale, w_scale: float32 scalars that replace s_x and s_w, for instance from the maxima of earlier steps. Values
        beyond the largest one are then clipped to it. They have no gradient.
      gradient_scale: the same for s_dy.
      dtype: of q(x) and q(w), float8_e4m3fn or float8_e5m2.
      gradient_dtype: of q(dy). float8_e5m2 has more range and half the precision; beside a scale of the tensor itself
        the range is seldom needed.
      out_dtype: of the result; default the promotion of x and w.
      implementation: as in `gemm`.

    Returns:
      (..., N). The cotangents of x and w have the dtypes of x and w.

    Raises:
      TypeError: an array or dtype that is not as above.
      ValueError: shapes that do not fit.
    """
    check_implementation("fp8.matmul", implementation)
    check_floats("fp8.matmul", x=x, w=w)
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"fp8.matmul: x has shape {x.shape} and w {w.shape}; they must be (..., K) and (K, N)")
    scales = [
        _checked_scale(name, scale)
        for name, scale in (("x_scale", x_scale), ("w_scale", w_scale), ("gradient_scale", gradient_scale))
    ]
    options = _Options(
        _checked_dtype("dtype", dtype),
        _checked_dtype("gradient_dtype", gradient_dtype),
        np.dtype(out_dtype or jnp.promote_types(x.dtype, w.dtype)),
        implementation,
    )
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.ndim != 2 else x
    leaves, tree = jax.tree.flatten((rows, w, scales))
    y = _product(options, *jax.tree.unflatten(tree, vary(varying_axes(*leaves), *leaves)))
    return y.reshape(*x.shape[:-1], w.shape[1])


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` by `matmul`, for layers that take one.

    `flax.nnx.Linear(..., dot_general=coda.fp8.DotGeneral())`, `flax.linen.Dense(..., dot_general_cls=
    coda.fp8.DotGeneral)`. All scales are those of the tensors.

    Attributes:
      dtype, gradient_dtype, implementation: as in `matmul`.
    """

    dtype: Any = jnp.float8_e4m3fn
    gradient_dtype: Any = jnp.float8_e4m3fn
    implementation: str = "auto"

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
        precision: Any = None,
        preferred_element_type: Any = None,
        **options: Any,
    ) -> jax.Array:
        """The sum over the contracting axes of lhs and rhs: other axes of lhs, then those of rhs.

        Args:
          lhs, rhs: bfloat16, float16 or float32, of any number of axes.
          dimension_numbers: as in `jax.lax.dot_general`, without batch axes.
          precision: None or jax.lax.Precision.DEFAULT; fp8 has no other.
          preferred_element_type: dtype of the result; default the promotion of lhs and rhs.
          **options: what else a layer gives must be None.

        Raises:
          ValueError: batch axes, another precision, or an option.
        """
        contracting, batch = dimension_numbers
        if any(batch):
            raise ValueError(f"fp8.DotGeneral: batch axes {batch}; use jax.vmap for a batch of products")
        precisions = precision if isinstance(precision, tuple | list) else (precision,)
        if any(one not in (None, "default", lax.Precision.DEFAULT) for one in precisions):
            raise ValueError(f"fp8.DotGeneral: precision = {precision}; it must be None, fp8 has no other")
        if unsupported := {name: value for name, value in options.items() if value is not None}:
            raise ValueError(f"fp8.DotGeneral: {unsupported}; these options are not supported and must be None")
        x, rows = _contracting_last(lhs, contracting[0])
        w, columns = _contracting_last(rhs, contracting[1])
        y = matmul(
            x,
            w.T,
            dtype=self.dtype,
            gradient_dtype=self.gradient_dtype,
            out_dtype=preferred_element_type,
            implementation=self.implementation,
        )
        return y.reshape(*rows, *columns)


class _Options(NamedTuple):
    dtype: np.dtype
    gradient_dtype: np.dtype
    out_dtype: np.dtype
    implementation: str


class _Quantised(NamedTuple):
    """An array as fp8 values; `unit` times them is the array."""

    values: jax.Array
    unit: jax.Array


def _quantised(x: jax.Array, scale: jax.Array | None, dtype: np.dtype) -> _Quantised:
    most = float(jnp.finfo(dtype).max)
    if scale is None:
        # Not 1 / (maximum / largest): XLA makes a product of a division by a constant, but not everywhere.
        scale = most / jnp.maximum(largest(x).astype(jnp.float32), LEAST_AMAX)
    return _Quantised(saturated_in_memory(x.astype(jnp.float32) * scale, dtype), 1 / scale)


def _multiply(a: _Quantised, b: _Quantised, out_dtype: Any, implementation: str) -> jax.Array:
    """a b^T: a (M, K), b (N, K)."""
    y: jax.Array = gemm(
        a.values,
        b.values,
        a.unit * b.unit,
        epilogue=scaled,
        out_dtype=out_dtype,
        transpose_b=True,
        implementation=implementation,
    )
    return y


def scaled(acc: jax.Array, unit: jax.Array) -> jax.Array:
    """Epilogue: the product of the arrays, from that of their quantised values."""
    return acc * unit


def _transposed(x: _Quantised) -> _Quantised:
    return _Quantised(x.values.T, x.unit)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(options: _Options, x: jax.Array, w: jax.Array, scales: list[Any]) -> jax.Array:
    return _forward(options, x, w, scales)[0]


def _forward(options: _Options, x: jax.Array, w: jax.Array, scales: list[Any]) -> tuple[jax.Array, Any]:
    x_scale, w_scale, gradient_scale = scales
    qx, qw = _quantised(x, x_scale, options.dtype), _quantised(w, w_scale, options.dtype)
    y = _multiply(qx, _transposed(qw), options.out_dtype, options.implementation)
    empty = jnp.empty((0,), x.dtype), jnp.empty((0,), w.dtype)  # their dtypes, for the backward pass
    return y, (qx, qw, gradient_scale, *empty, [None if one is None else jnp.zeros_like(one) for one in scales])


def _backward(options: _Options, kept: Any, dy: jax.Array) -> tuple[Any, ...]:
    qx, qw, gradient_scale, like_x, like_w, no_gradient = kept
    qdy = _quantised(dy, gradient_scale, options.gradient_dtype)
    dx = _multiply(qdy, qw, like_x.dtype, options.implementation)
    dw = _multiply(_transposed(qx), _transposed(qdy), like_w.dtype, options.implementation)
    return dx, dw, no_gradient


_product.defvjp(_forward, _backward)


def _contracting_last(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, tuple[int, ...]]:
    """x as a matrix (others, contracting), and the sizes of the others."""
    others = [axis for axis in range(x.ndim) if axis not in axes]
    sizes = tuple(x.shape[axis] for axis in others)
    k = math.prod(x.shape[axis] for axis in axes)
    return x.transpose(*others, *axes).reshape(math.prod(sizes), k), sizes


def _checked_dtype(name: str, dtype: Any) -> np.dtype:
    if np.dtype(dtype).name not in FLOATS_OF_8_BITS:
        raise TypeError(f"fp8.matmul: {name} = {np.dtype(dtype)}; it must be {listed(FLOATS_OF_8_BITS)}")
    return np.dtype(dtype)


def _checked_scale(name: str, scale: Any) -> jax.Array | None:
    if scale is None:
        return None
    scale = jnp.float32(scale) if isinstance(scale, int | float) else jnp.asarray(scale)
    if scale.shape != () or scale.dtype != FLOAT32:
        raise TypeError(f"fp8.matmul: {name} is {scale.dtype} of shape {scale.shape}; it must be a float32 scalar")
    return scale
