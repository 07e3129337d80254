"""Files of Hugging Face's safetensors: slices of their arrays read, and arrays written one after another.

A file is the length of a header (8 bytes, little endian), the header, JSON that says of each array its dtype, shape and
place, and the arrays as they lie in memory. The package safetensors reads them; it writes only what is in memory whole.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_DTYPES |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file, of which a slice is read each time that one is asked for."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        # Opened anew, for what has been read of an open file stays in memory.
        with safetensors_module().safe_open(self.file, framework="numpy") as opened:
            return np.asarray(opened.get_slice(self.name)[index])


def stored_in(file: Path) -> dict[str, Stored]:
    """The arrays of a file by name.

    Raises:
      ImportError: without the package safetensors, which the extra `hf` brings.
    """
    with safetensors_module().safe_open(file, framework="numpy") as opened:
        return {name: Stored(file, name, tuple(opened.get_slice(name).get_shape())) for name in opened.keys()}  # noqa: SIM118, it is no dictionary


def write(file: Path, types: Mapping[str, tuple[tuple[int, ...], np.dtype]], arrays: Iterable[np.ndarray]) -> None:
    """Writes a file.

    Args:
      file: its path.
      types: name -> shape and dtype, in the order of the arrays.
      arrays: each is asked for when those before it are written.

    Raises:
      ValueError: a dtype that these files do not have.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in types.items():
        if dtype.name not in _DTYPES:
            raise ValueError(f"{name} is of {dtype.name}, which safetensors files do not have")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # arrays begin at a multiple of 8 bytes
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for (name, (shape, dtype)), array in zip(types.items(), arrays, strict=True):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{name} is {array.dtype}{array.shape}, not {dtype}{shape}")
            opened.write(np.ascontiguousarray(array).view(np.uint8).data)


def safetensors_module() -> Any:
    """The package, with its functions for NumPy."""
    try:
        import safetensors.numpy
    except ImportError:
        raise ImportError("Hugging Face folders need the package safetensors: pip install 'coda-jax[hf]'") from None
    return safetensors
