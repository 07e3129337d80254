"""Low-rank adapters from and to the folders of Hugging Face's PEFT: adapter_config.json, adapter_model.safetensors.

PEFT adapts torch's Linears one by one: y += (alpha / r) * x @ lora_A^T @ lora_B^T, lora_A (r, in), lora_B (out, r).
Where several of them are concatenated in one kernel of ours, as query, key and value, one `lora_a` serves all. When
written, each gets that lora_A and its own columns of `lora_b`: the same function. When read, adapters with different
lora_As become one with all of them, whose `lora_b` is block-diagonal: the same function too, of the summed rank.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from flax_layers.checkpoints.folder import write_folder
from flax_layers.checkpoints.hf_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, settings_of
from flax_layers.checkpoints.hf_names import entries
from flax_layers.checkpoints.incoming import readable
from flax_layers.checkpoints.peft_settings import KNOWN, check_targets, scaling
from flax_layers.checkpoints.placement import on_host, wait_for_all_processes
from flax_layers.checkpoints.safetensors_files import stored_in, write
from flax_layers.checkpoints.settings import check_settings, refusal, without
from flax_layers.checkpoints.table import Entry, Part, as_stored, at, place, some
from flax_layers.lora import put_lora
from flax_layers.models.gpt2 import GPT2, GPT2Config
from flax_layers.models.llama import Llama
from flax_layers.models.origin import remember, settings_in

_PREFIX = "base_model.model."
_DEFAULTS = {"task_type": "CAUSAL_LM", "lora_dropout": 0.0, "inference_mode": True}
# Settings that select modules, where target_modules alone is written, with all modules that have adapters; and how
# arrays were initialised, which PEFT would apply to the base again.
_SAID_OTHERWISE = ("exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters", "init_lora_weights")


def to_peft(model: Llama | GPT2) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The adapters of a model as PEFT's settings and arrays, float32 or as they are stored.

    Settings that adapters of `from_peft` came with are kept, updated with ours.

    Args:
      model: a model with adapters, as `add_lora` puts them there. Its layers may be stacked for a scan.

    Raises:
      ValueError: a model without adapters, or an adapter of a module that `transformers` does not have.
    """
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    arrays: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    modules, written = [], set()
    for entry in as_stored(_table(model), params):
        modules += [_module(part) for part in entry.parts]
        path, index = place(params, _layer(entry.path))
        low_rank = _low_rank(params, path)
        if low_rank is None:
            continue
        written.add(path)
        a, b = (np.asarray(on_host(x, index)) for x in low_rank)
        columns = np.split(b, np.cumsum([_columns(part) for part in entry.parts])[:-1], axis=-1)
        for part, part_columns in zip(entry.parts, columns, strict=True):
            name = _module(part)
            ranks[name] = a.shape[-1]
            arrays[f"{_PREFIX}{name}.lora_A.weight"] = np.ascontiguousarray(a.T)
            arrays[f"{_PREFIX}{name}.lora_B.weight"] = np.ascontiguousarray(part.in_their_order(part_columns).T)
    adapted = _adapted(model)
    if not adapted:
        raise ValueError("the model has no adapters")
    if len(adapted) > len(written):
        names = [".".join(map(str, path)) for path in adapted if not written & {path, path[:-1]}]
        raise ValueError(f"PEFT has no place for the adapter {some(names)}")
    former = settings_in(model.origin, ADAPTER_CONFIG) or {}
    kept = {name: value for name, value in former.items() if name not in _SAID_OTHERWISE}
    return _DEFAULTS | kept | _settings(model, ranks, modules), arrays


