"""Parameters of a Llama, a Qwen3 or a GPT-2 from and to Hugging Face's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import numpy as np
from flax import nnx

from flax_layers.checkpoint import arrays_of, check, fill
from flax_layers.gpt2 import GPT2, GPT2Config
from flax_layers.hf_config import config_from_hf, config_to_hf
from flax_layers.hf_names import entries
from flax_layers.llama import Llama, LlamaConfig

# What checkpoints hold beside parameters: rotary frequencies, causal masks.
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@overload
def from_hf(state_dict: Mapping[str, Any], config: LlamaConfig, **options: Any) -> Llama: ...
@overload
def from_hf(state_dict: Mapping[str, Any], config: GPT2Config, **options: Any) -> GPT2: ...
def from_hf(state_dict: Mapping[str, Any], config: LlamaConfig | GPT2Config, **options: Any) -> Llama | GPT2:
    """A model with the parameters of a Hugging Face LlamaForCausalLM, Qwen3ForCausalLM or GPT2LMHeadModel.

    `load_hf_folder` reads config and arrays from a folder.

    Args:
      state_dict: name -> array, in the shapes that `transformers` gives them; of any floating dtype. GPT-2's names may
        lack the leading "transformer.".
      config: sizes; those of the arrays must agree.
      **options: of `Llama` or `GPT2`: dtype, param_dtype, and Llama's scan_layers, remat and remat_layers. Stacked
        layers are filled directly.

    Raises:
      ValueError: names that are missing or unknown, or a shape that does not agree with `config`.
    """
    if isinstance(config, GPT2Config) and "wte.weight" in state_dict:
        state_dict = {f"transformer.{name}": array for name, array in state_dict.items()}
    # Checkpoints of tied models may hold the head too.
    is_tied = isinstance(config, GPT2Config) or config.tie_word_embeddings
    ignored = (*_BUFFERS, "lm_head.weight") if is_tied else _BUFFERS
    arrays = {name: array for name, array in state_dict.items() if not name.endswith(ignored)}
    table = entries(config)
    hint = "attention_bias gives a LlamaConfig biases, qk_norm QK-norms, and adapters are not supported"
    check(table, arrays, hint)
    cls: Any = GPT2 if isinstance(config, GPT2Config) else Llama
    model: Llama | GPT2 = fill(nnx.eval_shape(lambda: cls(config, **options, rngs=nnx.Rngs(0))), table, arrays)
    return model


def to_hf(model: Llama | GPT2 | nnx.State, config: LlamaConfig | GPT2Config) -> dict[str, np.ndarray]:
    """The inverse of `from_hf`: name -> array in the parameters' own dtype.

    Args:
      model: a model, or a state with its structure, as a gradient is. Its layers may be stacked for a scan.
      config: its sizes.
    """
    # Files are written from memory as it lies: a transposed view would be written untransposed.
    return {part.name: np.ascontiguousarray(array) for part, array in arrays_of(model, entries(config))}


def load_hf_folder(path: str | Path, **options: Any) -> Llama | GPT2:
    """The model in a folder that `save_pretrained` of `transformers` wrote: config.json and safetensors files.

    Args:
      path: the folder, with model.safetensors, or model.safetensors.index.json and the files that it names.
      **options: as in `from_hf`.

    Raises:
      FileNotFoundError: a folder without these files.
      ImportError: without the package safetensors, which the extra `hf` brings.
      ValueError: as `from_hf`, or a config.json of another kind of model.
    """
    path = Path(path)
    config = config_from_hf(json.loads((path / "config.json").read_text()))
    if (path / _INDEX).exists():
        files = sorted(set(json.loads((path / _INDEX).read_text())["weight_map"].values()))
    else:
        files = [_WEIGHTS]
    arrays: dict[str, np.ndarray] = {}
    for file in files:
        if not (path / file).exists():
            raise FileNotFoundError(f"{path} has no {file}; its parameters must be in safetensors files")
        arrays |= _safetensors().load_file(path / file)
    return from_hf(arrays, config, **options)


def save_hf_folder(model: Llama | GPT2, path: str | Path) -> None:
    """Writes a folder that `from_pretrained` of `transformers` and `load_hf_folder` read.

    Raises:
      ImportError: without the package safetensors, which the extra `hf` brings.
      ValueError: a sliding window, or no rotary embedding, which these models of `transformers` do not have.
    """
    safetensors, path = _safetensors(), Path(path)
    settings = config_to_hf(model.config)
    arrays = to_hf(model, model.config)
    path.mkdir(parents=True, exist_ok=True)
    settings["torch_dtype"] = next(iter(arrays.values())).dtype.name
    safetensors.save_file(arrays, path / _WEIGHTS, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError("Hugging Face folders need the package safetensors: pip install 'coda-jax[hf]'") from None
    return safetensors.numpy
