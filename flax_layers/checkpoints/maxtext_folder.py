"""A MaxText checkpoint in a folder that orbax wrote, whose arrays are read slice by slice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from flax_layers.checkpoints.hf_files import is_bare
from flax_layers.checkpoints.maxtext import from_maxtext
from flax_layers.checkpoints.placement import Index
from flax_layers.models.llama import Llama, LlamaConfig

_METADATA = "_METADATA"
_ROOTS = ("decoder", "token_embedder")
# A chunk of a file is what one device wrote. It is read entirely: with stacked layers once for all layers and devices.
_CACHE_BYTES = 2**30


def load_maxtext_folder(path: str | Path, config: LlamaConfig, **options: Any) -> Llama:
    """The model with the parameters of a MaxText checkpoint.

    Arrays are read one parameter at a time. With shardings each device's shard is read by itself and put there, by the
    process that has the device; the host's memory also holds up to 1 GiB of the chunks that were read last.

    Args:
      path: the folder of orbax's with the parameters and perhaps an optimizer's state, which is not read:
        .../checkpoints/<step>/items, where the file _METADATA is.
      config: sizes; those of the arrays must agree.
      **options: as in `from_maxtext`: query_scaled, rotary, shardings, and options of the model.

    Raises:
      FileNotFoundError: no such folder.
      ImportError: without the package tensorstore, which comes with orbax.
      ValueError: as `from_maxtext`, a checkpoint without a decoder's parameters, or one that names arrays elsewhere.
    """
    return from_maxtext(_arrays_in(Path(path).resolve()), config, **options)


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensorstore array, whose slices are read when NumPy asks for them."""

    opened: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.opened.shape)

    @property
    def dtype(self) -> Any:
        return self.opened.dtype

    def __getitem__(self, index: Index) -> np.ndarray:
        return np.asarray(self.opened[index])


def _arrays_in(path: Path) -> Mapping[str, Any]:
    """The dictionary that `from_maxtext` takes, of arrays that are not read yet."""
    if not (path / _METADATA).exists():
        raise FileNotFoundError(f"{path} has no {_METADATA}: it must be the folder in which orbax keeps the parameters")
    settings = json.loads((path / _METADATA).read_text())
    driver = "zarr3" if settings.get("use_zarr3") else "zarr"
    keys = [[str(key["key"]) for key in leaf["key_metadata"]] for leaf in settings["tree_metadata"].values()]
    pending = {}
    store = _tensorstore()
    context = store.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    for names in keys:
        inner = names[next((i for i, name in enumerate(names) if name != "params"), len(names)) :]
        if inner[:1] and inner[0] in _ROOTS:
            name = ".".join(names)
            if not is_bare(name):
                raise ValueError(f"{path / _METADATA} names an array {name!r}: it must be the bare name of one there")
            kvstore = (
                {"driver": "ocdbt", "base": path.as_uri() + "/", "path": f"{name}/"}
                if (path / "manifest.ocdbt").exists()
                else {"driver": "file", "path": f"{path / name}/"}
            )
            pending[tuple(inner)] = store.open({"driver": driver, "kvstore": kvstore}, read=True, context=context)
    if not pending:
        raise ValueError(f"{path} has no params with {' or '.join(_ROOTS)}: it is no MaxText checkpoint of a decoder")
    arrays: dict[str, Any] = unflatten_dict({names: _Stored(opened.result()) for names, opened in pending.items()})
    return arrays


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError:
        raise ImportError("orbax's folders need the package tensorstore: pip install orbax-checkpoint") from None
    return tensorstore
