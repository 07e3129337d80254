"""`make lab-energy`: what products and epilogues cost in energy, of which time at the power limit is made.

Each call runs alone for a second or more, back to back, at the clock that its own power leaves it, while the device's
own counter runs (NVML). `python -m benchmarks` compares at one clock, which flatters what takes more power. Bare
products are ours, with --tiles in each of `Arch.tiles`, XLA's and those of peers that are installed. Beside the energy
of an epilogue over the bare product's stands that of copying as many bytes as it moves to and from memory beyond the
product's own, both less what an idle device takes in that time. With --products no epilogues; with --step, instead of
all that, the products of a training step (`cases.STEP`) in the layouts that they have there: XLA's bare ones, ours, and
ours with their epilogues. In half a second the counter errs by some percent, the time by one.
Writes benchmarks/results/<device>_energy.csv, _energy_products.csv or _energy_step.csv.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import cases, peers, results
from benchmarks.alone import Execution, Steps, device_counter, executed
from benchmarks.programs import PROGRAMS, Program
from coda_jax.epilogue import trace
from coda_jax.tiles.arch import SM90
from coda_jax.tiles.config import GemmConfig

COPIED = 1 << 29  # elements, 2 bytes each


def extra_bytes(program: Program, m: int, n: int) -> int:
    """The bytes of the program's operands and outputs beyond those of the bare product's output."""
    if program.epilogue is None:
        return 0
    operands = program.operand_types(m, n)
    epilogue, _ = trace(program.epilogue, jax.ShapeDtypeStruct((m, n), jnp.float32), operands)
    tiles = iter(program.out_dtypes)
    total = -2 * m * n
    for output in epilogue.out_avals:
        is_tile = output.shape[0] == m and output.size > m
        total += output.size * jnp.dtype(next(tiles) if is_tile else jnp.float32).itemsize
    return total + sum(operand.size * operand.dtype.itemsize for operand in operands)


class Meter:
    """Measures calls, and keeps a row for each."""

    def __init__(self, counter: Callable[[], float], seconds: float, repeats: int):
        self.counter, self.seconds, self.repeats = counter, seconds, repeats
        self.rows: list[dict[str, Any]] = []
        rested = time.perf_counter() + 2 * seconds
        with Steps(counter) as steps:
            while not (found := steps.apart(seconds, rested, time.perf_counter())):
                time.sleep(seconds / 10)
        (first, joules), (last, more_joules) = found
        self.idle_watts = (more_joules - joules) / (last - first)
        self.keep({"kind": "idle"}, "idle", Execution(self.idle_watts * seconds, seconds))

    def measured(self, about: dict[str, Any], calls: dict[str, Callable[[], Any]]) -> dict[str, Execution]:
        """Medians of the repeats, in random order."""
        found: dict[str, list[Execution]] = {name: [] for name in calls}
        for _ in range(self.repeats):
            for name in random.sample(list(calls), len(calls)):
                found[name].append(executed(calls[name], self.counter, self.seconds))
        medians = {name: Execution(*map(statistics.median, zip(*of, strict=True))) for name, of in found.items()}
        for name, median in medians.items():
            self.keep(about, name, median)
        return medians

    def keep(self, about: dict[str, Any], variant: str, execution: Execution) -> None:
        self.rows.append({**about, "variant": variant, **execution._asdict()})

    def beyond_idle(self, execution: Execution) -> float:
        return execution.joules - self.idle_watts * execution.seconds


def measure_products(
    meter: Meter,
    shapes: cases.Shapes,
    gemm: Any,
    cache_bytes: float,
    beside: Sequence[peers.Peer],
    tiles: Sequence[tuple[int, int]],
) -> None:
    configs: dict[str, GemmConfig | None] = {"coda_product": None}
    configs |= {f"coda_{m}x{n}": GemmConfig(tile_m=m, tile_n=n) for m, n in tiles}
    print("\nbare products")
    for layout, m, n, k in shapes:
        calls = cases.product_calls(layout, m, n, k, configs, gemm, cache_bytes, beside)
        found = meter.measured({"kind": "product", "program": layout, "m": m, "n": n, "k": k}, calls)
        ours = found["coda_product"]
        print(f"{layout} {m}, {n}, {k}", flush=True)
        for name, of in found.items():
            shown = f"{of.joules / ours.joules:8.3f} of ours{1e6 * of.seconds:10.1f} us{of.seconds / ours.seconds:8.3f}"
            print(f"  {name:28}{1e3 * of.joules:10.1f} mJ{of.joules / of.seconds:6.0f} W{shown}", flush=True)


def measure_epilogues(meter: Meter, shapes: cases.Shapes, gemm: Any, cache_bytes: float, joules_of_byte: float) -> None:
    print(
        f"\n{'program':16}{'m':>7}{'n':>8}{'k':>6}{'bare mJ':>10}{'W':>5}{'fused mJ':>10}{'W':>5}{'energy':>8}"
        f"{'time':>8}{'extra MB':>10}{'extra mJ':>10}{'copied mJ':>11}"
    )
    for name, m, n, k in shapes:
        calls = cases.epilogue_calls(name, m, n, k, gemm, cache_bytes)
        moved = extra_bytes(PROGRAMS[name], m, n)
        about = {"kind": "epilogue", "program": name, "m": m, "n": n, "k": k, "extra_bytes": moved}
        found = meter.measured(about, {one: calls[one] for one in ("bare", "fused")})
        bare, fused = found["bare"], found["fused"]
        extra = meter.beyond_idle(fused) - meter.beyond_idle(bare)
        print(
            f"{name:16}{m:7}{n:8}{k:6}{1e3 * bare.joules:10.1f}{bare.joules / bare.seconds:5.0f}"
            f"{1e3 * fused.joules:10.1f}{fused.joules / fused.seconds:5.0f}{fused.joules / bare.joules - 1:8.1%}"
            f"{fused.seconds / bare.seconds - 1:8.1%}{moved / 1e6:10.0f}"
            f"{1e3 * extra:10.1f}{1e3 * joules_of_byte * moved:11.1f}",
            flush=True,
        )


def measure_step(meter: Meter, step: Sequence[tuple[int, str, str, int, int, int]], gemm: Any, cache: float) -> None:
    variants = ("xla_product", "bare", "fused")
    print(f"{'joules of all executions':54}{'XLA, bare':>10}{'bare':>10}{'fused':>10}{'fused / XLA, bare':>20}")

    def show(of: str, joules: Sequence[float]) -> None:
        xla_product, _, fused = joules
        print(f"{of:54}{''.join(f'{one:10.3f}' for one in joules)}{fused / xla_product:20.3f}", flush=True)

    total = [0.0] * len(variants)
    for times, name, layout, m, n, k in step:
        calls = cases.epilogue_calls(name, m, n, k, gemm, cache, layout)
        about = {"kind": "step", "program": name, "layout": layout, "m": m, "n": n, "k": k, "times": times}
        found = meter.measured(about, {one: calls[one] for one in variants})
        joules = [times * found[one].joules for one in variants]
        total = [sum(both) for both in zip(total, joules, strict=True)]
        show(f"{times:2} x {name:15}{layout:14}{m:6}{n:7}{k:7}", joules)
    show("all", total)


def main(
    arguments: Sequence[str] | None = None,
    modules: Sequence[str] = peers.MODULES,
    counter: Callable[[], float] | None = None,
) -> int:
    parser = results.parser("benchmarks.lab.energy", __doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each call, in random order")
    parser.add_argument("--tiles", action="store_true", help="bare products also in every tile")
    parser.add_argument("--products", action="store_true", help="no epilogues")
    parser.add_argument("--step", action="store_true", help="the products of a training step")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds, by XLA")
    options = parser.parse_args(arguments)
    products, epilogues, gemm, cache_bytes = cases.setting(options.tiny)
    meter = Meter(counter or device_counter(), options.seconds, options.repeats)
    if options.step:
        measure_step(meter, cases.TINY_STEP if options.tiny else cases.STEP, gemm, cache_bytes)
        columns = ["kind", "program", "layout", "m", "n", "k", "times", "variant", *Execution._fields]
        results.write("_energy_step", columns, meter.rows, folder=options.out, commit=options.commit)
        return 0

    beside = peers.available(modules)
    x = jax.random.normal(jax.random.key(0), (COPIED >> 16 if options.tiny else COPIED,), jnp.bfloat16)
    negative, moved = functools.partial(jax.jit(jnp.negative), x), 2 * x.nbytes
    copy = meter.measured({"kind": "copy", "extra_bytes": moved}, {"copy": negative})["copy"]
    joules_of_byte = meter.beyond_idle(copy) / moved
    watts = copy.joules / copy.seconds
    print(f"idle {meter.idle_watts:.0f} W; a copy {watts:.0f} W, {1e12 * joules_of_byte:.0f} pJ a byte beyond that")
    del x, negative
    if not options.products:
        measure_epilogues(meter, epilogues, gemm, cache_bytes, joules_of_byte)
    measure_products(meter, products, gemm, cache_bytes, beside, tuple(SM90.tiles) if options.tiles else ())
    columns = ["kind", "program", "m", "n", "k", "extra_bytes", "variant", *Execution._fields]
    about = {"peers": peers.versions(beside)}
    suffix = "_energy_products" if options.products else "_energy"
    results.write(suffix, columns, meter.rows, folder=options.out, commit=options.commit, **about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
