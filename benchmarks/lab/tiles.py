"""`make lab-tiles`: every tile that a product can have, on shapes of real models; is the best one chosen?

The products of Llama 3, Qwen3, Gemma 2 and 3 and GPT-2 with 256 to 65536 tokens: forward, back to the activations and
to the weights, bare and with three epilogues. Each tile is checked once against XLA. A shape's tiles are interleaved
in random order, small shapes' with those of others so that none finds its arguments in L2, and timed by the profiler.
Shapes come in random order too, so that some of them are a fair sample of the grid. Writes
benchmarks/results/<device>_tiles.csv, a row a shape and tile.

From that file alone, without a GPU: `--report` says how good the cost model's choice is, `--fit` the constants of
coda_jax/tiles/constants.py that suit it best, and `--table` writes the library's table of the shapes where the
cost model loses, coda_jax/tiles/tuned/<device>.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import random
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import programs, results, timing
from benchmarks.lab import tile_losses
from benchmarks.lab.tile_losses import Shape
from coda_jax.jaxprs.walk import equations_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES, coda_gemm_p
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles import table as tile_table
from coda_jax.tiles.choose import candidates
from coda_jax.tiles.config import GemmConfig, KernelConfig
from coda_jax.tiles.constants import by_time, constants_for
from coda_jax.tools import tune


@dataclasses.dataclass(frozen=True)
class Model:
    """Widths of a layer: model, queries with keys and values, heads together, hidden; whether the MLP has a gate."""

    d: int
    qkv: int
    heads: int
    hidden: int
    gated: bool = True


MODELS = {
    "Llama 3 1B": Model(2048, 3072, 2048, 8192),
    "Llama 3 8B": Model(4096, 6144, 4096, 14336),
    "Llama 3 70B": Model(8192, 10240, 8192, 28672),
    "Qwen3 0.6B": Model(1024, 4096, 2048, 3072),
    "Qwen3 8B": Model(4096, 6144, 4096, 12288),
    "Gemma 2 2B": Model(2304, 4096, 2048, 9216),
    "Gemma 2 9B": Model(3584, 8192, 4096, 14336),
    "Gemma 3 1B": Model(1152, 1536, 1024, 6912),
    "Gemma 3 4B": Model(2560, 4096, 2048, 10240),
    "Gemma 3 12B": Model(3840, 8192, 4096, 15360),
    "GPT-2": Model(768, 2304, 768, 3072, gated=False),
}
TOKENS = (256, 1024, 4096, 16384, 65536)
TINY_MODELS, TINY_TOKENS = {"tiny": Model(64, 96, 64, 64)}, (64, 192)
LARGEST_BYTES = 5e9  # of an array
CHUNK_BYTES, CHUNK_FUNCTIONS = 30e9, 400  # measured in one trace
LEAST_ROUNDS, MOST_ROUNDS = 10, 150  # of a shape's tiles
RUN_AHEAD_BYTES = 5e8  # of a shape from which each execution is waited for: many results at once would fill the memory
CHECKED = ((384, 768, 256), (384, 768, 4096))  # m, n, k; a pipeline may depend on k


def shapes(models: dict[str, Model], tokens: Sequence[int]) -> list[Shape]:
    """The products of the models' layers, each once."""
    found = []
    for model, m in itertools.product(models.values(), tokens):
        up = model.hidden * (2 if model.gated else 1)
        weights = ((model.qkv, model.d), (model.d, model.heads), (up, model.d), (model.d, model.hidden))
        for n, k in weights:
            found += [
                Shape("identity", "NN", m, n, k),
                Shape("identity", "NT", m, k, n),
                Shape("identity", "TN", k, n, m),
            ]
        found += [Shape("residual_sumsq", "NN", m, n, k) for n, k in (weights[1], weights[3])]
        if model.gated:
            found.append(Shape("swiglu", "NN", m, up, model.d))
            found.append(Shape("gated_backward", "NT", m, model.hidden, model.d))
    return [shape for shape in dict.fromkeys(found) if max(array_bytes(shape)) <= LARGEST_BYTES]


def array_bytes(shape: Shape) -> list[int]:
    """The bytes of each argument and of each tile of the results."""
    problem = shape.problem
    program, stores = problem.program, zip(problem.program.stores, problem.out_dtypes, strict=True)
    results = [shape.m * program.halves.columns(store.width, shape.n) * dtype.itemsize for store, dtype in stores]
    return [math.prod(type_.shape) * type_.dtype.itemsize for type_ in shape.types] + results


