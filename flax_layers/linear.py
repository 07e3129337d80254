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
    noted,
    scaled_weight,
    separate_residual,
    spec_of_sum,
)
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
    LayerNorm is formed; `Linear` and the operators of `coda_jax` apply it in their epilogues.

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
        z = x @ (kernel.T if transpose_b else kernel)
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
    """Whether all are Linears, called as such, not adapters put in their place: a chain may take their kernels."""
    return all(isinstance(layer, Linear) and type(layer).__call__ is Linear.__call__ for layer in layers)


class LowRank(NamedTuple):
    """An adapter in the place of a Linear, whose arrays a chain may take: y = x @ kernel + bias + x @ a @ b.

    Attributes:
      base: the Linear, of ours or of flax.
      lora: the module with `lora_a` (K, r) and `lora_b` (r, N).
    """

    base: Any
    lora: Any

    @classmethod
    def of(cls, layer: Any) -> LowRank | None:
        """Of an nnx.LoRALinear, or an nnx.LoRA around a Linear, called as such; None of anything else."""
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

    def inner(self, x: jax.Array | Stream | DeferredNorm) -> jax.Array:
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


def takes_norm(*layers: Any) -> bool:
    """Whether all are Linears or adapters of these, so that `normalized` computes them."""
    return all(is_linear(layer) or LowRank.of(layer) is not None for layer in layers)


def normalized(
    norm: DeferredNorm, layers: Sequence[Any], *, out_sharding: Any = None
) -> tuple[list[jax.Array], jax.Array]:
    """layer(norm) for each, and what is normalised, for the residual: `coda_jax.norm_projection`.

    Two products, of all kernels and of all adapters' `lora_a`, and one of each `lora_b`. They are apart for the
    gradient of frozen kernels to be products of their own, which are dropped where nobody reads them.

    Args:
      norm: of x (..., D).
      layers: as `takes_norm` has them.
      out_sharding: of each layer's result, as in `coda_jax.norm_projection`.
    """
    adapters = [LowRank.of(layer) for layer in layers]
    bases = [layer if adapter is None else adapter.base for layer, adapter in zip(layers, adapters, strict=True)]
    present = [adapter for adapter in adapters if adapter is not None]
    inner: list[jax.Array] = []
    if present:
        dtype = present[0].lora.dtype or present[0].dtype
        made, x = coda.norm_projection(norm, tuple(adapter.lora.lora_a[...] for adapter in present), dtype=dtype)
        inner, norm = list(made) if len(present) > 1 else [made], norm.with_array(x)
    bias = None
    if any(base.bias is not None for base in bases):
        bias = tuple(jnp.zeros(base.kernel.shape[-1]) if base.bias is None else base.bias[...] for base in bases)
    kernels = tuple(base.kernel[...] for base in bases)
    made, x = coda.norm_projection(
        norm, kernels, bias, dtype=bases[0].dtype, out_sharding=out_sharding, keep_weights=keeps_weights()
    )
    ys, remaining = list(made) if len(bases) > 1 else [made], iter(inner)
    return [
        y if adapter is None else adapter.added(next(remaining), y) for adapter, y in zip(adapters, ys, strict=True)
    ], x


def mapped(layer: Callable[..., Any], x: jax.Array | Stream | DeferredNorm) -> jax.Array:
    """layer(x), of a Linear or of what stands in its place, which is given an array unless it is a known adapter."""
    if isinstance(layer, Linear):
        return layer(x)
    if (adapter := LowRank.of(layer)) is not None:
        if isinstance(x, DeferredNorm):
            return normalized(x, [layer])[0][0]
        biases = () if adapter.bias is None else (adapter.bias,)
        y = project(x, adapter.kernel, *biases, epilogue=add_bias if biases else None, dtype=adapter.dtype)
        return adapter.added(adapter.inner(x), y)
    return layer(unchained(array(x), layer) if isinstance(x, DeferredNorm) else array(x))


def unchained(x: jax.Array, layer: Any) -> jax.Array:
    """x, with a note for GPUs and `coda.explain` that the layer in the place of a Linear takes no part in a chain."""
    reason = (
        f"a {type(layer).__name__} stands in the place of a Linear, which disables the fused chain of its sub-layer: "
        "norm, activation or their backward passes are passes of their own there"
    )
    remedy = "Keep a flax_layers.Linear there; what a low-rank adapter adds leaves the norm in the products"
    return noted(x, "flax_layers", reason, remedy)


