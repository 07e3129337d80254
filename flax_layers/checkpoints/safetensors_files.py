"""Files of Hugging Face's safetensors: slices of their arrays read, and arrays written one after another.

A file is the length of a header (8 bytes, little endian), the header, JSON with the dtype, shape and place of each
array, and the arrays' bytes. The package safetensors checks a file when it opens it; it writes only arrays that are all
in memory, and reads no float8 for NumPy.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_DTYPES |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
_READ = {stored: jnp.dtype(name) for name, stored in _DTYPES.items()} | {"BOOL": np.dtype(bool)}
_READ |= {f"{kind.upper()}{8 * size}": np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)}


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file, from which each slice is read when it is asked for.

    Attributes:
      dtype: NumPy's, or the file's name for a dtype that NumPy does not have.
      begin: its first byte in the file.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype | str
    begin: int

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)[index]
        # Mapped anew each time: pages that were read of a mapped file stay in memory.
        return np.array(np.memmap(self.file, self.dtype, "r", self.begin, self.shape)[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[tuple(slice(0, size) for size in self.shape)], dtype)


def stored_in(file: Path) -> dict[str, Stored]:
    """The arrays of a file by name.

    Raises:
      ImportError: without the package safetensors, which the extra `hf` brings.
      ValueError: a file that is damaged or no safetensors file.
    """
    module = safetensors_module()
    try:
        with module.safe_open(file, framework="numpy"):
            pass
    except module.SafetensorError as error:
        raise ValueError(f"{file} cannot be read, it is damaged or no safetensors file: {error}") from None
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    arrays = {}
    for name, one in header.items():
        dtype = _READ.get(one["dtype"], one["dtype"])
        arrays[name] = Stored(file, name, tuple(one["shape"]), dtype, 8 + size + one["data_offsets"][0])
    return arrays


def write(file: Path, types: Mapping[str, tuple[tuple[int, ...], np.dtype]], arrays: Iterable[np.ndarray]) -> None:
    """Writes a file.

    Args:
      file: its path.
      types: name -> shape and dtype, in the order of the arrays.
      arrays: an iterable, of which each is asked for when those before it are written.

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
    """The package."""
    try:
        import safetensors
    except ImportError:
        raise ImportError(
            "Hugging Face folders need the package safetensors: pip install '.[hf]' in a clone, or safetensors alone"
        ) from None
    return safetensors
