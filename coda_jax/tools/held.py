"""An estimate of the memory that a function holds at once, from its jaxpr.

Operations run in the order of the jaxpr. An array in memory is held from the operation that writes it to the last one
that reads it. A pass, a loop or a scatter writes its result into an array of as many bytes, and elements of the same
size, of which it is the last reader. While a loop runs, the memory of its body is added. Beside arguments and results
this is what XLA calls temporaries; `tests/test_explain_compare.py` checks that it is within 10 % of XLA's for seven
recorded steps.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from coda_jax.jaxprs.graph import LOOPS, Array, Graph
from coda_jax.jaxprs.traced import made_results
from coda_jax.jaxprs.walk import inner_jaxprs
from coda_jax.tools.passes import Moved


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that a function holds.

    Attributes:
      arguments, results: of all leaves, each once; arguments that are returned count only as arguments.
      reused: of results in the memory of arguments that the caller donates.
      temporaries: the most that is held at once beside arguments and results.
    """

    arguments: int
    results: int
    reused: int = 0
    temporaries: int = 0

    @property
    def bytes(self) -> int:
        """The sum, with reused memory counted once."""
        return self.arguments + self.results - self.reused + self.temporaries


def memory_of(trace: jax.stages.Traced, temporaries: int) -> Memory:
    """The memory that a traced function holds. Only a jitted function donates arguments."""
    arguments, results = jax.tree.leaves(trace.args_info), made_results(trace)
    donated = collections.Counter(_type(x) for x in arguments if x.donated)
    reused = donated & collections.Counter(map(_type, results))
    return Memory(
        sum(map(_bytes, arguments)),
        sum(map(_bytes, results)),
        sum(Array(*type_).bytes * count for type_, count in reused.items()),
        temporaries,
    )


def held(graphs: Sequence[Graph], moved: Sequence[Sequence[Moved]]) -> int:
    """`Memory.temporaries` of graphs, each of which is followed by the graphs of the loops in it."""
    return _held(iter(list(zip(graphs, moved, strict=True))))


def _held(graphs: Iterator[tuple[Graph, Sequence[Moved]]]) -> int:
    graph, moved = next(graphs)
    last = {array: i for i, one in enumerate(moved) for array in one.read}
    results, here = set(graph.results), dict[Array, int]()  # what is held, and how large it is
    most = now = 0
    for i, one in enumerate(moved):
        inside = 0
        if one.by.name in LOOPS:
            inside = max((_held(graphs) for _ in inner_jaxprs(one.by.equation)), default=0)
        ending = [array for array in one.read if array in here and last[array] == i]
        for array in one.written:
            if array in results:
                continue
            place = next((x for x in ending if _fits_in(array, x)), None) if one.in_place else None
            if place is not None:
                ending.remove(place)
                now -= here.pop(place)
            here[array] = array.bytes
            now += array.bytes
        most = max(most, now + inside)
        ending += [array for array in one.written if array in here and array not in last]
        now -= sum(here.pop(array) for array in ending)
    return most


def _fits_in(array: Array, place: Array) -> bool:
    return (_item(array), array.bytes) == (_item(place), place.bytes)


def _item(array: Array) -> int:
    return int(getattr(array.dtype, "itemsize", 0))


def _type(x: Any) -> tuple[tuple[Any, ...], Any]:
    return tuple(x.shape), x.dtype


def _bytes(x: Any) -> int:
    return Array(*_type(x)).bytes
