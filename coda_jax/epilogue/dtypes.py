"""The table of dtypes: what each one is in CUDA, and where a kernel can have it. All rules about dtypes read it.

A new dtype of factors needs a row here, a line of CODA_DTYPES in cuda/dtypes.cuh and its instruction in
cuda/accumulator_sm90.cuh. A dtype of tiles or results also needs its conversions in cuda/fragment_sm90.cuh, and one
that is rounded to a function in cuda/elementwise.cuh and in epilogue/rounding.py. ffi/tensor_map.cc has the types of
tensor maps. Epilogues compute in `DTYPES`; to and from floats of 8 bits they only convert.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class DType:
    """A dtype.

    Attributes:
      name: as numpy has it.
      cuda: enumerator of coda::DType.
      register: C++ type of its values in an epilogue: "float", "int" or "bool".
      rounding: CUDA function that rounds a float32 to it; empty where its values are exact in their register.
      is_factor: the kernel multiplies arrays of it.
      is_tile: an epilogue loads tiles, and arrays over heads, of it.
      is_vector: an epilogue loads vectors and scalars of it.
      is_result: the kernel stores results of it.
      has_narrow_range: it is a float with a smaller range than float32: sums overflow in it.
      has_arithmetic: an epilogue computes in it; else it only converts to it and from it.
    """

    name: str
    cuda: str
    register: str
    rounding: str = ""
    is_factor: bool = False
    is_tile: bool = False
    is_vector: bool = False
    is_result: bool = False
    has_narrow_range: bool = False
    has_arithmetic: bool = True

    @property
    def bytes(self) -> int:
        return jnp.dtype(self.name).itemsize

    @property
    def is_float(self) -> bool:
        return self.register == "float"


FLOAT32, INT32, BOOL = "float32", "int32", "bool"  # the types of an epilogue's registers

_in_tiles = functools.partial(DType, register="float", is_tile=True, is_vector=True, is_result=True)
_float8 = functools.partial(
    DType,
    register="float",
    is_factor=True,
    is_tile=True,
    is_result=True,
    has_narrow_range=True,
    has_arithmetic=False,
)
_ROWS = (
    _in_tiles("bfloat16", "bf16", rounding="coda::round_to_bf16", is_factor=True),
    _in_tiles("float16", "f16", rounding="coda::round_to_f16", is_factor=True, has_narrow_range=True),
    _in_tiles(FLOAT32, "f32"),
    DType(INT32, "i32", register="int", is_vector=True),
    DType(BOOL, "pred", register="bool", is_vector=True),
    _float8("float8_e4m3fn", "e4m3", rounding="coda::round_to_e4m3"),
    _float8("float8_e5m2", "e5m2", rounding="coda::round_to_e5m2"),
)
TABLE = {row.name: row for row in _ROWS}

# Names, in the table's order; the first three are of dtypes in which epilogues compute.
DTYPES = tuple(row.name for row in _ROWS if row.has_arithmetic)
FLOATS = tuple(row.name for row in _ROWS if row.is_float and row.has_arithmetic)
NUMBERS = (*FLOATS, INT32)
FACTORS = tuple(row.name for row in _ROWS if row.is_factor)
FLOATS_OF_16_BITS = tuple(row.name for row in _ROWS if row.rounding and row.has_arithmetic)
FLOATS_OF_8_BITS = tuple(row.name for row in _ROWS if row.is_float and not row.has_arithmetic)
TILES = tuple(row.name for row in _ROWS if row.is_tile)
VECTORS = tuple(row.name for row in _ROWS if row.is_vector)
OPERANDS = tuple(row.name for row in _ROWS if row.is_tile or row.is_vector)
RESULTS = tuple(row.name for row in _ROWS if row.is_result)


@functools.cache
def row_of(dtype: Any) -> DType | None:
    """The row of a dtype, or of its name; None where it has none."""
    return TABLE.get(np.dtype(dtype).name)


def is_rounded(dtype: Any) -> bool:
    """True if values of `dtype` are rounded: it is a float of fewer bits than float32."""
    row = row_of(dtype)
    return row is not None and bool(row.rounding)


def has_narrow_range(dtype: Any) -> bool:
    """True if sums may overflow in `dtype` where they do not in float32."""
    row = row_of(dtype)
    return row is not None and row.has_narrow_range


@functools.cache
def is_of_8_bits(dtype: Any) -> bool:
    """True for a float of 8 bits."""
    return np.dtype(dtype).name in FLOATS_OF_8_BITS


def listed(names: Sequence[str], conjunction: str = "or") -> str:
    """The names for a message: "bfloat16, float16 or float32"."""
    *others, last = names
    return f"{', '.join(others)} {conjunction} {last}" if others else last