def from_peft(
    model: Llama | GPT2,
    settings: Mapping[str, Any],
    arrays: Mapping[str, Any],
    *,
    ignore: Sequence[str] = (),
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
) -> None:
    """Puts PEFT's adapters into the model that they were trained for, in place.

    Args:
      model: without adapters. Its layers may be stacked for a scan: then a layer without an adapter gets zeros.
      settings: of adapter_config.json.
      arrays: name -> array, of NumPy, JAX or torch, with PEFT's names.
      ignore: names of settings that are not read, as if the file did not have them; `to_peft` writes them again.
      dtype, param_dtype: as in `add_lora`.

    Raises:
      TypeError: settings that are no dictionary, or an `ignore` that is no sequence of names.
      ValueError: settings that adapters here do not have (DoRA, biases, saved modules, an init_lora_weights that
        changes the base) or that are not known, arrays of modules that the settings do not name, of unknown names or
        other shapes, a kernel beside an adapter, as PEFT writes the head's, that is not the model's own, or a model
        with adapters.
    """
    check_settings(settings, "from_peft", "an adapter_config.json", "load_peft_folder")
    all_settings, settings = settings, without(settings, ignore)
    KNOWN.check(settings, "an adapter_config.json", " of an adapter")
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if _adapted(model):
        raise ValueError("the model has adapters already: merge_lora or remove_lora first")
    unread = readable(arrays)
    adapters: dict[Any, dict[Any, tuple[np.ndarray, np.ndarray]]] = {}
    for entry in as_stored(_table(model), params):
        _check_base(entry, params, unread)
        if (adapter := _adapter_arrays(entry, unread, settings, _rows(entry))) is not None:
            path, index = place(params, _layer(entry.path))
            adapters.setdefault(path, {})[index] = adapter
    if unread:
        raise ValueError(f"a model of this config takes no {some(sorted(unread))}")
    if (
        ("head",) in adapters
        and "kernel" not in params.get("head", {})
        and (tying := settings.get("ensure_weight_tying"))
    ):
        raise refusal("ensure_weight_tying", tying, "the embedding cannot share the head's adapter", " of an adapter")
    for path, layer_adapters in adapters.items():
        parent: Any = model
        for key in path[:-1]:
            parent = parent[key] if isinstance(key, int) else getattr(parent, key)
        count = None if () in layer_adapters else model.config.num_hidden_layers
        a, b = layer_adapters[()] if count is None else _stacked(layer_adapters, count)
        put_lora(parent, str(path[-1]), jnp.asarray(a, param_dtype), jnp.asarray(b, param_dtype), dtype=dtype)
    remember(model, ADAPTER_CONFIG, all_settings)


def save_peft_folder(model: Llama | GPT2, path: str | Path, *, base_model: str | None = None) -> None:
    """Writes the adapters of a model as a folder that `peft.PeftModel.from_pretrained` and `load_peft_folder` read.

    A process that is killed leaves the former files or the new ones, as in `save_hf_folder`. lora_alpha is the rank:
    `lora_b` includes the factor. Where adapters are on devices of several processes, all of these call this, and the
    first one writes.

    Args:
      model: as in `to_peft`.
      path: the folder.
      base_model: name or path of the adapted model, by which PEFT finds it; default that in the settings that the
        adapters came with.

    Raises:
      ValueError: as `to_peft`.
    """
    settings, arrays = to_peft(model)
    settings = {"base_model_name_or_path": None, **settings}
    if base_model is not None:
        settings["base_model_name_or_path"] = base_model

    def write_files(folder: Path) -> None:
        types = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        write(folder / ADAPTER_WEIGHTS, types, arrays.values())
        (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n")

    if jax.process_index() == 0:
        write_folder(Path(path).resolve(), write_files, key=ADAPTER_CONFIG)
    wait_for_all_processes("save_peft_folder")


def load_peft_folder(model: Llama | GPT2, path: str | Path, *, ignore: Sequence[str] = (), **options: Any) -> None:
    """Puts the adapters of a folder of PEFT into the model that they were trained for, in place.

    Args:
      model: without adapters.
      path: the folder, with adapter_config.json and adapter_model.safetensors.
      ignore: names of settings in adapter_config.json that are not read, as in `from_peft`.
      **options: dtype and param_dtype, as in `from_peft`.

    Raises:
      FileNotFoundError, NotADirectoryError: no such folder, as a name on the Hub is none, or one without these files.
      ImportError: without the package safetensors, which the extra `hf` brings.
      ValueError: as `from_peft`.
    """
    path = Path(path)
    settings = settings_of(path, ADAPTER_CONFIG)
    if not (path / ADAPTER_WEIGHTS).exists():
        raise FileNotFoundError(
            f"{path} has no {ADAPTER_WEIGHTS}; save_pretrained of peft writes it, from_peft takes arrays from elsewhere"
        )
    from_peft(model, settings, stored_in(path / ADAPTER_WEIGHTS), ignore=ignore, **options)


def _table(model: Llama | GPT2) -> list[Entry]:
    """The kernels that may have adapters, the head's among them where it is tied; not those of experts and routers."""
    config = model.config
    table = [
        entry
        for entry in entries(config)
        if entry.path[-1] in ("kernel", "gate_up") and not {"experts", "router"} & {*entry.path}
    ]
    if config.tie_word_embeddings:
        width = config.n_embd if isinstance(config, GPT2Config) else config.hidden_size
        table.append(Entry(("head", "kernel"), (Part("lm_head.weight", (config.vocab_size, width), transposed=True),)))
    return table


def _adapted(model: nnx.Module) -> list[tuple[Any, ...]]:
    """Paths of the modules with a lora_a."""
    return [path[:-1] for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param)) if path[-1] == "lora_a"]


