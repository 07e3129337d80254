"""The bare custom call on outputs that hold NaN before it runs, so that an element nobody writes shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs import Program, lowered, spec_of
from coda_jax import ffi
from coda_jax.epilogue import trace
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.config import GemmConfig


def poisoned_call(
    program: Program,
    a: jax.Array,
    b: jax.Array,
    operands: Sequence[jax.Array],
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    symmetric: bool = False,
    config: GemmConfig | None = None,
    yields: bool = False,
    rewrite: Callable[[str], str] = lambda source: source,
) -> Callable[[], list[jax.Array]]:
    """A function that runs the program's kernel on fresh outputs full of NaN: stores, then partial reductions.

    Args:
      symmetric: as of `coda.symmetric_gemm`.
      yields: as in a program of several devices.
      rewrite: applied to the kernel's whole source, headers inlined; for planting faults.
    """
    m = a.shape[1] if transpose_a else a.shape[0]
    n = b.shape[0] if transpose_b else b.shape[1]
    epilogue, captured = trace(program.epilogue, jax.ShapeDtypeStruct((m, n), jnp.float32), operands)
    assert not captured
    if symmetric:
        epilogue = epilogue.symmetric()
    options = {"transpose_a": transpose_a, "transpose_b": transpose_b, "symmetric": symmetric}
    spec = spec_of(program, epilogue, **options)
    return poisoned(spec, (a, b, *operands), config=config, yields=yields, rewrite=rewrite)


def poisoned(
    spec: GemmSpec,
    arguments: Sequence[jax.Array],
    *,
    config: GemmConfig | None = None,
    yields: bool = False,
    rewrite: Callable[[str], str] = lambda source: source,
) -> Callable[[], list[jax.Array]]:
    """`poisoned_call` of any product."""

    def poison_of(result):
        return jnp.full(result.shape, jnp.nan if jnp.issubdtype(result.dtype, jnp.floating) else 1, result.dtype)

    kernel = lowered(arguments, spec, config, yields=yields)
    poison = [poison_of(result) for result in kernel.results]
    outputs = len(spec.program.stores) + len(spec.program.reductions)  # what follows is scratch
    # The poison comes in as operands behind all others, and so the results' buffers have greater numbers.
    first, more = len(arguments), len(poison)

    def number(buffer: int) -> int:
        return buffer + more if buffer >= first else buffer

    maps = [number(x) if i % 6 == 0 else x for i, x in enumerate(kernel.call.maps)]
    rewritten = dataclasses.replace(
        kernel.call,
        source=rewrite(inline_headers(kernel.call.source)),
        maps=maps,
        pointers=[number(x) for x in kernel.call.pointers],
        flags=number(kernel.call.flags) if kernel.call.flags >= 0 else -1,
    )

    @jax.jit
    def call(arguments, poison):
        aliases = {first + i: i for i in range(more)}
        return ffi.gemm_call((*arguments, *poison), kernel.results, rewritten, input_output_aliases=aliases)

    return lambda: call(tuple(arguments), poison)[:outputs]


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


def poisoned_launches(monkeypatch: Any) -> None:
    """Makes kernels that are no products start with results full of NaN, in what is traced from now on.

    Results that are arguments, too, start with what these hold.
    """
    launch = ffi.launch_call

    def poisoned_launch(
        args: Sequence[Any], results: Sequence[Any], call: ffi.LaunchCall, given: Mapping[int, int] | None = None
    ) -> list[jax.Array]:
        first, more = len(args), len(results)
        poison = [
            jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0x7F7F7F7F, x.dtype)
            for x in results
        ]

        def renumbered(numbers: Sequence[int], each: int) -> list[int]:
            return [x + more if i % each == 0 and x >= first else x for i, x in enumerate(numbers)]

        moved = dataclasses.replace(
            call,
            grid=renumbered(call.grid, 3),
            maps=renumbered(call.maps, 3),
            pointers=renumbered(call.pointers, 1),
            sizes=renumbered(call.sizes, 2),
            zeroed=renumbered(call.zeroed, 1),
        )
        given = dict(given or {})
        aliases = given | {first + i: i for i in range(more) if i not in given.values()}
        return launch([*args, *poison], results, moved, input_output_aliases=aliases)

    monkeypatch.setattr(ffi, "launch_call", poisoned_launch)
