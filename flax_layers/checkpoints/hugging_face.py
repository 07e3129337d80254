"""Parameters of a Llama or its kin, or a GPT-2, from and to Hugging Face's checkpoints."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from flax import nnx

from flax_layers.checkpoints.folder import write_folder
from flax_layers.checkpoints.hf_beside import with_its_head, without_buffers
from flax_layers.checkpoints.hf_config import config_from_hf, config_to_hf
from flax_layers.checkpoints.hf_experts import as_in_files, check_dequantised
from flax_layers.checkpoints.hf_files import CONFIG, GENERATION, WEIGHTS, former_files, settings_of, weight_files
from flax_layers.checkpoints.hf_names import entries
from flax_layers.checkpoints.incoming import readable
from flax_layers.checkpoints.placement import Shardings, wait_for_all_processes
from flax_layers.checkpoints.safetensors_files import Stored, stored_in, write
from flax_layers.checkpoints.table import arrays_of, check, check_layers, fill, types_of
from flax_layers.models import model_class
from flax_layers.models.gpt2 import GPT2, GPT2Config
from flax_layers.models.llama import Llama, LlamaConfig
from flax_layers.models.moe_config import MoEConfig
from flax_layers.models.origin import settings_in, with_settings


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
    """A model with the parameters of a Hugging Face LlamaForCausalLM, its kin, or GPT2LMHeadModel.

    Its kin are those of Mistral, Qwen2, Qwen3, Phi-3, Granite and SmolLM3, as Llamas; of Gemma 1 to 3, OLMo 2 and
    Command R, of classes of their own (`flax_layers.models`); and with experts MixtralForCausalLM, Qwen2MoeForCausalLM
    and Qwen3MoeForCausalLM, of a MoEConfig: each expert in an array of its own, as in files, or all in one, as
    transformers 5 has them in memory; and GptOssForCausalLM, dequantised. `load_hf_folder` reads config and arrays from
    a folder.

    Args:
      state_dict: name -> array, of NumPy, JAX or torch, in the shapes that `transformers` gives them; of any floating
        dtype. GPT-2's names may lack the leading "transformer.". Buffers are not read, but compared with the config. A
        model that the config ties gets a head of its own if there is one that is not the embedding, with a warning.
      config: sizes; those of the arrays must agree.
      shardings: of the parameters, as on a mesh: a jax.sharding.Sharding for all, a function
        f(path, leaf) -> Sharding, or an nnx.State or nested dictionaries of them; default the default device. No more
        of an array is read at once than a device's shard of its parameter.
      **options: of the model: dtype, param_dtype, and of all but `GPT2` scan_layers, remat and remat_layers. Stacked
        layers are filled directly.

    Raises:
      TypeError: a model instead of its state_dict, or another kind of config.
      ValueError: names that are missing or unknown, a shape that does not agree with `config`, an array of other than
        floating numbers, or shardings that do not divide a parameter or are not those of all parameters.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"from_hf takes arrays by name, not a {type(state_dict).__name__}: give model.state_dict(), or a folder to "
            "load_hf_folder"
        )
    _check_config(config)
    arrays = dict(state_dict)
    if isinstance(config, GPT2Config) and "wte.weight" in arrays:
        arrays = {name if name == "lm_head.weight" else f"transformer.{name}": x for name, x in arrays.items()}
    arrays, config = with_its_head(without_buffers(arrays, config), config)
    if isinstance(config, MoEConfig):
        check_dequantised(arrays)
    arrays = readable(arrays)
    if isinstance(config, MoEConfig):
        arrays = as_in_files(arrays, config)
    check_layers(config.n_layer if isinstance(config, GPT2Config) else config.num_hidden_layers, arrays)
    table = entries(config)
    hint = (
        "attention_bias and attention_out_bias give a LlamaConfig biases, qk_norm QK-norms; adapters are not supported"
    )
    check(table, arrays, hint)
    cls: Any = model_class(config)
    abstract = nnx.eval_shape(lambda: cls(config, **options, rngs=nnx.Rngs(0)))
    model: Llama | GPT2 = fill(abstract, table, arrays, shardings)
    return model


def to_hf(model: Llama | GPT2 | nnx.State, config: LlamaConfig | GPT2Config) -> dict[str, np.ndarray]:
    """The inverse of `from_hf`: name -> array in the parameters' own dtype, all in the host's memory.

    Each expert has arrays of its own, as in files.

    Args:
      model: a model, on a mesh too; all processes of the mesh must call this. Or a state with its structure, as a
        gradient is. Its layers may be stacked for a scan.
      config: its sizes, as model.config has them.

    Raises:
      TypeError: another kind of config.
      ValueError: parameters for which the config has no place.
    """
    _check_config(config)
    # Files are written from contiguous memory: a transposed view would be written untransposed.
    return {part.name: np.ascontiguousarray(array) for part, array in arrays_of(model, entries(config))}


