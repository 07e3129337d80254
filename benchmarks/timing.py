"""Device time of jitted functions, interleaved in one run."""

from __future__ import annotations

import collections
import glob
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class Times(NamedTuple):
    """Medians in microseconds: of all kernels of one execution together, and of the longest one alone."""

    total: float
    longest: float


def interleaved(
    functions: Mapping[str, Callable[[], Any]], *, seconds: float = 1.5, burst: int = 4, pause: float = 0.0
) -> dict[str, Times]:
    """Device times of each function, kernels only, measured by the profiler (CUPTI).

    Each round runs the functions in a fresh random order, `burst` times each, so that clock and temperature fall on all
    alike; the first third of the rounds is not measured. Without pauses the chip comes to its power limit, as in
    training; with them it stays below, and the clock at its highest.

    Args:
      functions: name -> call of a jitted function on fixed arguments. The jitted function's own name must be the key:
        kernels are told apart by the name of their XLA module, `jit_<name>`.
      seconds: of measured execution, at least ten rounds.
      burst: executions of a function in a row.
      pause: seconds of rest after each round, not counted in `seconds`.

    Raises:
      RuntimeError: the trace holds no kernels of a function.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    started, warm_rounds = time.perf_counter(), 0
    while time.perf_counter() - started < seconds / 2 + pause * warm_rounds:
        _round(functions, burst, pause)
        warm_rounds += 1
    rounds = max(10, 2 * warm_rounds)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                _round(functions, burst, pause)
        path = glob.glob(folder + "/**/*.xplane.pb", recursive=True)[-1]
        kernels = _kernels_by_module(jax.profiler.ProfileData.from_file(path))
    executions = rounds * burst
    medians = {}
    for name in functions:
        durations = kernels.get(f"jit_{name}", [])
        if not durations or len(durations) % executions:
            raise RuntimeError(f"{name}: {len(durations)} kernels in the trace for {executions} executions")
        each = len(durations) // executions
        executed = [durations[i : i + each] for i in range(0, len(durations), each)]
        medians[name] = Times(statistics.median(map(sum, executed)) / 1e3, statistics.median(map(max, executed)) / 1e3)
    return medians


def _round(functions: Mapping[str, Callable[[], Any]], burst: int, pause: float) -> None:
    order = list(functions)
    random.shuffle(order)
    for name in order:
        for _ in range(burst):
            result = functions[name]()
    jax.block_until_ready(result)
    time.sleep(pause)


def _kernels_by_module(profile) -> dict[str, list[float]]:
    """Durations in ns of the device's kernels in time order, by XLA module."""
    events = collections.defaultdict(list)
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                module = dict(event.stats).get("hlo_module")
                if module is not None:
                    events[module].append((event.start_ns, event.duration_ns))
    return {module: [duration for _, duration in sorted(entries)] for module, entries in events.items()}


def clock() -> str:
    """SM clock and power as nvidia-smi has them now."""
    command = ["nvidia-smi", "--query-gpu=name,clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
