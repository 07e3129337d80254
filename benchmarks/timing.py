"""Device time of jitted functions, and of what other libraries launch, interleaved in one run and on one clock."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import glob
import itertools
import math
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from coda_jax.tools.tune import relative_medians


class Times(NamedTuple):
    """Microseconds of one execution: of all its kernels together, and of the longest one alone."""

    total: float
    longest: float


class Kernel(NamedTuple):
    """A kernel, copy or fill that the device ran: its own name, that of its HLO instruction, start and duration in ns.

    A kernel that began before those before it in its stream had ended starts with their end, so that all together take
    the time in which any ran: coda_jax's kernels begin early and wait, and so do XLA's. instruction is empty where the
    trace does not have it, as for what a CUDA graph launches.
    """

    name: str
    instruction: str
    start: float
    duration: float


@dataclasses.dataclass(frozen=True)
class Outside:
    """A call of another library, whose kernels run on a stream of its own and not in an XLA module.

    Args:
      call: launches them and returns.
      synchronize: waits for the device.
    """

    call: Callable[[], Any]
    synchronize: Callable[[], None]

    def __call__(self) -> Any:
        return self.call()


Functions = Mapping[str, Callable[[], Any]]

L2_BYTES = 60e6  # that of an H200 and an H100, rounded up
_AHEAD = 0.02  # seconds of work that the host prepares: while the device waits for it, the chip cools


def sets_beyond(cache_bytes: float, arguments: Any, results: Any) -> int:
    """How many sets of these arguments and results are together at least twice as large as a cache."""
    leaves = jax.tree.leaves((arguments, results))
    return max(1, math.ceil(2 * cache_bytes / sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)))


def rotated(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A function that runs the next of the calls each time, so that no input is still in the cache.

    The results of one round are kept, so that no memory for a result comes back before either.
    """
    turn, kept = itertools.cycle(calls), collections.deque[Any](maxlen=len(calls))

    def call() -> Any:
        kept.append(next(turn)())
        return kept[-1]

    return call


def interleaved(functions: Functions, *, seconds: float = 1.5, burst: int = 4, pause: float = 0.0) -> dict[str, Times]:
    """Device times of each function, kernels only, measured by the profiler (CUPTI).

    Each round runs the functions in a fresh random order, `burst` times each, so that clock and temperature fall on all
    alike; the first third of the rounds is not measured, and rounds are compared one by one (`relative_medians`).
    Without pauses the chip comes to its power limit, as in training; with them it stays below, and the clock at its
    highest. With an `Outside` among the functions, every burst ends before the next one starts: else kernels of two
    streams would run at the same time.

    Args:
      functions: as in `executions`.
      seconds: of measured execution, at least ten rounds.
      burst: executions of a function in a row.
      pause: seconds of rest after each round, not counted in `seconds`.
    """
    for function in functions.values():
        wait(function, function())
    started, warm_rounds = time.perf_counter(), 0
    while time.perf_counter() - started < seconds / 2 + pause * warm_rounds:
        _round(functions, burst)
        time.sleep(pause)
        warm_rounds += 1
    rounds = max(10, 2 * warm_rounds)
    at_once = math.ceil(_AHEAD * warm_rounds / (seconds / 2))
    found = executions(functions, rounds=rounds, burst=burst, pause=pause, at_once=at_once)

    def medians(of_kernels: Callable[[Iterable[float]], float]) -> list[float]:
        of_rounds = []
        for executed in found.values():
            us = [of_kernels(kernel.duration / 1e3 for kernel in kernels) for kernels in executed]
            each = len(us) // rounds
            of_rounds.append([statistics.mean(us[i : i + each]) for i in range(0, len(us), each)])
        return relative_medians(of_rounds)

    return {name: Times(*of) for name, *of in zip(found, medians(sum), medians(max), strict=True)}


class Group(NamedTuple):
    """Functions that are interleaved with each other, and how often each runs its burst."""

    functions: Functions
    rounds: int


def executions(
    functions: Functions, *, rounds: int, burst: int = 1, pause: float = 0.0, at_once: int = 1
) -> dict[str, list[list[Kernel]]]:
    """The kernels of each execution of each function, in time order; the functions are interleaved as above.

    Where there is no GPU, one Kernel an execution stands for all, with the wall clock's time.

    Args:
      functions: name -> call of a jitted function on fixed arguments. The jitted function's own name must be the key:
        kernels are told apart by the name of their XLA module, `jit_<name>`. Those of an `Outside` have no module: they
        are the ones that ran while its burst did.
      rounds: how often each function is run `burst` times.
      burst, pause: as in `interleaved`.
      at_once: how many rounds the host may be ahead of the device, which waits for the host in between.

    Raises:
      RuntimeError: the trace holds no kernels of a function.
    """
    return executions_of_groups([Group(functions, rounds)], burst=burst, pause=pause, at_once=at_once)


