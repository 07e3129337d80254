"""Whether an epilogue is linear in acc: its results may then be summed over devices in the place of acc."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.epilogue.program import HEAD_REDUCTIONS, Node, Program, ReductionOp


class _Degree(enum.IntEnum):
    """The degree of a value as a function of acc."""

    CONSTANT = 0
    LINEAR = 1  # and zero where acc is zero
    OTHER = 2


def is_linear(program: Program) -> bool:
    """Whether every tile and reduction of a + b is the sum of those of a and of b, if all are finite, but for rounding.

    A quotient counts as linear only if the divisor is a constant of the epilogue. An operand may have zeros, and
    infinities of both signs would be added.
    """
    degrees: list[_Degree] = []
    for node in program.nodes:
        degrees.append(_degree(node, program.nodes, degrees))
    values = [value for store in program.stores for value in store.values]
    values += [value for reduction in program.reductions for value in reduction.values]
    sums = all(reduction.op is ReductionOp.SUM for reduction in program.reductions)
    return sums and all(degrees[value] is _Degree.LINEAR for value in values)


def _degree(node: Node, nodes: Sequence[Node], degrees: Sequence[_Degree]) -> _Degree:
    """The degree of a node, from those of the nodes before it."""
    if node.op == "acc":
        return _Degree.LINEAR
    inputs = [degrees[i] for i in node.inputs]
    if max(inputs, default=_Degree.CONSTANT) is _Degree.CONSTANT:
        return _Degree.CONSTANT
    match node.op, inputs:
        case _ if node.dtype != FLOAT32:  # a sum of rounded values is less exact than one rounded sum
            return _Degree.OTHER
        case "mul", [x, y] if _Degree.CONSTANT in (x, y):
            return max(x, y)
        case "div", [x, _] if nodes[node.inputs[1]].op == "literal":
            return x
        case (("add" | "sub"), [x, y]) if x is y:
            return x
        case "neg", [x]:
            return x
        case _ if HEAD_REDUCTIONS.get(node.op) is ReductionOp.SUM and set(inputs) == {_Degree.LINEAR}:
            return _Degree.LINEAR
        case _:
            return _Degree.OTHER
