"""Arrays of checkpoints: of NumPy, JAX, torch, or in files; a slice of each is an array of NumPy's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_layers.checkpoints.placement import Index, block_of

# Parts of names of dtypes that say nothing without scales: of 4 and 6 bits, and powers of two, which are scales.
_OF_BLOCKS = ("float4_", "float6_", "e8m0")
_BLOCK_BYTES = 2**24  # of two arrays that are compared


def readable(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays, each with a shape and slices that NumPy takes.

    Raises:
      ValueError: one that is no array of floating numbers, as quantised ones are.
    """
    return {name: readable_one(name, array) for name, array in arrays.items()}


def readable_one(name: str, array: Any) -> Any:
    """As `readable`, of one."""
    dtype = getattr(array, "dtype", None)
    if hasattr(array, "detach"):
        array, is_floating = TorchArray(array), bool(array.is_floating_point())
    elif dtype is None or isinstance(dtype, str):
        is_floating = dtype is None
    else:
        dtype = getattr(dtype, "numpy_dtype", dtype)  # tensorstore's has one
        is_floating = jnp.issubdtype(dtype, jnp.floating)
    if not is_floating or any(part in str(dtype) for part in _OF_BLOCKS):
        raise ValueError(
            f"{name} is an array of {dtype}, and parameters are plain floating numbers: a quantised checkpoint must be "
            "dequantised first, as by model.dequantize() and save_pretrained of transformers"
        )
    return array


@dataclasses.dataclass(frozen=True, eq=False)
class TorchArray:
    """A tensor of torch's on any device; NumPy lacks some of its dtypes, whose numbers are float32 then, the same."""

    tensor: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getitem__(self, index: Index) -> np.ndarray:
        part = self.tensor.detach()[index].cpu()
        has_dtype = str(part.dtype) in ("torch.float16", "torch.float32", "torch.float64")
        return np.asarray((part if has_dtype else part.float()).numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self[(...,)], dtype)  # type: ignore[index]


def are_equal(a: Any, b: Any) -> bool:
    """Whether two arrays (R, C) have the same shape and numbers; no more than parts of them are read at once."""
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
