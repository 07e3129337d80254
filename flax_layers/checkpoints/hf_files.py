"""The files of a folder that are read, and the errors for a folder that lacks them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def settings_of(path: Path, name: str) -> dict[str, Any]:
    """The settings in a file of a folder.

    Raises:
      FileNotFoundError, NotADirectoryError: no such folder or file.
      ValueError: a file that is no JSON of a dictionary.
    """
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file; give the folder that it is in, {path.parent}")
    if not path.exists():
        raise FileNotFoundError(
            f"there is no folder {path}; a model of the Hugging Face Hub is downloaded first, "
            f"huggingface_hub.snapshot_download({str(path)!r}) returns its folder"
        )
    if not (path / name).exists():
        raise FileNotFoundError(f"{path} has no {name}; {_instead(path, name)}")
    try:
        settings = json.loads((path / name).read_text())
    except ValueError as error:
        raise ValueError(f"{path / name} is no JSON, {error}: copy it anew from where it came from") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path / name} must be a dictionary, and is a {type(settings).__name__}")
    return settings


def weight_files(path: Path) -> list[str]:
    """Names of the files with a model's parameters: as in transformers one file, or else those of an index.

    Raises:
      FileNotFoundError: neither, or a file of the index that is not there.
      ValueError: an index that names a file outside of the folder, or that is no index.
    """
    if (path / WEIGHTS).exists():
        return [WEIGHTS]
    if not (path / INDEX).exists():
        raise FileNotFoundError(f"{path} has no {WEIGHTS}; {_weights_instead(path)}")
    weight_map = settings_of(path, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path / INDEX} has no weight_map: copy it anew from where the model came from")
    for parameter, file in weight_map.items():
        if not is_bare(file):
            raise ValueError(
                f"{path / INDEX} says that {parameter} is in {file!r}: it must be the bare name of a file in {path}"
            )
    files = sorted(set(weight_map.values()))
    if missing := [file for file in files if not (path / file).exists()]:
        raise FileNotFoundError(
            f"{path} has no {missing[0]}, which {INDEX} names: its parameters must be in safetensors files there"
        )
    return files


def former_files(path: Path) -> list[str]:
    """Names of the files in the folder itself whose parameters a single new file replaces, the index last."""
    try:
        weight_map: Any = settings_of(path, INDEX).get("weight_map")
    except (OSError, ValueError):
        weight_map = {}
    named = set(weight_map.values()) if isinstance(weight_map, dict) and _all_strings(weight_map) else set()
    return [*sorted(file for file in named if is_bare(file) and file.endswith(".safetensors")), INDEX]


def is_bare(file: Any) -> bool:
    """Whether this is the name of a file in a folder, and not a path."""
    return isinstance(file, str) and file not in ("", ".", "..") and not set(file) & {"/", "\\", "\0"}


def _all_strings(weight_map: Mapping[str, Any]) -> bool:
    return all(isinstance(file, str) for file in weight_map.values())


def _instead(path: Path, name: str) -> str:
    if name == CONFIG and (path / ADAPTER_CONFIG).exists():
        return "it has adapters: load their base model, then load_peft_folder(model, path)"
    if name == ADAPTER_CONFIG and (path / CONFIG).exists():
        return "it has a model: load_hf_folder(path) reads it"
    if snapshots := sorted((path / "snapshots").glob(f"*/{name}")):
        return f"it is a folder of the Hub's cache, whose models are in its snapshots: give {snapshots[0].parent}"
    if below := sorted(path.glob(f"*/{name}")):
        return f"{below[0].parent} has one"
    return "it must be a folder that save_pretrained wrote"


def _weights_instead(path: Path) -> str:
    if shards := sorted(path.glob("*-of-*.safetensors")):
        return f"{shards[0].name} wants the {INDEX} that belongs to it: copy that too from where the model came from"
    others = [file for kind in ("*.safetensors", "*.bin", "*.pth", "*.gguf") for file in sorted(path.glob(kind))]
    elsewhere = f", not in {others[0].name}" if others else ""
    return (
        f"its parameters must be in safetensors files{elsewhere}: save_pretrained of transformers writes them so, "
        "from_hf takes arrays from elsewhere"
    )
