"""How much machine code an epilogue becomes."""

from __future__ import annotations

from collections.abc import Iterable

from coda_jax.epilogue.elementwise import OPERATIONS, ROUND
from coda_jax.epilogue.program import Node, Program, ReductionOp

_LEAVES = ("acc", "operand", "literal", "row", "column")
_ROUNDING = 2  # to 16 bits, after an operation
_STORE, _LOAD, _REDUCE, _LOGSUMEXP = 1, 1, 2, 6  # a value of a tile, of an operand, of a reduction


def instructions(program: Program) -> int:
    """Instructions for what a thread works on at a time: one element of acc, or one of each half.

    All copies of the code count: one for each section of the columns that stores something else, and one for each
    pass over a head. So estimated, kernels have 0.8 to 1.2 of the instructions that NVRTC makes, and up to 1.9 where it
    shares much among the passes over a head.
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
    of_sections = sum(
        _to_compute(program, [*reduced, *values]) + _STORE * len(values) + reductions for values in stored
    )
    levels = program.head_levels
    of_passes = sum(
        _to_compute(program, [number for number, level in levels.items() if level == one])
        for one in set(levels.values())
    )
    return of_sections + of_passes


def _to_compute(program: Program, values: Iterable[int]) -> int:
    return sum(_of_node(program.nodes[number]) for number in program.needed(values))


def _of_node(node: Node) -> int:
    if node.op in _LEAVES:
        return _LOAD if node.op == "operand" else 0
    operation = OPERATIONS.get(node.op)  # none for a reduction of a head
    match node.op:
        case "polynomial":
            of_operation = len(node.inputs) - 1
        case "integer_pow":
            power = abs(node["y"])
            of_operation = power.bit_length() + power.bit_count() - 2 + (4 if node["y"] < 0 else 0)
        case _:
            of_operation = operation.instructions if operation else 1
    is_rounded = node.dtype in ROUND and (node.op == "convert_element_type" or not (operation and operation.exact))
    return of_operation + (_ROUNDING if is_rounded else 0)
