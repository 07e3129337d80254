"""Feed-forward layers, gated and plain."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import coda_jax as coda
from coda_jax.extend import both_halves, constrained
from flax_layers.activation import Activation, activation_of
from flax_layers.adapters import apply
from flax_layers.axis_metadata import name_parameters
from flax_layers.fp8 import history_of
from flax_layers.fused import fused
from flax_layers.linear import Linear, default_kernel_init, is_linear, product
from flax_layers.remat import named
from flax_layers.sharding import activation_spec, constrain

_HIDDEN = ("batch", None, "mlp")
_HIDDEN_NAME = "mlpwi"  # of `flax_layers.remat`


class GatedMLP(nnx.Module):
    """Gated feed-forward layer.

    y = (activation(x @ gate) * (x @ up)) @ down

    Gate and up are stored together as `gate_up` (D, 2, F), the shape TransformerEngine gives `wi_kernel`: seen as
    (D, 2F) without a copy, it is one product, whose epilogue multiplies the halves and stores half the width.
    A module in its place, as an nnx.LoRALinear, is called with x and returns (..., 2F), the gate's columns first; as
    its kernel, gate_up is `gate_up.reshape(D, 2 * F)`. With separate_gate_up they are two Linears, `gate` and `up`, as
    other libraries keep them.
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

    @fused
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x (..., D); returns (..., D) in the compute dtype.

        Raises:
          ValueError: x of another width.
        """
        gate, up = self._gate_and_up(x)
        return apply(self.down, _stored(self.activation(_wide(gate)) * _wide(up), gate.dtype))

    def _gate_and_up(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.separate_gate_up:
            gate, up = (constrain(apply(layer, x), *_HIDDEN) for layer in (self.gate, self.up))
            return named(gate, _HIDDEN_NAME), named(up, _HIDDEN_NAME)
        if isinstance(self.gate_up, nnx.Module):
            gate, up = both_halves(named(apply(self.gate_up, x), _HIDDEN_NAME))
            return constrain(gate, *_HIDDEN), constrain(up, *_HIDDEN)
        z = product(x, self.gate_up[...], dtype=self.dtype, fp8=self.fp8, history=self.gate_up_history)
        z = named(_with_sharded_halves(z), _HIDDEN_NAME)
        return z[..., 0, :], z[..., 1, :]


class MLP(nnx.Module):
    """Feed-forward layer without a gate.

    y = activation(x @ up + up_bias) @ down + down_bias

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

    @fused
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to x (..., D); returns (..., D) in the compute dtype.

        Raises:
          ValueError: x of another width.
        """
        z = named(constrain(apply(self.up, x), *_HIDDEN), _HIDDEN_NAME)
        return apply(self.down, _stored(self.activation(_wide(z)), z.dtype))


def _wide(z: jax.Array) -> jax.Array:
    return z.astype(jnp.promote_types(z.dtype, jnp.float32))


def _stored(hidden: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The hidden activation (..., F) in the compute dtype, sharded by the rules in force."""
    return constrain(hidden.astype(dtype), *_HIDDEN)


def _with_sharded_halves(z: jax.Array) -> jax.Array:
    """The product (..., 2, F), with F sharded by the rules in force."""
    spec = activation_spec((*z.shape[:-2], z.shape[-1]), *_HIDDEN)
    return constrained(z, None if spec is None else jax.P(*spec[:-1], None, spec[-1]))


def _paired(kernel: Any) -> Any:
    """An initialiser's (D, 2F) as (D, 2, F): an array, or with the sharding of a partitioned initialiser."""
    if not isinstance(kernel, nnx.VariableMetadata):
        return kernel.reshape(kernel.shape[0], 2, -1)
    metadata = dict(kernel.metadata)
    if metadata.get("out_sharding"):
        inputs, features = (*metadata["out_sharding"], None)[:2]
        metadata["out_sharding"] = (inputs, None, features)
    return dataclasses.replace(kernel, raw_value=_paired(kernel.raw_value), metadata=metadata)
