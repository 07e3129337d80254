"""OLMo 2: norms after sub-layers, before the sum, and over all heads of queries and of keys."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from flax_layers.block_orders import NormBeforeSumBlock
from flax_layers.models.llama import Llama
from flax_layers.models.llama_config import LlamaConfig, check_unused
from flax_layers.models.parts import attention_of, gated_mlp_of


@dataclasses.dataclass(frozen=True)
class Olmo2Config(LlamaConfig):
    """Sizes of an OLMo 2, with the names and defaults of Hugging Face's Olmo2Config.

    Raises:
      ValueError: a field out of its range.
    """

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    qk_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_unused(self, "residual_multiplier")


class Olmo2(Llama):
    """OLMo 2: a norm after each sub-layer and none before it; queries and keys are normalised over all heads.

    Arguments as of `Llama`, with an Olmo2Config. From arXiv 2501.00656.
    """

    _config_class = Olmo2Config

    def _block(self, config: Olmo2Config, layer: int, **options: Any) -> NormBeforeSumBlock:
        norm = partial(self._norm, config, param_dtype=options["param_dtype"], rngs=options["rngs"])
        attention = attention_of(config, layer, **{**options, "qk_norm": config.qk_norm and "width"})
        return NormBeforeSumBlock(attention, norm(), gated_mlp_of(config, **options), norm())
