"""An estimate of an epilogue's machine code, in instructions."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from jax import lax

from coda_jax.epilogue.dtypes import INT32, is_rounded
from coda_jax.epilogue.elementwise import OPERATIONS
from coda_jax.epilogue.program import Node, Program, ReductionOp

_LEAVES = ("acc", "operand", "literal", "row", "column")
_ROUNDING = 2  # to 16 bits, after an operation
_STORE, _LOAD, _REDUCE, _LOGSUMEXP = 1, 1, 2, 6  # a value of a tile, of an operand, of a reduction


@functools.cache  # a product's tile is chosen among many, and so are its column passes
def instructions(program: Program) -> int:
    """Instructions for what a thread works on at a time: one element of acc, or one of each half.

    All copies of the code count: one for each section of the columns that stores other values, and one for each pass
    over a head. The estimate is 0.85 to 1.3 times what NVRTC makes, and up to twice as much where NVRTC shares much
    code among the passes over a head, or fuses multiplications with additions.
    """
    reduced = [value for reduction in program.reductions for value in reduction.values]
    stored = {
        tuple(value for i in program.stores_of(section) for value in program.stores[i].values)
        for section in program.sections
    }
    reductions = sum(
        (_LOGSUMEXP if reduction.op is ReductionOp.LOGSUMEXP else _REDUCE) * len(reduction.values)
        for reduction in program.reductions
    )
    section_instructions = sum(
        _to_compute(program, [*reduced, *values]) + _STORE * len(values) + reductions for values in stored
    )
    levels = program.head_levels
    pass_instructions = sum(
        _to_compute(program, [number for number, level in levels.items() if level == one])
        for one in set(levels.values())
    )
    return section_instructions + pass_instructions


def _to_compute(program: Program, values: Iterable[int]) -> int:
    return sum(_node_instructions(program.nodes, program.nodes[number]) for number in program.needed(values))


def _node_instructions(nodes: Sequence[Node], node: Node) -> int:
    if node.op in _LEAVES:
        return _LOAD if node.op == "operand" else 0
    operation = OPERATIONS.get(node.op)  # none for a reduction of a head
    inputs = [nodes[number] for number in node.inputs]
    count = operation.instructions if operation else 1
    match node.op:
        case "div" | "rem" if node.dtype == INT32:
            count = 6 if inputs[1].op == "literal" else 34
        case "integer_pow":
            power = abs(node["y"])
            count = power.bit_length() + power.bit_count() - 2 + (6 if node["y"] < 0 else 0)
        case "polynomial":
            count = len(inputs) - 1
        case "round" if node["rounding_method"] == lax.RoundingMethod.AWAY_FROM_ZERO:
            count = 4
        case "select_n" if inputs[0].dtype == INT32:
            count = 2 * (len(inputs) - 2)
    is_exact = node.op != "convert_element_type" and operation and operation.exact
    return count + (_ROUNDING if is_rounded(node.dtype) and not is_exact else 0)
