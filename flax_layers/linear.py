"""The product under every module: its input may be a norm that is not applied yet, its result may join the stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import flax
import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax import DeferredNorm, Stream
from coda_jax.extend import (
    add_residual,
    add_residual_sumsq,
    array,
    hide_frames,
    scaled_weight,
    spec_of_sum,
)
from coda_jax.extend import joined as joined_vectors
from coda_jax.extend import product as fused_product
from flax_layers.as_block import called, check_residual
from flax_layers.fp8 import History, history_of
from flax_layers.sharding import keeps_weights

for library in (__file__, flax.__file__):  # a warning names the line that called the layer, or the model
    hide_frames(library)

default_kernel_init = nnx.initializers.lecun_normal()


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
    """epilogue(x @ kernel, *operands), with an RMSNorm that x is applied on the way; of a `coda.Value` a map.

    For an RMSNorm the accumulator is rstd * (x.x @ (x.scale[:, None] * kernel)). The scale is always folded into the
    kernel, in the pass that casts it to the compute dtype; with float32 parameters that pass is needed anyway. A
    LayerNorm is formed.

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


def is_linear(*layers: Any) -> bool:
    """Whether all are Linears, called as such, not adapters put in their place: a block may take their kernels."""
    return all(isinstance(layer, Linear) and type(layer).__call__ is Linear.__call__ for layer in layers)


class LowRank(NamedTuple):
    """An adapter in the place of a Linear, whose arrays a block may take: y = x @ kernel + bias + x @ a @ b.

    Attributes:
      base: the Linear, of ours or of flax.
      lora: the module with `lora_a` (K, r) and `lora_b` (r, N).
    """

    base: Any
    lora: Any

    @classmethod
    def of(cls, layer: Any) -> LowRank | None:
        """The adapter of an nnx.LoRALinear, or an nnx.LoRA around a Linear, called as such; None of anything else."""
        if isinstance(layer, nnx.LoRALinear) and type(layer).__call__ is nnx.LoRALinear.__call__:
            found, call = cls(layer, layer.lora), nnx.LoRALinear.__call__
        elif isinstance(layer, nnx.LoRA):
            found, call = cls(layer.base_module, layer), nnx.Linear.__call__  # type: ignore[assignment]
        else:
            return None
        lora = found.lora
        if type(lora).__call__ is not nnx.LoRA.__call__ or lora.promote_dtype is not dtypes.promote_dtype:
            return None
        return found if is_linear(found.base) or _is_plain(found.base, call) else None

    @property
    def kernel(self) -> jax.Array:
        kernel: jax.Array = self.base.kernel[...]
        return kernel

    @property
    def bias(self) -> jax.Array | None:
        return None if self.base.bias is None else self.base.bias[...]

    @property
    def dtype(self) -> DTypeLike | None:
        """The compute dtype, the adapter's too where it has none of its own."""
        return self.base.dtype

    @property
    def fp8(self) -> coda.fp8.Recipe | None:
        """The recipe of the base's product; the adapter's products are in the compute dtype."""
        return getattr(self.base, "fp8", None)

    @property
    def fp8_history(self) -> History | None:
        return getattr(self.base, "fp8_history", None)

    def inner(self, x: Any) -> jax.Array:
        """x @ a, (..., r)."""
        y: jax.Array = project(x, self.lora.lora_a[...], dtype=self.lora.dtype or self.dtype)
        return y

    def added(self, inner: jax.Array, y: jax.Array) -> jax.Array:
        """y + inner @ b, in y's dtype."""
        dtype = self.lora.dtype or self.dtype
        total: jax.Array = project(
            inner, self.lora.lora_b[...], y, epilogue=add_residual, dtype=dtype, out_dtype=y.dtype
        )
        return total


def _is_plain(base: Any, call: Any) -> bool:
    """Whether flax's Linear, called as `call`, multiplies as ours does."""
    return (
        isinstance(base, nnx.Linear)
        and type(base).__call__ is call
        and base.dot_general is jax.lax.dot_general
        and base.promote_dtype is dtypes.promote_dtype
        and base.precision is None
        and base.preferred_element_type is None
    )


def have_kernels(*layers: Any) -> bool:
    """Whether all are Linears, or low-rank adapters of these, whose kernels a block may take."""
    return all(is_linear(layer) or LowRank.of(layer) is not None for layer in layers)


