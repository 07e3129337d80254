"""The check that a score function is local to a pair, and its translation to one pair's program.

The function is of whole arrays. Its result is asked for at (b, h, t, s), and each equation says at which places it
reads its inputs then: a `Places` has for each axis the axis of the scores whose index it is, or None for index 0. So an
array may be of any rank and be broadcast anywhere. Scores may be read at (b, h, t, s) alone.

A table of few entries may be read at an index that is computed of positions and arrays: a gather becomes a node "entry"
whose input is the node of the index. Where that is out of range it gives the nearest entry, or what the gather fills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coda_jax.attend.score.gathers import MOST_ENTRIES, Component, Place, Places, fill_of, of_concatenated, reads
from coda_jax.attend.score.ranges import Number, Tiles, Truth, bounds_of, unknown
from coda_jax.epilogue import elementwise
from coda_jax.epilogue.dtypes import INT32, NUMBERS
from coda_jax.epilogue.elements import IDENTITIES, Elements, is_nested
from coda_jax.epilogue.flatten import Atom, Equation, Flat, Literal
from coda_jax.epilogue.program import needed_nodes
from coda_jax.epilogue.values import LiteralFloat, NotElementwise, UnknownOperation, same_size

PAIR: Places = (0, 1, 2, 3)
_NO_END = 1 << 30  # of positions
ENTRIES = 4  # the place of a table's axis that a computed index counts
AXES = ("batch", "head", "row", "column")

ALLOWED = (
    "Allowed in a score: elementwise operations on s (B, H, T, S) and arrays that broadcast against it, and positions, "
    "from jnp.arange or jax.lax.broadcasted_iota. jnp.where(.., s, -jnp.inf) hides a key. table[index] may read a "
    f"table of up to {MOST_ENTRIES} entries, or one of each head, at an index that is elementwise too."
)
_BEFORE = "Compute it before the call and pass it as an operand."
HINTS = {
    **dict.fromkeys(("gather", "dynamic_slice", "slice", "concatenate", "cumsum", "cumlogsumexp", "sort"), _BEFORE),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"), _BEFORE),
    "dot_general": "Products belong in query and key; what they give may be an operand, or bias=.",
    "scan": "Unroll it with a Python loop.",
    "while": "Unroll it with a Python loop.",
    "cond": "Use jnp.where.",
    "random_bits": "Pass random numbers as an operand.",
    "threefry2x32": "Pass random numbers as an operand.",
    "custom_lin": "It is the derivative of a jax.custom_vjp function; write that as a jax.custom_jvp.",
    "axis_index": "Compute it outside of the score and close over it.",
}


class Source(NamedTuple):
    """An array that a score reads.

    Attributes:
      kind: "scores", "operand" (explicit or captured), "computed" of these before the call, "position" along an axis.
      number: of the array; the axis.
      is_tangent: whether it is its tangent.
    """

    kind: str
    number: int = 0
    is_tangent: bool = False


class Access(NamedTuple):
    """An array, and the places at which a score reads it.

    Attributes:
      source: the array.
      places: for each of its axes.
      entry: the node of the index that counts the axis at `ENTRIES`; None of other arrays than tables.
      fills: whether there is something else where the index is out of range; else the nearest entry.
    """

    source: Source
    places: Places
    entry: int | None = None
    fills: bool = False


class ScoreElements(Elements):
    """The nodes of one pair's score.

    Args:
      flat: the equations.
      sources: what the variables of its inputs and of the arrays that it closes over are.
      name: of the function, for messages.
    """

    kind = "score"
    hints, allowed = HINTS, ALLOWED

    def __init__(self, flat: Flat, sources: Mapping[int, Source], name: str) -> None:
        super().__init__(flat, name)
        self.sources = sources
        self.accesses: dict[Access, int] = {}  # the arrays that are read, numbered
        self.dtypes: list[str] = []  # of these, as they are read

    def element(self, atom: Atom) -> int:
        """The node of an array (B, H, T, S) at its pair."""
        for equation in self.flat.equations:
            self.check_no_callback(equation)
        wanted = self._wanted(atom)
        made: dict[tuple[int, Places], int] = {}
        for variable, source in self.sources.items():
            for places, reader in wanted.get(variable, {}).items():
                made[variable, places] = self._leaf(variable, source, places, reader)
        for equation in self.flat.equations:
            for places in wanted.get(equation.outputs[0], {}):
                try:
                    made[equation.outputs[0], places] = self._combined(equation, places, made)
                except NotElementwise as error:
                    self.refuse(equation, error)
        return self._read(atom, PAIR, made)

    def _wanted(self, atom: Atom) -> dict[int, dict[Places, Equation | None]]:
        """For each variable the places at which it is read, and an equation that does."""
        wanted: dict[int, dict[Places, Equation | None]] = {}
        if isinstance(atom, int):
            wanted[atom] = {PAIR: None}
        for equation in reversed(self.flat.equations):
            found = {places: None for out in equation.outputs for places in wanted.get(out, {})}
            for places in found:
                try:
                    demanded = demands(self.flat, equation, places, self.kind)
                except NotElementwise as error:
                    self.refuse(equation, error)
                for x, at in demanded:
                    if isinstance(x, int):
                        wanted.setdefault(x, {}).setdefault(at, equation)
        return wanted

    def _leaf(self, variable: int, source: Source, places: Places, equation: Equation | None) -> int:
        shape, dtype = self.flat.avals[variable].shape, np.dtype(self.flat.avals[variable].dtype)
        kept = tuple(None if same_size(size, 1) else place for size, place in zip(shape, places, strict=True))
        if any(isinstance(place, Component) for place in kept):
            self._refuse_at(equation, f"computes an index of one entry of an array {shape}. {_BEFORE}")
        if source.kind == "scores":
            if any(place not in (None, axis) for axis, place in enumerate(kept)):
                self._refuse_at(equation, "reads the scores of other pairs of a query and a key than its own")
            return self.node("tangent" if source.is_tangent else "score", (), dtype.name, index=-1)
        indices = [place for place in kept if place is not None]
        if len(indices) != len(set(indices)):
            self._refuse_at(equation, "reads the diagonal of an array")
        if sum(not same_size(size, 1) for size in shape) != len(indices):
            self._refuse_at(equation, f"reads one entry of an array {shape}. {_BEFORE}")
        if source.kind == "computed" and {2, 3} <= set(indices):
            self._refuse_at(
                equation,
                "reads an array of all queries and keys that no elementwise operation makes. "
                "Compute it before the call and pass it as an operand, or as bias=",
            )
        number = self._access(Access(source, kept), dtype.name)
        return self.node("tangent" if source.is_tangent else "operand", (), dtype.name, index=number)

    def _access(self, access: Access, dtype: str) -> int:
        """The number of an array that is read there."""
        access = access._replace(source=access.source._replace(is_tangent=False))
        if access not in self.accesses:
            self.accesses[access] = len(self.accesses)
            self.dtypes.append(dtype)
        return self.accesses[access]

    def _refuse_at(self, equation: Equation | None, why: str) -> None:
        assert equation is not None  # the result has the scores' shape
        self.refuse(equation, why)

    def _combined(self, equation: Equation, places: Places, made: Mapping[tuple[int, Places], int]) -> int:
        """The node of an equation's output at `places`."""
        if equation.name == "iota":
            return self._position(equation, places)
        if equation.name == "gather":
            return self._entry(equation, places, made)
        inputs = tuple(self._read(x, at, made) for x, at in demands(self.flat, equation, places, self.kind))
        if equation.name in _RULES or equation.name == "concatenate":
            return inputs[0]
        if equation.name in IDENTITIES:
            rounding = self.rounding(equation, self.nodes[inputs[0]].dtype)
            return inputs[0] if rounding is None else rounding(inputs)
        return self.operation(equation, self.nodes[inputs[0]].op == "literal")(inputs)

    def _entry(self, equation: Equation, places: Places, made: Mapping[tuple[int, Places], int]) -> int:
        """The node of the entry of a table that a gather reads."""
        table, indices = equation.inputs
        shapes = [self.flat.aval(x).shape for x in equation.inputs]
        of = reads(equation, shapes, places)
        source = self.sources.get(table) if isinstance(table, int) else None
        if source is None or source.kind == "scores":
            raise NotElementwise("reads scores, or what is made of them, at a computed place")
        assert isinstance(table, int)
        numbers = [self._known(self._read(indices, at, made)) for at in of.indices]
        kept: list[Place] = []
        index = None
        for size, place in zip(shapes[0], of.table, strict=True):
            if not isinstance(place, Component):
                kept.append(None if same_size(size, 1) else place)
                continue
            number = numbers[place.number]
            if (axis := self._axis_of_positions(number, size)) is not None:
                kept.append(None if same_size(size, 1) else axis)
            elif index is None:
                kept.append(ENTRIES)
                index = number, size
            else:
                raise NotElementwise(
                    f"reads an array {shapes[0]} at two computed indices. Make one axis of both before"
                )
        own = [place for place in kept if place is not None]
        if index is None or {2, 3} & {*own} or len(own) != len({*own}):
            raise NotElementwise(f"reads an array {shapes[0]} that has more axes than a table's entries and heads")
        number, size = index
        if not isinstance(size, int) or not 0 < size <= MOST_ENTRIES:
            raise NotElementwise(f"reads a table of {size} entries at a computed index; {MOST_ENTRIES} is the most")
        if any(self.nodes[i].op in ("score", "tangent") for i in needed_nodes(self.nodes, [number])):
            # Forward and backward pass round scores otherwise, so that they would read other entries.
            raise NotElementwise("reads a table at an index that depends on the scores")
        return self._entry_at(equation, Access(source, tuple(kept), number), table, size)

    def _entry_at(self, equation: Equation, access: Access, table: int, size: int) -> int:
        """The node of an entry, by the gather's mode where the index is out of range."""
        assert access.entry is not None
        dtype = np.dtype(self.flat.avals[table].dtype).name
        bounds = self._bounds(access.entry)
        assert isinstance(bounds, Number)
        is_inside = bool(bounds.low >= 0) and bool(bounds.high < size)
        fill = None if is_inside else fill_of(equation, dtype)
        number = self._access(access._replace(fills=fill is not None), dtype)
        if access.source.is_tangent:
            return self.node("tangent", (access.entry,), dtype, index=number)
        attributes: dict[str, Any] = {"entries": size} | ({"is_inside": True} if is_inside else {})
        if fill is not None:
            attributes["fill"] = LiteralFloat(fill) if fill.dtype.kind == "f" else fill.item()
        return self.node("entry", (access.entry,), dtype, index=number, **attributes)

    def _bounds(self, number: int) -> Number | Truth:
        """The bounds of a node for all pairs, whatever arrays have."""
        ends = np.int32(0), np.int32(_NO_END - 1)
        arrays = [
            Number(np.int32(0), np.int32(self._size(access.source.number) - 1))
            if access.source.kind == "position"
            else unknown(dtype, np)
            for access, dtype in zip(self.accesses, self.dtypes, strict=True)
        ]
        return bounds_of(self.nodes, number, Tiles(np, ends, ends, arrays))

    def _size(self, axis: int) -> int:
        """The size of an axis of the scores, or what it is less than."""
        scores = next(x for x, source in self.sources.items() if source.kind == "scores")
        size = self.flat.avals[scores].shape[axis]
        return size if isinstance(size, int) else _NO_END

    def _known(self, number: int) -> int:
        """A node without choices by conditions that are the same for all pairs, as of an index below 0."""
        node = self.nodes[number]
        while node.op == "select_n":
            condition = self._bounds(node.inputs[0])
            if not isinstance(condition, Truth) or bool(condition.may_be_false) == bool(condition.may_be_true):
                break
            number = node.inputs[1 + bool(condition.may_be_true)]
            node = self.nodes[number]
        return number

    def _axis_of_positions(self, number: int, size: Any) -> int | None:
        """The axis of the scores, of this size, whose positions a node is; None of another one."""
        node = self.nodes[number]
        if node.op != "operand":
            return None
        source = list(self.accesses)[node["index"]].source
        is_whole = source.kind == "position" and same_size(size, self._size(source.number))
        return source.number if is_whole else None

    def _position(self, equation: Equation, places: Places) -> int:
        dtype = np.dtype(equation.params["dtype"]).name
        if dtype not in NUMBERS:
            raise NotElementwise(f"makes {dtype} indices; int32 and floats are known")
        axis = places[int(equation.params["dimension"])]
        if axis is None or isinstance(axis, Component):
            return self.literal(0 if axis is None else axis.number, dtype)
        if axis < 2:  # which they are depends on the device, and on vmap
            number = self._access(Access(Source("position", axis), (axis,)), INT32)
            return self.convert(self.node("operand", (), "int32", index=number), dtype)
        return self.convert(self.node(AXES[axis], (), "int32"), dtype)

    def _read(self, atom: Atom, places: Places, made: Mapping[tuple[int, Places], int]) -> int:
        if isinstance(atom, Literal):
            if atom.dtype.kind == "c":
                raise NotElementwise("works in complex numbers")
            return self.literal(atom.value, atom.dtype)
        return made[atom, places]


