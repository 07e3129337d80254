"""CUDA text of a score function: `struct Score`, as cuda/attention_scores.cuh describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coda_jax.attend.score.hiding import keeps_hidden
from coda_jax.attend.score.program import Score
from coda_jax.epilogue.dtypes import BOOL, FLOAT32, TABLE
from coda_jax.epilogue.emit import literal_text, operation_text, register_of
from coda_jax.epilogue.program import Node, needed_nodes
from coda_jax.epilogue.struct_text import declared, entry
from coda_jax.epilogue.values import same_size

_AXES = ("batch", "heads", "queries", "keys")


def emit(score: Score, arrays: Sequence[Any], gradients: Sequence[int] = ()) -> str:
    """The definition of `struct Score` for arrays, or types of arrays, such as these.

    It depends on their dtypes and on which of their axes have more than one entry.

    Args:
      gradients: the arrays of which the kernel makes the gradients.
    """
    names = [_leaf(node) or f"v{i}" for i, node in enumerate(score.nodes)]
    value, slope = names[score.value], names[score.slope]
    return "\n".join(
        [
            "struct Score {",
            f"  static constexpr int arrays = {len(arrays)}, gradients = {len(gradients)};",
            f"  static constexpr bool unit_slope = {str(score.has_unit_slope).lower()};",
            f"  static constexpr bool keeps_hidden = {str(keeps_hidden(score, [x.shape for x in arrays])).lower()};",
            *declared("coda::attention::ScoreArray array[]", [[entry(_array(x)) for x in arrays] or [""]]),
            "",
            *_function("", [*_statements(score, [score.value], names), f"return {value};"]),
            "",
            *_function(
                ", float& slope",
                [*_statements(score, [score.value, score.slope], names), f"slope = {slope};", f"return {value};"],
            ),
            *_slopes(score, gradients, names),
            "};",
            "",
        ]
    )


def _array(x: Any) -> dict[str, object]:
    has = {name: True for name, size in zip(_AXES, x.shape, strict=True) if not same_size(size, 1)}
    return {"dtype": f"coda::DType::{TABLE[np.dtype(x.dtype).name].cuda}", **has}


def _gradient(score: Score, array: int) -> dict[str, object]:
    own: dict[str, object] = {"array": array}
    return own | ({"of_product": True} if score.is_slope_of_product(array) else {})


def _function(parameter: str, lines: Sequence[str], name: str = "float value") -> list[str]:
    given = f"float product, int row, int column, const coda::Word* operand{parameter}"
    return [f"  CODA_DEVICE static {name}({given}) {{", *(f"    {line}" for line in lines), "  }"]


def _slopes(score: Score, gradients: Sequence[int], names: Sequence[str]) -> list[str]:
    if not gradients:
        return []
    roots = [dict(score.slopes)[array] for array in gradients]
    entries = [[entry(_gradient(score, x)) for x in gradients]]
    stores = [f"slope[{i}] = {names[root]};" for i, root in enumerate(roots)]
    lines = [*_statements(score, roots, names), *stores]
    return [
        "",
        *declared("coda::attention::ScoreGradient gradient[]", entries),
        *_function(f", float (&slope)[{len(gradients)}]", lines, "void slopes"),
    ]


def _statements(score: Score, roots: Sequence[int], names: Sequence[str]) -> list[str]:
    return [
        f"const {register_of(score.nodes[i])} {names[i]} = {_expression(score, i, names)};"
        for i in sorted(needed_nodes(score.nodes, roots))
        if score.nodes[i].inputs
    ]


def _leaf(node: Node) -> str:
    """The expression of a leaf; empty for other nodes."""
    match node.op:
        case "score":
            return "product"
        case "row" | "column":
            return node.op
        case "literal":
            return literal_text(node["value"], node.dtype)
        case "operand":
            word = f"operand[{node['index']}].{'f' if TABLE[node.dtype].is_float else 'i'}"
            return f"({word} != 0)" if node.dtype == BOOL else word
    return ""


def _expression(score: Score, number: int, names: Sequence[str]) -> str:
    node = score.nodes[number]
    inputs, dtypes = [names[i] for i in node.inputs], [score.nodes[i].dtype for i in node.inputs]
    if node.op == "tanh" and node.dtype == FLOAT32:
        return f"coda::attention::tanh_approximate({inputs[0]})"
    divisor = score.nodes[node.inputs[-1]]
    if node.op == "div" and node.dtype == FLOAT32 and divisor.op == "literal" and divisor["value"]:
        return f"{inputs[0]} * {literal_text(float(1 / np.float32(divisor['value'])), FLOAT32)}"
    return operation_text(node, inputs, dtypes)