def partly_chained(x: jax.Array, layers: Sequence[Any], passes: str) -> jax.Array:
    """x, with a note that adapters among the layers leave the norm in the products, and what is a pass of its own."""
    name = next(type(layer).__name__ for layer in layers if not is_linear(layer))
    reason = (
        f"a {name} stands in the place of a Linear. The norm and its backward pass stay in the products' epilogues; "
        f"{passes} a pass of its own there, forward and backward"
    )
    return noted(x, "flax_layers", reason, "Merge the adapter into its weight where it is no longer trained")


Residual = jax.Array | Stream | Literal[True] | None


class Sum(NamedTuple):
    """What a result is added to.

    Attributes:
      array: the residual itself.
      is_stream: whether the sum is a Stream,
      has_sums: and that with the row sums of its squares.
    """

    array: jax.Array
    is_stream: bool
    has_sums: bool

    @classmethod
    def of(cls, residual: Residual, x: Any, passed: jax.Array | None = None) -> Sum | None:
        """What `residual=` of a module says, beside its input x.

        Args:
          residual: True for what x, a DeferredNorm, normalises; an array or a Stream; None for no residual.
          x: the module's input.
          passed: x's array as an operator passed it on, to add its cotangent in the operator's epilogue.
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
            return cls(x.x if passed is None else passed, True, x.mean is None)
        plain = array(residual) if passed is None else separate_residual(residual, "flax_layers")
        return cls(plain, isinstance(residual, Stream), isinstance(residual, Stream))


def joined(layer: Callable[..., Any], x: jax.Array, residual: Sum | None) -> Any:
    """layer(x) [+ residual], of a Linear or of what stands in its place."""
    if residual is None:
        return mapped(layer, x)
    if is_linear(layer):
        return _added(layer, x, residual)
    if (adapter := LowRank.of(layer)) is not None:
        dtype = adapter.lora.dtype or adapter.dtype
        low_rank = project(adapter.inner(x), adapter.lora.lora_b[...], dtype=dtype, out_dtype=residual.array.dtype)
        return _added(adapter.base, x, residual, low_rank)
    y = layer(x)
    _check_residual(residual, y.shape)
    total = (residual.array + y).astype(residual.array.dtype)
    if not residual.is_stream:
        return total
    return Stream(total).with_statistic() if residual.has_sums else Stream(total)


def _check_residual(residual: Sum, shape: tuple[int, ...]) -> None:
    given = jnp.shape(residual.array)
    if given != shape:
        raise ValueError(f"a residual of shape {given} is added to an output of shape {shape}")


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
        if (target := Sum.of(residual, x)) is not None:
            return _added(self, x, target)
        if isinstance(x, DeferredNorm) and x.mean is not None:
            return self.beside(x)[0]
        biases = () if self.bias is None else (self.bias[...],)
        y: jax.Array = project(x, self.kernel[...], *biases, epilogue=add_bias if biases else None, dtype=self.dtype)
        return y

    def beside(self, x: DeferredNorm) -> tuple[jax.Array, jax.Array]:
        """The map of x, and the array that x normalises, for the residual: `coda_jax.norm_projection`."""
        bias = None if self.bias is None else self.bias[...]
        return coda.norm_projection(x, self.kernel[...], bias, dtype=self.dtype, keep_weights=keeps_weights())


def _added(
    layer: Any, x: jax.Array | Stream | DeferredNorm | coda.Value, residual: Sum, low_rank: jax.Array | None = None
) -> jax.Array | Stream:
    """The map of x added to the residual, and to what an adapter adds, in one product."""
    kernel, biases = layer.kernel[...], () if layer.bias is None else (layer.bias[...],)
    _check_residual(residual, (*x.shape[:-1], kernel.shape[-1]))
    add = add_residual_sumsq if residual.has_sums else add_residual

    def add_low_rank_residual(acc: jax.Array, residual: jax.Array, low_rank: jax.Array, *bias: jax.Array) -> Any:
        return add(acc + low_rank, residual, *bias)

    operands = (residual.array, *(() if low_rank is None else (low_rank,)), *biases)
    epilogue = add if low_rank is None else add_low_rank_residual
    out = project(x, kernel, *operands, epilogue=epilogue, dtype=layer.dtype, out_dtype=residual.array.dtype)
    if not residual.is_stream:
        return out
    return Stream(*out) if residual.has_sums else Stream(out)
