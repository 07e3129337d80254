"""Labels of axes: an axis is made of atoms, which are index ranges. Two axes are the same where their atoms are.

A product of two arrays gives each of its axes an atom. Reshapes join and split atoms, transposes move them, and an axis
of one element has none. So nothing depends on the sizes of axes, or on where they stand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from coda_jax.fusion.dots import Equation

VIEWS = frozenset({"broadcast_in_dim", "reshape", "transpose", "squeeze"})


class Unlike(Exception):
    """The equations are no attention; the message says why."""


class Atom:
    """An index range.

    Attributes:
      size: how many indices it has.
      kind: "batch", "left" or "right" for the axes of a product, "sum" for those that it sums over, "value" for the
        columns of values.
      parts: the atoms that a reshape split it into, the first of which counts slowest; none if it is whole.
    """

    def __init__(self, size: int, kind: str):
        self.size, self.kind, self.parts = size, kind, tuple[Atom, ...]()

    def __repr__(self) -> str:
        return f"{self.kind}:{self.size}"


Label = tuple[Atom, ...]  # of an axis; none for one of one element, or along which all elements are equal
Labels = tuple[Label, ...]


def new_label(size: int, kind: str) -> Label:
    """The label of a new axis."""
    return (Atom(size, kind),) if size > 1 else ()


def whole(label: Iterable[Atom]) -> Label:
    """A label with the parts of the atoms that were split."""
    return tuple(part for atom in label for part in (whole(atom.parts) if atom.parts else (atom,)))


def labels_of(labels: Sequence[Label]) -> Labels:
    """Labels with the parts of the atoms that were split."""
    return tuple(map(whole, labels))


def atoms_of(labels: Sequence[Label]) -> list[Atom]:
    """All atoms of labels, in order."""
    return [atom for label in labels for atom in whole(label)]


def size_of(label: Iterable[Atom]) -> int:
    """The size of an axis with this label."""
    return math.prod(atom.size for atom in whole(label))


def moved(equation: Equation, labels: Sequence[Label]) -> Labels:
    """The labels of the result of one of `VIEWS`, from those of its argument.

    Raises:
      Unlike: a reshape joins or splits axes that have no common atoms.
    """
    params, (x, out) = equation.params, (equation.invars[0].aval, equation.outvars[0].aval)
    name, labels = equation.primitive.name, labels_of(labels)
    if name == "broadcast_in_dim":
        found: list[Label] = [()] * out.ndim
        for axis, label, size in zip(params["broadcast_dimensions"], labels, x.shape, strict=True):
            found[axis] = label if size == out.shape[axis] else ()
        return tuple(found)
    if name == "reshape":
        return regrouped(labels, x.shape, out.shape)
    if name == "transpose":
        return tuple(labels[axis] for axis in params["permutation"])
    return tuple(label for axis, label in enumerate(labels) if axis not in params["dimensions"])


def moved_back(equation: Equation, labels: Sequence[Label]) -> Labels:
    """The labels of the argument of one of `VIEWS`, from those of its result; raises as `moved` does."""
    params, (x, out) = equation.params, (equation.invars[0].aval, equation.outvars[0].aval)
    name, labels = equation.primitive.name, labels_of(labels)
    if not x.shape:
        return ()
    if name == "broadcast_in_dim":
        axes = zip(params["broadcast_dimensions"], x.shape, strict=True)
        return tuple(labels[axis] if size == out.shape[axis] else () for axis, size in axes)
    if name == "reshape":
        return regrouped(labels, out.shape, x.shape)
    if name == "transpose":
        return tuple(labels[axis] for axis in np.argsort(params["permutation"]))
    rest = iter(labels)
    return tuple(() if axis in params["dimensions"] else next(rest) for axis in range(x.ndim))


def regrouped(labels: Sequence[Label], shape: Sequence[int], new_shape: Sequence[int]) -> Labels:
    """The labels of a reshaped array. An axis without a label, of more than one element, stays one by itself.

    Raises:
      Unlike: atoms do not fit into the new axes, or one would be joined with an axis that has none.
    """
    parts: list[tuple[int, Atom | None]] = []
    for label, size in zip(labels_of(labels), shape, strict=True):
        parts += [(atom.size, atom) for atom in label] if label else ([(size, None)] if size > 1 else [])
    found = [_taken(parts, size) for size in new_shape]
    return tuple(found)


def _taken(parts: list[tuple[int, Atom | None]], size: int) -> Label:
    """The label of an axis of this size, whose atoms are taken from the front of `parts`."""
    label: list[Atom | None] = []
    reached = 1
    while reached < size:
        if not parts:
            raise Unlike("a reshape of other axes")
        count, atom = parts.pop(0)
        if reached * count > size:
            wanted = size // reached
            if size % reached or count % wanted:
                raise Unlike("a reshape splits an axis")
            if atom is not None:
                atom.parts = (Atom(wanted, atom.kind), Atom(count // wanted, atom.kind))
                atom, rest = atom.parts
                parts.insert(0, (count // wanted, rest))
            else:
                parts.insert(0, (count // wanted, None))
            count = wanted
        reached *= count
        label.append(atom)
    if not any(label):
        return ()
    if not all(label):
        raise Unlike("a reshape joins an axis with one along which all elements are equal")
    return tuple(atom for atom in label if atom is not None)


def scope_of(label: Any) -> frozenset[Atom]:
    """The atoms of labels as a set."""
    return frozenset(atoms_of(label))
