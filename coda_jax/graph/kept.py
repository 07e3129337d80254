"""The values of a graph's forward pass that are kept for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from coda_jax.graph.calls import Result
from coda_jax.graph.plan import remembered
from coda_jax.graph.values import Leaf, Map, Product, Turned, Value, inputs_read, reachable


def kept_values(outputs: Sequence[Value], wanted: Sequence[Value]) -> list[Value]:
    """The values of a forward pass that are kept, for those that a backward pass is to make.

    A value is kept if the backward pass reads it, unless it is as short to make again: maps of leaves alone that are
    tiles or read none, maps of one tile that lies in memory, and transposed copies of these where an epilogue reads
    that tile. Of these the vectors that they read are kept.
    """
    found = _read_of_forward(outputs, wanted)
    choice = _Choice(set(found))
    for value in found:  # what a value is made of has been decided before it
        choice.decide(value)
    return sorted(choice.kept, key=lambda value: value.number)


def _read_of_forward(outputs: Sequence[Value], wanted: Sequence[Value]) -> list[Value]:
    """The values of the forward pass that a backward pass reads, but leaves; inputs before users."""
    forward = set(reachable(outputs))
    calls = {value.call for value in forward if isinstance(value, Result)}
    origins = {value.origin for value in forward if isinstance(value, Map)}
    found, open_, seen = set[Value](), list(wanted), set(wanted)
    while open_:
        value = open_.pop()
        is_copy = isinstance(value, Turned) and value.inputs[0] in forward  # made beside it
        is_amax = any(x in forward and x.amax is value for x in value.inputs)
        is_beside = isinstance(value, Map) and value.origin in origins  # another result of a function
        is_result = isinstance(value, Result) and value.call in calls
        if value in forward or is_copy or is_amax or is_beside or is_result:
            if not isinstance(value, Leaf):
                found.add(value)
            continue
        new = set(value.inputs) - seen
        seen |= new
        open_ += new
    return sorted(found, key=lambda value: value.number)


class _Choice:
    """The choice of the values to keep, among those that are read; the others are made again.

    Attributes:
      kept: all that are read, until `decide` takes some away and adds what these read.
    """

    def __init__(self, kept: set[Value]):
        self.kept = kept
        self._behind: dict[Value, set[Value | None]] = {}

    def decide(self, value: Value) -> None:
        """Whether the value stays; what it is made of has been decided."""
        if value.is_factor:
            return
        if isinstance(value, Turned):
            of = self._sources(value.inputs[0])
            if _is_of_leaves(value):
                self.kept.remove(value)
            elif len(of) == 1 and not of.isdisjoint(self.kept) and all(isinstance(x, Map | Product) for x in of):
                self.kept.remove(value)  # an epilogue of the backward pass reads the one tile, and stores the copy
                self._keep_vectors(value)
        elif isinstance(value, Map) and not value.is_tile:
            if _is_of_vectors(value):
                self.kept.remove(value)
        elif isinstance(value, Map):
            self.kept.remove(value)
            of = self._sources(value)
            if _is_of_leaves(value) or (len(of) == 1 and None not in of):
                self._keep_vectors(value)
            else:
                self.kept.add(value)
                self._behind.pop(value, None)

    def _sources(self, value: Value) -> set[Value | None]:
        """The tiles in memory that a tile is or is made again of; None beside them if it cannot be made again."""
        if isinstance(value, Leaf) or value in self.kept:
            return {value}
        if not isinstance(value, Map):
            return {None}
        if value not in self._behind:
            self._behind[value] = set().union(*(self._sources(x) for x in value.inputs if x.is_tile))
        return self._behind[value]

    def _keep_vectors(self, value: Value) -> None:
        """Keeps the vectors that are read where the value is made again."""
        open_, seen = [value], set[Value]()
        while open_:
            for x in open_.pop().inputs:
                if isinstance(x, Leaf) or x in self.kept or x in seen or _is_of_vectors(x):
                    continue
                seen.add(x)
                if x.is_tile:
                    open_.append(x)
                else:
                    self.kept.add(x)


@remembered
def _is_of_leaves(value: Value) -> bool:
    return isinstance(value, Leaf) or (isinstance(value, Map | Turned) and all(map(_is_of_leaves, value.inputs)))


@remembered
def _is_of_vectors(value: Value) -> bool:
    """True for what is computed from vectors and scalars among the leaves alone."""
    return isinstance(value, Leaf | Map) and not value.is_tile and all(map(_is_of_vectors, inputs_read(value)))
