"""Every program once at sizes with edges, for compute-sanitizer: `make gpu-sanitize`.

    python -m tests.gpu.sanitized --part 2/9

A part is a process: compute-sanitizer itself ends in a segmentation fault after some 20 programs in one.
"""

from __future__ import annotations

import argparse
import itertools

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks.programs import PROGRAMS

LAYOUTS = ((False, True), (False, False), (True, False))  # transpose_a, transpose_b
Case = tuple[tuple[bool, bool], str]


def cases(part: str) -> list[Case]:
    """Those of part "i/n", a layout and a program each.

    Raises:
      argparse.ArgumentTypeError: it is not i/n with 1 <= i <= n.
    """
    index, _, count = part.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{part!r}; it must be i/n with 1 <= i <= n")
    return list(itertools.product(LAYOUTS, PROGRAMS))[int(index) - 1 :: int(count)]


def run(layout: tuple[bool, bool], name: str) -> None:
    program, (transpose_a, transpose_b) = PROGRAMS[name], layout
    m, n, k = 264, program.columns(400), 136
    a = jax.random.normal(jax.random.key(0), (k, m) if transpose_a else (m, k)).astype(jnp.bfloat16)
    b = jax.random.normal(jax.random.key(1), (n, k) if transpose_b else (k, n)).astype(jnp.bfloat16)

    @jax.jit
    def fused(a, b, *operands):
        return coda.gemm(
            a,
            b,
            *operands,
            epilogue=program.epilogue,
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            implementation="cuda",
        )

    jax.block_until_ready(fused(a, b, *program.operands(m, n)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitized", description=__doc__.splitlines()[0])
    parser.add_argument("--part", type=cases, default="1/1", metavar="I/N", help="which of how many (default 1/1)")
    for layout, name in parser.parse_args().part:
        run(layout, name)
        print(name, *layout, "ran", flush=True)


if __name__ == "__main__":
    main()
