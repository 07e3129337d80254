"""Arrays of checkpoints: of NumPy, JAX, torch, or in files; a slice of each is an array of NumPy's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_layers.checkpoints.placement import Index, block_of

# Names of dtypes contain these where numbers need scales, in 4 or 6 bits, or are scales, as powers of two.
_SCALED_DTYPES = ("float4_", "float6_", "e8m0")
_BLOCK_BYTES = 2**24  # of two arrays that are compared


def readable(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, each with a shape and slices that NumPy takes.

    Raises:
      ValueError: one that is no array of floating numbers, as a quantised one.
    """
    return {name: readable_one(name, array) for name, array in arrays.items()}


def readable_one(name: str, array: Any) -> Any:
    """`readable` of one array."""
    dtype = getattr(array, "dtype", None)
    if hasattr(array, "detach"):
        array, is_floating = TorchArray(array), bool(array.is_floating_point())
    elif dtype is None or isinstance(dtype, str):
        is_floating = dtype is None
    else:
        dtype = getattr(dtype, "numpy_dtype", dtype)  # tensorstore's has one
        is_floating = jnp.issubdtype(dtype, jnp.floating)
    if not is_floating or any(part in str(dtype) for part in _SCALED_DTYPES):
        raise ValueError(
            f"{name} is an array of {dtype}, and parameters are plain floating numbers: a quantised checkpoint must be "
            "dequantised first, as by model.dequantize() and save_pretrained of transformers"
        )
    return array


@dataclasses.dataclass(frozen=True, eq=False)
class TorchArray:
    """A torch tensor on any device; numbers of dtypes that NumPy lacks become float32, which holds them exactly."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index: Index) -> np.ndarray:
        block = self.tensor.detach()[index].cpu()
        has_dtype = str(block.dtype) in ("torch.float16", "torch.float32", "torch.float64")
        return np.asarray((block if has_dtype else block.float()).numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[(...,)], dtype)  # type: ignore[index]


def are_equal(a: Any, b: Any) -> bool:
    """Whether two arrays (R, C) have the same shape and numbers; they are read and compared in blocks of rows."""
    if tuple(a.shape) != tuple(b.shape) or len(a.shape) != 2:
        return False
    rows, columns = a.shape
    step = max(1, _BLOCK_BYTES // (8 * max(columns, 1)))
    for start in range(0, rows, step):
        index = (slice(start, min(start + step, rows)), slice(0, columns))
        one, other = (block_of(x, index) for x in (a, b))
        dtype = np.promote_types(np.promote_types(one.dtype, np.float32), np.promote_types(other.dtype, np.float32))
        if not np.array_equal(one.astype(dtype), other.astype(dtype), equal_nan=True):
            return False
    return True
