"""The values of a graph's forward pass that are kept for the backward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from coda_jax.graph.calls import Call, Result
from coda_jax.graph.plan import remembered
from coda_jax.graph.pulled_back import is_derivative_of_attention
from coda_jax.graph.values import ForEachRow, Leaf, Map, Product, Transposed, Value, inputs_read, reachable


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
    Arrays that attention's derivative reads are kept: a pass would have to make them. A product's parts, from which it
    is recovered, are values of the forward pass.
    The vectors that these read are kept. With `joins` maps of several tiles in memory, and their transposed copies, are
    computed again too, where a map of the backward pass reads all of these. Those of `as_stored` are not.
    """
    read = _forward_values_read(outputs, cotangents)
    choice = _Choice(set(read), _read_together(outputs, cotangents) if joins else [])
    of_attention = {
        x
        for y in reachable(cotangents)
        if isinstance(y, Result) and is_derivative_of_attention(y.call)
        for x in y.inputs
    }
    for value in read:  # the values that it is made of have been decided before it
        if value not in as_stored and value not in of_attention:
            choice.decide(value)
    return sorted(choice.kept, key=lambda value: value.number)


def _forward_values_read(outputs: Sequence[Value], cotangents: Sequence[Value]) -> list[Value]:
    """The values of the forward pass that a backward pass reads, without leaves; inputs before users."""
    forward = set(reachable(outputs))
    forward.update(*(value.recovered.inputs for value in list(forward) if value.recovered is not None))
    calls = {value.call for value in forward if isinstance(value, Result)}
    origins = {value.origin for value in forward if isinstance(value, Map)}
    read, open_, seen = set[Value](), list(cotangents), set(cotangents)
    while open_:
        value = open_.pop()
        is_copy = isinstance(value, Transposed) and value.inputs[0] in forward  # made together with it
        is_amax = isinstance(value, Map) and any(x in forward and x.amax is value for x in value.inputs)
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
        if isinstance(value, Transposed):
            sources = self._sources(value.inputs[0])
            if is_of_leaves(value):
                self.kept.remove(value)
            elif (
                (len(sources) == 1 or any(sources <= one for one in self.together))
                and all(x in self.kept for x in sources)
                and all(isinstance(x, Map | Product) for x in sources)
            ):
                self.kept.remove(value)  # an epilogue of the backward pass reads the tiles, and stores the copy
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
    return isinstance(value, Leaf) or (isinstance(value, Map | Transposed) and all(map(is_of_leaves, value.inputs)))


@remembered
def _is_of_vectors(value: Value) -> bool:
    """True for a vector computed from vectors and scalars among the leaves alone, also for one of each group."""
    if isinstance(value, ForEachRow):
        return is_of_leaves(value)
    return isinstance(value, Leaf | Map) and not value.is_tile and all(map(_is_of_vectors, inputs_read(value)))


@dataclasses.dataclass(frozen=True, eq=False)
class Answers:
    """The answers of policies of `jax.checkpoint` about the values that they keep.

    Attributes:
      values: for each value that a policy keeps, the policies' answers.
      calls: the same for what the derivatives of calls keep.
      kept_in_calls: the calls in which a policy keeps something: JAX computes their results again from that.
      cheap: the calls that are computed again as maps are.
      name: makes the name of an array with such answers, for `checkpoint_name`; the second argument is what policies
        read that are none of these.
      names_outputs: whether outputs have names too, where they follow with no product from what a policy keeps, and
        not from what the backward pass is given of that: what follows in a checkpoint starts from these.
      is_least: whether what is made of kept values with no product is computed again, and not kept beside them.
      is_part: whether the outputs are computed again too, as what follows in a checkpoint reads them. Then the backward
        pass is given what else it reads of products, which are run again in any case, once.
    """

    values: Mapping[Value, Mapping[Any, Any]]
    calls: Mapping[Call, Mapping[Any, Any]]
    kept_in_calls: Collection[Call]
    cheap: Collection[Call]
    name: Callable[[Mapping[Any, Any], str], str]
    names_outputs: bool = True
    is_least: bool = False
    is_part: bool = False

    def choice(
        self, kept: Sequence[Value], outputs: Sequence[Value], dtype: Any
    ) -> tuple[list[Value], dict[Value, str]]:
        """The values that are kept under the policies; their names, and those of outputs that need no product again.

        A value is kept if a policy keeps it, or if it is one of `kept` and a map of values that a policy keeps: these
        need not be kept beside it. What else a backward pass reads is computed again; with `is_part` what needs a
        product is among the values, without a name.

        Args:
          kept: the values that are kept without a policy.
          outputs: of the graph.
          dtype: of the products' factors.
        """
        found = _Found(self, kept, outputs, dtype)
        chosen = found.chosen()
        chosen = found.least(chosen) if self.is_least else chosen
        chosen = found.with_products(chosen, is_part=self.is_part)
        answers = {x: found.of(x) for x in chosen}
        if self.names_outputs:
            answers |= {x: found.of_output(x, chosen) for x in outputs if x not in answers}
        return chosen, {x: self.name(of, "coda_kept") for x, of in answers.items() if of}


