"""The derivatives of a score by what it reads, from its tangent, which is linear in the tangents of these."""

from __future__ import annotations

import numpy as np

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
    op, inputs, dtype = node.op, node.inputs, node.dtype

    def added(first: int, second: int) -> int:
        if _is_zero(elements, first) or _is_zero(elements, second):
            return second if _is_zero(elements, first) else first
        one = elements.nodes[second]
        if one.op == "mul" and first in one.inputs:  # a + a b, as rules have it for a function's derivative
            other = one.inputs[one.inputs[0] == first]
            return _product(elements, first, elements.node("add", (elements.literal(1, dtype), other), dtype), dtype)
        return elements.node("add", (first, second), dtype)

    if op in ("add", "add_any", "sub"):
        if any(terms is None and not _is_zero(elements, i) for terms, i in zip(given, inputs, strict=True)):
            raise NotElementwise("adds to a tangent what is none")
        total = dict(given[0] or {})
        for index, factor in (given[1] or {}).items():
            factor = _negated(elements, factor) if op == "sub" else factor
            total[index] = added(total[index], factor) if index in total else factor
        return total
    if op == "neg":
        return {index: _negated(elements, factor) for index, factor in (given[0] or {}).items()}
    if op == "mul" and (given[0] is None) != (given[1] is None):
        of_tangent, factor = (given[0], inputs[1]) if given[0] is not None else (given[1], inputs[0])
        return {index: _product(elements, one, factor, dtype) for index, one in (of_tangent or {}).items()}
    if op == "div" and given[0] is not None and given[1] is None:
        return {index: _quotient(elements, one, inputs[1], dtype) for index, one in given[0].items()}
    if op == "convert_element_type" and given[0] is not None:
        return {index: elements.convert(one, dtype) for index, one in given[0].items()}
    if op == "select_n" and given[0] is None:
        zero, cases = elements.literal(0, dtype), given[1:]
        indices = dict.fromkeys(index for terms in cases for index in terms or {})
        if any(terms is None and not _is_zero(elements, i) for terms, i in zip(cases, inputs[1:], strict=True)):
            raise NotElementwise("chooses between a tangent and what is none")
        chosen = {index: tuple((terms or {}).get(index, zero) for terms in cases) for index in indices}
        return {index: elements.node(op, (inputs[0], *each), dtype) for index, each in chosen.items()}
    raise NotElementwise(f"has a derivative by '{op}'")


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
    return float(node["value"]) if node.op == "literal" and node.dtype == "float32" else None


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
