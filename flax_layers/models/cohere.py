"""Cohere's Command R: attention and the feed-forward layer side by side after one LayerNorm."""

from __future__ import annotations

import dataclasses
from typing import Any

from flax_layers.block_orders import ParallelBlock
from flax_layers.config_checks import check_positive
from flax_layers.models.llama import Llama
from flax_layers.models.llama_config import FULL, LlamaConfig, check_unused
from flax_layers.models.parts import attention_of, gated_mlp_of
from flax_layers.norm import LayerNorm
from flax_layers.rope_scaling import RotaryScaling


@dataclasses.dataclass(frozen=True)
class CohereConfig(LlamaConfig):
    """Sizes of a Command R or a Command R7B, with the names and defaults of Hugging Face's CohereConfig.

    rms_norm_eps is its layer_norm_eps. Logits are multiplied by logit_scale. With layer_types, as a
    Cohere2Config has them, layers with full attention have no rotary embedding.

    Raises:
      ValueError: a field out of its range.
    """

    vocab_size: int = 256000
    hidden_size: int = 8192
    intermediate_size: int = 22528
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    rope_theta: float | None = 500000.0
    tie_word_embeddings: bool = True
    logit_scale: float = 0.0625

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "logit_scale")
        check_unused(self, "residual_multiplier", "logits_scaling")

    def layer_rotary(self, layer: int) -> tuple[float | None, RotaryScaling | None]:
        is_full = self.layer_types is not None and self.layer_types[layer] == FULL
        return (None, None) if is_full else super().layer_rotary(layer)

    @property
    def logits_factor(self) -> float:
        return self.logit_scale


class Cohere(Llama):
    """Command R: a block adds attention and a gated MLP of one LayerNorm, without a bias, to the stream.

    Arguments as of `Llama`, with a CohereConfig.
    """

    _config_class = CohereConfig

    def _block(self, config: CohereConfig, layer: int, **options: Any) -> ParallelBlock:
        norm = self._norm(config, param_dtype=options["param_dtype"], rngs=options["rngs"])
        return ParallelBlock(norm, attention_of(config, layer, **options), gated_mlp_of(config, **options))

    def _norm(self, config: CohereConfig, **options: Any) -> LayerNorm:
        return LayerNorm(config.hidden_size, epsilon=config.rms_norm_eps, use_bias=False, **options)