class _Found:
    """The answers about all values that a graph's derivative may keep."""

    def __init__(self, answers: Answers, kept: Sequence[Value], outputs: Sequence[Value], dtype: Any):
        self._cheap, self._kept_in_calls = frozenset(answers.cheap), frozenset(answers.kept_in_calls)
        self._kept, self._order = frozenset(kept), reachable([*outputs, *kept])
        self._given = {x: dict(answers.values.get(x, {})) for x in self._order}
        for x in self._order:
            if isinstance(x, Result) and x.differentiated is not None:
                self._given[x] = dict(answers.calls.get(x.call, {}))
        for x in self._order:
            self._give_to_source(x, dtype)
        self._all: dict[Value, dict[Hashable, Any] | None] = {}  # None: of a map of leaves alone
        for x in self._order:
            self._all[x] = self._answers(x)

    def of(self, x: Value) -> dict[Hashable, Any]:
        """The answers of the policies that keep a value, or all that it is a map of."""
        return self._all[x] or {}

    def of_output(self, x: Value, chosen: Sequence[Value]) -> dict[Hashable, Any]:
        """The same of those policies that keep nothing among the chosen values that an output is made of by maps."""
        return {
            policy: answer
            for policy, answer in self.of(x).items()
            if not (self._is_map(x) and self._is_made_of(x, {y for y in chosen if policy in self.of(y)}))
        }

    def chosen(self) -> list[Value]:
        """The values that are kept."""
        chosen, open_, seen = set[Value](), list(self._kept), set(self._kept)
        while open_:
            x = open_.pop()
            if self._given[x] or (x in self._kept and self.of(x)):
                chosen.add(x)
            else:
                new = set(x.inputs) - seen
                seen |= new
                open_ += new
        return sorted(chosen, key=lambda x: x.number)

    def least(self, chosen: Sequence[Value]) -> list[Value]:
        """The values among these that a policy keeps, and those that are not made of other ones of these."""
        left = dict.fromkeys(chosen)
        for x in chosen:
            if not self._given[x] and self._is_made_of(x, left):
                del left[x]
        return list(left)

    def with_products(self, chosen: Sequence[Value], *, is_part: bool) -> list[Value]:
        """The values, and those that are kept without a policy and need a product again that JAX runs again anyway.

        These are the results of calls in which a policy keeps something, which JAX computes again with what it keeps,
        with the products that these calls read; of a part of a checkpoint all that are no maps of leaves and of the
        values.
        """
        found, others = dict.fromkeys(chosen), sorted(self._kept.difference(chosen), key=lambda x: x.number)
        of_calls = [x for x in others if isinstance(x, Result) and x.call in self._kept_in_calls]
        again = set(reachable([y for x in of_calls for y in x.inputs], found)).difference(found)
        again = {x for x in again if isinstance(x, Product)}
        for x in others:
            is_again = is_part or not again.isdisjoint((x, *x.inputs))
            if x in of_calls or (is_again and not (self._is_map(x) and self._is_made_of(x, found))):
                found[x] = None
        return sorted(found, key=lambda x: x.number)

    def _is_made_of(self, x: Value, left: Collection[Value]) -> bool:
        """True for a map of leaves and of these values."""
        open_, seen = list(x.inputs), set(x.inputs)
        while open_:
            y = open_.pop()
            if y in left or isinstance(y, Leaf):
                continue
            if not self._is_map(y):
                return False
            new = set(y.inputs) - seen
            seen |= new
            open_ += new
        return True

    def _give_to_source(self, x: Value, dtype: Any) -> None:
        """Gives a tile's answers to the one kept tile from which it is computed again, if that is no larger.

        The kept vectors that are read beside it have them too.
        """
        if not self._given[x] or x in self._kept or not isinstance(x, Map) or not x.is_tile:
            return
        tiles, vectors, seen, open_ = set[Value](), set[Value](), set[Value](), list(x.inputs)
        while open_:
            y = open_.pop()
            if y in seen:
                continue
            seen.add(y)
            if y in self._kept:
                (tiles if y.is_tile else vectors).add(y)
            elif self._is_map(y):
                open_ += y.inputs
            elif not isinstance(y, Leaf):
                return
        if len(tiles) == 1 and max(_bytes(y, dtype) for y in tiles) <= _bytes(x, dtype):
            for y in tiles | vectors:
                self._given[y] = self._given[x] | self._given[y]
            self._given[x] = {}

    def _is_map(self, x: Value) -> bool:
        """True for a map, and for a call that is computed again as one."""
        return isinstance(x, Map | Transposed) or (isinstance(x, Result) and x.call in self._cheap)

    def _answers(self, x: Value) -> dict[Hashable, Any] | None:
        if isinstance(x, Leaf):
            return None
        own = self._given[x]
        if not self._is_map(x):
            return own
        inputs = [of for y in inputs_read(x) if (of := self._all[y]) is not None]
        if not inputs:
            return own or None
        policies = set(inputs[0]).intersection(*inputs[1:])
        return {
            policy: next((of[policy] for of in inputs if of[policy] is not True), True) for policy in policies
        } | own


def _bytes(x: Value, dtype: Any) -> Any:
    return math.prod(x.shape) * x.stored_as(dtype).itemsize
