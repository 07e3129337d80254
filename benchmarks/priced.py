"""What an epilogue's price is measured on: a product without and with it, and XLA's form of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import programs, timing

# (program, m, n, k)
SHAPES: Sequence[tuple[str, int, int, int]] = [
    (program, *shape)
    for program, shapes in (
        (
            "residual_sumsq",
            [(16384, 2048, 2048), (16384, 4096, 4096), (16384, 2048, 8192), (16384, 4096, 14336)],
        ),
        ("swiglu", [(16384, 16384, 2048), (16384, 28672, 4096)]),
        ("gated_backward", [(16384, 8192, 2048), (16384, 14336, 4096)]),
        ("norm_backward", [(16384, 2048, 16384), (16384, 4096, 28672)]),
        ("residual", [(16384, 2048, 2048), (16384, 4096, 4096)]),
        ("bias_gelu", [(16384, 8192, 2048), (16384, 16384, 4096)]),
        ("column_sum", [(16384, 2048, 2048), (16384, 4096, 4096)]),
        ("rotary_qkv", [(16384, 3072, 2048), (16384, 6144, 4096)]),
        ("logsumexp_pick", [(4096, 128256, 2048), (4096, 128256, 4096)]),
    )
    for shape in shapes
]


def calls(
    name: str, m: int, n: int, k: int, gemm: Callable[..., Any], cache_bytes: float
) -> dict[str, Callable[[], Any]]:
    """Calls of jitted functions of these names, on sets of random arguments in turn, after a check of the results.

    bare: the product alone. fused: with the program's epilogue. xla: the same by XLA.

    Args:
      name: of a program in programs.PROGRAMS.
      gemm: `coda.gemm` with the implementation to measure.
      cache_bytes: the sets are together at least twice as large.
    """
    program = programs.PROGRAMS[name]

    def make(seed: int) -> tuple:
        b = normal(2 * seed + 1, n, k) / jnp.bfloat16(math.sqrt(k))
        return normal(2 * seed, m, k), b, program.operands(m, n, seed=seed + 7)

    def bare(a, b, operands):
        return gemm(a, b, transpose_b=True)

    def fused(a, b, operands):
        return gemm(a, b, *operands, epilogue=program.epilogue, transpose_b=True)

    def xla(a, b, operands):
        return coda.gemm(a, b, *operands, epilogue=program.epilogue, transpose_b=True, implementation="xla")

    functions = {one.__name__: jitted(one.__name__, one) for one in (bare, fused, xla)}
    arguments = sets(functions["bare"], make, cache_bytes)
    programs.check(f"{name} {m} {n} {k}", functions["fused"](*arguments[0]), functions["xla"](*arguments[0]))
    return {one: rotated(function, arguments) for one, function in functions.items()}


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


def jitted(name, function):
    """jax.jit with the module name that `timing.interleaved` looks for."""
    function.__name__ = name
    return jax.jit(function)


def sets(function: Callable[..., Any], make: Callable[[int], tuple], cache_bytes: float) -> list[tuple]:
    """make(seed), which is (a, b, ...), for as many seeds as it takes to leave the cache before one comes again.

    function is the one that touches least: the bare product.
    """
    first = make(0)
    count = timing.sets_beyond(cache_bytes, first[:2], jax.eval_shape(function, *first))
    return [first, *map(make, range(1, count))]


def rotated(function: Callable[..., Any], sets: Sequence[tuple]) -> Callable[[], Any]:
    return timing.rotated([functools.partial(function, *arguments) for arguments in sets])
