"""Integers as sums of expressions, and what comparisons of them say: of positions of keys, and on the diagonal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from coda_jax.fusion.attention.axes import Atom, Label, whole
from coda_jax.fusion.attention.trees import SAME, Node, constant_of, value_of

COMPARISONS = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}  # with their opposites
_SWAPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


def dtype_of(node: Node) -> Any:
    """The dtype of an expression."""
    if node.op == "constant":
        return np.asarray(node.var).dtype
    if node.op in ("leaf", "operand"):
        return node.var.aval.dtype
    if node.op == "iota":
        return node.var
    return np.dtype(bool) if node.equation is None else node.equation.outvars[0].aval.dtype


def identity(node: Node, twins: Mapping[Atom, Atom] | None = None) -> Hashable:
    """A key that is equal for expressions that are equal.

    Args:
      node: an expression.
      twins: atoms in whose place others stand, as rows in the place of keys on the diagonal.
    """
    names = twins or {}

    def label(atoms: Label) -> Hashable:
        return tuple(id(names.get(atom, atom)) for atom in whole(atoms))

    def of(one: Node) -> Hashable:
        if one.op == "constant":
            return "constant", np.asarray(one.var).tobytes(), str(np.asarray(one.var).dtype)
        if one.op in ("leaf", "operand"):
            return "leaf", id(one.var), tuple(map(label, one.labels))
        if one.op == "iota":
            return "iota", label(one.labels[0]), one.start
        if one.op in SAME:
            return of(one.args[0])
        params = "" if one.equation is None else str(sorted(map(str, one.equation.params.items())))
        return one.op, params, tuple(map(of, one.args))

    return of(node)


@dataclasses.dataclass(frozen=True)
class Linear:
    """An integer: a constant and the sum of multiples of expressions, by their keys."""

    terms: Mapping[Hashable, tuple[int, Node]]
    constant: int = 0

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """The sum with a multiple of another one."""
        terms = dict(self.terms)
        for key, (count, node) in other.terms.items():
            total = terms[key][0] + factor * count if key in terms else factor * count
            terms[key] = total, node
        return Linear({key: one for key, one in terms.items() if one[0]}, self.constant + factor * other.constant)

    def without(self, key: Hashable) -> Linear:
        return Linear({k: one for k, one in self.terms.items() if k != key}, self.constant)

    def atoms(self) -> frozenset[Atom]:
        """The atoms that it depends on."""
        return frozenset(atom for _, node in self.terms.values() for atom in node.atoms())

    def value(self, values: Mapping[Any, Any], order: Sequence[Atom]) -> Any:
        """Its value, int32, with an axis for each atom of `order`."""
        total = jnp.full((1,) * len(order), self.constant, jnp.int32)
        for count, node in self.terms.values():
            total = total + count * value_of(node, values, order).astype(jnp.int32)
        return total


def linear_of(node: Node, twins: Mapping[Atom, Atom] | None = None) -> Linear | None:
    """An integer expression of 32 bits as a sum; None for one of another type."""
    dtype = dtype_of(node)
    if not jnp.issubdtype(dtype, jnp.signedinteger) or dtype.itemsize < 4:
        return None
    number = constant_of(node)
    if number is not None:
        return Linear({}, int(number))
    if node.op == "iota" and node.start:
        return _alone(dataclasses.replace(node, start=0), twins).plus(Linear({}, node.start))
    if node.op in SAME or node.op == "convert_element_type":
        inner = linear_of(node.args[0], twins)
        return inner if inner is not None else _alone(node, twins)
    if node.op in ("add", "sub", "neg", "mul"):
        parts = [linear_of(arg, twins) for arg in node.args]
        if all(part is not None for part in parts):
            found = _combined(node.op, parts)  # type: ignore[arg-type]
            if found is not None:
                return found
    return _alone(node, twins)


def _alone(node: Node, twins: Mapping[Atom, Atom] | None) -> Linear:
    return Linear({identity(node, twins): (1, node)})


def _combined(op: str, parts: Sequence[Linear]) -> Linear | None:
    zero = Linear({})
    if op == "neg":
        return zero.plus(parts[0], -1)
    first, second = parts
    if op == "mul":
        if first.terms and second.terms:
            return None
        one, number = (first, second.constant) if first.terms else (second, first.constant)
        return zero.plus(one, number)
    return first.plus(second, -1 if op == "sub" else 1)


def differences(
    node: Node, *, is_true: bool, twins: Mapping[Atom, Atom] | None = None
) -> list[tuple[str, Linear]] | None:
    """Comparisons (op, d), "d op 0", all of which hold where a comparison of integers does, or does not.

    |x| <= y is two of them. None for another expression.
    """
    if node.op not in COMPARISONS:
        return None
    op = node.op if is_true else COMPARISONS[node.op]
    left, right = node.args
    if right.op == "abs" and left.op != "abs":
        left, right, op = right, left, _SWAPPED[op]
    if left.op == "abs" and op in ("le", "lt"):
        inner, bound = linear_of(left.args[0], twins), linear_of(right, twins)
        if inner is None or bound is None:
            return None
        return [(op, inner.plus(bound, -1)), (op, Linear({}).plus(inner, -1).plus(bound, -1))]
    first, second = linear_of(left, twins), linear_of(right, twins)
    return None if first is None or second is None else [(op, first.plus(second, -1))]


_HOLDS: Mapping[str, Callable[[int], bool]] = {
    "eq": lambda d: d == 0,
    "ne": lambda d: d != 0,
    "lt": lambda d: d < 0,
    "le": lambda d: d <= 0,
    "gt": lambda d: d > 0,
    "ge": lambda d: d >= 0,
}


def on_diagonal(node: Node, twins: Mapping[Atom, Atom]) -> bool | None:
    """Whether a condition holds for each row and the key of the same number; None if that is not known.

    Args:
      node: of the operations of `logic`.
      twins: the rows' atoms by those of the keys.
    """
    if node.op == "constant":
        values = {bool(x) for x in np.asarray(node.var).ravel()}
        return values.pop() if len(values) == 1 else None
    if node.op == "not":
        inner = on_diagonal(node.args[0], twins)
        return None if inner is None else not inner
    if node.op in ("and", "or"):
        decides = node.op == "or"
        parts = [on_diagonal(arg, twins) for arg in node.args]
        if decides in parts:
            return decides
        return None if None in parts else not decides
    found = differences(node, is_true=True, twins=twins)
    if found is not None:
        answers = [_HOLDS[op](d.constant) if not d.terms else None for op, d in found]
        return False if False in answers else None if None in answers else True
    if node.op in ("eq", "ge", "le") and _is_discrete(node.args[0]):
        return True if identity(node.args[0], twins) == identity(node.args[1], twins) else None
    return None


def _is_discrete(node: Node) -> bool:
    """True for integers and booleans, which are equal to themselves."""
    dtype = dtype_of(node)
    return bool(jnp.issubdtype(dtype, jnp.integer) or dtype == np.dtype(bool))
