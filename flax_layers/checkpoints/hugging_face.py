"""Parameters of a Llama, a Qwen3 or a GPT-2 from and to Hugging Face's checkpoints."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from flax import nnx

from flax_layers.checkpoints.hf_config import config_from_hf, config_to_hf
from flax_layers.checkpoints.hf_names import entries
from flax_layers.checkpoints.placement import Shardings, wait_for_all_processes
from flax_layers.checkpoints.safetensors_files import Stored, stored_in, write
from flax_layers.checkpoints.table import arrays_of, check, fill, types_of
from flax_layers.models.gpt2 import GPT2, GPT2Config
from flax_layers.models.llama import Llama, LlamaConfig

# What checkpoints hold beside parameters: rotary frequencies, causal masks.
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


@overload
def from_hf(
    state_dict: Mapping[str, Any], config: LlamaConfig, *, shardings: Shardings = None, **options: Any
) -> Llama: ...
@overload
def from_hf(
    state_dict: Mapping[str, Any], config: GPT2Config, *, shardings: Shardings = None, **options: Any
) -> GPT2: ...
def from_hf(
    state_dict: Mapping[str, Any],
    config: LlamaConfig | GPT2Config,
    *,
    shardings: Shardings = None,
    **options: Any,
) -> Llama | GPT2:
    """A model with the parameters of a Hugging Face LlamaForCausalLM, Qwen3ForCausalLM or GPT2LMHeadModel.

    `load_hf_folder` reads config and arrays from a folder.

    Args:
      state_dict: name -> array, in the shapes that `transformers` gives them; of any floating dtype. GPT-2's names may
        lack the leading "transformer.".
      config: sizes; those of the arrays must agree.
      shardings: where the parameters lie, on a mesh say: a jax.sharding.Sharding for all, a function
        f(path, leaf) -> Sharding, or an nnx.State or nested dictionaries of them; default the default device. Of an
        array no more is read at once than what a device holds of its parameter.
      **options: of `Llama` or `GPT2`: dtype, param_dtype, and Llama's scan_layers, remat and remat_layers. Stacked
        layers are filled directly.

    Raises:
      ValueError: names that are missing or unknown, a shape that does not agree with `config`, or shardings that do not
        divide a parameter or are not those of all parameters.
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
    abstract = nnx.eval_shape(lambda: cls(config, **options, rngs=nnx.Rngs(0)))
    model: Llama | GPT2 = fill(abstract, table, arrays, shardings)
    return model


def to_hf(model: Llama | GPT2 | nnx.State, config: LlamaConfig | GPT2Config) -> dict[str, np.ndarray]:
    """The inverse of `from_hf`: name -> array in the parameters' own dtype, all in the host's memory.

    Args:
      model: a model, on a mesh too; one that has several processes wants this call in each of them. Or a state
        with its structure, as a gradient is. Its layers may be stacked for a scan.
      config: its sizes.
    """
    # Files are written from memory as it lies: a transposed view would be written untransposed.
    return {part.name: np.ascontiguousarray(array) for part, array in arrays_of(model, entries(config))}


def load_hf_folder(path: str | Path, **options: Any) -> Llama | GPT2:
    """The model in a folder that `save_pretrained` of `transformers` wrote: config.json and safetensors files.

    Arrays are read one parameter at a time: beside the model the host's memory holds no more than that. With shardings
    each device's part is read by itself and put there, so that neither the host nor a device holds the whole model;
    each process reads the parts of its own devices.

        load_hf_folder(path, shardings=NamedSharding(mesh, P("fsdp")), dtype=jnp.bfloat16)

    Args:
      path: the folder, with model.safetensors, or model.safetensors.index.json and the files that it names.
      **options: as in `from_hf`: shardings, and options of the model.

    Raises:
      FileNotFoundError: a folder without these files.
      ImportError: without the package safetensors, which the extra `hf` brings.
      ValueError: as `from_hf`, or a config.json of another kind of model.
    """
    path = Path(path)
    config = config_from_hf(json.loads((path / _CONFIG).read_text()))
    arrays: dict[str, Stored] = {}
    for file in _files(path):
        if not (path / file).exists():
            raise FileNotFoundError(f"{path} has no {file}; its parameters must be in safetensors files")
        arrays |= stored_in(path / file)
    return from_hf(arrays, config, **options)


def save_hf_folder(model: Llama | GPT2, path: str | Path) -> None:
    """Writes a folder that `from_pretrained` of `transformers` and `load_hf_folder` read.

    All is written into a hidden folder first. It is then renamed, so that the new folder is whole or not there; into an
    existing folder its files are moved one by one, the parameters first. Other files there, as a tokenizer's, stay, but
    for parameters in several files, which are removed with their index: they are the former model's.

    Parameters are written one at a time, those of stacked layers a layer at a time: the host's memory holds no more
    than that beside the model. From a mesh each is gathered alone. Where the mesh has several processes, all of them
    call this, the first one writes, and all return when the folder is there.

    Raises:
      ValueError: a sliding window, or no rotary embedding, which these models of `transformers` do not have.
    """
    settings, table = config_to_hf(model.config), entries(model.config)
    types = {part.name: (part.shape, dtype) for part, dtype in types_of(model, table)}
    settings["torch_dtype"] = next(iter(types.values()))[1].name
    arrays = (array for _, array in arrays_of(model, table, only_first_process=True))
    if jax.process_index():
        for _ in arrays:  # helps to gather them
            raise AssertionError("the first process alone gets arrays")
    else:
        _write_folder(Path(path).resolve(), settings, types, arrays)
    wait_for_all_processes("save_hf_folder")


def _write_folder(
    path: Path,
    settings: dict[str, Any],
    types: dict[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterator[np.ndarray],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # On the file system where it is to lie: only there a renaming is one step.
    made = (path if path.exists() else path.parent) / f".{path.name}.{uuid.uuid4().hex}"
    made.mkdir()
    try:
        write(made / _WEIGHTS, types, arrays)
        (made / _CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        if made.parent != path:
            made.rename(path)
            return
        former = _files(path) if (path / _INDEX).exists() else []
        (made / _WEIGHTS).replace(path / _WEIGHTS)
        (path / _INDEX).unlink(missing_ok=True)
        (made / _CONFIG).replace(path / _CONFIG)
        for file in former:
            if file != _WEIGHTS:
                (path / file).unlink(missing_ok=True)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _files(path: Path) -> list[str]:
    """Names of the files with the parameters in a folder."""
    if not (path / _INDEX).exists():
        return [_WEIGHTS]
    return sorted(set(json.loads((path / _INDEX).read_text())["weight_map"].values()))