def _layer(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """The path of a kernel's module."""
    return path[:-1] if path[-1] == "kernel" else path


def _module(part: Part) -> str:
    return part.name.removesuffix(".weight")


def _columns(part: Part) -> int:
    return part.shape[0] if part.transposed else part.shape[-1]


def _rows(entry: Entry) -> int:
    part = entry.parts[0]
    return part.shape[-1] if part.transposed else part.shape[0]


def _low_rank(params: Any, path: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """lora_a and lora_b of the module at a path, if that is an nnx.LoRA or an nnx.LoRALinear."""
    try:
        node = at(params, path)
    except KeyError:  # a tied head has no parameters
        return None
    node = node.get("lora", node) if isinstance(node, dict) else {}
    return (node["lora_a"], node["lora_b"]) if "lora_a" in node else None


def _settings(model: Llama | GPT2, ranks: dict[str, int], modules: list[str]) -> dict[str, Any]:
    rank = Counter(ranks.values()).most_common(1)[0][0]
    other = {name: module_rank for name, module_rank in ranks.items() if module_rank != rank}
    # The last component of a name stands for all layers, the full name for a single layer.
    kinds = {name.rpartition(".")[2] for name in ranks}
    everywhere = {kind for kind in kinds if all(name in ranks for name in modules if name.rpartition(".")[2] == kind)}
    targets = sorted(everywhere | {name for name in ranks if name.rpartition(".")[2] not in everywhere})
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": other,
        "alpha_pattern": dict(other),
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": isinstance(model, GPT2),
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _check_base(entry: Entry, params: Any, unread: dict[str, Any]) -> None:
    """Removes kernels that PEFT wrote beside adapters from `unread`: they must be the model's own."""
    names = {f"{_PREFIX}{_module(part)}.base_layer.weight": i for i, part in enumerate(entry.parts)}
    for name in names.keys() & unread.keys():
        is_tied = entry.path[0] == "head" and "kernel" not in params.get("head", {})
        path, index = (("embed", "embedding"), ()) if is_tied else place(params, entry.path)
        kernel = np.asarray(at(params, path))[index]
        own = kernel if is_tied else entry.split(kernel)[names[name]]
        if not np.array_equal(np.asarray(unread.pop(name)).astype(own.dtype), own):
            raise ValueError(f"{name} is not the model's own: the adapter was trained on another one")


LowRankArrays = tuple[np.ndarray, np.ndarray]  # lora_a (D, r) and lora_b (r, N)


def _adapter_arrays(
    entry: Entry, unread: dict[str, Any], settings: Mapping[str, Any], rows: int
) -> LowRankArrays | None:
    """The adapter of a kernel, float32, from those of its parts, which are removed from `unread`; None without any."""
    pairs = [_read(part, unread, settings, rows) for part in entry.parts]
    all_a = [pair[0] for pair in pairs if pair is not None]
    if not all_a:
        return None
    shared = all(np.array_equal(a, all_a[0]) for a in all_a)
    joined_a = all_a[0] if shared else np.concatenate(all_a, axis=1)
    columns, start = [], 0
    for part, pair in zip(entry.parts, pairs, strict=True):
        part_columns = np.zeros((joined_a.shape[1], _columns(part)), np.float32)
        if pair is not None:
            part_columns[start : start + len(pair[1])] = pair[1]
            start += 0 if shared else len(pair[1])
        columns.append(part_columns)
    return joined_a, np.concatenate(columns, axis=1)


def _read(part: Part, unread: dict[str, Any], settings: Mapping[str, Any], rows: int) -> LowRankArrays | None:
    """The adapter of one of PEFT's modules, if it has one."""
    module = _module(part)
    names = [f"{_PREFIX}{module}.lora_{x}.weight" for x in "AB"]
    missing = [name for name in names if name not in unread]
    if len(missing) == 2:
        return None
    if missing:
        raise ValueError(f"the adapter lacks {missing[0]}")
    check_targets(settings, module)
    a, b = (np.asarray(unread.pop(name)).astype(np.float32) for name in names)
    rank = a.shape[0]
    if not rank:
        raise ValueError(f"{names[0]} has shape {a.shape}: the rank must be at least 1")
    for name, array, shape in zip(names, (a, b), ((rank, rows), (_columns(part), rank)), strict=True):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; the model makes it {shape}")
    return a.T, part.in_our_order(b.T) * scaling(settings, module, rank)


def _stacked(
    layer_adapters: Mapping[tuple[int, ...], tuple[np.ndarray, np.ndarray]], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The stacked arrays of all layers: the rank is the largest one, with zeros where a layer has less."""
    a, b = next(iter(layer_adapters.values()))
    rank = max(x.shape[1] for x, _ in layer_adapters.values())
    all_a, all_b = np.zeros((count, a.shape[0], rank), a.dtype), np.zeros((count, rank, b.shape[1]), b.dtype)
    for (i,), (a, b) in layer_adapters.items():
        all_a[i, :, : a.shape[1]], all_b[i, : b.shape[0]] = a, b
    return all_a, all_b
