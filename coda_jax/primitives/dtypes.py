"""The dtypes that operators take. float64, where jax_enable_x64 lets it be, is refused: it would be rounded unseen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import elementwise
from coda_jax.primitives.mesh_types import placed_alike

FLOATS = tuple(sorted(elementwise.FLOATS))


def check_dtype(operator: str, name: str, x: Any, allowed: Sequence[str] = FLOATS) -> None:
    """Raises TypeError where x is no array or has a dtype that is not among those allowed."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(f"{operator}: {name} is {type(x).__name__}; it must be an array")
    dtype = x.dtype if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.dtype(x.dtype)
    if dtype.name not in allowed:
        raise TypeError(f"{operator}: {name} has dtype {dtype}; it must be {_listed(allowed)}")


def check_floats(operator: str, **arrays: Any) -> None:
    """`check_dtype` of floating arrays by their names; None is no array."""
    for name, x in arrays.items():
        if x is not None:
            check_dtype(operator, name, x)


def resolve_dtype(operator: str, dtype: Any, *factors: jax.Array) -> np.dtype:
    """The dtype of an operator's products: that asked for, else the promotion of the factors."""
    chosen = np.dtype(dtype or jnp.result_type(*factors))
    if chosen.name not in FLOATS:
        raise TypeError(f"{operator}: dtype = {chosen}; it must be {_listed(FLOATS)}")
    return chosen


def _listed(names: Sequence[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def joined_halves(function: str, name: str, x: Any, axis: int = 1) -> jax.Array:
    """x; of a pair of matrices one array, whose halves this axis tells apart, as (K, N / 2) become (K, 2, N / 2)."""
    if not isinstance(x, tuple | list):
        return x  # what else it may be, its caller looks at
    check_floats(function, **{f"{name}[{i}]": part for i, part in enumerate(x)})
    shapes = [np.shape(part) for part in x]
    if len(x) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 2:
        raise ValueError(
            f"{function}: {name} are arrays of shapes {', '.join(map(str, shapes))}; several must be two matrices of "
            "one shape, the halves of N"
        )
    return jnp.stack(placed_alike(x, None), axis=axis)
