"""The overlap of a program's products and collectives on the first GPU, by the profiler."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks import timing

Interval = tuple[float, float]


class Overlap(NamedTuple):
    """The times of one step on the first device, in milliseconds.

    Attributes:
      compute: the time in which a kernel other than a collective ran.
      collective: the time in which a collective ran.
      exposed: the time in which a collective ran and nothing else did.
      span: the time from the first kernel's start to the last one's end.
    """

    compute: float
    collective: float
    exposed: float
    span: float


class OfClass(NamedTuple):
    """Kernels of one class in one step: how many and their milliseconds, and of those that ran beside a collective."""

    count: int
    ms: float
    beside_count: int
    beside_ms: float


def kernels(call: Callable[[], Any]) -> list[timing.Kernel]:
    """The kernels that one call runs on the first GPU; none where there is no GPU."""
    if jax.default_backend() != "gpu":
        return []
    jax.block_until_ready(call())
    return timing.kernels_of(call)


def is_collective(kernel: timing.Kernel) -> bool:
    return "nccl" in kernel.name.lower()


def overlap(of_step: Sequence[timing.Kernel]) -> Overlap:
    """The times in which the kernels of a step compute and move data."""
    moving = [_interval(kernel) for kernel in of_step if is_collective(kernel)]
    computing = [_interval(kernel) for kernel in of_step if not is_collective(kernel)]
    everything = [*computing, *moving]
    span = max((end for _, end in everything), default=0.0) - min((start for start, _ in everything), default=0.0)
    compute, collective = covered(computing), covered(moving)
    exposed = covered(everything) - compute
    return Overlap(*(ns / 1e6 for ns in (compute, collective, exposed, span)))


def by_class(of_step: Sequence[timing.Kernel], class_of: Callable[[timing.Kernel], str]) -> dict[str, OfClass]:
    """The kernels of a step by class, the longest class first; a kernel is beside a collective for half its time."""
    moving = [_interval(kernel) for kernel in of_step if is_collective(kernel)]
    found: dict[str, list[tuple[float, bool]]] = collections.defaultdict(list)
    for kernel in of_step:
        start, end = _interval(kernel)
        shared = covered(
            [(max(start, first), min(end, last)) for first, last in moving if first < end and last > start]
        )
        name = kernel.name.split("(")[0] if is_collective(kernel) else class_of(kernel)
        found[name].append((kernel.duration / 1e6, not is_collective(kernel) and 2 * shared >= kernel.duration))
    classes = {}
    for name, those in found.items():
        beside = [ms for ms, is_beside in those if is_beside]
        classes[name] = OfClass(len(those), sum(ms for ms, _ in those), len(beside), sum(beside))
    return dict(sorted(classes.items(), key=lambda item: -item[1].ms))


def covered(intervals: Sequence[Interval]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _interval(kernel: timing.Kernel) -> Interval:
    return kernel.start, kernel.start + kernel.duration
