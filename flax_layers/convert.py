"""Parameters of a Llama, a Qwen3 or a GPT-2 from and to Hugging Face's checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from flax_layers.gpt2 import GPT2, GPT2Config
from flax_layers.hf_config import config_from_hf, config_to_hf
from flax_layers.hf_names import Entry, entries
from flax_layers.llama import Llama, LlamaConfig

# What checkpoints hold beside parameters: rotary frequencies, causal masks.
_BUFFERS = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


@overload
def from_hf(
    state_dict: Mapping[str, Any],
    config: LlamaConfig,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
) -> Llama: ...
@overload
def from_hf(
    state_dict: Mapping[str, Any],
    config: GPT2Config,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
) -> GPT2: ...
def from_hf(
    state_dict: Mapping[str, Any],
    config: LlamaConfig | GPT2Config,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
) -> Llama | GPT2:
    """A model with the parameters of a Hugging Face LlamaForCausalLM, Qwen3ForCausalLM or GPT2LMHeadModel.

    `load_hf_folder` reads config and arrays from a folder.

    Args:
      state_dict: name -> array, in the shapes that `transformers` gives them; of any floating dtype. GPT-2's names may
        lack the leading "transformer.".
      config: sizes; those of the arrays must agree.
      dtype, param_dtype: as in `Llama`.

    Raises:
      ValueError: names that are missing or unknown, or a shape that does not agree with `config`.
    """
    if isinstance(config, GPT2Config) and "wte.weight" in state_dict:
        state_dict = {f"transformer.{name}": array for name, array in state_dict.items()}
    table = entries(config)
    graphdef, state = nnx.split(_abstract(config, dtype=dtype, param_dtype=param_dtype))
    shapes = nnx.to_pure_dict(state)
    wanted = _shapes(shapes, table)
    # Checkpoints of tied models may hold the head too.
    is_tied = isinstance(config, GPT2Config) or config.tie_word_embeddings
    ignored = {"lm_head.weight"} if is_tied else set()
    given = {name for name in state_dict if name not in ignored and not name.endswith(_BUFFERS)}
    if missing := sorted(wanted.keys() - given):
        raise ValueError(f"the checkpoint lacks {_some(missing)}")
    if unknown := sorted(given - wanted.keys()):
        raise ValueError(
            f"a model of this config has no {_some(unknown)}; attention_bias gives a LlamaConfig biases, qk_norm "
            "QK-norms, and adapters are not supported"
        )
    for name, shape in wanted.items():
        if tuple(state_dict[name].shape) != shape:
            raise ValueError(f"{name} has shape {tuple(state_dict[name].shape)}; the config makes it {shape}")

    params: dict[Any, Any] = {}
    for entry in table:
        arrays = [jnp.asarray(state_dict[name]) for name in entry.names]
        joined = entry.join(arrays, _at(shapes, entry.path).shape, jnp.concatenate)
        _put(params, entry.path, joined.astype(param_dtype))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def to_hf(model: Llama | GPT2 | nnx.State, config: LlamaConfig | GPT2Config) -> dict[str, np.ndarray]:
    """The inverse of `from_hf`: name -> array in the parameters' own dtype.

    Args:
      model: a model, or a state with its structure, as a gradient is. Its layers may be stacked for a scan.
      config: its sizes.
    """
    state = nnx.state(model, nnx.Param) if isinstance(model, nnx.Module) else model
    params = nnx.to_pure_dict(state)
    if 0 not in params["layers"]:
        count = config.n_layer if isinstance(config, GPT2Config) else config.num_hidden_layers
        params["layers"] = {i: jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(count)}
    arrays: dict[str, np.ndarray] = {}
    for entry in entries(config):
        parts = entry.split(np.asarray(_at(params, entry.path)))
        # Files are written from memory as it lies: a transposed view would be written untransposed.
        arrays |= zip(entry.names, map(np.ascontiguousarray, parts), strict=True)
    return arrays


def load_hf_folder(
    path: str | Path, *, dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32
) -> Llama | GPT2:
    """The model in a folder that `save_pretrained` of `transformers` wrote: config.json and safetensors files.

    Args:
      path: the folder, with model.safetensors, or model.safetensors.index.json and the files that it names.
      dtype, param_dtype: as in `Llama`.

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
    return from_hf(arrays, config, dtype=dtype, param_dtype=param_dtype)


def save_hf_folder(model: Llama | GPT2, path: str | Path) -> None:
    """Writes a folder that `from_pretrained` of `transformers` and `load_hf_folder` read.

    Raises:
      ImportError: without the package safetensors, which the extra `hf` brings.
    """
    safetensors, path = _safetensors(), Path(path)
    path.mkdir(parents=True, exist_ok=True)
    settings = config_to_hf(model.config)
    arrays = to_hf(model, model.config)
    settings["torch_dtype"] = next(iter(arrays.values())).dtype.name
    safetensors.save_file(arrays, path / _WEIGHTS, metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError("Hugging Face folders need the package safetensors: pip install 'coda-jax[hf]'") from None
    return safetensors.numpy


def _abstract(config: LlamaConfig | GPT2Config, **dtypes: Any) -> Llama | GPT2:
    if isinstance(config, GPT2Config):
        return nnx.eval_shape(lambda: GPT2(config, **dtypes, rngs=nnx.Rngs(0)))
    return nnx.eval_shape(lambda: Llama(config, **dtypes, rngs=nnx.Rngs(0)))


def _shapes(params: Any, table: list[Entry]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the checkpoint."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in table:
        empty = np.broadcast_to(np.float32(0), _at(params, entry.path).shape)
        shapes |= zip(entry.names, (x.shape for x in entry.split(empty)), strict=True)
    return shapes


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: dict[Any, Any], path: tuple[str | int, ...], value: jax.Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
