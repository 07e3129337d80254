"""Bounds of the keys that a row sees: comparisons of a key's position with what does not depend on keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from coda_jax.fusion.attention.axes import Atom, size_of, whole
from coda_jax.fusion.attention.layout import Layout
from coda_jax.fusion.attention.linear import Linear, differences
from coda_jax.fusion.attention.logic import conjuncts, disjuncts
from coda_jax.fusion.attention.trees import Node, Trees, spread


@dataclasses.dataclass(frozen=True)
class Bound:
    """The first or the last key that a row sees.

    Attributes:
      is_first: whether it is the first.
      options: integers; the largest of them is the last key, the smallest the first.
      known: the numbers of all rows instead, (T,), and the rows' atoms.
    """

    is_first: bool
    options: tuple[Linear, ...] = ()
    known: tuple[np.ndarray, tuple[Atom, ...]] | None = None

    def value(self, values: Mapping[Any, Any], order: Sequence[Atom]) -> Any:
        """It, int32, with an axis for each atom of `order`."""
        if self.known is not None:
            numbers, rows = self.known
            return spread(jnp.asarray(numbers, jnp.int32), (rows,), order)
        options = (option.value(values, order) for option in self.options)
        return functools.reduce(jnp.minimum if self.is_first else jnp.maximum, options)

    def relative(self, layout: Layout) -> int | None:
        """c, where the bound is i + c for row i; None if it is not."""
        if self.known is not None:
            return _relative(self.known[0], size_of(layout.keys), is_first=self.is_first)
        if len(self.options) != 1:
            return None
        (option,) = self.options
        terms = list(option.terms.values())
        is_row = len(terms) == 1 and terms[0][0] == 1 and is_position(terms[0][1], layout.rows)
        return option.constant if is_row else None

    def numbers(self, layout: Layout) -> np.ndarray | None:
        """The bounds of all rows, (T,); None if they are not known."""
        if self.known is not None:
            return self.known[0]
        if len(self.options) == 1 and not self.options[0].terms:
            return np.full(size_of(layout.rows), self.options[0].constant)
        relative = self.relative(layout)
        return None if relative is None else np.arange(size_of(layout.rows)) + relative

    @property
    def holds_on_diagonal(self) -> bool:
        """Whether each row's bound lets it see the key of its own number, where the bounds are known."""
        assert self.known is not None
        numbers, rows = self.known[0], np.arange(len(self.known[0]))
        return bool(np.all(numbers <= rows if self.is_first else numbers >= rows))


def _relative(numbers: np.ndarray, keys: int, *, is_first: bool) -> int | None:
    """c, where known bounds are i + c, but for those of the first or the last key."""
    rows = np.arange(len(numbers))
    inner = numbers > 0 if is_first else numbers < keys - 1
    if not inner.any():
        return None
    offsets = (numbers - rows)[inner]
    offset = int(offsets[0])
    expected = np.maximum(rows + offset, 0) if is_first else np.minimum(rows + offset, keys - 1)
    return offset if np.all(offsets == offset) and np.array_equal(expected, numbers) else None


def is_position(node: Node, axis: Sequence[Atom]) -> bool:
    """True for the positions along this axis."""
    return node.op == "iota" and whole(node.labels[0]) == whole(axis)


def bounds_of(node: Node, sees: bool, layout: Layout) -> list[Bound] | None:
    """The bounds that a condition, or its opposite, is; None if it is none."""
    if node.op == ("or" if sees else "and"):
        return _one_of(node, sees, layout)
    found = differences(node, is_true=sees)
    if found is None:
        return None
    bounds = [_bounds(op, d, layout) for op, d in found]
    return [bound for each in bounds for bound in each] if all(bounds) else None


def _one_of(node: Node, sees: bool, layout: Layout) -> list[Bound] | None:
    """The bound of conditions one of which must hold: each is one, of the first key, or of the last."""
    options: list[Linear] = []
    sides = set()
    for one, flag in disjuncts(node, is_true=sees):
        parts = list(conjuncts(one, is_true=flag))
        found = bounds_of(*parts[0], layout) if len(parts) == 1 else None
        if found is None or len(found) != 1:
            return None
        sides.add(found[0].is_first)
        options += found[0].options
    return [Bound(sides.pop(), tuple(options))] if len(sides) == 1 else None


def _bounds(op: str, d: Linear, layout: Layout) -> list[Bound]:
    """The bounds that "d op 0" says; none if it says none."""
    keys, allowed = set(layout.keys), {*layout.batch, *layout.rows}
    positions = [(key, count) for key, (count, node) in d.terms.items() if is_position(node, layout.keys)]
    if len(positions) != 1 or positions[0][1] not in (1, -1) or op == "ne":
        return []
    ((key, count),) = positions
    rest = d.without(key)
    if not rest.atoms() <= allowed or rest.atoms() & keys:
        return []
    limit = Linear({}).plus(rest, -count)  # d op 0 is "j op limit", the other way where j is subtracted
    if count == -1:
        op = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le", "eq": "eq"}[op]
    one = Linear({}, 1)
    last = {"lt": limit.plus(one, -1), "le": limit, "eq": limit}.get(op)
    first = {"gt": limit.plus(one), "ge": limit, "eq": limit}.get(op)
    return [Bound(is_first, (x,)) for is_first, x in ((True, first), (False, last)) if x is not None]


def known_bounds(node: Node, sees: bool, layout: Layout, trees: Trees) -> list[Bound] | None:
    """The bounds that a constant array of pairs is, where each row sees keys that stand together."""
    if node.op != "leaf" or not node.atoms() <= {*layout.rows, *layout.keys}:
        return None
    value = trees.known(node.var)
    if value is None or value.dtype != np.dtype(bool):
        return None
    pairs = np.broadcast_to(_as_pairs(value, node, layout), (size_of(layout.rows), size_of(layout.keys)))
    pairs = pairs if sees else ~pairs
    count = pairs.sum(axis=1)
    first, last = pairs.argmax(axis=1), pairs.shape[1] - 1 - pairs[:, ::-1].argmax(axis=1)
    if not np.all(count) or not np.all(last - first + 1 == count):
        return None
    return [Bound(True, known=(first, layout.rows)), Bound(False, known=(last, layout.rows))]


def _as_pairs(value: np.ndarray, node: Node, layout: Layout) -> np.ndarray:
    """The array (T or 1, S or 1)."""
    order = [*layout.rows, *layout.keys]
    labels = [whole(label) for label in node.labels]
    own = [atom for label in labels for atom in label]
    split = value.reshape([atom.size for atom in own])
    moved = split.transpose([own.index(atom) for atom in order if atom in own])
    every = moved.reshape([atom.size if atom in own else 1 for atom in order])
    full = np.broadcast_to(every, [atom.size for atom in order])
    return full.reshape(size_of(layout.rows), size_of(layout.keys))


def static_band(bounds: Sequence[Bound], layout: Layout) -> tuple[int | None, int | None] | None:
    """The band (left, right) around a row's number that all bounds are together; None if they are more."""
    left: int | None = None
    right: int | None = None
    for bound in bounds:
        if bound.known is not None and _hides_nothing(bound, layout):
            continue
        offset = bound.relative(layout)
        if offset is None:
            return None
        if bound.is_first:
            left = -offset if left is None else min(left, -offset)
        else:
            right = offset if right is None else min(right, offset)
    return left, right


def _hides_nothing(bound: Bound, layout: Layout) -> bool:
    assert bound.known is not None
    numbers = bound.known[0]
    return bool(np.all(numbers == 0) if bound.is_first else np.all(numbers == size_of(layout.keys) - 1))
