"""Tiles that each reader sees as they are stored.

An epilogue has a tile in float32, and memory has it in 16 bits. What an epilogue reduces of the one and a later map
reads beside the other do not fit together: no element equals the maximum, and a difference from it may have the wrong
sign. So such a tile is rounded where it is made, before anything reads it, and is never computed again. Vectors of it
are of two kinds:

    max, min, results of calls, sums of comparisons    no map may read one beside the tile unrounded
    other sums, as a mean                              none may add, subtract or compare it

A norm's mean square multiplies the tile and no more: the epilogue sums what it has in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend import core

from coda_jax.epilogue.dtypes import is_of_8_bits
from coda_jax.graph.calls import Result
from coda_jax.graph.kept import is_of_leaves
from coda_jax.graph.values import Map, Product, Value, is_float, reachable

_EXTREMES = frozenset({"reduce_max", "reduce_min", "argmax", "argmin"})
_REDUCTIONS = _EXTREMES | {"reduce_sum"}
_JUMPS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "floor", "ceil", "round", "sign"})
_MULTIPLIES = frozenset({"mul", "div", "dot_general"})

_Tiles = dict[Value, bool]  # the tiles of a vector; True where no map may read the vector beside the tile unrounded


def seen_as_stored(values: Iterable[Value]) -> frozenset[Value]:
    """The tiles that are read beside vectors that are reduced from them, among what these values are made of."""
    tiles_of: dict[Value, _Tiles] = {}
    found: set[Value] = set()
    for value in reachable(values):
        if not isinstance(value, Map | Result):
            continue
        for vector in value.inputs:
            for tile, is_strict in tiles_of.get(vector, {}).items():
                for i, x in enumerate(value.inputs):
                    shared = _shared(tile, x)
                    if shared and (is_strict or _adds(value, i, value.inputs.index(vector))):
                        found.update(shared)
        if tiles := _tiles_of(value, tiles_of):
            tiles_of[value] = tiles
    return frozenset(found)


def _shared(tile: Value, beside: Value) -> Sequence[Value]:
    """The tile, and what it is computed from up to the tile that `beside` is computed from too; none without one."""
    other, found = frozenset(_chain(beside)), list[Value]()
    for x in _chain(tile) if other else ():
        if _is_made(x):
            found.append(x)
        if x in other:
            return found
    return ()


def _chain(x: Value) -> Iterator[Value]:
    """A tile, the only tile that it is a map of, the only one that this is a map of, and so on."""
    tiles = [x] if x.is_tile else []
    while len(tiles) == 1:
        (x,) = tiles
        yield x
        tiles = [y for y in x.inputs if y.is_tile and is_float(y.dtype)] if isinstance(x, Map) else []


def _tiles_of(value: Map | Result, tiles_of: Mapping[Value, _Tiles]) -> _Tiles:
    """The tiles that a vector is reduced from, also by vectors that it is made of; none for a tile.

    A maximum that is broadcast to a tile is still one. A sum is not: as a cotangent's part it only shifts that.
    """
    read = [x for x in value.inputs if x.is_tile and x not in tiles_of]
    reduces, is_strict = _reduces(value)
    if any(x.amax is value for x in read):
        return {}  # a scale of 8 bits comes from it: what exceeds that is clipped
    if value.is_tile and read and (not reduces or any(_has_its_columns(value, x) for x in read)):
        return {}
    tiles = {x: is_strict for x in read if reduces and _is_made(x)}
    for x in value.inputs:
        for tile, flag in tiles_of.get(x, {}).items():
            tiles[tile] = flag or tiles.get(tile, False)
    if value.is_tile and not read:
        return {tile: flag for tile, flag in tiles.items() if flag}
    return tiles


def _is_made(x: Value) -> bool:
    """True for a tile of numbers that an epilogue may make."""
    return isinstance(x, Map | Product) and is_float(x.dtype) and not is_of_8_bits(x.dtype) and not is_of_leaves(x)


def _has_its_columns(value: Value, x: Value) -> bool:
    """True where a value has as many columns as the tile x, or more; sums of heads have fewer."""
    columns, of_tile = value.shape[-1], x.shape[-1]
    return not (isinstance(columns, int) and isinstance(of_tile, int) and columns < of_tile)


def _reduces(value: Map | Result) -> tuple[bool, bool]:
    """Whether it reduces an array, and whether the result jumps where the array is rounded."""
    if isinstance(value, Result):
        return not value.is_tile, True

    def found() -> tuple[bool, bool]:
        names = {equation.primitive.name for equation in value.primal()[0].jaxpr.eqns}
        return not names.isdisjoint(_REDUCTIONS), not names.isdisjoint(_EXTREMES | _JUMPS)

    answer: tuple[bool, bool] = value.body.once(("reduces",), found)
    return answer


def _adds(value: Map | Result, tile: int, vector: int) -> bool:
    """True if it does anything but multiply its input `tile` with what it computes from `vector` and from no tile."""
    return isinstance(value, Result) or value.body.once(("adds", tile, vector), lambda: _body_adds(value, tile, vector))


def _body_adds(value: Map, tile: int, vector: int) -> bool:
    jaxpr, is_read = value.primal()
    kinds = {tile: frozenset({"tile"}), vector: frozenset({"vector"})}
    others = [frozenset({"other"} if x.is_tile else ()) for x in value.inputs]
    read_kinds = [kinds.get(i, others[i]) for i, flag in enumerate(is_read) if flag]
    made_of: dict[Any, frozenset[str]] = dict(zip(jaxpr.jaxpr.invars, read_kinds, strict=True))
    for equation in jaxpr.jaxpr.eqns:
        read = [made_of.get(x, frozenset()) for x in equation.invars if not isinstance(x, core.Literal)]
        has_tile = any("tile" in x and "vector" not in x for x in read)
        if has_tile and kinds[vector] in read and equation.primitive.name not in _MULTIPLIES:
            return True
        made_of |= dict.fromkeys(equation.outvars, frozenset().union(*read))
    return False