def product(
    x: coda.Value, kernels: Sequence[Any], fp8: coda.fp8.Recipe | None = None, history: History | None = None
) -> Any:
    """x w of kernels (K, N_i) side by side, values or arrays, one product; or of one (K, 2, F).

    Under rules that cut the width, what is gathered of w is kept for the backward pass.
    """
    values = [x._trace.value(kernel) for kernel in kernels]
    of = None if history is None else history[...]
    return fused_product(x, values, keep_weights=keeps_weights(), recipe=fp8, history=of)


def mapped_together(layers: Sequence[Any], x: coda.Value) -> Any:
    """The results of Linears side by side, one product."""
    y = product(x, [layer.kernel[...] for layer in layers], *_rounding(layers))
    if all(layer.bias is None for layer in layers):
        return y
    absent = (jnp.zeros(layer.kernel.shape[-1]) if layer.bias is None else layer.bias[...] for layer in layers)
    biases = [x._trace.value(bias) for bias in absent]
    return y + (joined_vectors(biases) if len(biases) > 1 else biases[0])


def _rounding(layers: Sequence[Any]) -> tuple[coda.fp8.Recipe | None, History | None]:
    """The recipe and the history of layers which are one product: the history is that of the first."""
    first, *others = (layer.fp8 for layer in layers)
    if any(other != first for other in others):
        raise ValueError(f"fp8: layers that are one product have {[first, *others]}; all must have the same")
    return first, layers[0].fp8_history


def mapped(layer: Callable[..., Any], x: jax.Array | Stream | DeferredNorm | coda.Value) -> Any:
    """layer(x), of a Linear or of what stands in its place; of a value it is a Linear or an adapter of one."""
    if not isinstance(x, coda.Value):
        return layer(x if isinstance(layer, Linear) else array(x))
    if is_linear(layer):
        return mapped_together([layer], x)
    adapter = LowRank.of(layer)
    assert adapter is not None
    return adapter.added(adapter.inner(x), mapped_together([adapter], x))


Residual = jax.Array | Stream | Literal[True] | None


class Sum(NamedTuple):
    """The residual that a result is added to.

    Attributes:
      array: the residual itself.
      is_stream: whether the sum is a Stream,
      has_sums: and that with the row sums of its squares.
      is_normalised: whether it is what the norm of the module's input normalises.
    """

    array: jax.Array
    is_stream: bool
    has_sums: bool
    is_normalised: bool = False

    @classmethod
    def of(cls, residual: Residual, x: Any) -> Sum | None:
        """The residual that `residual=` of a module says, beside its input x.

        Args:
          residual: True for what x, a DeferredNorm, normalises; an array or a Stream; None for no residual.
          x: the module's input.
        """
        if residual is None:
            return None
        if isinstance(x, coda.Value):
            raise TypeError("residual is given beside a value of a coda.block; write the sum, x + layer(h)")
        if residual is True:
            if not isinstance(x, DeferredNorm):
                raise ValueError(
                    "residual=True adds what a norm that is not applied yet normalises; the input is "
                    f"{type(x).__name__}. Give the norm a Stream, or give the residual itself"
                )
            return cls(x.x, True, x.mean is None, True)
        return cls(jnp.asarray(array(residual)), isinstance(residual, Stream), isinstance(residual, Stream))


def joined(layer: Callable[..., Any], x: jax.Array, residual: Sum | None) -> Any:
    """layer(x) [+ residual], of a Linear or of what stands in its place."""
    if residual is None:
        return mapped(layer, x)
    if is_linear(layer):
        return _added(layer, x, residual)
    y = layer(x)
    check_residual(residual.array.shape, y.shape)
    total = (residual.array + y).astype(residual.array.dtype)
    if not residual.is_stream:
        return total
    return Stream(total).with_statistic() if residual.has_sums else Stream(total)


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
          x: (..., K); of a `coda.Value` the result is one, in the dtype of the block.
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
            return mapped_together([self], x)
        if isinstance(x, DeferredNorm) or self.fp8 is not None:
            return _in_block(self, x, target)
        if target is not None:
            return _added(self, x, target)
        biases = () if self.bias is None else (self.bias[...],)
        y: jax.Array = project(x, self.kernel[...], *biases, epilogue=add_bias if biases else None, dtype=self.dtype)
        return y


def _in_block(layer: Linear, x: Any, residual: Sum | None) -> Any:
    dtype = layer.dtype or jnp.result_type(x.dtype, layer.kernel[...])
    return called(layer, _lines, x, residual, dtype=dtype)


def _lines(layer: Linear, x: Any) -> Any:
    return mapped_together([layer], x).named("norm_projection")  # of `flax_layers.remat`


def _added(layer: Any, x: jax.Array | Stream, residual: Sum) -> jax.Array | Stream:
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
