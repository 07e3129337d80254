"""gpt-oss: experts with biases and a gate of both halves, attention with sinks, windows in every second layer."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import coda_jax as coda
from flax_layers.activation import ClippedSwiGLU
from flax_layers.block import TransformerBlock
from flax_layers.config_checks import check_positive
from flax_layers.models.llama import Llama, experts_of
from flax_layers.models.llama_config import FULL, SLIDING, check_unused
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.parts import attention_of
from flax_layers.rope_scaling import RotaryScaling, YarnRopeScaling

_YARN = YarnRopeScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False)


@dataclasses.dataclass(frozen=True)
class GptOssConfig(MoEConfig):
    """Sizes of a gpt-oss, with the names and defaults of Hugging Face's GptOssConfig.

    swiglu_limit and swiglu_alpha are of the experts' gate, `flax_layers.activation.ClippedSwiGLU`. layer_types, by
    default, are "sliding_attention" and "full_attention" in turn.

    Raises:
      ValueError: a field out of its range.
    """

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 150000.0
    rope_scaling: RotaryScaling | None = _YARN
    attention_bias: bool = True
    sliding_window: int | None = 128
    num_experts: int = 128
    num_experts_per_tok: int = 4
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "swiglu_limit", "swiglu_alpha")
        check_unused(self, "residual_multiplier")
        if self.hidden_act != "silu":
            raise ValueError(
                f"GptOssConfig: hidden_act={self.hidden_act!r}; its experts' gate is that of swiglu_limit and "
                "swiglu_alpha, leave 'silu'"
            )
        if self.mlp_only_layers or self.decoder_sparse_step != 1:
            raise ValueError(
                f"GptOssConfig: mlp_only_layers={self.mlp_only_layers!r}, decoder_sparse_step="
                f"{self.decoder_sparse_step!r}; all its layers have experts, leave () and 1"
            )
        if self.layer_types is None and self.sliding_window is not None:
            kinds = tuple(FULL if i % 2 else SLIDING for i in range(self.num_hidden_layers))
            object.__setattr__(self, "layer_types", kinds)

    @classmethod
    def gpt_oss_20b(cls) -> GptOssConfig:
        """gpt-oss-20b."""
        return cls(num_hidden_layers=24, num_experts=32, router_aux_loss_coef=0.9)

    @classmethod
    def gpt_oss_120b(cls) -> GptOssConfig:
        """gpt-oss-120b."""
        return cls(router_aux_loss_coef=0.9)


class GptOss(Llama):
    """gpt-oss: a Llama with mixtures of experts that have biases, and with attention that has sinks.

    Arguments as of `Llama`, with a GptOssConfig. From arXiv 2508.10925.
    """

    _config_class = GptOssConfig

    def _block(self, config: GptOssConfig, layer: int, **options: Any) -> TransformerBlock:
        norm = partial(self._norm, config, param_dtype=options["param_dtype"], rngs=options["rngs"])
        attention = attention_of(config, layer, use_sinks=True, **options)
        gate = coda.gated(ClippedSwiGLU(config.swiglu_limit, config.swiglu_alpha), of_both=True)
        shared = {name: options[name] for name in ("dtype", "param_dtype", "kernel_init", "rngs")}
        experts = experts_of(config, layer, activation=gate, use_bias=True, use_logit_bias=True, **shared)
        assert experts is not None
        return TransformerBlock(norm(), attention, norm(), experts)
