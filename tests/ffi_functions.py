"""`DescribeMap` and `DescribeGeometry` of coda_jax/ffi, built by themselves for tests."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import jax

FFI = Path(__file__).resolve().parents[1] / "coda_jax" / "ffi"
T = TypeVar("T")
# XLA's enum.
DTYPES = {"int32": 4, "float16": 10, "float32": 11, "bfloat16": 16, "float8_e5m2": 19, "float8_e4m3fn": 20}
SOURCE = """
#include <cstring>
#include <stdexcept>
#include "handler.h"

using coda::Buffer, coda::GemmCall, coda::Geometry, coda::MapLayout;

struct Dims {
  int32_t rank;
  int64_t sizes[4];
  operator std::span<const int64_t>() const { return {sizes, static_cast<size_t>(rank)}; }
};

/// 0, or 1 with the message of a refusal.
static int Guarded(auto&& function, char* message, int capacity) {
  try {
    function();
    return 0;
  } catch (const std::invalid_argument& error) {
    std::strncpy(message, error.what(), capacity);
    return 1;
  }
}

extern "C" int describe_map(MapLayout* layout, char* message, int capacity, const int32_t* map, int dtype,
                            const Dims* dims) {
  const auto describe = [&] {
    *layout = coda::DescribeMap({map[0], map[1], map[2], map[3], map[4], map[5]},
                                {static_cast<xla::ffi::DataType>(dtype), *dims, nullptr});
  };
  return Guarded(describe, message, capacity);
}

extern "C" int describe_geometry(Geometry* geometry, char* message, int capacity, const Dims* a, const Dims* b,
                                 const Dims* result, const int32_t* options) {
  GemmCall call{};
  call.transpose_a = options[0];
  call.transpose_b = options[1];
  call.tile_m = options[2];
  call.tile_n = options[3];
  call.halves = options[4];
  call.cluster_m = options[5];
  call.flags = options[6];
  call.yield_k_blocks = options[7];
  const auto describe = [&] {
    const auto dtype = static_cast<xla::ffi::DataType>(options[9]);
    *geometry = coda::DescribeGeometry(call, {dtype, *a}, {dtype, *b}, {dtype, *result}, options[8]);
  };
  return Guarded(describe, message, capacity);
}
"""


class _Dims(ctypes.Structure):
    _fields_ = (("rank", ctypes.c_int32), ("sizes", ctypes.c_int64 * 4))

    @classmethod
    def of(cls, dims: Sequence[int]) -> _Dims:
        return cls(len(dims), (ctypes.c_int64 * 4)(*dims))


class Geometry(ctypes.Structure):
    """`struct Geometry`."""

    _fields_ = (
        ("m", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("clusters", ctypes.c_int64),
        ("blocks", ctypes.c_uint32),
    )


class Layout(ctypes.Structure):
    """`struct MapLayout`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("dims", ctypes.c_uint64 * 4),
        ("strides_bytes", ctypes.c_uint64 * 3),
        ("box", ctypes.c_uint32 * 4),
        ("swizzle", ctypes.c_int),
    )


class Functions:
    """The compiled functions; they raise ValueError where the handler refuses.

    Args:
      directory: where they are built.
    """

    def __init__(self, directory: Path):
        source, path = directory / "functions.cc", directory / "functions.so"
        source.write_text(SOURCE)
        files = [source, *(FFI / name for name in ("geometry.cc", "tensor_map.cc", "cuda_api.cc"))]
        command = [
            "g++",
            "-std=c++20",
            "-shared",
            "-fPIC",
            f"-I{FFI}",
            f"-I{jax.ffi.include_dir()}",
            "-o",
            path,
            *files,
        ]
        subprocess.run([*map(str, command), "-ldl"], check=True)
        self._library = ctypes.CDLL(str(path))

    def map_layout(self, map_: Sequence[int], dtype: str, dims: Sequence[int]) -> Layout:
        numbers = (ctypes.c_int32 * 6)(*map_)
        return self._made(self._library.describe_map, Layout(), numbers, DTYPES[dtype], ctypes.byref(_Dims.of(dims)))

    def geometry(self, a: Sequence[int], b: Sequence[int], result: Sequence[int], options: Sequence[int]) -> Geometry:
        """options: transpose_a, transpose_b, tile_m, tile_n, halves, cluster_m, flags, yield_k_blocks, SMs, dtype."""
        dims = [ctypes.byref(_Dims.of(of_one)) for of_one in (a, b, result)]
        return self._made(self._library.describe_geometry, Geometry(), *dims, (ctypes.c_int32 * 10)(*options))

    @staticmethod
    def _made(function: Callable[..., int], result: T, *arguments: object) -> T:
        message = ctypes.create_string_buffer(1024)
        if function(ctypes.byref(result), message, len(message) - 1, *arguments):  # type: ignore[arg-type]
            raise ValueError(message.value.decode())
        return result
