"""`DescribeMap` of coda_jax/ffi/tensor_map.cc, built by itself for tests."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax

FFI = Path(__file__).resolve().parents[1] / "coda_jax" / "ffi"
DTYPES = {"int32": 4, "float16": 10, "float32": 11, "bfloat16": 16}  # XLA's enum
SOURCE = """
#include <cstring>
#include <stdexcept>
#include "tensor_map.h"

extern "C" int describe_map(const int32_t* map, int dtype, const int64_t* dims, int rank, coda::MapLayout* layout,
                            char* message, int capacity) {
  try {
    *layout = coda::DescribeMap({map[0], map[1], map[2], map[3], map[4], map[5]},
                                {static_cast<xla::ffi::DataType>(dtype), {dims, static_cast<size_t>(rank)}, nullptr});
    return 0;
  } catch (const std::invalid_argument& error) {
    std::strncpy(message, error.what(), capacity);
    return 1;
  }
}
"""


class Layout(ctypes.Structure):
    """`struct MapLayout`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("dims", ctypes.c_uint64 * 4),
        ("strides_bytes", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
        ("swizzle", ctypes.c_int),
    )


class TensorMaps:
    """The compiled function.

    Args:
      directory: where it is built.
    """

    def __init__(self, directory: Path):
        source, path = directory / "describe_map.cc", directory / "describe_map.so"
        source.write_text(SOURCE)
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{FFI}", f"-I{jax.ffi.include_dir()}", "-o", str(path)]
        command += [str(source), str(FFI / "tensor_map.cc"), str(FFI / "cuda_api.cc"), "-ldl"]
        subprocess.run(command, check=True)
        self._describe = ctypes.CDLL(str(path)).describe_map

    def __call__(self, map_: Sequence[int], dtype: str, dims: Sequence[int]) -> Layout:
        """Raises ValueError where TMA cannot address the array."""
        layout, message = Layout(), ctypes.create_string_buffer(1024)
        numbers, sizes = (ctypes.c_int32 * 6)(*map_), (ctypes.c_int64 * len(dims))(*dims)
        if self._describe(numbers, DTYPES[dtype], sizes, len(dims), ctypes.byref(layout), message, len(message) - 1):
            raise ValueError(message.value.decode())
        return layout
