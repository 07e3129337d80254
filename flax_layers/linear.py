"""The product under every module: its input may be a norm not yet applied, its result may join the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax.epilogue import call_site
from coda_jax.operators.deferred_norm import add_residual_sumsq
from flax_layers.stream import Deferred, LayerNormalized, Normalized, Stream, array, in_place_of, layer_norm_arguments

for library in (__file__, flax.__file__):  # a warning names the line that called the layer, or the model
    call_site.hide(library)

default_kernel_init = nnx.initializers.lecun_normal()


def add_residual(acc: jax.Array, x: jax.Array) -> jax.Array:
    """Epilogue: y = acc + x."""
    return acc + x


def add_bias(acc: jax.Array, bias: jax.Array) -> jax.Array:
    """Epilogue: y = acc + bias."""
    return acc + bias


def project(
    x: jax.Array | Stream | Deferred,
    kernel: jax.Array,
    *operands: jax.Array,
    epilogue: Callable[..., Any] | None = None,
    dtype: DTypeLike | None = None,
    out_dtype: DTypeLike | None = None,
    transpose_b: bool = False,
) -> Any:
    """epilogue(x @ kernel, *operands), with the norm of a Normalized x applied on the way.

    For a Normalized x the accumulator is rstd * (x.x @ (x.scale[:, None] * kernel)). The scale is always folded into
    the kernel, in the pass that casts it to the compute dtype; with float32 parameters that pass is needed anyway.
    A LayerNormalized x is formed; `Linear` and the chains of `coda_jax` apply it in their epilogues.

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
    source = x.x if isinstance(x, Normalized) else array(x)
    features = kernel.shape[1 if transpose_b else 0]
    if jnp.ndim(source) < 2 or source.shape[-1] != features:
        raise ValueError(
            f"a product over {features} features wants (..., M, {features}), got shape {jnp.shape(source)}"
        )
    dtype = dtype or jnp.result_type(source, kernel)
    if isinstance(x, Normalized):
        scale = x.scale.astype(jnp.float32)
        kernel = kernel.astype(jnp.float32) * (scale if transpose_b else scale[:, None])
        operands, epilogue = (x.rstd()[..., None], *operands), _after_row_scale(epilogue)
    return coda.gemm(
        source.astype(dtype),
        kernel.astype(dtype),
        *operands,
        epilogue=epilogue,
        out_dtype=out_dtype,
        transpose_b=transpose_b,
    )


def _after_row_scale(epilogue: Callable[..., Any] | None) -> Callable[..., Any]:
    def row_scale(acc: jax.Array, rstd: jax.Array, *operands: jax.Array) -> Any:
        y = acc * rstd
        return y if epilogue is None else epilogue(y, *operands)

    if epilogue is not None:
        row_scale.__name__ = f"row_scale_{epilogue.__name__}"
    return row_scale


def is_linear(*layers: Any) -> bool:
    """Whether all are Linears, called as such, not adapters put in their place: a chain may take their kernels."""
    return all(isinstance(layer, Linear) and type(layer).__call__ is Linear.__call__ for layer in layers)


def mapped(layer: Callable[..., Any], x: jax.Array | Stream | Deferred) -> jax.Array:
    """layer(x), of a Linear or of what stands in its place, which is given an array."""
    return layer(x if isinstance(layer, Linear) else array(x))


def check_residual(residual: Any, shape: tuple[int, ...]) -> None:
    """Raises a ValueError unless the residual has the shape of what it is added to."""
    if jnp.shape(array(residual)) != shape:
        raise ValueError(f"a residual of shape {jnp.shape(array(residual))} is added to an output of shape {shape}")


def joined(layer: Callable[..., Any], x: jax.Array, residual: jax.Array | Stream | None) -> Any:
    """layer(x) [+ residual], as `Linear` returns it, of a Linear or of what stands in its place."""
    if isinstance(layer, Linear):
        return layer(x, residual=residual)
    y = layer(x)
    if residual is None:
        return y
    check_residual(residual, y.shape)
    total = (array(residual) + y).astype(residual.dtype)
    return Stream(total).with_statistic() if isinstance(residual, Stream) else total


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
      rngs: source of keys.
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
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features), param_dtype))
        self.bias = nnx.Param(bias_init(rngs.params(), (out_features,), param_dtype)) if use_bias else nnx.data(None)
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype

    @overload
    def __call__(self, x: jax.Array | Stream | Deferred, *, residual: Stream) -> Stream: ...
    @overload
    def __call__(self, x: jax.Array | Stream | Deferred, *, residual: jax.Array | None = None) -> jax.Array: ...
    def __call__(
        self, x: jax.Array | Stream | Deferred, *, residual: jax.Array | Stream | None = None
    ) -> jax.Array | Stream:
        """Applies the map.

        Args:
          x: (..., K).
          residual: (..., N) to add before the one rounding. Given a Stream, the result is a Stream with its statistic.

        Returns:
          (..., N), in the residual's dtype if there is one, else in the compute dtype.

        Raises:
          ValueError: x or residual of another shape.
        """
        kernel, biases = self.kernel[...], () if self.bias is None else (self.bias[...],)
        if residual is None:
            if isinstance(x, LayerNormalized):
                return self.beside(x, None)[0]
            return project(x, kernel, *biases, epilogue=add_bias if biases else None, dtype=self.dtype)
        check_residual(residual, (*x.shape[:-1], kernel.shape[-1]))
        add = add_residual_sumsq if isinstance(residual, Stream) else add_residual

        def add_bias_residual(acc: jax.Array, residual: jax.Array, bias: jax.Array) -> Any:
            return add(acc + bias, residual)

        epilogue = add_bias_residual if biases else add
        out = project(
            x, kernel, array(residual), *biases, epilogue=epilogue, dtype=self.dtype, out_dtype=residual.dtype
        )
        return Stream(*out) if isinstance(residual, Stream) else out

    def beside(self, x: jax.Array | Stream | Deferred, residual: Any) -> tuple[jax.Array, Any]:
        """The map of x, and the residual that a later product of the sub-layer adds.

        Where x is the norm of the residual, both are results of `coda_jax.norm_projection`: use the returned residual.
        """
        if not isinstance(x, Deferred):
            return self(x), residual
        z, passed = coda.norm_projection(
            x.x,
            x.sumsq,
            x.scale,
            self.kernel[...],
            None if self.bias is None else self.bias[...],
            **layer_norm_arguments(x),
            epsilon=x.epsilon,
            dtype=self.dtype,
        )
        return z, in_place_of(residual, x, passed)
