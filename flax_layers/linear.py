"""A Linear: its input may be a norm that is not applied yet, its result may join the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax import DeferredNorm, Stream
from coda_jax.extend import add_residual, add_residual_sumsq
from coda_jax.extend import concatenate as joined_vectors
from coda_jax.extend import product as fused_product
from flax_layers.as_block import call_as_block, check_residual
from flax_layers.fp8 import History, history_of
from flax_layers.project import add_bias, project
from flax_layers.residual import Residual, Sum
from flax_layers.sharding import keeps_weights

default_kernel_init = nnx.initializers.lecun_normal()


def is_linear(*layers: Any) -> bool:
    """Whether all are Linears, called as such, not adapters in their place: a block may read their kernels."""
    return all(isinstance(layer, Linear) and type(layer).__call__ is Linear.__call__ for layer in layers)


def product(
    x: coda.Value, kernels: Sequence[Any], fp8: coda.fp8.Recipe | None = None, history: History | None = None
) -> Any:
    """x w for w of concatenated kernels (K, N_i), values or arrays, as one product; or of one kernel (K, 2, F).

    Under rules that shard the width, the gathered w is kept for the backward pass.
    """
    values = [x._trace.value(kernel) for kernel in kernels]
    maxima = None if history is None else history[...]
    return fused_product(x, values, keep_weights=keeps_weights(), recipe=fp8, history=maxima)


def apply_as_one_product(layers: Sequence[Any], x: coda.Value) -> Any:
    """The concatenated results of Linears, as one product."""
    y = product(x, [layer.kernel[...] for layer in layers], *_rounding(layers))
    if all(layer.bias is None for layer in layers):
        return y
    arrays = (jnp.zeros(layer.kernel.shape[-1]) if layer.bias is None else layer.bias[...] for layer in layers)
    biases = [x._trace.value(bias) for bias in arrays]
    return y + (joined_vectors(biases) if len(biases) > 1 else biases[0])


def _rounding(layers: Sequence[Any]) -> tuple[coda.fp8.Recipe | None, History | None]:
    """The recipe and the history of layers which are one product: the history is that of the first."""
    first, *others = (layer.fp8 for layer in layers)
    if any(other != first for other in others):
        raise ValueError(f"fp8: layers that are one product have {[first, *others]}; all must have the same")
    return first, layers[0].fp8_history


class Linear(nnx.Module):
    """Linear map, optionally added to the residual stream in the product's epilogue.

    y = x @ kernel [+ bias],  or  y = residual + x @ kernel [+ bias]

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

    @overload
    def __call__(self, x: coda.Value) -> coda.Value: ...
    @overload
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: Stream | Literal[True]) -> Stream: ...
    @overload
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: jax.Array | None = None) -> jax.Array: ...
    def __call__(self, x: jax.Array | Stream | DeferredNorm | coda.Value, *, residual: Residual = None) -> Any:
        """Applies the map.

        Args:
          x: (..., K); for a `coda.Value` the result is one, in the dtype of the block.
          residual: (..., N) to add before the one rounding; True for what x, a norm that is not applied yet,
            normalises. Given a Stream or True, the result is a Stream, with its statistic unless x is a LayerNorm.

        Returns:
          (..., N), in the residual's dtype if there is one, else in the compute dtype.

        Raises:
          ValueError: x or residual of another shape, or True beside an x that is no DeferredNorm.
          TypeError: a residual beside a value.
        """
        target = Sum.of(residual, x)
        if isinstance(x, coda.Value):
            return apply_as_one_product([self], x)
        if isinstance(x, DeferredNorm) or self.fp8 is not None:
            return _in_block(self, x, target)
        if target is not None:
            return add_product(self, x, target)
        biases = () if self.bias is None else (self.bias[...],)
        y: jax.Array = project(x, self.kernel[...], *biases, epilogue=add_bias if biases else None, dtype=self.dtype)
        return y


def _in_block(layer: Linear, x: Any, residual: Sum | None) -> Any:
    dtype = layer.dtype or jnp.result_type(x.dtype, layer.kernel[...])
    return call_as_block(layer, _lines, x, residual, dtype=dtype)


def _lines(layer: Linear, x: Any) -> Any:
    return apply_as_one_product([layer], x).named("norm_projection")  # of `flax_layers.remat`


def add_product(layer: Any, x: jax.Array | Stream, residual: Sum) -> jax.Array | Stream:
    """The map of x added to the residual, in one product."""
    if layer.fp8 is not None:
        return _in_block(layer, x, residual)
    kernel, biases = layer.kernel[...], () if layer.bias is None else (layer.bias[...],)
    check_residual(residual.array.shape, (*x.shape[:-1], kernel.shape[-1]))
    add = add_residual_sumsq if residual.has_sums else add_residual
    out = project(x, kernel, residual.array, *biases, epilogue=add, dtype=layer.dtype, out_dtype=residual.array.dtype)
    if not residual.is_stream:
        return out
    return Stream(*out) if residual.has_sums else Stream(out)
