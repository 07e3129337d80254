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


class Kernel(NamedTuple):
    """A kernel, copy or fill that the device ran: its own name, that of its HLO instruction, start and duration in ns.

    instruction is empty where the trace does not have it, as for what a CUDA graph launches.
    """

    name: str
    instruction: str
    start: float
    duration: float


Functions = Mapping[str, Callable[[], Any]]


def interleaved(functions: Functions, *, seconds: float = 1.5, burst: int = 4, pause: float = 0.0) -> dict[str, Times]:
    """Device times of each function, kernels only, measured by the profiler (CUPTI).

    Each round runs the functions in a fresh random order, `burst` times each, so that clock and temperature fall on all
    alike; the first third of the rounds is not measured. Without pauses the chip comes to its power limit, as in
    training; with them it stays below, and the clock at its highest.

    Args:
      functions: as in `executions`.
      seconds: of measured execution, at least ten rounds.
      burst: executions of a function in a row.
      pause: seconds of rest after each round, not counted in `seconds`.
    """
    for function in functions.values():
        jax.block_until_ready(function())
    started, warm_rounds = time.perf_counter(), 0
    while time.perf_counter() - started < seconds / 2 + pause * warm_rounds:
        _round(functions, burst, pause)
        warm_rounds += 1
    rounds = max(10, 2 * warm_rounds)
    medians = {}
    for name, executed in executions(functions, rounds=rounds, burst=burst, pause=pause).items():
        durations = [[kernel.duration for kernel in kernels] for kernels in executed]
        medians[name] = Times(
            statistics.median(map(sum, durations)) / 1e3, statistics.median(map(max, durations)) / 1e3
        )
    return medians


def executions(
    functions: Functions, *, rounds: int, burst: int = 1, pause: float = 0.0
) -> dict[str, list[list[Kernel]]]:
    """What the device ran in each execution of each function, in time order; the functions interleaved as above.

    Where there is no GPU, one Kernel an execution stands for all, with the wall clock's time.

    Args:
      functions: name -> call of a jitted function on fixed arguments. The jitted function's own name must be the key:
        kernels are told apart by the name of their XLA module, `jit_<name>`.
      rounds: how often each function is run `burst` times.
      burst, pause: as in `interleaved`.

    Raises:
      RuntimeError: the trace holds no kernels of a function.
    """
    if jax.default_backend() != "gpu":
        return _wall_clock(functions, rounds)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(rounds):
                _round(functions, burst, pause)
        path = glob.glob(folder + "/**/*.xplane.pb", recursive=True)[-1]
        kernels = _kernels_by_module(jax.profiler.ProfileData.from_file(path))
    count, found = rounds * burst, {}
    for name in functions:
        ran = kernels.get(f"jit_{name}", [])
        if not ran or len(ran) % count:
            raise RuntimeError(f"{name}: {len(ran)} kernels in the trace for {count} executions")
        each = len(ran) // count
        found[name] = [ran[i : i + each] for i in range(0, len(ran), each)]
    return found


def _wall_clock(functions: Functions, rounds: int) -> dict[str, list[list[Kernel]]]:
    found: dict[str, list[list[Kernel]]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name in random.sample(list(functions), len(functions)):
            start = time.perf_counter_ns()
            jax.block_until_ready(functions[name]())
            found[name].append([Kernel(name, "", start, time.perf_counter_ns() - start)])
    return found


def _round(functions: Functions, burst: int, pause: float) -> None:
    order = list(functions)
    random.shuffle(order)
    for name in order:
        for _ in range(burst):
            result = functions[name]()
    jax.block_until_ready(result)
    time.sleep(pause)


def _kernels_by_module(profile) -> dict[str, list[Kernel]]:
    """The device's kernels in time order, by XLA module."""
    events = collections.defaultdict(list)
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                about = dict(event.stats)
                module = about.get("hlo_module")
                if module is not None:
                    instruction = str(about.get("hlo_op", ""))
                    events[module].append(Kernel(event.name, instruction, event.start_ns, event.duration_ns))
    return {module: sorted(kernels, key=lambda kernel: kernel.start) for module, kernels in events.items()}


def clock() -> str:
    """Device, SM clock and power as nvidia-smi has them now; the platform where there is no GPU."""
    if jax.default_backend() != "gpu":
        return jax.devices()[0].device_kind
    command = ["nvidia-smi", "--query-gpu=name,clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
