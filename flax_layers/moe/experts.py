"""Gated feed-forward experts: their parameters, and their outputs for rows sorted by expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import coda_jax as coda
from flax_layers.activation import Activation, activation_of
from flax_layers.axis_metadata import parameter
from flax_layers.linear import default_kernel_init
from flax_layers.sharding import keeps_weights


class Experts(nnx.Module):
    """E gated feed-forward layers, each for the rows of its tokens.

    y = row_scale * (activation(x @ gate[e]) * (x @ up[e])) @ down[e]           e the expert of a row

    With biases, gpt-oss's, gate_up_bias[e] is added to x @ gate[e] and x @ up[e], and down_bias[e] before row_scale.

    Args:
      in_features: D.
      hidden_features: F of each expert.
      num_experts: E.
      activation: applied to the gate; a function, or its name: see `flax_layers.activation`. Or
        `coda_jax.gated(function, of_both=True)`, of gate and up.
      use_bias: whether there are biases, `gate_up_bias` (E, 2, F) and `down_bias` (E, D), at first 0.
      dtype: compute dtype; default the promotion of input and parameters.
      param_dtype: storage dtype of `gate_up` (E, D, 2, F) and `down` (E, F, D).
      kernel_init: initialiser of all; it sees one expert's shapes, (D, 2F) and (F, D), and returns an array.
      rngs: source of keys.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        *,
        activation: str | Activation = "silu",
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        def kernels(rows: int, columns: int) -> jax.Array:
            def one(key: jax.Array) -> Any:
                kernel = kernel_init(key, (rows, columns), param_dtype)
                if isinstance(kernel, nnx.VariableMetadata):
                    raise TypeError("Experts: kernel_init has metadata; give one that returns an array, and axis rules")
                return kernel

            return jax.vmap(one)(jax.random.split(rngs.params(), num_experts))

        gate_up = kernels(in_features, 2 * hidden_features)
        gate_up = gate_up.reshape(num_experts, in_features, 2, hidden_features)
        self.gate_up = parameter(gate_up, "expert", "embed", None, "mlp")
        self.down = parameter(kernels(hidden_features, in_features), "expert", ("mlp", "fan_in"), "embed")
        self.gate_up_bias: Any = nnx.data(None)
        self.down_bias: Any = nnx.data(None)
        if use_bias:
            self.gate_up_bias = parameter(
                jnp.zeros((num_experts, 2, hidden_features), param_dtype), "expert", None, "mlp"
            )
            self.down_bias = parameter(jnp.zeros((num_experts, in_features), param_dtype), "expert", "embed")
        self.activation = activation_of(activation)
        self.dtype = dtype

    def __call__(self, rows: jax.Array, row_scale: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """The experts' outputs for rows sorted by expert.

        Args:
          rows: (R, D).
          row_scale: (R,) float32.
          group_sizes: (E,) int32, how many rows each expert has; rows beyond their sum give zeros.

        Returns:
          (R, D) in the compute dtype.
        """
        return self.apply(rows, row_scale, group_sizes, *self.parameters())

    def parameters(self) -> tuple[jax.Array, ...]:
        """The arrays that `apply` takes: gate_up, down, and the biases if there are any."""
        biases = (self.gate_up_bias, self.down_bias) if self.gate_up_bias is not None else ()
        return tuple(x[...] for x in (self.gate_up, self.down, *biases))

    def apply(
        self,
        rows: jax.Array,
        row_scale: jax.Array,
        group_sizes: jax.Array,
        gate_up: jax.Array,
        down: jax.Array,
        gate_up_bias: jax.Array | None = None,
        down_bias: jax.Array | None = None,
    ) -> jax.Array:
        """As a call, with these parameters instead of the module's: a device's experts, or its shard of F."""
        dtype = self.dtype or jnp.result_type(rows, gate_up)
        return coda.expert_mlp(
            rows.astype(dtype),
            gate_up,
            down,
            group_sizes,
            up_bias=gate_up_bias,
            down_bias=down_bias,
            row_scale=row_scale,
            activation=self.activation,
            dtype=dtype,
            keep_weights=keeps_weights(),
        )