def _product(shape: Shape, implementation: str) -> Callable[..., Any]:
    transpose_a, transpose_b = shape.transposes
    return functools.partial(
        coda.gemm,
        epilogue=programs.PROGRAMS[shape.program].epilogue,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        implementation=implementation,
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A shape's programs: what makes its arguments, and one for each config, by the name of its XLA module."""

    shape: Shape
    bytes: int
    make: jax.stages.Compiled
    configs: dict[str, KernelConfig]
    calls: dict[str, jax.stages.Compiled]


def compiled(number: int, shape: Shape, implementation: str) -> Compiled:
    def make() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(number, impl="rbg"), len(shape.types))
        scale = [1, 1 / math.sqrt(shape.k), *[1] * (len(shape.types) - 2)]
        return [
            (x * jax.random.normal(key, type_.shape, jnp.bfloat16)).astype(type_.dtype)
            for x, key, type_ in zip(scale, keys, shape.types, strict=True)
        ]

    problem = shape.problem
    device = jax.devices()[0].device_kind
    found = candidates(problem.shape, problem.program, problem.out_dtypes, device)
    configs = {f"tile_{number}_{i}": config for i, config in enumerate(found)}
    # Traced once, for that takes longer than all else that one thread at a time can do.
    equations, _ = equations_of(_product(shape, implementation), *shape.types)
    (spec,) = (equation.params["spec"] for equation, _ in equations if equation.primitive in PRIMITIVES)
    calls = {}
    for name, config in configs.items():
        with_config = spec.replace(config=GemmConfig(**dataclasses.asdict(config)))

        def run(*arguments: jax.Array, spec: GemmSpec = with_config) -> list[jax.Array]:
            return coda_gemm_p.bind(*arguments, spec=spec)

        run.__name__ = name  # timing.executions tells programs apart by it
        # What a command buffer launches has no module's name in the trace.
        options = {"xla_gpu_enable_command_buffer": ""}
        calls[name] = jax.jit(run).lower(*shape.types).compile(options)
    return Compiled(shape, sum(array_bytes(shape)), jax.jit(make).lower().compile(), configs, calls)


def check(one: Compiled) -> None:
    """Raises unless every config gives what XLA gives."""
    arguments = one.make()
    expected = jax.jit(_product(one.shape, "xla"))(*arguments)
    for name, call in one.calls.items():
        programs.check(f"{one.shape} {one.configs[name]}", call(*arguments), expected)


def measure(chunk: Sequence[Compiled], seconds: float) -> list[dict[str, Any]]:
    """A row a shape and tile, each shape's tiles measured for about so long; see `tune.relative_medians`."""
    groups = []
    for of_group in grouped(chunk):
        functions: dict[str, Callable[[], Any]] = {}
        for one in of_group:
            arguments = one.make()
            for name, call in one.calls.items():
                run = functools.partial(call, *arguments)
                if one.bytes > RUN_AHEAD_BYTES:
                    run = functools.partial(_finished, run)
                jax.block_until_ready(run())
                functions[name] = run
        started = time.perf_counter()
        for run in functions.values():
            result = run()
        jax.block_until_ready(result)
        rounds = round(seconds * len(of_group) / (time.perf_counter() - started))
        groups.append(timing.Group(functions, min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS)))
    with _clock() as clocks:
        executed = timing.executions_of_groups(groups)
    rows = []
    for one in chunk:
        us = [[sum(kernel.duration for kernel in of) / 1e3 for of in executed[name]] for name in one.configs]
        of_rounds = (us, [of[0::2] for of in us], [of[1::2] for of in us])
        medians = zip(*map(tune.relative_medians, of_rounds), strict=True)
        for config, (all_rounds, even, odd) in zip(one.configs.values(), medians, strict=True):
            rows.append(
                {
                    **dataclasses.asdict(one.shape),
                    **dataclasses.asdict(config),
                    "us": round(all_rounds, 3),
                    "us_even": round(even, 3),
                    "us_odd": round(odd, 3),
                    "rounds": len(us[0]),
                    "measured_at": clocks[-1],
                }
            )
    return rows


def grouped(chunk: Sequence[Compiled]) -> Iterator[list[Compiled]]:
    """Shapes whose tiles are interleaved: as few as are together beyond the cache."""
    group: list[Compiled] = []
    for one in chunk:
        group.append(one)
        if sum(other.bytes for other in group) > 2 * timing.L2_BYTES:
            yield group
            group = []
    if group:
        yield group


def _finished(run: Callable[[], Any]) -> Any:
    return jax.block_until_ready(run())


class _clock:
    """Asks for clock and power all the while; in the end its list has the one with the highest power last."""

    def __enter__(self) -> list[str]:
        self._stop = threading.Event()
        self._found = [timing.clock()]
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        return self._found

    def _ask(self) -> None:
        while not self._stop.wait(0.2):
            self._found.append(timing.clock())

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        self._found.sort(key=lambda one: float((re.search(r"([\d.]+) W", one) or [0, 0])[1]))


