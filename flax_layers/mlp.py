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
from flax_layers.activation import Activation, activation_of
from flax_layers.linear import Linear, Residual, Sum, default_kernel_init, is_linear, joined, mapped, project, unchained


class GatedMLP(nnx.Module):
    """Gated feed-forward layer.

    y = (activation(x @ gate) * (x @ up)) @ down [+ residual]

    Gate and up are stored together as `gate_up` (D, 2, F), the shape TransformerEngine gives `wi_kernel`: seen as
    (D, 2F) without a copy, it is one product, whose two halves meet in the epilogue; the result leaves at half width.
    `gate` and `up` give the (D, F) kernels of other checkpoints. A module in its place, as an nnx.LoRALinear, is called
    with x and returns (..., 2F), the gate's columns first; as its kernel, gate_up is `gate_up.reshape(D, 2 * F)`.

    Args:
      in_features: D.
      hidden_features: F.
      activation: applied to the gate; a function, or its name: see `flax_layers.activation`.
      dtype: compute dtype; default the promotion of input and kernels.
      param_dtype: storage dtype of `gate_up` (D, 2, F) and `down.kernel` (F, D).
      kernel_init: initialiser of both; it sees gate_up as (D, 2F), and a sharding that it carries is that of (D, F).
      rngs: source of keys.

    A mesh may cut F: each device has its share of gate and of up.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation: str | Activation = "silu",
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        gate_up = kernel_init(rngs.params(), (in_features, 2 * hidden_features), param_dtype)
        self.gate_up: Any = nnx.Param(_paired(gate_up))
        self.down = Linear(
            hidden_features, in_features, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )
        self.activation = activation_of(activation)
        self.dtype = dtype

    @property
    def gate(self) -> jax.Array:
        """The gate's kernel, (D, F)."""
        return self._gate_up()[:, 0]

    @property
    def up(self) -> jax.Array:
        """The kernel of the gated half, (D, F)."""
        return self._gate_up()[:, 1]

    @overload
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: Stream | Literal[True]) -> Stream: ...
    @overload
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: jax.Array | None = None) -> jax.Array: ...
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: Residual = None) -> jax.Array | Stream:
        """Applies the layer to x (..., D); `residual` as in Linear.

        Where x is a norm that is not applied yet, all of it is the chain `coda_jax.mlp`.
        """
        if isinstance(self.gate_up, nnx.Module):
            gate, up = jnp.split(mapped(self.gate_up, x), 2, axis=-1)
            return joined(self.down, self.activation(gate) * up, Sum.of(residual, x))
        activation = coda.gated(self.activation)
        return feed_forward(x, self.gate_up[...], None, self.down, residual, activation=activation, dtype=self.dtype)

    def _gate_up(self) -> jax.Array:
        if isinstance(self.gate_up, nnx.Module):
            raise TypeError(f"gate_up is a {type(self.gate_up).__name__}, which has no kernels (D, F) to give")
        kernels: jax.Array = self.gate_up[...]
        return kernels


class MLP(nnx.Module):
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
        rngs: nnx.Rngs,
    ):
        linear = partial(
            Linear, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )
        self.up = linear(in_features, hidden_features)
        self.down = linear(hidden_features, in_features)
        self.activation = activation_of(activation)
        self.dtype = dtype

    @overload
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: Stream | Literal[True]) -> Stream: ...
    @overload
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: jax.Array | None = None) -> jax.Array: ...
    def __call__(self, x: jax.Array | Stream | DeferredNorm, *, residual: Residual = None) -> jax.Array | Stream:
        """Applies the layer to x (..., D); `residual` as in Linear.

        Where x is a norm that is not applied yet, all of it is the chain `coda_jax.mlp`.
        """
        if not is_linear(self.up):
            return joined(self.down, self.activation(mapped(self.up, x)), Sum.of(residual, x))
        up_bias = None if self.up.bias is None else self.up.bias[...]
        up = self.up.kernel[...]
        return feed_forward(x, up, up_bias, self.down, residual, activation=self.activation, dtype=self.dtype)


def feed_forward(
    x: jax.Array | Stream | DeferredNorm,
    up: jax.Array,
    up_bias: jax.Array | None,
    down: Any,
    residual: Residual,
    *,
    activation: Activation,
    dtype: DTypeLike | None,
) -> Any:
    """down(activation(x @ up + up_bias)) [+ residual], one chain where x is a norm and down a Linear."""
    target = Sum.of(residual, x)
    if isinstance(x, DeferredNorm) and is_linear(down):
        y = coda.mlp(
            x,
            up,
            down.kernel[...],
            up_bias=up_bias,
            down_bias=None if down.bias is None else down.bias[...],
            activation=activation,
            residual=True if residual is True else False if target is None else target.array,
            dtype=dtype,
        )
        return y if target is not None and target.is_stream else y.x

    def activated(acc: jax.Array, *bias: jax.Array) -> jax.Array:
        return activation(acc + bias[0] if bias else acc)

    hidden = project(x, up, *(() if up_bias is None else (up_bias,)), epilogue=activated, dtype=dtype)
    if isinstance(x, DeferredNorm):
        hidden = unchained(hidden, down)
    return joined(down, hidden, target)


def _paired(kernel: Any) -> Any:
    """An initialiser's (D, 2F) as (D, 2, F), an array or, from a partitioned initialiser, with its sharding."""
    if not isinstance(kernel, nnx.VariableMetadata):
        return kernel.reshape(kernel.shape[0], 2, -1)
    metadata = dict(kernel.metadata)
    if metadata.get("out_sharding"):
        inputs, features = (*metadata["out_sharding"], None)[:2]
        metadata["out_sharding"] = (inputs, None, features)
    return dataclasses.replace(kernel, raw_value=_paired(kernel.raw_value), metadata=metadata)
