"""Nodes of elementwise equations: what the check of an epilogue and that of attention's scores have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from coda_jax.epilogue import elementwise
from coda_jax.epilogue.dtypes import DTYPES, FLOAT32, INT32, TABLE, is_of_8_bits, listed
from coda_jax.epilogue.flatten import Equation, Flat
from coda_jax.epilogue.program import Node
from coda_jax.epilogue.values import LiteralFloat, NotElementwise, NotTileLocalError, UnknownOperation, with_article

IDENTITIES = frozenset((
    "copy", "copy_p", "stop_gradient", "optimization_barrier", "pvary", "pcast", "name", "reduce_precision",
    "sharding_constraint", "reshard",
))  # fmt: skip


CONVERSIONS = frozenset(("convert_element_type", "saturate"))  # to or from dtypes that are stored but not computed in

OfNodes = Callable[[tuple[int, ...]], int]  # the node of an operation, from its inputs' nodes


class Elements:
    """The nodes of one element, each once, and those of an elementwise equation.

    Attributes:
      kind: what the function is, for messages: "epilogue" or "score".
    """

    kind = "epilogue"
    hints: dict[str, str]
    allowed: str

    def __init__(self, flat: Flat, name: str):
        self.flat, self.name = flat, name
        self.nodes: list[Node] = []
        self.numbers: dict[Node, int] = {}

    def node(self, op: str, inputs: tuple[int, ...], dtype: str, /, **attributes: Any) -> int:
        """Number of the node, shared with an equal one."""
        node = Node(op, inputs, dtype, tuple(attributes.items()))
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]

    def literal(self, value: Any, dtype: Any) -> int:
        dtype = np.dtype(dtype)
        value = np.asarray(value, dtype)
        return self.node("literal", (), dtype.name, value=value.item() if dtype.kind in "biu" else LiteralFloat(value))

    def convert(self, node: int, dtype: str) -> int:
        source = self.nodes[node]
        if source.dtype == dtype:
            return node
        if source.op == "literal":
            return self.literal(np.asarray(source["value"], source.dtype), dtype)
        return self.node("convert_element_type", (node,), dtype, dtype=dtype)

    def converted(self, nodes: Sequence[int], dtype: str) -> tuple[int, ...]:
        return tuple(self.convert(node, dtype) for node in nodes)

    def refuse(self, equation: Equation, why: object) -> NoReturn:
        hint = self.hints.get(equation.name) or self.hints.get(equation.call)
        sentences = [f"{equation.where()} {why}.", hint, self.allowed if isinstance(why, UnknownOperation) else None]
        raise NotTileLocalError(f"{self.kind} '{self.name}': {' '.join(filter(None, sentences))}")

    def check_no_callback(self, equation: Equation) -> None:
        if not equation.outputs or "callback" in equation.name:
            self.refuse(equation, "calls back into Python, which a kernel cannot do")

    def check_arithmetic(self, dtype: Any) -> None:
        if is_of_8_bits(dtype):
            raise NotElementwise(
                f"computes in {dtype}, which an epilogue only converts to and from. Compute in float32, "
                "x.astype(jnp.float32), and convert the result last"
            )

    def check_dtype(self, dtype: Any) -> None:
        if np.dtype(dtype).name not in TABLE:
            raise NotElementwise(f"works in {dtype}; {with_article(self.kind)} computes in {listed(DTYPES, 'and')}")

    def operation(self, equation: Equation, first_is_literal: bool) -> OfNodes:
        """The function of nodes that an elementwise equation is.

        Args:
          first_is_literal: whether the node of its first input is a literal, of any dtype: it is converted at once.

        Raises:
          NotElementwise: it is no operation of epilogues, or not of these dtypes.
        """
        adds_cotangents = equation.name == "add_any"  # the cotangents of f's own values, in their dtypes
        name = "add" if adds_cotangents else equation.name
        operation = elementwise.OPERATIONS.get(name)
        if operation is None:
            raise UnknownOperation(self.kind)
        dtype = np.dtype(self.flat.avals[equation.outputs[0]].dtype)
        if not (adds_cotangents or name in CONVERSIONS):
            for atom in (equation.outputs[0], *equation.inputs):
                self.check_arithmetic(self.flat.aval(atom).dtype)
        self.check_dtype(dtype)
        if name == "convert_element_type" and first_is_literal:
            return lambda nodes: self.convert(nodes[0], dtype.name)
        for atom in equation.inputs:
            self.check_dtype(self.flat.aval(atom).dtype)
        first = self.flat.aval(equation.inputs[0]).dtype.name
        if not (first in operation.dtypes or adds_cotangents) or (name == "pow" and first == INT32):
            raise NotElementwise(f"is not supported for {first}")
        if name == "convert_element_type":
            return lambda nodes: self.convert(nodes[0], dtype.name)
        if name == "mul":  # it may widen: lax.mul(x, y, out_dtype=float32) of 16-bit values
            return lambda nodes: self.node(name, self.converted(nodes, dtype.name), dtype.name)
        attributes = dict(elementwise.attributes_of(name, equation.params))
        return lambda nodes: self.node(name, nodes, dtype.name, **attributes)

    def rounding(self, equation: Equation, dtype: str) -> OfNodes | None:
        """The function of nodes that an identity of values of this dtype is; None if it changes nothing."""
        if equation.name != "reduce_precision":
            return None
        bits = (equation.params["exponent_bits"], equation.params["mantissa_bits"])
        if bits == (8, 23):
            return None
        if bits != (8, 7) or dtype != FLOAT32:
            raise NotElementwise(f"with {bits[0]} exponent and {bits[1]} mantissa bits is not supported; use astype")
        return lambda nodes: self.convert(self.convert(nodes[0], "bfloat16"), "float32")


def is_nested(equation: Equation) -> bool:
    """Whether it is control flow, or has another program in it."""
    nested = any(hasattr(x, "eqns") or hasattr(x, "jaxpr") for x in jax.tree.leaves(list(equation.params.values())))
    return nested and not equation.name.startswith("scatter")
