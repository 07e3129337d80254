"""Language models made of the layers."""

from flax_layers.models.cohere import Cohere, CohereConfig
from flax_layers.models.gemma import Gemma, GemmaConfig
from flax_layers.models.gpt2 import GPT2, GPT2Config, gpt2_block
from flax_layers.models.gpt_oss import GptOss, GptOssConfig
from flax_layers.models.llama import Llama, LlamaBlock, LlamaConfig
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.olmo2 import Olmo2, Olmo2Config

_CLASSES: dict[type, type[Llama] | type[GPT2]] = {
    GPT2Config: GPT2,
    GemmaConfig: Gemma,
    Olmo2Config: Olmo2,
    CohereConfig: Cohere,
    GptOssConfig: GptOss,
}


def model_class(config: LlamaConfig | GPT2Config) -> type[Llama] | type[GPT2]:
    """The class of models of a configuration, as `config_from_hf` makes one: model_class(config)(config, rngs=...)."""
    return next((model for cls, model in _CLASSES.items() if isinstance(config, cls)), Llama)


__all__ = [
    "GPT2",
    "Cohere",
    "CohereConfig",
    "GPT2Config",
    "Gemma",
    "GemmaConfig",
    "GptOss",
    "GptOssConfig",
    "Llama",
    "LlamaBlock",
    "LlamaConfig",
    "MoEConfig",
    "Olmo2",
    "Olmo2Config",
    "gpt2_block",
    "model_class",
]
