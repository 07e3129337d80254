"""Feed-forward layers, gated and plain."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax import DeferredNorm, Stream
from coda_jax.extend import split_halves, with_same_sharding
from flax_layers import on_values
from flax_layers.activation import Activation, activation_of
from flax_layers.adapters import apply, apply_and_add
from flax_layers.as_block import call_as_block
from flax_layers.axis_metadata import name_parameters
from flax_layers.fp8 import history_of
from flax_layers.linear import Linear, default_kernel_init, is_linear
from flax_layers.on_values import dtype_of_products, takes_values, why_not, why_not_linears, with_reason
from flax_layers.residual import Residual, Sum
from flax_layers.sharding import constrain

HIDDEN = ("batch", None, "mlp")


@takes_values
class _FeedForward(nnx.Module):
    """The common base of GatedMLP and MLP: down(hidden) [+ residual]."""

    down: Any
    dtype: DTypeLike | None

    @overload
    def __call__(self, x: coda.Value) -> coda.Value: ...
    @overload
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: Stream | Literal[True]) -> Stream: ...
    @overload
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: jax.Array | None = None) -> jax.Array: ...
    def __call__(self, x: jax.Array | Stream | DeferredNorm | coda.Value, *, residual: Residual = None) -> Any:
        """Applies the layer to x (..., D); `residual` as in Linear.

        The layer is one block, with the norm of x where that is not applied yet. A `coda.Value` gives a value.

        Raises:
          TypeError: with a value, a residual, or a module that is neither a Linear nor a low-rank adapter of one.
        """
        if isinstance(x, coda.Value):
            on_values.check_call(self, self._linears(), residual=residual)
            return self._on_value(x)
        target = Sum.of(residual, x)
        if (reason := why_not(self, x)) is None:
            return call_as_block(self._in_block(), _lines, x, target, dtype=dtype_of_products([self], x))
        if why_not_linears(self, self._ups()) is None:
            hidden = call_as_block(self._in_block(), _hidden_lines, x, None, dtype=dtype_of_products([self], x))
        else:
            zs = [apply(up, x) for up in self._ups()]
            wide = [z.astype(jnp.promote_types(z.dtype, jnp.float32)) for z in zs]
            hidden = constrain(self._activated(wide).astype(zs[0].dtype), *HIDDEN)
        return apply_and_add(self.down, with_reason(hidden, reason), target)

    def _linears(self) -> list[Any]:
        """The modules that stand in the place of Linears."""
        return [*self._ups(), self.down]

    def _on_value(self, x: Any) -> Any:
        return apply(self.down, on_values.hidden(self._hidden(x)))

    def _in_block(self) -> Any:
        """The layer as its block reads it."""
        return self

    def _activated(self, zs: list[jax.Array]) -> jax.Array:
        """The hidden activation from the results of the modules of `_ups`."""
        raise NotImplementedError

    def _ups(self) -> list[Any]:
        """The modules that make the hidden activation, Linears or modules in their place."""
        raise NotImplementedError

    def _hidden(self, x: coda.Value) -> Any:
        """The hidden activation of a value."""
        raise NotImplementedError


class GatedMLP(_FeedForward):
    """Gated feed-forward layer.

    y = (activation(x @ gate) * (x @ up)) @ down [+ residual]

    Gate and up are stored together as `gate_up` (D, 2, F), the shape TransformerEngine gives `wi_kernel`: seen as
    (D, 2F) without a copy, it is one product, whose epilogue multiplies the halves and stores half the width.
    A module in its place, as an nnx.LoRALinear, is called with x and returns (..., 2F), the gate's columns first; as
    its kernel, gate_up is `gate_up.reshape(D, 2 * F)`. With separate_gate_up they are two Linears, `gate` and `up`, as
    other libraries keep them, and still one product: their kernels are concatenated where they are cast.
    `split_kernel` gives the (D, F) kernels in either form.

    Args:
      in_features: D.
      hidden_features: F.
      activation: applied to the gate; a function, or its name: see `flax_layers.activation`.
      separate_gate_up: whether gate and up have kernels of their own.
      dtype: compute dtype; default the promotion of input and kernels.
      param_dtype: storage dtype of `gate_up` (D, 2, F), or `gate.kernel` and `up.kernel` (D, F), and `down.kernel`
        (F, D).
      fp8: a `coda.fp8.Recipe` by which the products train in 8 bits; default in the compute dtype.
      kernel_init: initialiser of all; it sees gate_up as (D, 2F), and a sharding that it carries is that of (D, F).
      rngs: source of keys.

    A mesh may shard F: each device has its shards of gate and of up.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: str | Activation = "silu",
        separate_gate_up: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        fp8: coda.fp8.Recipe | None = None,
        rngs: nnx.Rngs,
    ):
        linear = partial(Linear, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, fp8=fp8, rngs=rngs)
        if separate_gate_up:
            self.gate: Any = linear(in_features, hidden_features)
            self.up: Any = linear(in_features, hidden_features)
        else:
            gate_up = kernel_init(rngs.params(), (in_features, 2 * hidden_features), param_dtype)
            self.gate_up: Any = nnx.Param(_paired(gate_up))
        self.gate_up_history = nnx.data(None) if separate_gate_up else history_of(fp8)
        self.down = linear(hidden_features, in_features)
        name_parameters(self)
        self.separate_gate_up = separate_gate_up
        if isinstance(activation, coda.gated):
            raise TypeError(f"GatedMLP: {activation=}; it must be a function of the gate, by which up is multiplied")
        self.activation = activation_of(activation)
        self.dtype, self.fp8 = dtype, fp8

    def split_kernel(self) -> list[jax.Array]:
        """The kernels of the gate and of what it gates, (D, F) each."""
        if not self.separate_gate_up:
            if isinstance(self.gate_up, nnx.Module):
                raise TypeError(f"gate_up is a {type(self.gate_up).__name__}, which has no kernels (D, F) to give")
            return [self.gate_up[...][:, 0], self.gate_up[...][:, 1]]
        for name, layer in (("gate", self.gate), ("up", self.up)):
            if not is_linear(layer):
                raise TypeError(f"{name} is a {type(layer).__name__} in the place of a Linear: no kernel to give")
        return [self.gate.kernel[...], self.up.kernel[...]]

    def _in_block(self) -> GatedMLP:
        """The layer as its block reads it: kernels of gate and up are one, (D, 2, F)."""
        if not self.separate_gate_up or not is_linear(self.gate, self.up):
            return self
        layer: GatedMLP = nnx.merge(*nnx.split(self))
        layer.gate_up = nnx.Param(jnp.stack(with_same_sharding(self.split_kernel(), None), axis=1))
        layer.gate_up_history = layer.gate.fp8_history
        layer.gate = layer.up = nnx.data(None)
        layer.separate_gate_up = False
        return layer

    def _activated(self, zs: list[jax.Array]) -> jax.Array:
        gate, up = zs if self.separate_gate_up else jnp.moveaxis(split_halves(zs[0]), -2, 0)
        return self.activation(gate) * up

    def _ups(self) -> list[Any]:
        if self.separate_gate_up:
            return [self.gate, self.up]
        return [self.gate_up] if isinstance(self.gate_up, nnx.Module) else []

    def _hidden(self, x: coda.Value) -> Any:
        gate_up = (self.gate, self.up) if self.separate_gate_up else self.gate_up
        return on_values.gated(x, gate_up, self.activation, self.fp8, self.gate_up_history)


