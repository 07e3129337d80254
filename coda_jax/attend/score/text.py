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
            *(["  static constexpr bool has_entries = true;"] if score.has_entries else []),
            *declared("coda::attention::ScoreArray array[]", [[entry(x) for x in _arrays(score, arrays)] or [""]]),
            "",
            *_function(score, "", [*_statements(score, [score.value], names), f"return {value};"]),
            "",
            *_function(
                score,
                ", float& slope",
                [*_statements(score, [score.value, score.slope], names), f"slope = {slope};", f"return {value};"],
            ),
            *_slopes(score, gradients, names),
            "};",
            "",
        ]
    )


def _arrays(score: Score, arrays: Sequence[Any]) -> list[dict[str, object]]:
    """The members of each array's `ScoreArray`; a table has its number of entries in the place of rows and keys."""
    found = []
    for number, x in enumerate(arrays):
        axes = zip(_AXES[:2] if number in score.table_of else _AXES, x.shape, strict=False)
        has: dict[str, object] = {name: True for name, size in axes if not same_size(size, 1)}
        entries = {"entries": x.shape[3]} if number in score.table_of else {}
        found.append({"dtype": f"coda::DType::{TABLE[np.dtype(x.dtype).name].cuda}", **has, **entries})
    return found


def _gradient(score: Score, array: int) -> dict[str, object]:
    own: dict[str, object] = {"array": array}
    own |= {"of_product": True} if score.is_slope_of_product(array) else {}
    if (table := score.table_of.get(array)) is None:
        return own
    slope = score.nodes[dict(score.slopes)[array]]
    is_one = slope.op == "literal" and float(slope["value"]) == 1
    return own | ({"of_one": True} if is_one else {}) | {"entries": table.entries}


def _function(score: Score, parameter: str, lines: Sequence[str], name: str = "float value") -> list[str]:
    entries = ", const Entries& entries" if score.has_entries else ""
    given = f"float product, int row, int column, const coda::Word* operand{entries}{parameter}"
    template = ["  template <class Entries>"] if score.has_entries else []
    return [*template, f"  CODA_DEVICE static {name}({given}) {{", *(f"    {line}" for line in lines), "  }"]


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
        *_function(score, f", float (&slope)[{len(gradients)}]", lines, "void slopes"),
        *_place(score, gradients, names),
    ]


def _place(score: Score, gradients: Sequence[int], names: Sequence[str]) -> list[str]:
    """The function of the place of a distance, which all tables by distance have in common."""
    indices = [score.table_of[array].index for array in gradients if array in score.table_of]
    if not indices:
        return []
    lines = [*_statements(score, indices[:1], names), f"return {names[indices[0]]};"]
    head = "  CODA_DEVICE static int place(int row, int column, const coda::Word* operand) {"
    return ["", head, *(f"    {line}" for line in lines), "  }"]


def _statements(score: Score, roots: Sequence[int], names: Sequence[str]) -> list[str]:
    indices = [score.nodes[i].inputs[0] for i in needed_nodes(score.nodes, roots) if score.nodes[i].op == "entry"]
    # A reciprocal's last digit may be that of another entry.
    exact = needed_nodes(score.nodes, indices)
    return [
        f"const {register_of(score.nodes[i])} {names[i]} = {_expression(score, i, names, is_exact=i in exact)};"
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
            return _of_word(f"operand[{node['index']}]", node.dtype)
    return ""


def _of_word(word: str, dtype: str) -> str:
    value = f"{word}.{'f' if TABLE[dtype].is_float else 'i'}"
    return f"({value} != 0)" if dtype == BOOL else value


def _entry_text(node: Node, index: str) -> str:
    """The expression of an entry of a table."""
    attributes = dict(node.attributes)
    is_inside = str(attributes.get("is_inside", False)).lower()
    found = _of_word(f"entries.template at<{node['index']}, {is_inside}>({index})", node.dtype)
    if (fill := attributes.get("fill")) is None:
        return found
    return f"{index} >= 0 && {index} < {node['entries']} ? {found} : {literal_text(fill, node.dtype)}"


def _expression(score: Score, number: int, names: Sequence[str], *, is_exact: bool) -> str:
    node = score.nodes[number]
    inputs, dtypes = [names[i] for i in node.inputs], [score.nodes[i].dtype for i in node.inputs]
    if node.op == "entry":
        return _entry_text(node, inputs[0])
    if is_exact:
        return operation_text(node, inputs, dtypes)
    if node.op == "tanh" and node.dtype == FLOAT32:
        return f"coda::attention::tanh_approximate({inputs[0]})"
    divisor = score.nodes[node.inputs[-1]]
    if node.op == "div" and node.dtype == FLOAT32 and divisor.op == "literal" and divisor["value"]:
        return f"{inputs[0]} * {literal_text(float(1 / np.float32(divisor['value'])), FLOAT32)}"
    return operation_text(node, inputs, dtypes)
