"""Gemma, Gemma 2 and the text model of Gemma 3: norms around sub-layers, with scales learned as distances from 1."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

from flax_layers.attention import Attention
from flax_layers.block import TransformerBlock
from flax_layers.block_orders import SandwichNormBlock
from flax_layers.config_checks import check_flags, check_positive
from flax_layers.mlp import GatedMLP
from flax_layers.models.llama import Llama
from flax_layers.models.llama_config import LlamaConfig, check_unused
from flax_layers.models.parts import attention_of, gated_mlp_of
from flax_layers.norm import RMSNorm
from flax_layers.rope_scaling import RotaryScaling


@dataclasses.dataclass(frozen=True)
class GemmaConfig(LlamaConfig):
    """Sizes of a Gemma, a Gemma 2 or the text model of a Gemma 3, with Hugging Face's names.

    Beside a LlamaConfig's: sandwich_norms says whether there are norms after sub-layers too, as in Gemma 2 and 3.
    query_pre_attn_scalar, default head_dim, is s of scores scaled by 1 / sqrt(s). attn_logit_softcapping and
    final_logit_softcapping bound scores and logits. rope_local_base_freq is Gemma 3's base of the rotary frequencies of
    layers with a sliding window, which are not stretched; default rope_theta. The embedding is multiplied by
    sqrt(hidden_size). Gemma 3 has qk_norm.

    Raises:
      ValueError: a field out of its range.
    """

    hidden_act: str = "gelu_pytorch_tanh"
    head_dim: int | None = 256
    tie_word_embeddings: bool = True
    sandwich_norms: bool = True
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope_local_base_freq: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(self, "sandwich_norms")
        check_positive(self, "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
        check_positive(self, "rope_local_base_freq")
        check_unused(self, "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

    def layer_rotary(self, layer: int) -> tuple[float | None, RotaryScaling | None]:
        theta, scaling = super().layer_rotary(layer)
        is_local = self.rope_local_base_freq is not None and self.layer_window(layer) is not None
        return (self.rope_local_base_freq, None) if is_local and theta is not None else (theta, scaling)

    @property
    def embedding_factor(self) -> float:
        return math.sqrt(self.hidden_size)

    @property
    def score_scale(self) -> float | None:
        return None if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar**-0.5

    @property
    def soft_cap(self) -> float | None:
        return self.final_logit_softcapping


class Gemma(Llama):
    """Gemma: a Llama with scales 1 + w in its norms, and from Gemma 2 on norms after sub-layers too.

    Arguments as of `Llama`, with a GemmaConfig. From arXiv 2403.08295, 2408.00118 and 2503.19786.
    """

    _config_class = GemmaConfig

    def _block(self, config: GemmaConfig, layer: int, **options: Any) -> SandwichNormBlock | TransformerBlock:
        norm = partial(self._norm, config, param_dtype=options["param_dtype"], rngs=options["rngs"])
        attention: Attention = attention_of(
            config, layer, soft_cap=config.attn_logit_softcapping, qk_scale_offset=1.0, **options
        )
        mlp: GatedMLP = gated_mlp_of(config, **options)
        if not config.sandwich_norms:
            return TransformerBlock(norm(), attention, norm(), mlp)
        return SandwichNormBlock(norm(), attention, norm(), norm(), mlp, norm())

    def _norm(self, config: GemmaConfig, **options: Any) -> RMSNorm:
        return RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, scale_offset=1.0, **options)