class MLP(_FeedForward):
    """Feed-forward layer without a gate.

    y = activation(x @ up + up_bias) @ down + down_bias [+ residual]

    Args:
      in_features: D.
      hidden_features: F.
      activation: a function, or its name: see `flax_layers.activation`.
      use_bias: whether both maps have a bias.
      dtype: compute dtype; default the promotion of input and kernels.
      param_dtype: storage dtype of `up.kernel` (D, F), `down.kernel` (F, D) and their biases.
      kernel_init: initialiser of both kernels.
      fp8: a `coda.fp8.Recipe` by which the products train in 8 bits; default in the compute dtype.
      rngs: source of keys.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: str | Activation = "gelu",
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        fp8: coda.fp8.Recipe | None = None,
        rngs: nnx.Rngs,
    ):
        linear = partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            fp8=fp8,
            rngs=rngs,
        )
        self.up = linear(in_features, hidden_features)
        self.down = linear(hidden_features, in_features)
        name_parameters(self)
        self.activation = activation_of(activation)
        self.dtype = dtype

    def _activated(self, zs: list[jax.Array]) -> jax.Array:
        return self.activation(zs[0])

    def _ups(self) -> list[Any]:
        return [self.up]

    def _hidden(self, x: coda.Value) -> Any:
        return on_values.activated(x, self.up, self.activation)


def _lines(layer: _FeedForward, x: Any) -> Any:
    return layer._on_value(x)


def _hidden_lines(layer: _FeedForward, x: Any) -> Any:
    return on_values.hidden(layer._hidden(x))


def _paired(kernel: Any) -> Any:
    """An initialiser's (D, 2F) as (D, 2, F): an array, or with the sharding of a partitioned initialiser."""
    if not isinstance(kernel, nnx.VariableMetadata):
        return kernel.reshape(kernel.shape[0], 2, -1)
    metadata = dict(kernel.metadata)
    if metadata.get("out_sharding"):
        inputs, features = (*metadata["out_sharding"], None)[:2]
        metadata["out_sharding"] = (inputs, None, features)
    return dataclasses.replace(kernel, raw_value=_paired(kernel.raw_value), metadata=metadata)
