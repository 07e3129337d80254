"""An identity that makes programs cheaper without changing what they compute."""

from collections import Counter
from collections.abc import Collection, Sequence

from coda_jax.epilogue.program import Node
from coda_jax.epilogue.values import LiteralFloat


def halved_tanh_to_logistic(nodes: Sequence[Node], needed: Collection[int]) -> tuple[list[Node], dict[int, int]]:
    """Writes 0.5 * (1 + tanh(u)), as in the GELU's tanh form, as logistic(2 * u): a third of the instructions.

    Args:
      nodes: inputs before users.
      needed: the nodes that are used; a tanh with other users is left as it is.

    Returns:
      The new nodes, inputs before users, and the new number of each needed old one.
    """
    users = Counter(value for number in needed for value in nodes[number].inputs)
    new: list[Node] = []
    numbers: dict[Node, int] = {}
    at: dict[int, int] = {}

    def add(node: Node) -> int:
        if node not in numbers:
            numbers[node] = len(new)
            new.append(node)
        return numbers[node]

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
            two = add(Node("literal", (), "float32", (("value", LiteralFloat(2)),)))
            twice = add(Node("mul", (two, at[nodes[tanh].inputs[0]]), "float32"))
            at[number] = add(Node("logistic", (twice,), "float32"))
        else:
            at[number] = add(Node(node.op, tuple(at[value] for value in node.inputs), node.dtype, node.attributes))
    return new, at
