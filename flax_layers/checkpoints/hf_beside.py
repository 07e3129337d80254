"""Further arrays in Hugging Face's checkpoints than a config's parameters: heads of tied models, buffers."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_layers.attention import rotary_angles
from flax_layers.checkpoints.incoming import are_equal, readable_one
from flax_layers.models.gpt2 import GPT2Config
from flax_layers.models.llama import LlamaConfig
from flax_layers.rope_scaling import turned_columns

_HEAD = "lm_head.weight"
_BFLOAT16_ERROR = 2**-7  # frequencies may have been rounded


def without_buffers(arrays: dict[str, Any], config: LlamaConfig | GPT2Config) -> dict[str, Any]:
    """The arrays without buffers: rotary frequencies, causal masks. They are computed from the config.

    Warns if a buffer is not what the config makes it; transformers does not read it either.
    """
    kept, others = dict(arrays), []
    for name in arrays:
        is_expected = _is_expected(name, arrays[name], config)
        if is_expected is not None:
            del kept[name]
            others += [] if is_expected else [name]
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warnings.warn(
            f"{others[0]}{more} of the checkpoint is not what the config makes it, and is not read, as in "
            "transformers: does the config belong to it, its rope_theta and rope_scaling above all?",
            stacklevel=3,
        )
    return kept


def with_its_head(
    arrays: dict[str, Any], config: LlamaConfig | GPT2Config
) -> tuple[dict[str, Any], LlamaConfig | GPT2Config]:
    """The arrays and the config of a model whose head is tied only if the checkpoint has no other one.

    Warns if the config says tied and the head is not the embedding: it then gets that head, as in transformers.
    """
    embedding = "transformer.wte.weight" if isinstance(config, GPT2Config) else "model.embed_tokens.weight"
    if not config.tie_word_embeddings or _HEAD not in arrays or embedding not in arrays:
        return arrays, config
    head, other = (readable_one(name, arrays[name]) for name in (_HEAD, embedding))
    if are_equal(head, other):
        return {name: array for name, array in arrays.items() if name != _HEAD}, config
    warnings.warn(
        f"the config ties the head to the embedding, and the checkpoint has another {_HEAD}: the model gets it, and "
        "has tie_word_embeddings=False. Set that in the config to silence this.",
        stacklevel=3,
    )
    return arrays, dataclasses.replace(config, tie_word_embeddings=False)


def _is_expected(name: str, array: Any, config: LlamaConfig | GPT2Config) -> bool | None:
    """Whether a buffer is what the config makes it; None for other arrays."""
    shape = tuple(array.shape)
    if isinstance(config, LlamaConfig):
        if not name.endswith("rotary_emb.inv_freq"):
            return None
        size = turned_columns(config.resolved_head_dim, config.partial_rotary_factor)
        if config.rope_theta is None or shape != (size // 2,):
            return False
        cos, sin = rotary_angles(jnp.ones(1), size, config.rope_theta, config.rope_scaling)
        return bool(np.allclose(_numbers(array), np.arctan2(sin, cos)[0], rtol=_BFLOAT16_ERROR, atol=0))
    if re.fullmatch(r"transformer\.h\.\d+\.attn\.masked_bias", name) and shape in ((), (1,)):
        return bool(np.all(_numbers(array) < -1e3))
    if re.fullmatch(r"transformer\.h\.\d+\.attn\.bias", name) and len(shape) == 4 and shape[:2] == (1, 1):
        return bool(np.array_equal(_numbers(array), np.tri(*shape[2:])[None, None]))
    return None


def _numbers(array: Any) -> np.ndarray:
    """All of a small array."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().float()
    return np.asarray(array).astype(np.float32)
