"""`python -m benchmarks.launch`: what a custom call costs the host, with command buffers (CUDA graphs) and without.

A program is a chain of many small products, each of which needs the one before. Beside coda_jax's custom call stand
XLA's own product and a small row reduction, whose kernels XLA launches itself. For each: the time until the call of the
jitted program returns, until its result is there, and of its kernels, all for one link of the chain; what a program of
one link takes is taken off before. The host limits the second where it is well above the third. Each setting of
command buffers runs in a process of its own. Writes benchmarks/results/<device>_launch.csv.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import programs, results, timing

FLAGS = {"off": "--xla_gpu_enable_command_buffer=", "on": ""}  # XLA has them on unless told otherwise
SIZE = 128
ROUNDS = 4  # of the profiler
MARK = "rows: "  # before what a process found


def chain(name: str, link: Callable[[jax.Array, jax.Array], jax.Array], length: int) -> Callable[..., jax.Array]:
    """The jitted program x -> link(link(... link(x, w) ..., w), w)."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(length):
            x = link(x, w)
        return x

    program.__name__ = name  # timing.executions tells programs apart by it
    return jax.jit(program)


def links(implementation: str) -> dict[str, tuple[Callable[[jax.Array, jax.Array], jax.Array], jax.Array]]:
    """Name -> a link, and what the chain starts with."""

    def coda_product(x: jax.Array, w: jax.Array) -> jax.Array:
        return coda.gemm(x, w, implementation=implementation)

    def xla_product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w, preferred_element_type=jnp.float32).astype(x.dtype)

    def reduction(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.max(w.astype(jnp.float32) - x, axis=1)  # not fused with the next one, which needs all of it

    x = jax.random.normal(jax.random.key(0), (SIZE, SIZE), jnp.bfloat16)
    found: dict[str, Any] = {"coda_product": (coda_product, x), "xla_product": (xla_product, x)}
    return found | {"reduction": (reduction, x[0].astype(jnp.float32))}


def seconds(functions: timing.Functions, repeats: int) -> dict[str, tuple[float, float]]:
    """Medians of the time until the call returns, and until its result is there; in random order, one at a time."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for repeat in range(repeats + 3):  # the first ones load kernels and record graphs
        for name in random.sample(list(functions), len(functions)):
            start = time.perf_counter()
            result = functions[name]()
            returned = time.perf_counter()
            jax.block_until_ready(result)
            if repeat >= 3:
                found[name].append((returned - start, time.perf_counter() - start))
    return {name: tuple(map(statistics.median, zip(*times, strict=True))) for name, times in found.items()}


def measure(calls: int, repeats: int, implementation: str) -> list[dict[str, Any]]:
    """A row a program: microseconds of one link of a chain of so many."""
    w = jax.random.normal(jax.random.key(1), (SIZE, SIZE), jnp.float32) / math.sqrt(SIZE)
    w = w.astype(jnp.bfloat16)
    functions: dict[str, Callable[[], Any]] = {}
    for name, (link, x) in links(implementation).items():
        for length in (1, calls):
            function = chain(f"{name}_{length}", link, length)
            functions[f"{name}_{length}"] = lambda f=function, x=x: f(x, w)
    programs.check("coda_product", functions["coda_product_1"](), functions["xla_product_1"]())
    wall = seconds(functions, repeats)
    executed = timing.executions(functions, rounds=ROUNDS)
    rows = []
    for name in links(implementation):
        one, many = (f"{name}_{length}" for length in (1, calls))
        dispatch, total = (1e6 * (b - a) / (calls - 1) for a, b in zip(wall[one], wall[many], strict=True))
        kernels = [sum(kernel.duration for kernel in ran) for ran in executed[many]]
        device = statistics.median(kernels) / 1e3 / calls
        row = {"program": name, "calls": calls, "dispatch_us": dispatch, "total_us": total, "kernels_us": device}
        rows.append(row | {"kernels": len(executed[many][0]) / calls})
    return rows


def in_process(command_buffers: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a process with this setting, which XLA reads when it starts."""
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS[command_buffers]}".strip()}
    command = [sys.executable, "-m", "benchmarks.launch", *arguments, f"--command-buffers={command_buffers}"]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith(MARK))
    return [{"command_buffers": command_buffers, **row} for row in json.loads(line.removeprefix(MARK))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.launch", __doc__)
    parser.add_argument("--calls", type=int, default=256, help="links of a chain, at least 2 (default 256)")
    parser.add_argument("--repeats", type=int, default=50, help="measured executions of each program (default 50)")
    parser.add_argument("--tiny", action="store_true", help="whatever computes the product here, a CPU's XLA for one")
    parser.add_argument(
        "--command-buffers", choices=list(FLAGS), help=argparse.SUPPRESS
    )  # of a process of `in_process`
    options = parser.parse_args(arguments)
    if options.calls < 2:
        parser.error(f"--calls {options.calls}; it must be at least 2")
    if options.command_buffers:
        rows = measure(options.calls, options.repeats, "auto" if options.tiny else "cuda")
        print(MARK + json.dumps(rows))
        return 0
    passed_on = [f"--calls={options.calls}", f"--repeats={options.repeats}", *(["--tiny"] if options.tiny else [])]
    # This process starts jax only afterwards: two of them do not fit into a GPU's memory.
    rows = [row for command_buffers in FLAGS for row in in_process(command_buffers, passed_on)]
    print(f"one link of a chain of {options.calls}, ({SIZE}, {SIZE}) bfloat16, microseconds   [{timing.clock()}]")
    print(f"{'command buffers':17}{'program':14}{'returns':>10}{'done':>10}{'kernels':>10}{'a link has':>12}")
    for row in rows:
        times = "".join(f"{row[column]:10.2f}" for column in ("dispatch_us", "total_us", "kernels_us"))
        print(f"{row['command_buffers']:17}{row['program']:14}{times}{row['kernels']:4.0f} kernel(s)")
    results.write("_launch", list(rows[0]), rows, folder=options.out, commit=options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
