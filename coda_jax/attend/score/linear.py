"""The derivatives of a score by what it reads, from its tangent, which is linear in the tangents of these."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.epilogue.elements import Elements
from coda_jax.epilogue.program import needed_nodes
from coda_jax.epilogue.values import NotElementwise

_Terms = dict[int, int]  # of a leaf's index the node of its factor


def factors(elements: Elements, tangent: int) -> dict[int, int]:
    """For each leaf "tangent", by its index, the node by which `tangent` has it: their sum is the tangent.

    Raises:
      NotElementwise: it is not linear in them, or in a way that is not known.
    """
    terms: dict[int, _Terms] = {}
    for number in sorted(needed_nodes(elements.nodes, [tangent])):
        node = elements.nodes[number]
        if node.op == "tangent":
            terms[number] = {node["index"]: elements.literal(1, node.dtype)}
        elif any(i in terms for i in node.inputs):
            terms[number] = _terms(elements, number, [terms.get(i) for i in node.inputs])
    return {index: elements.convert(factor, "float32") for index, factor in terms.get(tangent, {}).items()}


def _terms(elements: Elements, number: int, given: list[_Terms | None]) -> _Terms:
    """The terms of a node, from those of its inputs; None is an input without tangents."""
    node = elements.nodes[number]
    inputs, dtype, first = node.inputs, node.dtype, given[0] or {}
    match node.op:
        case "add" | "add_any" | "sub":
            _check_zeros(elements, inputs, given)
            sign = _negated if node.op == "sub" else _same
            return _added(elements, first, {i: sign(elements, x) for i, x in (given[1] or {}).items()}, dtype)
        case "neg":
            return {index: _negated(elements, factor) for index, factor in first.items()}
        case "mul" if None in given:
            factor = inputs[given.index(None)]
            return {index: _product(elements, one, factor, dtype) for index, one in (first or given[1] or {}).items()}
        case "div" if given[1] is None:
            return {index: _quotient(elements, one, inputs[1], dtype) for index, one in first.items()}
        case "convert_element_type":
            return {index: elements.convert(one, dtype) for index, one in first.items()}
        case "select_n" if given[0] is None:
            _check_zeros(elements, inputs[1:], given[1:])
            return _chosen(elements, inputs[0], [terms or {} for terms in given[1:]], dtype)
    raise NotElementwise(f"has a derivative by '{node.op}'")


def _check_zeros(elements: Elements, inputs: Sequence[int], given: Sequence[_Terms | None]) -> None:
    if any(terms is None and not _is_zero(elements, i) for terms, i in zip(given, inputs, strict=True)):
        raise NotElementwise("adds to a tangent, or chooses beside one, what is none")


def _added(elements: Elements, first: _Terms, second: _Terms, dtype: str) -> _Terms:
    total = dict(first)
    for index, factor in second.items():
        total[index] = _sum(elements, total[index], factor, dtype) if index in total else factor
    return total


def _chosen(elements: Elements, condition: int, cases: Sequence[_Terms], dtype: str) -> _Terms:
    zero = elements.literal(0, dtype)
    indices = dict.fromkeys(index for terms in cases for index in terms)
    chosen = {index: tuple(terms.get(index, zero) for terms in cases) for index in indices}
    return {index: elements.node("select_n", (condition, *each), dtype) for index, each in chosen.items()}


def _sum(elements: Elements, a: int, b: int, dtype: str) -> int:
    if _is_zero(elements, a) or _is_zero(elements, b):
        return b if _is_zero(elements, a) else a
    node = elements.nodes[b]
    if node.op == "mul" and a in node.inputs:  # a + a c, as rules have it for a function's derivative
        other = node.inputs[node.inputs[0] == a]
        return _product(elements, a, elements.node("add", (elements.literal(1, dtype), other), dtype), dtype)
    return elements.node("add", (a, b), dtype)


def _same(elements: Elements, factor: int) -> int:
    return factor


def _is_zero(elements: Elements, number: int) -> bool:
    """Whether it is the tangent of what has none: rules of functions have a zero there, and factors of it."""
    node = elements.nodes[number]
    match node.op:
        case "literal":
            return float(node["value"]) == 0
        case "mul":
            return any(_is_zero(elements, i) for i in node.inputs)
        case "neg" | "convert_element_type" | "div":
            return _is_zero(elements, node.inputs[0])
        case "add" | "add_any" | "sub":
            return all(_is_zero(elements, i) for i in node.inputs)
    return False


def _literal(elements: Elements, number: int) -> float | None:
    node = elements.nodes[number]
    return float(node["value"]) if node.op == "literal" and node.dtype == FLOAT32 else None


def _negated(elements: Elements, factor: int) -> int:
    value, dtype = _literal(elements, factor), elements.nodes[factor].dtype
    return elements.node("neg", (factor,), dtype) if value is None else elements.literal(-value, dtype)


def _product(elements: Elements, a: int, b: int, dtype: str) -> int:
    x, y = _literal(elements, a), _literal(elements, b)
    if x is not None and y is not None:
        return elements.literal(np.float32(x) * np.float32(y), dtype)
    if x in (0, 1):
        return b if x == 1 else a
    if y in (0, 1):
        return a if y == 1 else b
    return elements.node("mul", elements.converted((a, b), dtype), dtype)


def _quotient(elements: Elements, a: int, b: int, dtype: str) -> int:
    x, y = _literal(elements, a), _literal(elements, b)
    if x == 0 or y == 1:
        return a
    if x is not None and y:
        return elements.literal(np.float32(x) / np.float32(y), dtype)
    return elements.node("div", (a, b), dtype)
