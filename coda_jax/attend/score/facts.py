"""The conditions that hold of a pair whose key is not hidden: choices by them are decided there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coda_jax.attend.score.program import HIDDEN
from coda_jax.epilogue.dtypes import BOOL, FLOAT32
from coda_jax.epilogue.elements import Elements
from coda_jax.epilogue.program import Node, needed_nodes


def facts(nodes: Sequence[Node], value: int) -> dict[int, bool]:
    """Conditions, by their nodes, that are known where the value is above `HIDDEN`, if all that is added is finite."""
    known: dict[int, bool] = {}
    waiting = [value]
    while waiting:
        node = nodes[waiting.pop()]
        if node.op == "select_n" and nodes[node.inputs[0]].dtype == BOOL:
            condition, if_false, if_true = node.inputs
            hides = [_hides(nodes[i]) for i in (if_false, if_true)]
            if hides[0] != hides[1]:
                _learn(nodes, condition, hides[0], known)
                waiting.append(if_true if hides[0] else if_false)
        elif node.op in ("add", "min"):
            waiting += node.inputs
        elif node.op == "sub":
            waiting.append(node.inputs[0])
    return known


def _hides(node: Node) -> bool:
    return node.op == "literal" and node.dtype == FLOAT32 and float(node["value"]) <= HIDDEN


def _learn(nodes: Sequence[Node], condition: int, is_true: bool, known: dict[int, bool]) -> None:
    known[condition] = is_true
    node = nodes[condition]
    if node.op == "not":
        _learn(nodes, node.inputs[0], not is_true, known)
    elif node.dtype == BOOL and node.op == ("and" if is_true else "or"):
        for i in node.inputs:
            _learn(nodes, i, is_true, known)


def decided(elements: Elements, root: int, known: Mapping[int, bool]) -> int:
    """The node with choices by these conditions made."""
    at: dict[int, int] = {}
    for number in sorted(needed_nodes(elements.nodes, [root])):
        node = elements.nodes[number]
        inputs = tuple(at[i] for i in node.inputs)
        if node.op == "select_n" and node.inputs[0] in known:
            at[number] = inputs[1 + known[node.inputs[0]]]
        else:
            at[number] = elements.node(node.op, inputs, node.dtype, **dict(node.attributes))
    return at[root]
