"""Identities that make programs cheaper or more exact without changing what they mean."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from coda_jax.epilogue.program import Node, needed_nodes
from coda_jax.epilogue.values import LiteralFloat


def simplify(nodes: Sequence[Node], roots: Iterable[int]) -> tuple[list[Node], dict[int, int]]:
    """All identities of this file, one after the other.

    Args:
      nodes: inputs before users.
      roots: the nodes that are wanted.

    Returns:
      The new nodes, inputs before users, and the new number of each of `roots`.
    """
    new, at = list(nodes), {root: root for root in roots}
    for identity in (halved_tanh_to_logistic, angles):
        new, moved = identity(new, needed_nodes(new, at.values()))
        at = {root: moved[number] for root, number in at.items()}
    return new, at


class _Nodes:
    """New nodes, equal ones shared."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.numbers: dict[Node, int] = {}

    def add(self, node: Node) -> int:
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]


def halved_tanh_to_logistic(nodes: Sequence[Node], needed: Collection[int]) -> tuple[list[Node], dict[int, int]]:
    """Writes 0.5 * (1 + tanh(u)), as in the GELU's tanh form, as logistic(2 * u): a third of the instructions.

    Args:
      nodes: inputs before users.
      needed: the nodes that are used; a tanh with other users is left as it is.

    Returns:
      The new nodes, inputs before users, and the new number of each needed old one.
    """
    users = Counter(value for number in needed for value in nodes[number].inputs)
    new = _Nodes()
    at: dict[int, int] = {}

    def split(number: int, op: str, literal: float) -> int | None:
        """x, where the node is op(literal, x)."""
        node = nodes[number]
        if node.op == op and node.dtype == "float32":
            for constant, x in (node.inputs, node.inputs[::-1]):
                if nodes[constant].op == "literal" and nodes[constant]["value"] == LiteralFloat(literal):
                    return x
        return None

    for number in sorted(needed):
        node = nodes[number]
        total = split(number, "mul", 0.5)
        tanh = None if total is None else split(total, "add", 1.0)
        if total is not None and tanh is not None and nodes[tanh].op == "tanh" and users[total] == users[tanh] == 1:
            two = new.add(Node("literal", (), "float32", (("value", LiteralFloat(2)),)))
            twice = new.add(Node("mul", (two, at[nodes[tanh].inputs[0]]), "float32"))
            at[number] = new.add(Node("logistic", (twice,), "float32"))
        else:
            at[number] = new.add(replace(node, inputs=tuple(at[value] for value in node.inputs)))
    return new.nodes, at


def angles(nodes: Sequence[Node], needed: Collection[int]) -> tuple[list[Node], dict[int, int]]:
    """Writes sin(x) as sin(angle(x)) and sin(x * y) of float32 values as sin(angle(x, y)); cos likewise.

    The sine and the cosine of an angle share its reduction. That of a product is of the exact one: float32 rounds
    position * frequency by up to 0.03 rad at 10^6.

    Args, Returns: as of `halved_tanh_to_logistic`.
    """
    new = _Nodes()
    at: dict[int, int] = {}
    for number in sorted(needed):
        node = nodes[number]
        inputs = tuple(at[value] for value in node.inputs)
        if node.op in ("sin", "cos"):
            source = nodes[node.inputs[0]]
            factors = source.inputs if source.op == "mul" and source.dtype == "float32" else node.inputs
            inputs = (new.add(Node("angle", tuple(at[value] for value in factors), source.dtype)),)
        at[number] = new.add(replace(node, inputs=inputs))
    return new.nodes, at
