"""Marks in a function by which it says to `coda.fuse` what its mathematics does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coda_jax.fusion.straight import OPAQUE, jitted
from coda_jax.graph.author import Value
from coda_jax.graph.opaque import opaque as opaque_of_values
from coda_jax.operators.enclosing import is_fused


def opaque(f: Callable[..., Any], *args: Any) -> Any:
    """f(*args), left as it is: a fused function fuses and replaces nothing of it, and JAX differentiates it.

    For what is to run as it is written, as a call of an attention of one's own choice. In a block its arguments are
    values or arrays, and its results values.

    Args:
      f: any JAX function.
      args: its arguments, pytrees of arrays.

    Returns:
      The results of f.
    """
    if any(isinstance(x, Value) for x in args):
        return opaque_of_values(f, *args)
    if not is_fused():
        return f(*args)
    return jitted(f"{OPAQUE}{getattr(f, '__name__', type(f).__name__)}", f)(*args)
