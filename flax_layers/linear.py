"""A Linear, and the product under every layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax.extend import explicit_cuts, in_row, spec_of_sum, without_axes
from flax_layers.fp8 import History, history_of
from flax_layers.fused import fused

default_kernel_init = nnx.initializers.lecun_normal()


def is_linear(*layers: Any) -> bool:
    """Whether all are Linears, called as such, not adapters in their place: their kernels say what they do."""
    return all(isinstance(layer, Linear) and type(layer).__call__ is Linear.__call__ for layer in layers)


def product(
    x: jax.Array,
    kernel: jax.Array,
    *,
    dtype: DTypeLike | None = None,
    fp8: coda.fp8.Recipe | None = None,
    history: History | None = None,
) -> jax.Array:
    """x (..., K) times kernel (K, ...), in the compute dtype; in 8 bits by a recipe and its history.

    Raises:
      ValueError: x has not K features.
    """
    x = jnp.asarray(x)
    if x.ndim < 1 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"a product over {kernel.shape[0]} features wants (..., {kernel.shape[0]}), got shape {x.shape}"
        )
    dtype = dtype or jnp.result_type(x, kernel)
    factors = x.astype(dtype), kernel.astype(dtype)
    numbers, spec = (((x.ndim - 1,), (0,)), ((), ())), spec_of_sum(*factors)
    if spec is None:
        factors = factors[0], _beside_rows(factors[1], factors[0])
    if fp8 is not None:
        return coda.fp8.matmul(*factors, recipe=fp8, history=None if history is None else history[...])
    return lax.dot_general(*factors, numbers, out_sharding=spec)


def _beside_rows(kernel: jax.Array, x: jax.Array) -> jax.Array:
    """The kernel, its columns gathered over explicit mesh axes that shard the rows of x, as FSDP's."""
    row_axes = frozenset().union(*explicit_cuts(x)[:-1])
    for axis in range(1, kernel.ndim):
        kernel = without_axes(kernel, axis, row_axes)
    return kernel


def add(x: jax.Array, *others: jax.Array) -> jax.Array:
    """The sum of x and others of its shape, rounded once, to the dtype of x.

    Raises:
      ValueError: one has another shape.
    """
    total = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for y in others:
        if y.shape != x.shape:
            raise ValueError(f"an output of shape {y.shape} is added to a stream of shape {x.shape}")
        total = total + y.astype(total.dtype)
    return total.astype(x.dtype)


class Linear(nnx.Module):
    """Linear map.

    y = x @ kernel [+ bias]

    Args:
      in_features: K.
      out_features: N.
      use_bias: whether there is a bias.
      dtype: compute dtype; default the promotion of input and kernel.
      param_dtype: storage dtype of `kernel` (K, N) and `bias` (N,).
      kernel_init, bias_init: initialisers of `kernel` and `bias`.
      fp8: a `coda.fp8.Recipe` by which the product trains in 8 bits; default in the compute dtype.
      rngs: source of keys.

    Raises:
      TypeError: fp8 is no recipe.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        bias_init: nnx.Initializer = nnx.initializers.zeros,
        fp8: coda.fp8.Recipe | None = None,
        rngs: nnx.Rngs,
    ):
        if not isinstance(fp8, coda.fp8.Recipe | None):
            raise TypeError(f"{fp8=} must be a coda.fp8.Recipe or None")
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features), param_dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype)) if use_bias else nnx.data(None)
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.fp8, self.fp8_history = fp8, history_of(fp8)

    @fused
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the map to x (..., K); returns (..., N) in the compute dtype.

        Raises:
          ValueError: x of another width.
        """
        y = product(x, self.kernel[...], dtype=self.dtype, fp8=self.fp8, history=self.fp8_history)
        return y if self.bias is None else _with_bias(y, self.bias[...])


def _with_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    wide = jnp.promote_types(y.dtype, jnp.float32)
    return (y.astype(wide) + in_row(bias.astype(wide), y)).astype(y.dtype)
