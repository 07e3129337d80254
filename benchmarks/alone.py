"""Calls that run alone, back to back, at the clock that their own power leaves them: their time and their energy."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pynvml

from benchmarks import timing

_AHEAD = 5e-3  # seconds of work that the host prepares


class Execution(NamedTuple):
    """The energy and the time of one execution, back to back with others of its kind."""

    joules: float
    seconds: float


def device_counter() -> Callable[[], float]:
    """Joules that JAX's first GPU has taken since its driver was loaded.

    Raises:
      pynvml.NVMLError: no NVML on this machine.
    """
    pynvml.nvmlInit()
    name = timing.first_gpu()
    device = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3


class Steps:
    """The steps of a counter that stands still for a tenth of a second at a time, while the `with` statement runs.

    A thread of its own looks for them: to read the device's counter takes milliseconds, in which the device would have
    nothing to do.

    Attributes:
      seen: time (of time.perf_counter) and joules of each.
    """

    def __init__(self, counter: Callable[[], float]):
        self.seen: list[tuple[float, float]] = []
        self._error: Exception | None = None
        self._counter, self._is_over = counter, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Steps:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            before = self._counter()
            while not self._is_over.wait(1e-3):
                joules = self._counter()
                if joules != before:
                    self.seen.append((time.perf_counter(), joules))
                before = joules
        except Exception as error:  # raised where it is waited for
            self._error = error

    def apart(self, seconds: float, start: float, end: float) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """The first and the last one from start to end, if they are so far apart; raises what the counter raised."""
        if self._error:
            raise self._error
        within = [step for step in self.seen if start <= step[0] <= end]
        return (within[0], within[-1]) if within and within[-1][0] - within[0][0] >= seconds else None


def executed(call: Callable[[], Any], counter: Callable[[], float], seconds: float) -> Execution:
    """The mean over so many seconds; half as many before, for the clock to settle. What is taken is from one step of
    the counter to another.
    """
    timing.wait(call, call())
    started = time.perf_counter()
    timing.wait(call, previous := call())
    at_once = max(1, round(_AHEAD / (time.perf_counter() - started)))
    started, counts, times = time.perf_counter(), [0], [time.perf_counter()]
    with Steps(counter) as steps:
        while not (found := steps.apart(seconds, started + seconds / 2, times[-1])):
            for _ in range(at_once):
                result = call()
            timing.wait(call, previous)  # the device goes on with what was just begun
            previous = result
            counts.append(counts[-1] + at_once)
            times.append(time.perf_counter())
    timing.wait(call, previous)
    (first, joules), (last, more_joules) = found
    executions = np.interp(last, times, counts) - np.interp(first, times, counts)
    return Execution((more_joules - joules) / float(executions), (last - first) / float(executions))


def in_turn(
    calls: Mapping[str, Callable[[], Any]], counter: Callable[[], float], seconds: float
) -> dict[str, Execution]:
    """Each by itself for half of the seconds, in order and then in reverse: a chip that warms up favours none."""
    found: dict[str, list[Execution]] = {name: [] for name in calls}
    for name in (*calls, *reversed(calls)):
        found[name].append(executed(calls[name], counter, seconds / 2))
    return {name: Execution(*(statistics.fmean(x) for x in zip(*both, strict=True))) for name, both in found.items()}