def _broadcast(equation: Equation, shapes: Sequence[Any], shape: Any, places: Places) -> list[Places]:
    axes = equation.params["broadcast_dimensions"]
    each = zip(shapes[0], axes, strict=True)
    # Sizes of dynamic shapes are further inputs; there are none.
    return [tuple(places[axis] if same_size(size, shape[axis]) else None for size, axis in each)]


def _reshaped(equation: Equation, shapes: Sequence[Any], shape: Any, places: Places) -> list[Places]:
    """Axes of size 1 are added or dropped."""
    kept = [place for size, place in zip(shape, places, strict=True) if not same_size(size, 1)]
    before = [size for size in shapes[0] if not same_size(size, 1)]
    after = [size for size in shape if not same_size(size, 1)]
    is_same = len(before) == len(after) and all(map(same_size, before, after))
    if equation.params.get("dimensions") is not None or not is_same:
        raise NotElementwise(
            f"reshapes {tuple(shapes[0])} to {tuple(shape)}; only axes of size 1 may be added or dropped"
        )
    remaining = iter(kept)
    return [tuple(None if same_size(size, 1) else next(remaining) for size in shapes[0])]


def _squeezed(equation: Equation, shapes: Sequence[Any], shape: Any, places: Places) -> list[Places]:
    dropped, remaining = {int(axis) for axis in equation.params["dimensions"]}, iter(places)
    return [tuple(None if axis in dropped else next(remaining) for axis in range(len(shapes[0])))]


