"""Low-rank adapters in the place of a Linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx.nn import dtypes
from jax.typing import DTypeLike

from flax_layers.linear import add, is_linear, product


class LowRank(NamedTuple):
    """An adapter in the place of a Linear: y = x @ kernel + bias + x @ a @ b.

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

    def delta(self, x: jax.Array) -> jax.Array:
        """x @ a @ b, (..., N)."""
        dtype = self.lora.dtype or self.dtype
        return product(product(x, self.lora.lora_a[...], dtype=dtype), self.lora.lora_b[...], dtype=dtype)


def apply(layer: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """layer(x) for a Linear or a module in its place; an adapter without a dtype computes in its base's."""
    adapter = LowRank.of(layer)
    if adapter is None:
        return layer(x)
    y = nnx.Linear.__call__(layer, x) if isinstance(layer, nnx.LoRALinear) else adapter.base(x)
    return add(y, adapter.delta(x))


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
