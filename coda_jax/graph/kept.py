"""The values of a graph's forward pass that are kept for the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coda_jax.graph.calls import Result
from coda_jax.graph.plan import remembered
from coda_jax.graph.values import Leaf, Map, Product, Turned, Value, inputs_read, reachable


def kept_values(
    outputs: Sequence[Value],
    cotangents: Sequence[Value],
    as_stored: Collection[Value] = (),
    *,
    joins: bool = False,
) -> list[Value]:
    """The values of a forward pass that are kept for a backward pass, which computes the values `cotangents`.

    A value is kept if the backward pass reads it, unless it is as quickly computed again: maps of leaves alone that are
    tiles or read none, maps of one tile in memory, and transposed copies of these where an epilogue reads that tile.
    The vectors that these read are kept. With `joins` maps of several tiles in memory are computed again too, where a
    map of the backward pass reads all of these. Those of `as_stored` are not.
    """
    read = _forward_values_read(outputs, cotangents)
    choice = _Choice(set(read), _read_together(outputs, cotangents) if joins else [])
    for value in read:  # the values that it is made of have been decided before it
        if value not in as_stored:
            choice.decide(value)
    return sorted(choice.kept, key=lambda value: value.number)


def _forward_values_read(outputs: Sequence[Value], cotangents: Sequence[Value]) -> list[Value]:
    """The values of the forward pass that a backward pass reads, without leaves; inputs before users."""
    forward = set(reachable(outputs))
    calls = {value.call for value in forward if isinstance(value, Result)}
    origins = {value.origin for value in forward if isinstance(value, Map)}
    read, open_, seen = set[Value](), list(cotangents), set(cotangents)
    while open_:
        value = open_.pop()
        is_copy = isinstance(value, Turned) and value.inputs[0] in forward  # made together with it
        is_amax = any(x in forward and x.amax is value for x in value.inputs)
        is_beside = isinstance(value, Map) and value.origin in origins  # another result of a function
        is_result = isinstance(value, Result) and value.call in calls
        if value in forward or is_copy or is_amax or is_beside or is_result:
            if not isinstance(value, Leaf):
                read.add(value)
            continue
        new = set(value.inputs) - seen
        seen |= new
        open_ += new
    return sorted(read, key=lambda value: value.number)


def _read_together(outputs: Sequence[Value], cotangents: Sequence[Value]) -> list[set[Value]]:
    """The tiles of the forward pass that each tile of the backward pass is a map of."""
    forward = set(reachable(outputs))
    backward = (value for value in reachable(cotangents, forward) if isinstance(value, Map) and value not in forward)
    return [{x for x in value.inputs if x in forward and x.is_tile} for value in backward if value.is_tile]


class _Choice:
    """The choice of the values to keep, among those that are read; the others are computed again.

    Attributes:
      kept: all that are read, until `decide` removes some and adds the vectors that these read.
      together: sets of tiles, each of which the backward pass reads in one map.
    """

    def __init__(self, kept: set[Value], together: Sequence[set[Value]]):
        self.kept, self.together = kept, together
        self._known_sources: dict[Value, set[Value | None]] = {}

    def decide(self, value: Value) -> None:
        """Decides whether the value stays; the values that it is made of have been decided."""
        if value.is_factor:
            return
        if isinstance(value, Turned):
            sources = self._sources(value.inputs[0])
            if is_of_leaves(value):
                self.kept.remove(value)
            elif (
                len(sources) == 1
                and not sources.isdisjoint(self.kept)
                and all(isinstance(x, Map | Product) for x in sources)
            ):
                self.kept.remove(value)  # an epilogue of the backward pass reads the one tile, and stores the copy
                self._keep_vectors(value)
        elif isinstance(value, Map) and not value.is_tile:
            if _is_of_vectors(value):
                self.kept.remove(value)
        elif isinstance(value, Map):
            self.kept.remove(value)
            sources = self._sources(value)
            is_again = None not in sources and (len(sources) == 1 or any(sources <= one for one in self.together))
            if is_of_leaves(value) or is_again:
                self._keep_vectors(value)
            else:
                self.kept.add(value)
                self._known_sources.pop(value, None)

    def _sources(self, value: Value) -> set[Value | None]:
        """The tiles in memory that a tile is, or is computed again from; with None if it cannot be computed again."""
        if isinstance(value, Leaf) or value in self.kept:
            return {value}
        if not isinstance(value, Map):
            return {None}
        if value not in self._known_sources:
            self._known_sources[value] = set().union(*(self._sources(x) for x in value.inputs if x.is_tile))
        return self._known_sources[value]

    def _keep_vectors(self, value: Value) -> None:
        """Keeps the vectors that are read where the value is computed again."""
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
def is_of_leaves(value: Value) -> bool:
    """True for a leaf, and for a map of leaves alone."""
    return isinstance(value, Leaf) or (isinstance(value, Map | Turned) and all(map(is_of_leaves, value.inputs)))


@remembered
def _is_of_vectors(value: Value) -> bool:
    """True for a vector computed from vectors and scalars among the leaves alone."""
    return isinstance(value, Leaf | Map) and not value.is_tile and all(map(_is_of_vectors, inputs_read(value)))
