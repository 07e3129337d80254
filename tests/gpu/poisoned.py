"""The bare custom call on outputs that hold NaN before it runs, so that an element nobody writes shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from benchmarks.programs import Program, lowered, spec_of
from coda_jax import ffi
from coda_jax.epilogue import trace
from coda_jax.tiles.config import GemmConfig


def poisoned_call(
    program: Program,
    a: jax.Array,
    b: jax.Array,
    operands: Sequence[jax.Array],
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    config: GemmConfig | None = None,
    yields: bool = False,
    rewrite: Callable[[str], str] = lambda source: source,
) -> Callable[[], list[jax.Array]]:
    """A function that runs the program's kernel on fresh outputs full of NaN: stores, then partial reductions.

    Args:
      yields: as in a program of several devices.
      rewrite: applied to the kernel's whole source, headers inlined; for planting faults.
    """
    m = a.shape[1] if transpose_a else a.shape[0]
    n = b.shape[0] if transpose_b else b.shape[1]
    epilogue, captured = trace(program.epilogue, jax.ShapeDtypeStruct((m, n), jnp.float32), operands)
    assert not captured

    def lower(extra):
        types = (a, b, *operands, *extra)
        spec = spec_of(program, epilogue, transpose_a=transpose_a, transpose_b=transpose_b)
        return lowered(types, spec.replace(batched=(False,) * len(types)), config, yields=yields)

    def poison_of(result):
        return jnp.full(result.shape, jnp.nan if jnp.issubdtype(result.dtype, jnp.floating) else 1, result.dtype)

    poison = [poison_of(result) for result in lower(()).results]
    outputs = len(epilogue.program.stores) + len(epilogue.program.reductions)  # what follows is scratch
    kernel = lower(poison)
    rewritten = dataclasses.replace(kernel.call, source=rewrite(inline_headers(kernel.call.source)))

    @jax.jit
    def call(a, b, operands, poison):
        arguments = (a, b, *operands, *poison)
        aliases = {2 + len(operands) + i: i for i in range(len(poison))}
        return ffi.gemm_call(arguments, kernel.results, rewritten, input_output_aliases=aliases)

    return lambda: call(a, b, tuple(operands), poison)[:outputs]


def inline_headers(source: str) -> str:
    """Replaces each include of a kernel header by its text, once."""
    seen: set[str] = set()

    def expand(text: str) -> str:
        lines = []
        for line in text.splitlines():
            name = line.removeprefix("#include ").strip('"')
            if name not in ffi.headers():
                lines.append("" if line.startswith("#pragma once") else line)
            elif name not in seen:
                seen.add(name)
                lines.append(expand(ffi.headers()[name]))
        return "\n".join(lines)

    return expand(source)
