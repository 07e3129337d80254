"""The bare custom call on outputs that hold NaN before it runs, so that an element nobody writes shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs import Program
from coda_jax import ffi
from coda_jax.epilogue import trace
from coda_jax.primitives import kernel
from coda_jax.tiles.config import GemmConfig, choose_tiling
from coda_jax.tiles.cost_model import Product


def poisoned_call(
    program: Program,
    a: jax.Array,
    b: jax.Array,
    operands: Sequence[jax.Array],
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    config: GemmConfig | None = None,
    rewrite: Callable[[str], str] = lambda source: source,
) -> Callable[[], list[jax.Array]]:
    """A function that runs the program's kernel on fresh outputs full of NaN: stores, then partial reductions.

    Args:
      rewrite: applied to the kernel's whole source, headers inlined; for planting faults.
    """
    k, m = a.shape if transpose_a else a.shape[::-1]
    n = b.shape[0] if transpose_b else b.shape[1]
    epilogue, captured = trace(program.epilogue, jax.ShapeDtypeStruct((m, n), jnp.float32), operands)
    assert not captured
    out_dtypes = [np.dtype(dtype) for dtype in program.out_dtypes]

    def lower(extra):
        arguments = (*operands, *extra)
        return kernel.lower(
            epilogue.program,
            a,
            b,
            arguments,
            out_dtypes=out_dtypes,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            batched=(False,) * (2 + len(arguments)),
            tiling=choose_tiling(Product(m, n, k, transpose_b=transpose_b), epilogue.program, out_dtypes, config),
            name=epilogue.name,
        )

    def poison_of(result):
        return jnp.full(result.shape, jnp.nan if jnp.issubdtype(result.dtype, jnp.floating) else 1, result.dtype)

    poison = [poison_of(result) for result in lower(()).results]
    outputs = len(epilogue.program.stores) + len(epilogue.program.reductions)  # what follows is split-K's
    lowered = lower(poison)
    source = rewrite(inline_headers(lowered.source))

    @jax.jit
    def call(a, b, operands, poison):
        arguments = (a, b, *operands, *poison)
        aliases = {2 + len(operands) + i: i for i in range(len(poison))}
        return ffi.gemm_call(
            arguments, lowered.results, source=source, input_output_aliases=aliases, **lowered.attributes
        )

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