def executions_of_groups(
    groups: Sequence[Group], *, burst: int = 1, pause: float = 0.0, at_once: int = 1
) -> dict[str, list[list[Kernel]]]:
    """As `executions`, one group after the other in one trace; no two of them have a function of the same name."""
    if jax.default_backend() != "gpu":
        return {name: found for group in groups for name, found in _wall_clock(*group).items()}
    alone = any(isinstance(function, Outside) for group in groups for function in group.functions.values())

    def run() -> None:
        for group in groups:
            for i in range(group.rounds):
                is_waited_for = pause > 0 or (i + 1) % at_once == 0 or i + 1 == group.rounds
                _round(group.functions, burst, is_waited_for)
                time.sleep(pause)

    profile = _profile(run, host=alone)
    kernels = _kernels_by_module(profile)
    bursts = _bursts(profile) if alone else {}
    found = {}
    for group in groups:
        count = group.rounds * burst
        for name, function in group.functions.items():
            if isinstance(function, Outside):
                ran = during(bursts.get(name, []), kernels.get("", []))
            else:
                ran = kernels.get(f"jit_{name}", [])
            if not ran or len(ran) % count:
                raise RuntimeError(f"{name}: {len(ran)} kernels in the trace for {count} executions")
            each = len(ran) // count
            found[name] = [ran[i : i + each] for i in range(0, len(ran), each)]
    return found


def kernels_of(call: Callable[[], Any]) -> list[Kernel]:
    """The kernels that the first GPU runs while a function is called once, in time order."""
    profile = _profile(lambda: jax.block_until_ready(call()))
    by_module = _kernels_by_module(profile, "/device:GPU:0")
    return sorted(itertools.chain.from_iterable(by_module.values()), key=lambda kernel: kernel.start)


def _profile(run: Callable[[], Any], *, host: bool = False) -> Any:
    """The profiler's trace of what a function runs; of the host's only if asked for, as its events cost it time."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = int(host)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        path = glob.glob(folder + "/**/*.xplane.pb", recursive=True)[-1]
        return jax.profiler.ProfileData.from_file(path)


def _wall_clock(functions: Functions, rounds: int) -> dict[str, list[list[Kernel]]]:
    found: dict[str, list[list[Kernel]]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name in random.sample(list(functions), len(functions)):
            start = time.perf_counter_ns()
            wait(functions[name], functions[name]())
            found[name].append([Kernel(name, "", start, time.perf_counter_ns() - start)])
    return found


def wait(function: Callable[[], Any], result: Any) -> None:
    """Until the device has done what function began, which returned this."""
    if isinstance(function, Outside):
        function.synchronize()
    else:
        jax.block_until_ready(result)


def _round(functions: Functions, burst: int, is_waited_for: bool = True) -> None:
    order = list(functions)
    random.shuffle(order)
    alone = any(isinstance(function, Outside) for function in functions.values())
    for name in order:
        with jax.profiler.TraceAnnotation(_BURST + name):
            for _ in range(burst):
                result = functions[name]()
            if alone or (is_waited_for and name == order[-1]):
                wait(functions[name], result)


_BURST = "burst: "  # before a function's name, what the host's trace calls its bursts


def _bursts(profile: Any) -> dict[str, list[tuple[float, float]]]:
    """Start and end of the bursts of each function in ns, as the host saw them."""
    found = collections.defaultdict(list)
    for plane in profile.planes:
        if plane.name.startswith("/host:"):
            for event in itertools.chain.from_iterable(line.events for line in plane.lines):
                if event.name.startswith(_BURST):
                    found[event.name.removeprefix(_BURST)].append((event.start_ns, event.start_ns + event.duration_ns))
    return found


def during(windows: Sequence[tuple[float, float]], kernels: Iterable[Kernel]) -> list[Kernel]:
    """The kernels that ran, or were still running, within one of the windows (start, end), which do not overlap.

    Host and device share a clock to some microseconds, and a burst's kernels start some after it and end some before.
    """
    starts, ends = zip(*sorted(windows), strict=True) if windows else ((), ())
    found = []
    for kernel in kernels:
        window = bisect.bisect_right(ends, kernel.start)  # the first that ends after the kernel starts
        if window < len(ends) and starts[window] < kernel.start + kernel.duration:
            found.append(kernel)
    return found


def _kernels_by_module(profile: Any, device: str = "/device:GPU") -> dict[str, list[Kernel]]:
    """The kernels of devices of this name in time order, by XLA module; under "" those that have none."""
    events = collections.defaultdict(list)
    for plane in profile.planes:
        if not plane.name.startswith(device):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            last_end = 0.0
            for event in sorted(line.events, key=lambda event: event.start_ns):
                about = dict(event.stats)
                instruction = str(about.get("hlo_op", ""))
                start = max(event.start_ns, last_end)
                last_end = max(start, event.start_ns + event.duration_ns)
                kernel = Kernel(event.name, instruction, start, last_end - start)
                events[about.get("hlo_module", "")].append(kernel)
    return {module: sorted(kernels, key=lambda kernel: kernel.start) for module, kernels in events.items()}


def clock() -> str:
    """Device, SM clock and power as nvidia-smi has them now; the platform where there is no GPU."""
    return _nvidia_smi("name,clocks.sm,power.draw") or jax.devices()[0].device_kind


def driver() -> str:
    """Version of the GPU's driver; nothing where there is no GPU."""
    return _nvidia_smi("driver_version")


def _nvidia_smi(fields: str) -> str:
    if jax.default_backend() != "gpu":
        return ""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", f"--id={first_gpu()}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def first_gpu() -> str:
    """The number, or the UUID, by which the driver's tools know the GPU that is JAX's first."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
