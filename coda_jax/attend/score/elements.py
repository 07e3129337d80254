"""The check that a score function is local to a pair, and its translation to one pair's program.

The function is of whole arrays. Its result is asked for at (b, h, t, s), and each equation says at which places it
reads its inputs then: a `Places` has for each axis the axis of the scores whose index it is, or None for index 0. So an
array may be of any rank and be broadcast anywhere. Scores may be read at (b, h, t, s) alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coda_jax.epilogue import elementwise
from coda_jax.epilogue.dtypes import NUMBERS
from coda_jax.epilogue.elements import IDENTITIES, Elements, is_nested
from coda_jax.epilogue.flatten import Atom, Equation, Flat, Literal
from coda_jax.epilogue.values import NotElementwise, UnknownOperation, same_size

Places = tuple[int | None, ...]
PAIR: Places = (0, 1, 2, 3)
AXES = ("batch", "head", "row", "column")

ALLOWED = (
    "Allowed in a score: elementwise operations on s (B, H, T, S) and arrays that broadcast against it, and positions, "
    "from jnp.arange or jax.lax.broadcasted_iota. jnp.where(.., s, -jnp.inf) hides a key."
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
    """An array, and the places at which a score reads it."""

    source: Source
    places: Places


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
                    inputs = self._places(equation, places)
                except NotElementwise as error:
                    self.refuse(equation, error)
                for x, at in zip(equation.inputs, inputs, strict=True):
                    if isinstance(x, int):
                        wanted.setdefault(x, {}).setdefault(at, equation)
        return wanted

    def _places(self, equation: Equation, places: Places) -> list[Places]:
        """The places at which an equation reads its inputs for its output to be at `places`."""
        shapes = [self.flat.aval(x).shape for x in equation.inputs]
        if rule := _RULES.get(equation.name):
            return rule(equation, shapes, self.flat.avals[equation.outputs[0]].shape, places)
        if not is_local(equation.name):
            if is_nested(equation):
                raise NotElementwise("is control flow or a nested program, which a score cannot hold")
            raise UnknownOperation(self.kind)
        return [places if len(shape) == len(places) else () for shape in shapes]

    def _leaf(self, variable: int, source: Source, places: Places, equation: Equation | None) -> int:
        shape, dtype = self.flat.avals[variable].shape, np.dtype(self.flat.avals[variable].dtype)
        kept = tuple(None if same_size(size, 1) else place for size, place in zip(shape, places, strict=True))
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
        number = self.accesses.setdefault(Access(source._replace(is_tangent=False), kept), len(self.accesses))
        return self.node("tangent" if source.is_tangent else "operand", (), dtype.name, index=number)

    def _refuse_at(self, equation: Equation | None, why: str) -> None:
        assert equation is not None  # the result has the scores' shape
        self.refuse(equation, why)

    def _combined(self, equation: Equation, places: Places, made: Mapping[tuple[int, Places], int]) -> int:
        """The node of an equation's output at `places`."""
        if equation.name == "iota":
            return self._position(equation, places)
        at = self._places(equation, places)
        inputs = tuple(self._read(x, one, made) for x, one in zip(equation.inputs, at, strict=True))
        if equation.name in _RULES:
            return inputs[0]
        if equation.name in IDENTITIES:
            rounding = self.rounding(equation, self.nodes[inputs[0]].dtype)
            return inputs[0] if rounding is None else rounding(inputs)
        return self.operation(equation, self.nodes[inputs[0]].op == "literal")(inputs)

    def _position(self, equation: Equation, places: Places) -> int:
        dtype = np.dtype(equation.params["dtype"]).name
        if dtype not in NUMBERS:
            raise NotElementwise(f"makes {dtype} indices; int32 and floats are known")
        axis = places[int(equation.params["dimension"])]
        if axis is None:
            return self.literal(0, dtype)
        if axis < 2:  # which they are depends on the device, and on vmap
            source = Access(Source("position", axis), (axis,))
            number = self.accesses.setdefault(source, len(self.accesses))
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
