"""Where a model's parameters lie in Hugging Face's checkpoints: one table a model, read in both directions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_layers.gpt2 import GPT2Config
from flax_layers.llama import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Entry:
    """One parameter, and the arrays of the checkpoint that lie side by side along its last axis.

    Attributes:
      path: keys of the parameter in the model's state.
      names: of the checkpoint's arrays.
      widths: their sizes along that axis; not needed of a single one.
      transposed: whether the checkpoint has them as (out, in), as torch.nn.Linear stores them.
    """

    path: tuple[str | int, ...]
    names: tuple[str, ...]
    widths: tuple[int, ...] = ()
    transposed: bool = False

    def join(self, arrays: Sequence[Any], shape: tuple[int, ...], concatenate: Any) -> Any:
        """The parameter of the model, in its shape."""
        parts = [x.T for x in arrays] if self.transposed else list(arrays)
        return (parts[0] if len(parts) == 1 else concatenate(parts, axis=-1)).reshape(shape)

    def split(self, parameter: np.ndarray) -> list[np.ndarray]:
        """The arrays of the checkpoint, not copied."""
        if len(self.names) > 1:
            parameter = parameter.reshape(*parameter.shape[:1], -1) if parameter.ndim > 2 else parameter
            parts = np.split(parameter, list(itertools.accumulate(self.widths[:-1])), axis=-1)
        else:
            parts = [parameter]
        return [x.T for x in parts] if self.transposed else parts


def entries(config: LlamaConfig | GPT2Config) -> list[Entry]:
    """All parameters of a model with this config."""
    return _llama(config) if isinstance(config, LlamaConfig) else _gpt2(config)


def _llama(config: LlamaConfig) -> list[Entry]:
    """LlamaForCausalLM and Qwen3ForCausalLM."""
    heads = config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // heads
    keys = (config.num_key_value_heads or heads) * head_dim
    qkv, hidden = (heads * head_dim, keys, keys), config.intermediate_size
    found = [
        Entry(("embed", "embedding"), ("model.embed_tokens.weight",)),
        Entry(("norm", "scale"), ("model.norm.weight",)),
    ]
    if not config.tie_word_embeddings:
        found.append(Entry(("head", "kernel"), ("lm_head.weight",), transposed=True))
    for i in range(config.num_hidden_layers):
        layer, attention, mlp = f"model.layers.{i}", f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        path: tuple[str | int, ...] = ("layers", i)
        projections, out = tuple(f"{attention}.{name}_proj" for name in "qkv"), f"{attention}.o_proj"
        gate_up = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        found += [
            Entry((*path, "attention_norm", "scale"), (f"{layer}.input_layernorm.weight",)),
            Entry((*path, "attention", "qkv", "kernel"), _each(projections, "weight"), qkv, transposed=True),
            Entry((*path, "attention", "out", "kernel"), (f"{out}.weight",), transposed=True),
            Entry((*path, "mlp_norm", "scale"), (f"{layer}.post_attention_layernorm.weight",)),
            Entry((*path, "mlp", "gate_up"), gate_up, (hidden, hidden), transposed=True),
            Entry((*path, "mlp", "down", "kernel"), (f"{mlp}.down_proj.weight",), transposed=True),
        ]
        if config.attention_bias:
            found += [
                Entry((*path, "attention", "qkv", "bias"), _each(projections, "bias"), qkv),
                Entry((*path, "attention", "out", "bias"), (f"{out}.bias",)),
            ]
        if config.qk_norm:
            found += [
                Entry((*path, "attention", f"{x}_norm", "scale"), (f"{attention}.{x}_norm.weight",)) for x in "qk"
            ]
    return found


def _gpt2(config: GPT2Config) -> list[Entry]:
    """GPT2LMHeadModel, whose Conv1D layers store (in, out), query, key and value packed as ours."""
    found = [
        Entry(("embed", "embedding"), ("transformer.wte.weight",)),
        Entry(("position_embed", "embedding"), ("transformer.wpe.weight",)),
        Entry(("norm", "scale"), ("transformer.ln_f.weight",)),
        Entry(("norm", "bias"), ("transformer.ln_f.bias",)),
    ]
    for i in range(config.n_layer):
        modules = [("attention_norm", "ln_1"), ("mlp_norm", "ln_2")]
        for name, theirs in modules:
            found.append(Entry(("layers", i, name, "scale"), (f"transformer.h.{i}.{theirs}.weight",)))
            found.append(Entry(("layers", i, name, "bias"), (f"transformer.h.{i}.{theirs}.bias",)))
        linears = {
            ("attention", "qkv"): "attn.c_attn",
            ("attention", "out"): "attn.c_proj",
            ("mlp", "up"): "mlp.c_fc",
            ("mlp", "down"): "mlp.c_proj",
        }
        for ours, theirs in linears.items():
            found.append(Entry(("layers", i, *ours, "kernel"), (f"transformer.h.{i}.{theirs}.weight",)))
            found.append(Entry(("layers", i, *ours, "bias"), (f"transformer.h.{i}.{theirs}.bias",)))
    return found


def _each(modules: Sequence[str], name: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for module in modules)
