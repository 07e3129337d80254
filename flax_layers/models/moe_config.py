"""Sizes of language models with mixtures of experts."""

from __future__ import annotations

import dataclasses

from flax_layers.config_checks import check_counts, check_flags, check_not_negative, check_positive
from flax_layers.models.llama_config import LlamaConfig
from flax_layers.moe.router import Scoring, check_router


@dataclasses.dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """Sizes of a Mixtral, a Qwen3-MoE or another Llama with experts, with Hugging Face's names.

    `Llama` takes it: the feed-forward layer of a layer with experts is a `MoE`. Layer i has experts if i is not among
    mlp_only_layers and i + 1 is a multiple of decoder_sparse_step. intermediate_size is the F of the other layers and,
    unless moe_intermediate_size says otherwise, of an expert. num_experts is Mixtral's num_local_experts.

    `Llama.loss` adds router_aux_loss_coef times `load_balancing_loss` and router_z_loss_coef times `router_z_loss`.
    scoring_func, norm_topk_prob, routed_scaling_factor, n_group and topk_group are the router's, with DeepSeek-V3's
    names; use_balance_bias balances it without an auxiliary loss. shared_expert_intermediate_size is F of an expert
    that all tokens have, shared_expert_gate whether it has Qwen2-MoE's gate. capacity_factor is `MoE`'s, for meshes.

    Raises:
      ValueError: a field out of its range.
    """

    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    scoring_func: Scoring = "softmax"
    routed_scaling_factor: float = 1.0
    n_group: int | None = None
    topk_group: int | None = None
    use_balance_bias: bool = False
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = False
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
        check_counts(self, "n_group", "topk_group", "shared_expert_intermediate_size")
        check_not_negative(self, "router_aux_loss_coef", "router_z_loss_coef")
        check_positive(self, "routed_scaling_factor", "capacity_factor")
        check_flags(self, "norm_topk_prob", "use_balance_bias", "shared_expert_gate")
        numbers = self.mlp_only_layers
        if not isinstance(numbers, tuple | list) or not all(type(i) is int and i >= 0 for i in numbers):
            raise ValueError(f"MoEConfig: mlp_only_layers={numbers!r}; it must be numbers of layers")
        object.__setattr__(self, "mlp_only_layers", tuple(numbers))
        if self.shared_expert_gate and self.shared_expert_intermediate_size is None:
            raise ValueError("MoEConfig: shared_expert_gate=True wants shared_expert_intermediate_size")
        check_router(self.num_experts, self.num_experts_per_tok, self.scoring_func, self.n_group, self.topk_group)

    @property
    def resolved_moe_intermediate_size(self) -> int:
        """moe_intermediate_size, or its default."""
        return self.moe_intermediate_size or self.intermediate_size

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @classmethod
    def mixtral_8x7b(cls) -> MoEConfig:
        """Mixtral 8x7B."""
        return cls(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=1000000.0,
            num_experts=8,
            num_experts_per_tok=2,
            router_aux_loss_coef=0.02,
        )

    @classmethod
    def qwen3_30b_a3b(cls) -> MoEConfig:
        """Qwen3 30B-A3B."""
        return cls(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            max_position_embeddings=40960,
            rope_theta=1000000.0,
            qk_norm=True,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            router_aux_loss_coef=0.001,
        )