def _transposed(equation: Equation, shapes: Sequence[Any], shape: Any, places: Places) -> list[Places]:
    of_axis = dict(zip(map(int, equation.params["permutation"]), places, strict=True))
    return [tuple(of_axis[axis] for axis in range(len(places)))]


def _of_nothing(equation: Equation, shapes: Sequence[Any], shape: Any, places: Places) -> list[Places]:
    return []


def demands(flat: Flat, equation: Equation, places: Places, kind: str = "score") -> list[tuple[Atom, Places]]:
    """The inputs of an equation that its output at `places` is made of, and the places at which it reads them.

    Raises:
      NotElementwise: it reads other entries than those at the place of its output.
    """
    shapes = [flat.aval(x).shape for x in equation.inputs]
    if rule := _RULES.get(equation.name):
        at: Sequence[Places | None] = rule(equation, shapes, flat.avals[equation.outputs[0]].shape, places)
    elif equation.name == "gather":
        return [(equation.inputs[1], one) for one in reads(equation, shapes, places).indices]
    elif equation.name == "concatenate" and any(isinstance(place, Component) for place in places):
        at = of_concatenated(equation, shapes, places)
    elif not is_local(equation.name):
        if is_nested(equation):
            raise NotElementwise("is control flow or a nested program, which a score cannot hold")
        raise UnknownOperation(kind)
    else:
        at = [places if len(shape) == len(places) else () for shape in shapes]
    return [(x, one) for x, one in zip(equation.inputs, at, strict=True) if one is not None]


_RULES = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "squeeze": _squeezed,
    "transpose": _transposed,
    "iota": _of_nothing,
}


def is_local(name: str) -> bool:
    """Whether such an operation needs no other entries of its inputs than those at its output's place."""
    return name in _RULES or name in elementwise.OPERATIONS or name in IDENTITIES
