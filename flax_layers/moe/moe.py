"""The mixture of experts as a layer, in the place of a block's feed-forward layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from flax_layers.activation import Activation
from flax_layers.axis_metadata import name_parameters
from flax_layers.config_checks import is_number
from flax_layers.fused import fused
from flax_layers.linear import Linear, default_kernel_init
from flax_layers.mlp import GatedMLP
from flax_layers.moe.balancing import router_statistics
from flax_layers.moe.expert_parallel import DOWN, DOWN_BIAS, GATE_UP, GATE_UP_BIAS, expert_parallel
from flax_layers.moe.experts import Experts
from flax_layers.moe.router import Router, Scoring


class MoE(nnx.Module):
    """Mixture of experts: each token's feed-forward layer is a weighted sum of k of E experts. No token is dropped
    without a capacity_factor.

    y = sum over j of weight[j] * expert[j](x) [+ [sigmoid(x @ shared_gate)] * shared(x)]

    Rows are sorted by expert, computed, and returned by the inverse permutation and a sum of k in float32: no scatter
    with additions, in either pass. `router` is a `Router`, `experts`
    an `Experts`, `shared` a GatedMLP that every token goes through, as Qwen2-MoE and DeepSeek have it. On a mesh rows
    are sent to the devices of their experts, as the rules in force say: see `flax_layers.moe.expert_parallel`.

    Args:
      in_features: D.
      hidden_features: F of each expert.
      num_experts: E.
      experts_per_token: k.
      activation: applied to the gates; a function, or its name: see `flax_layers.activation`; or as in Experts.
      scoring, normalized, scaling, groups, groups_kept: as in Router.
      use_balance_bias: whether the router has a bias for the choice alone: see `update_balance_bias`.
      use_logit_bias: as in Router.
      use_bias: whether the experts have biases, as in Experts.
      shared_features: F of the shared expert; default there is none.
      use_shared_gate: whether each token's shared expert is multiplied by a sigmoid, `shared_gate.kernel` (D, 1).
      capacity_factor: how many rows a device may receive over a mesh axis that shards the experts, in multiples of what
        it receives if all are chosen equally often; others are dropped, and counted. Default is room for all.
      dtype: compute dtype of the experts; default the promotion of input and parameters.
      param_dtype: storage dtype of `router.kernel` (D, E), `experts.gate_up` (E, D, 2, F), `experts.down` (E, F, D) and
        of the shared expert.
      kernel_init: initialiser of all; it sees one expert's kernels, as in Experts.
      rngs: source of keys.

    Raises:
      ValueError: as Router, a shared gate without a shared expert, or a capacity_factor that is not positive.
      TypeError: a shared expert beside an activation of gate and up.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        num_experts: int,
        experts_per_token: int,
        *,
        activation: str | Activation = "silu",
        scoring: Scoring = "softmax",
        normalized: bool = True,
        scaling: float = 1.0,
        groups: int | None = None,
        groups_kept: int | None = None,
        use_balance_bias: bool = False,
        use_logit_bias: bool = False,
        use_bias: bool = False,
        shared_features: int | None = None,
        use_shared_gate: bool = False,
        capacity_factor: float | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: nnx.Initializer = default_kernel_init,
        rngs: nnx.Rngs,
    ):
        if use_shared_gate and shared_features is None:
            raise ValueError(f"{use_shared_gate=} wants a shared expert: give shared_features")
        if capacity_factor is not None and not (is_number(capacity_factor) and capacity_factor > 0):
            raise ValueError(f"{capacity_factor=}; it must be positive, a number, or None for a place for all rows")
        self.capacity_factor = capacity_factor
        options: dict[str, Any] = {"param_dtype": param_dtype, "kernel_init": kernel_init, "rngs": rngs}
        self.router = Router(
            in_features,
            num_experts,
            experts_per_token,
            scoring=scoring,
            normalized=normalized,
            scaling=scaling,
            groups=groups,
            groups_kept=groups_kept,
            use_bias=use_balance_bias,
            use_logit_bias=use_logit_bias,
            **options,
        )
        self.experts = Experts(
            in_features,
            hidden_features,
            num_experts,
            activation=activation,
            use_bias=use_bias,
            dtype=dtype,
            **options,
        )
        self.shared: Any = nnx.data(None)
        if shared_features is not None:
            self.shared = GatedMLP(in_features, shared_features, activation=activation, dtype=dtype, **options)
        self.shared_gate: Any = Linear(in_features, 1, dtype=dtype, **options) if use_shared_gate else nnx.data(None)
        name_parameters(self)

    @fused
    def __call__(
        self,
        x: jax.Array,
        *,
        statistics: bool = False,
        token_mask: jax.Array | None = None,
        dtype: DTypeLike | None = None,
    ) -> Any:
        """Applies the layer to x (..., D).

        Args:
          x: (..., D).
          statistics: whether to return the router's statistics too.
          token_mask: (...,) bool, False for tokens that the statistics leave out, as padding. They are computed all the
            same.
          dtype: of the result; default the compute dtype.

        Returns:
          (..., D); with `statistics` a pair of it and of `RouterStatistics`.

        Raises:
          ValueError: x or token_mask of another shape.
        """
        features = self.router.kernel.shape[0]
        if x.ndim < 1 or x.shape[-1] != features:
            raise ValueError(f"MoE: x has shape {x.shape}; it must be (..., {features})")
        if token_mask is not None and token_mask.shape != x.shape[:-1]:
            raise ValueError(f"token_mask has shape {token_mask.shape}; of x {x.shape} it must be {x.shape[:-1]}")
        routing = self.router(x)
        compute_dtype = self.experts.dtype or jnp.result_type(x, self.experts.gate_up[...])
        wide = jnp.promote_types(compute_dtype, jnp.float32)
        parameters = self.experts.parameters()
        y: Any = expert_parallel(
            self.experts.apply,
            x.astype(compute_dtype),
            routing.ids,
            routing.weights,
            parameters,
            axes=(GATE_UP, DOWN, GATE_UP_BIAS, DOWN_BIAS)[: len(parameters)],
            capacity_factor=self.capacity_factor,
            compute_dtype=compute_dtype,
            dtype=wide,
        )
        y, dropped = (y, 0) if self.capacity_factor is None else y
        if self.shared is not None:
            y = y + self._shared(x, wide)
        y = y.astype(dtype or compute_dtype)
        return (y, router_statistics(routing, token_mask, dropped)) if statistics else y

    def _shared(self, x: jax.Array, wide: DTypeLike) -> jax.Array:
        """The shared expert's term of the sum for x (..., D), of the dtype `wide`."""
        rows = x if x.ndim > 1 else x[None]
        y: jax.Array = self.shared(rows).astype(wide)
        if self.shared_gate is not None:
            y = jax.nn.sigmoid(self.shared_gate(rows).astype(wide)) * y
        return y.reshape(x.shape)