def chunks(ready: Sequence[Compiled]) -> Iterator[list[Compiled]]:
    """As many as one trace takes."""
    chunk: list[Compiled] = []
    for one in ready:
        functions = sum(len(other.calls) for other in [*chunk, one])
        if chunk and (sum(other.bytes for other in [*chunk, one]) > CHUNK_BYTES or functions > CHUNK_FUNCTIONS):
            yield chunk
            chunk = []
        chunk.append(one)
    if chunk:
        yield chunk


def run(
    grid: Sequence[Shape], budget: float, seconds: float, implementation: str, checked: Sequence[tuple[int, int, int]]
) -> tuple[list[dict[str, Any]], bool]:
    """Rows of as many shapes of the grid, in this order, as the budget of seconds allows; and whether all went well.

    All is compiled before anything is measured, so that the host never keeps the device waiting.
    """
    started, rows, passed, well = time.perf_counter(), [], 0, True
    kinds = dict.fromkeys((shape.program, shape.layout) for shape in grid)
    build = functools.partial(compiled, implementation=implementation)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        samples = [Shape(*kind, *sizes) for kind in kinds for sizes in checked]
        first = list(pool.map(build, range(len(grid), len(grid) + len(samples)), samples))
        for one in first:
            check(one)
        count = sum(len(one.calls) for one in first)
        print(f"{count} samples agree with XLA's products, {time.perf_counter() - started:.0f} s", flush=True)
        ready = list(pool.map(build, range(len(grid)), grid))
        print(f"{len(grid)} shapes compiled, {time.perf_counter() - started:.0f} s", flush=True)
    started = time.perf_counter()
    for chunk in chunks(ready):
        if time.perf_counter() - started > budget:
            break
        try:
            rows += measure(chunk, seconds)
        except RuntimeError as error:  # of the memory or the profiler; the other shapes are worth having
            well = False
            print(f"not measured: {', '.join(str(one.shape) for one in chunk)}: {error}", file=sys.stderr)
        passed += len(chunk)
        at = rows[-1]["measured_at"] if rows else ""
        print(f"{passed} of {len(grid)} shapes, {time.perf_counter() - started:.0f} s   [{at}]", flush=True)
    return rows, well


def main(arguments: Sequence[str] | None = None) -> int:
    parser = results.parser("benchmarks.lab.tiles", __doc__)
    parser.add_argument("--shapes", type=int, default=420, help="how many of the grid's, in random order")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of measuring, then no more are begun")
    parser.add_argument("--seconds", type=float, default=0.15, help="of measurement of each shape")
    parser.add_argument("--seed", type=int, default=5, help="of the shapes' order")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds, by XLA")
    parser.add_argument("--csv", type=pathlib.Path, help="what to read instead of measuring; default all in --out")
    parser.add_argument("--report", action="store_true", help="how good the cost model's choice is in the CSV")
    parser.add_argument("--fit", action="store_true", help="the cost model's constants that suit the CSV best")
    parser.add_argument("--table", action="store_true", help="write the library's table from the CSV")
    options = parser.parse_args(arguments)
    if options.report or options.fit or options.table:
        return _read(parser, options)
    grid = shapes(TINY_MODELS, TINY_TOKENS) if options.tiny else shapes(MODELS, TOKENS)
    total = len(grid)
    random.Random(options.seed).shuffle(grid)
    grid = grid[: options.shapes]
    checked = [(64, 128, 64)] if options.tiny else CHECKED
    rows, well = run(grid, options.budget, options.seconds, "auto" if options.tiny else "cuda", checked)
    if not rows:
        return 1
    of_times = ["us", "us_even", "us_odd", "rounds", "measured_at"]
    columns = ["program", "layout", "m", "n", "k", *tile_losses.FIELDS, *of_times]
    path = results.write("_tiles", columns, rows, folder=options.out, commit=options.commit, shapes=total)
    print(tile_losses.summary(path))
    return 0 if well else 1


def _read(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    found = [options.csv] if options.csv else sorted(options.out.glob("*_tiles.csv"))
    if not found:
        parser.error(f"{options.out} has no file *_tiles.csv; name one by --csv")
    for path in found:
        device, times = tile_losses.read(path)
        constants = constants_for(device)
        print(f"{device}, {path.name}")
        if options.report:
            print(tile_losses.summary(path))
        if options.fit:
            fitted = tile_losses.fit(times, constants)
            both = (by_time(constants), by_time(fitted))
            before, after = (statistics.mean(tile_losses.losses(times, of).values()) for of in both)
            print(f"mean loss {before:.2%} with the present constants, {after:.2%} with\n{tile_losses.shown(fitted)}")
        if options.table:
            entries = tile_losses.table(times, constants)
            table = tile_table.shipped_path(device)
            tile_table.write(table, {device: entries})
            print(f"written: {table}, {len(entries)} of {len(times)} shapes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
