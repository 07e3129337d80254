"""Low-rank adapters in the place of a Linear, and what a block does with either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx.nn import dtypes
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax import DeferredNorm, Stream
from coda_jax.extend import add_residual, array
from flax_layers.as_block import check_residual
from flax_layers.fp8 import History
from flax_layers.linear import add_product, apply_as_one_product, is_linear
from flax_layers.project import project
from flax_layers.residual import Sum


class LowRank(NamedTuple):
    """An adapter in the place of a Linear, whose arrays a block may read: y = x @ kernel + bias + x @ a @ b.

    Attributes:
      base: the Linear, ours or flax's.
      lora: the module with `lora_a` (K, r) and `lora_b` (r, N).
    """

    base: Any
    lora: Any

    @classmethod
    def of(cls, layer: Any) -> LowRank | None:
        """The adapter in an nnx.LoRALinear, or in an nnx.LoRA around a Linear, with flax's own call; else None."""
        if isinstance(layer, nnx.LoRALinear) and type(layer).__call__ is nnx.LoRALinear.__call__:
            adapter, call = cls(layer, layer.lora), nnx.LoRALinear.__call__
        elif isinstance(layer, nnx.LoRA):
            adapter, call = cls(layer.base_module, layer), nnx.Linear.__call__  # type: ignore[assignment]
        else:
            return None
        lora = adapter.lora
        if type(lora).__call__ is not nnx.LoRA.__call__ or lora.promote_dtype is not dtypes.promote_dtype:
            return None
        return adapter if is_linear(adapter.base) or _is_plain(adapter.base, call) else None

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

    def add_product(self, inner: jax.Array, y: jax.Array) -> jax.Array:
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
    """Whether all are Linears, or low-rank adapters of these, whose kernels a block may read."""
    return all(is_linear(layer) or LowRank.of(layer) is not None for layer in layers)


def apply(layer: Callable[..., Any], x: jax.Array | Stream | DeferredNorm | coda.Value) -> Any:
    """layer(x) for a Linear or a module in its place; for a value it is a Linear or an adapter of one."""
    if not isinstance(x, coda.Value):
        return layer(x if is_linear(layer) else array(x))
    if is_linear(layer):
        return apply_as_one_product([layer], x)
    adapter = LowRank.of(layer)
    assert adapter is not None
    return adapter.add_product(adapter.inner(x), apply_as_one_product([adapter], x))


def apply_and_add(layer: Callable[..., Any], x: jax.Array, residual: Sum | None) -> Any:
    """layer(x) [+ residual] for a Linear or a module in its place."""
    if residual is None:
        return apply(layer, x)
    if is_linear(layer):
        return add_product(layer, x, residual)
    y = layer(x)
    check_residual(residual.array.shape, y.shape)
    total = (residual.array + y).astype(residual.array.dtype)
    if not residual.is_stream:
        return total
    return Stream(total).with_statistic() if residual.has_sums else Stream(total)
