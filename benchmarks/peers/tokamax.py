"""tokamax's ragged_dot, by each of its implementations for a GPU, with tokamax's own derivative."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

import jax

from benchmarks.grouped_forms import ROWS_OF_GROUPS, Form
from benchmarks.peers import Absent

IMPLEMENTATIONS = ("mosaic_gpu", "triton")


def form(tokamax: Any, implementation: str) -> Form:
    def multiply(a: jax.Array, b: jax.Array, sizes: jax.Array, transpose_b: bool = False) -> jax.Array:
        b = b.swapaxes(1, 2) if transpose_b else b
        return tokamax.ragged_dot(a, b, sizes, implementation=implementation)

    def contract(a: jax.Array, b: jax.Array, sizes: jax.Array) -> jax.Array:
        return tokamax.ragged_dot_general(a, b, sizes, ROWS_OF_GROUPS, implementation=implementation)

    return Form(
        f"tokamax_{implementation}",
        multiply,
        contract,
        version=f"tokamax {importlib.metadata.version('tokamax')}",
        includes=f"tokamax.ragged_dot({implementation=}) in its default configuration; the gate is XLA's pass",
    )


def load_grouped() -> list[Form]:
    if jax.default_backend() != "gpu":
        raise Absent("there is no GPU")
    try:
        import tokamax
    except ImportError as error:
        raise Absent(f"tokamax is not installed ({error})") from error
    return list(map(functools.partial(form, tokamax), IMPLEMENTATIONS))