def load_hf_folder(path: str | Path, *, ignore: Sequence[str] = (), **options: Any) -> Llama | GPT2:
    """The model in a folder that `save_pretrained` of `transformers` wrote: config.json and safetensors files.

    Arrays are read one parameter at a time: beside the model the host's memory holds no more than that. With shardings
    each device's shard is read by itself and put there, so that neither the host nor a device holds the entire model;
    each process reads the shards of its own devices.

        load_hf_folder(path, shardings=NamedSharding(mesh, P("fsdp")), dtype=jnp.bfloat16)

    Args:
      path: the folder, with model.safetensors, or model.safetensors.index.json and the files that it names. Other
        settings in its config.json and generation_config.json are kept with the model: `save_hf_folder` writes them
        again, and `generate` ends at the tokens that end a text there.
      ignore: names of settings in config.json that are not read, as in `config_from_hf`; `save_hf_folder` writes them
        again, except for those that are fields of the config.
      **options: as in `from_hf`: shardings, and options of the model.

    Raises:
      FileNotFoundError, NotADirectoryError: no such folder, as a name on the Hub is none, or one without these files.
      ImportError: without the package safetensors, which the extra `hf` brings.
      ValueError: as `from_hf`, a config.json of another kind of model or with a setting that our models do not
        have, a damaged file, or an index that names files outside of the folder.
    """
    path = Path(path)
    config = config_from_hf(settings_of(path, CONFIG), ignore=ignore)
    if (path / GENERATION).exists():
        origin = with_settings(config.origin, GENERATION, settings_of(path, GENERATION))
        config = dataclasses.replace(config, origin=origin)
    arrays: dict[str, Stored] = {}
    for file in weight_files(path):
        arrays |= stored_in(path / file)
    return from_hf(arrays, config, **options)


def save_hf_folder(model: Llama | GPT2, path: str | Path) -> None:
    """Writes a folder that `from_pretrained` of `transformers` and `load_hf_folder` read.

    Its config.json is the one that the parameters came with, updated with model.config's fields; a
    generation_config.json that they came with is written too.

    Files are written into a hidden folder first, and are on the disk before they take their places, so that a killed
    process leaves either the former files or the new ones. A new folder is renamed as one. In an existing one the file
    of parameters is renamed, if the settings stay the same. Else the folder is exchanged for another one with links to
    its other files, where the system can exchange folders (see `checkpoints.folder`). Other files, as a tokenizer's,
    stay, except for the former model's parameters in several files, which are removed with their index. The hidden
    folders of killed processes are removed by the first save there a day later.

    Parameters are written one at a time, those of stacked layers a layer at a time: the host's memory holds no more
    than that beside the model. Each is gathered from a mesh alone. Where the mesh has several processes, all of them
    call this, the first one writes, and all return when the folder is there.

    Raises:
      ValueError: as `config_to_hf`: a setting that none of these models of `transformers` has, as no rotary embedding.
    """
    settings, table = config_to_hf(model.config), entries(model.config)
    types = {part.name: (part.shape, dtype) for part, dtype in types_of(model, table)}
    # transformers writes dtype, its releases before 5 torch_dtype; it reads both.
    settings = {name: value for name, value in settings.items() if name not in ("dtype", "torch_dtype")} | {
        "dtype" if "dtype" in settings else "torch_dtype": next(iter(types.values()))[1].name
    }
    generation = settings_in(model.config.origin, GENERATION)
    arrays = (array for _, array in arrays_of(model, table, only_first_process=True))

    def write_files(folder: Path) -> None:
        write(folder / WEIGHTS, types, arrays)
        for name, file_settings in ((CONFIG, settings), (GENERATION, generation)):
            if file_settings is not None:
                (folder / name).write_text(json.dumps(file_settings, indent=2) + "\n")

    if jax.process_index():
        for _ in arrays:  # helps to gather them
            raise AssertionError("the first process alone gets arrays")
    else:
        path = Path(path).resolve()
        write_folder(path, write_files, key=CONFIG, former=former_files(path))
    wait_for_all_processes("save_hf_folder")


def _check_config(config: Any) -> None:
    if not isinstance(config, LlamaConfig | GPT2Config):
        raise TypeError(
            f"config is a {type(config).__name__}, and must be a LlamaConfig or a GPT2Config: config_from_hf makes one "
            "of the dictionary in a config.json, or of to_dict() of a config of transformers"
        )
