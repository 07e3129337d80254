"""Conditions of and, or, not and comparisons, from expressions of booleans and of numbers that stand for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from coda_jax.fusion.attention.linear import COMPARISONS, dtype_of
from coda_jax.fusion.attention.trees import SAME, Node, constant_of

_BOOL = np.dtype(bool)


@dataclasses.dataclass(frozen=True)
class TwoValued:
    """A number that is one of two, as a condition has it."""

    condition: Node
    if_false: float
    if_true: float


def two_valued(node: Node) -> TwoValued | None:
    """The condition and the two values of an expression of numbers; None if it is none."""
    if node.op in SAME:
        return two_valued(node.args[0])
    if node.op == "convert_element_type" and dtype_of(node.args[0]) == _BOOL:
        return None if constant_of(node) is not None else TwoValued(logic(node.args[0]), 0.0, 1.0)
    if node.op == "select_n" and len(node.args) == 3 and dtype_of(node.args[1]) != _BOOL:
        condition, *cases = node.args
        numbers = [constant_of(case) for case in cases]
        if None not in numbers and constant_of(condition) is None:
            return TwoValued(logic(condition), *numbers)  # type: ignore[arg-type]
    if node.equation is None or not node.args or dtype_of(node) == _BOOL:
        return None
    return _of_two_values(node)


def _of_two_values(node: Node) -> TwoValued | None:
    """`two_valued` of an operation on one such number and constants, or of the product of two that are 0 or 1."""
    found = [two_valued(arg) for arg in node.args]
    varied = [i for i, one in enumerate(found) if one is not None]
    if node.op == "mul" and len(varied) == 2:
        first, second = found
        assert first is not None and second is not None
        if {(one.if_false, one.if_true) for one in (first, second)} == {(0.0, 1.0)}:
            return TwoValued(Node("and", (first.condition, second.condition)), 0.0, 1.0)
    if len(varied) != 1 or any(constant_of(arg) is None for i, arg in enumerate(node.args) if i != varied[0]):
        return None
    (place,) = varied
    one = found[place]
    assert one is not None

    def at(number: float) -> float:
        args = list(node.args)
        args[place] = Node("constant", var=np.asarray(number, dtype_of(args[place])))
        result = constant_of(dataclasses.replace(node, args=tuple(args)))
        assert result is not None
        return result

    return TwoValued(one.condition, at(one.if_false), at(one.if_true))


def logic(node: Node) -> Node:
    """An expression of booleans, of the operations and, or, not, comparisons, and what is none of these."""
    number = constant_of(node)
    if number is not None:
        return Node("constant", var=np.asarray(bool(number)))
    if node.op in SAME:
        return logic(node.args[0])
    if dtype_of(node) != _BOOL:  # a number, where it is not 0
        return _of_number(node)
    if node.op in ("and", "or"):
        return Node(node.op, tuple(map(logic, node.args)))
    if node.op == "mul":
        return Node("and", tuple(map(logic, node.args)))
    if node.op == "not":
        return _not(logic(node.args[0]))
    if node.op == "convert_element_type":
        return logic(node.args[0])
    if node.op == "select_n" and len(node.args) == 3:
        condition, if_false, if_true = map(logic, node.args)
        return _chosen(condition, if_false, if_true)
    if node.op in COMPARISONS:
        return _comparison(node)
    return node


def _not(node: Node) -> Node:
    return node.args[0] if node.op == "not" else Node("not", (node,))


def _chosen(condition: Node, if_false: Node, if_true: Node) -> Node:
    """(condition and if_true) or (not condition and if_false)."""
    values = [bool(one.var) if one.op == "constant" and not np.ndim(one.var) else None for one in (if_false, if_true)]
    if values == [False, True]:
        return condition
    if values == [True, False]:
        return _not(condition)
    if values[0] is not None:
        return Node("and", (condition, if_true)) if not values[0] else Node("or", (_not(condition), if_true))
    if values[1] is not None:
        return Node("or", (condition, if_false)) if values[1] else Node("and", (_not(condition), if_false))
    return Node("or", (Node("and", (condition, if_true)), Node("and", (_not(condition), if_false))))


def _of_number(node: Node) -> Node:
    """The condition that a number is not 0."""
    found = two_valued(node)
    if found is None:
        return Node("nonzero", (node,))
    return _by_values(found.condition, found.if_false != 0, found.if_true != 0)


def _by_values(condition: Node, if_false: bool, if_true: bool) -> Node:
    if if_false == if_true:
        return Node("constant", var=np.asarray(if_true))
    return condition if if_true else _not(condition)


def _comparison(node: Node) -> Node:
    """A comparison; the condition itself where one of a number that stands for it is compared with a constant."""
    for place in (0, 1):
        found, other = two_valued(node.args[place]), node.args[1 - place]
        if found is None or constant_of(other) is None:
            continue
        truths = []
        for number in (found.if_false, found.if_true):
            args = list(node.args)
            args[place] = Node("constant", var=np.asarray(number, dtype_of(args[place])))
            truths.append(bool(constant_of(dataclasses.replace(node, args=tuple(args)))))
        return _by_values(found.condition, *truths)
    if all(dtype_of(arg) == _BOOL for arg in node.args) and node.op in ("eq", "ne"):
        return dataclasses.replace(node, args=tuple(map(logic, node.args)))
    return node


def conjuncts(node: Node, *, is_true: bool = True) -> Iterator[tuple[Node, bool]]:
    """The conditions all of which hold where one does, or does not, each with whether it does."""
    if node.op == "not":
        yield from conjuncts(node.args[0], is_true=not is_true)
    elif node.op == ("and" if is_true else "or"):
        for arg in node.args:
            yield from conjuncts(arg, is_true=is_true)
    else:
        yield node, is_true


def disjuncts(node: Node, *, is_true: bool = True) -> Iterator[tuple[Node, bool]]:
    """The conditions one of which holds where one does, or does not."""
    for one, flag in conjuncts(node, is_true=not is_true):
        yield one, not flag
