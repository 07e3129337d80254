"""`python -m benchmarks.energy`: what an epilogue costs in energy, of which its price at the power limit is made.

Each call runs alone for a second or more, back to back, while the device's own counter runs (NVML). Beside an
epilogue's energy over the bare product's stands that of copying as many bytes as the epilogue moves to and from memory
beyond the product's own, less what an idle device takes in that time. Writes benchmarks/results/<device>_energy.csv.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import coda_jax as coda
from benchmarks import priced, programs, results, timing

COPIED = 1 << 29  # elements, 2 bytes each
_AHEAD = 5e-3  # seconds of work that the host prepares
TINY = [("residual_sumsq", 64, 32, 64), ("rotary_qkv", 32, 192, 64)]


class Execution(NamedTuple):
    """Of one execution, back to back with others of the same."""

    joules: float
    seconds: float


def device_counter() -> Callable[[], float]:
    """Joules that the first GPU has taken since its driver was loaded.

    Raises:
      OSError: no NVML on this machine.
    """
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()

    def check(status: int) -> None:
        if status:
            raise OSError(f"NVML: status {status}")

    check(nvml.nvmlInit_v2())
    check(nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)))

    def counter() -> float:
        check(nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)))
        return millijoules.value / 1e3

    return counter


def executed(call: Callable[[], Any], counter: Callable[[], float], seconds: float) -> Execution:
    """The mean over so many seconds; half as many before, for the clock to settle.

    The counter stands still for a tenth of a second at a time: what is taken is from one of its steps to another.
    """
    jax.block_until_ready(call())
    started = time.perf_counter()
    jax.block_until_ready(call())
    ahead = max(1, round(_AHEAD / (time.perf_counter() - started)))
    started, count, joules = time.perf_counter(), 0, counter()
    steps: list[tuple[float, int, float]] = []  # joules, executions and seconds until then
    while len(steps) < 2 or steps[-1][2] - steps[0][2] < seconds:
        for _ in range(ahead):
            result = call()
        jax.block_until_ready(result)
        count += ahead
        before, joules, elapsed = joules, counter(), time.perf_counter() - started
        if joules != before and elapsed > seconds / 2:
            steps.append((joules, count, elapsed))
    taken, executions, elapsed = (last - first for first, last in zip(steps[0], steps[-1], strict=True))
    return Execution(taken / executions, elapsed / executions)


def extra_bytes(name: str, m: int, n: int) -> int:
    """What the program's operands and outputs have over the bare product's output."""
    program = programs.PROGRAMS[name]
    operands = program.operand_types(m, n)
    outputs = jax.eval_shape(program.epilogue, jax.ShapeDtypeStruct((m, n), jnp.float32), *operands)
    tiles = iter(program.out_dtypes)
    total = -2 * m * n
    for output in jax.tree.leaves(outputs):
        is_tile = output.shape[0] == m and output.size > m
        total += output.size * jnp.dtype(next(tiles) if is_tile else jnp.float32).itemsize
    return total + sum(operand.size * operand.dtype.itemsize for operand in operands)


def main(arguments: Sequence[str] | None = None, counter: Callable[[], float] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.energy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each call, in random order")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU runs in seconds, by XLA")
    parser.add_argument("--out", type=pathlib.Path, default=results.FOLDER, help="folder of the CSV")
    parser.add_argument("--commit", default=results.commit(), help="written into the results")
    options = parser.parse_args(arguments)
    counter = counter or device_counter()
    gemm = functools.partial(coda.gemm, implementation="auto" if options.tiny else "cuda")
    cache_bytes = 2e4 if options.tiny else timing.L2_BYTES
    shapes = TINY if options.tiny else [shape for shape in priced.SHAPES if shape[-1] == 2048]

    def measured(calls: dict[str, Callable[[], Any]]) -> dict[str, Execution]:
        found: dict[str, list[Execution]] = {name: [] for name in calls}
        for _ in range(options.repeats):
            for name in random.sample(list(calls), len(calls)):
                found[name].append(executed(calls[name], counter, options.seconds))
        return {name: Execution(*map(statistics.median, zip(*of, strict=True))) for name, of in found.items()}

    time.sleep(2 * options.seconds)
    before = counter()
    time.sleep(options.seconds)
    idle_watts = (counter() - before) / options.seconds
    x = priced.normal(0, COPIED >> 16 if options.tiny else COPIED)
    copy = measured({"copy": functools.partial(jax.jit(jnp.negative), x)})["copy"]
    of_byte = (copy.joules - idle_watts * copy.seconds) / (2 * x.nbytes)
    del x
    watts = copy.joules / copy.seconds
    print(f"idle {idle_watts:.0f} W; a copy {watts:.0f} W, {1e12 * of_byte:.0f} pJ a byte beyond that")
    print(
        f"{'program':16}{'m':>7}{'n':>8}{'k':>6}{'bare mJ':>10}{'W':>5}{'fused mJ':>10}{'W':>5}{'energy':>8}{'time':>8}"
        f"{'extra MB':>10}{'extra mJ':>10}{'copied mJ':>11}"
    )
    rows = []
    for name, m, n, k in shapes:
        calls = priced.calls(name, m, n, k, gemm, cache_bytes)
        found = measured({one: calls[one] for one in ("bare", "fused")})
        bare, fused, moved = found["bare"], found["fused"], extra_bytes(name, m, n)
        extra = fused.joules - bare.joules - idle_watts * (fused.seconds - bare.seconds)
        row = {"program": name, "m": m, "n": n, "k": k, "extra_bytes": moved, "idle_w": idle_watts}
        row |= {"bare_j": bare.joules, "bare_s": bare.seconds, "fused_j": fused.joules, "fused_s": fused.seconds}
        rows.append(row | {"extra_j": extra, "copied_j": of_byte * moved})
        print(
            f"{name:16}{m:7}{n:8}{k:6}{1e3 * bare.joules:10.1f}{bare.joules / bare.seconds:5.0f}"
            f"{1e3 * fused.joules:10.1f}{fused.joules / fused.seconds:5.0f}{fused.joules / bare.joules - 1:8.1%}"
            f"{fused.seconds / bare.seconds - 1:8.1%}{moved / 1e6:10.0f}"
            f"{1e3 * extra:10.1f}{1e3 * of_byte * moved:11.1f}",
            flush=True,
        )
    results.write("_energy", list(rows[0]), rows, folder=options.out, commit=options.commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
