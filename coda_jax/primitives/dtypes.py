"""The dtypes that operators take, and those in which a product is computed, kept and summed.

Operators take the floats of `epilogue/dtypes.py`. float64, where jax_enable_x64 lets it be, is refused: it would be
rounded unseen.

A product has three more dtypes than its arrays. Both factors are multiplied in `compute_dtype`, into a float32
accumulator. Where the accumulator is kept for a backward pass, or goes through memory, it has `kept_dtype`. Where k is
sharded, the products of the devices are summed in `wire_dtype`. Only a dtype with float32's range is kept or summed as
it is, for an accumulator may overflow a narrower one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue.dtypes import FLOATS, has_narrow_range, listed
from coda_jax.primitives.mesh_types import placed_alike
from coda_jax.primitives.spec import GemmSpec


def check_dtype(operator: str, name: str, x: Any, allowed: Sequence[str] = FLOATS) -> None:
    """Raises TypeError where x is no array or has a dtype that is not among those allowed."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{operator}: {name} is {type(x).__name__}; it must be an array")
    dtype = x.dtype if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.dtype(x.dtype)
    if dtype.name not in allowed:
        raise TypeError(f"{operator}: {name} has dtype {dtype}; it must be {listed(allowed)}")


def check_floats(operator: str, **arrays: Any) -> None:
    """`check_dtype` of floating arrays by their names; None is no array."""
    for name, x in arrays.items():
        if x is not None:
            check_dtype(operator, name, x)


def resolve_dtype(operator: str, dtype: Any, *factors: jax.Array) -> np.dtype:
    """The dtype of an operator's products: that asked for, else the promotion of the factors."""
    chosen = np.dtype(dtype or jnp.result_type(*factors))
    if chosen.name not in FLOATS:
        raise TypeError(f"{operator}: dtype = {chosen}; it must be {listed(FLOATS)}")
    return chosen


def compute_dtype(a: Any, b: Any) -> np.dtype:
    """The dtype that both factors are converted to before they are multiplied."""
    return np.dtype(jnp.promote_types(a.dtype, b.dtype))


def kept_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which the accumulator of a product in `dtype` is kept: float16 would overflow at 65504.

    bfloat16 has float32's range. In float16's place it would lose three bits, and a product computed again takes
    longer than the two bytes more.
    """
    return np.dtype(np.float32 if has_narrow_range(dtype) else dtype)


def wire_dtype(spec: GemmSpec, dtype: np.dtype) -> np.dtype:
    """The dtype in which products are summed over devices, as Megatron does: bfloat16 where all results are.

    float32 where a result is, as a gradient of float32 parameters; where the product has no tiles; and for float16,
    which a partial sum may overflow though the sum does not.
    """
    is_of_results = spec.store_dtypes and all(x == dtype for x in spec.store_dtypes)
    return np.dtype(dtype if is_of_results and not has_narrow_range(dtype) else np.float32)


def joined_halves(function: str, name: str, x: Any, axis: int = 1) -> jax.Array:
    """x; of a pair of arrays one, whose halves this axis tells apart, as two (K, N / 2) become (K, 2, N / 2).

    Args:
      function, name: the operator and its argument, for messages.
      x: an array; or two, of axis + 1 axes, of which the last is N / 2.
      axis: of the result.
    """
    if not isinstance(x, tuple | list):
        return x  # what else it may be, its caller looks at
    check_floats(function, **{f"{name}[{i}]": part for i, part in enumerate(x)})
    shapes = [np.shape(part) for part in x]
    if len(x) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != axis + 1:
        kind = "matrices" if axis == 1 else f"arrays of {axis + 1} axes"
        raise ValueError(
            f"{function}: {name} are arrays of shapes {', '.join(map(str, shapes))}; several must be two {kind} of "
            "one shape, the halves of N"
        )
    return jnp.stack(placed_alike(x, None), axis=axis)
