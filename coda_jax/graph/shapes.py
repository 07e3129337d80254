"""Shapes of the values of a block: those that arithmetic accepts, and those that an inverse has to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.graph.lazy import Lazy


def broadcast(what: str, x: tuple[Any, ...], y: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shape of the result of arithmetic, as JAX has it.

    Raises:
      ValueError: the shapes do not fit, or one is none of these: the result's, its rows' (..., 1), its columns' (N,),
        a scalar's. The message begins with `what`.
    """
    try:
        shape = jnp.broadcast_shapes(x, y)
    except ValueError:
        shape = None
    if shape is not None and all(_is_beside(one, shape) for one in (x, y)):
        return tuple(shape)
    raise ValueError(
        f"{what} of shapes {x} and {y}; arithmetic takes values of one shape, beside (..., N) also (..., 1) of all "
        "rows, (N,) of columns, and scalars"
    )


def _is_beside(shape: tuple[Any, ...], full: tuple[Any, ...]) -> bool:
    has_all_rows = len(shape) == len(full) and same_shape(shape[:-1], full[:-1])
    return has_all_rows or all(same_size(size, 1) for size in shape[:-1])


def named(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """f with this name, which messages use."""
    f.__name__ = name
    return f


def is_variable(x: Any) -> bool:
    """True for a variable of Flax, which holds an array, or in a block a value."""
    return hasattr(type(x), "__jax_array__") and hasattr(type(x), "__getitem__") and not isinstance(x, Lazy)


def checked_inverse(inverse: Callable[..., Any], shape: tuple[Any, ...]) -> Callable[..., Any]:
    """The inverse of a map, which has to give an array of this shape."""

    def recovered(*arrays: jax.Array) -> jax.Array:
        result: jax.Array = inverse(*arrays)
        result_shape = getattr(result, "shape", type(result).__name__)
        if result_shape != shape:
            raise ValueError(f"inverse: gives {result_shape}; the map is of an array of shape {shape}")
        return result

    return recovered
