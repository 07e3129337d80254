"""Identities that make programs cheaper or more exact without changing what they mean."""

from collections import defaultdict
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
    """Writes 0.5 * (1 + tanh(u)), as in the GELU's tanh form, as s = logistic(2 * u): a third of the instructions.

    The derivative of that tanh, (1 + tanh(u)) * (1 - tanh(u)), becomes 4 * s * (1 - s).

    Args:
      nodes: inputs before users.
      needed: the nodes that are used; a tanh with other users is left as it is.

    Returns:
      The new nodes, inputs before users, and the new number of each needed old one.
    """
    users = defaultdict[int, list[int]](list)
    for number in sorted(needed):
        for value in nodes[number].inputs:
            users[value].append(number)
    tanh_of: dict[int, int] = {}  # of halved sums and of derivatives
    for number in needed:
        sums = [user for user in users[number] if _other_input(nodes, user, "add", 1.0) == number]
        halves = [half for total in sums for half in users[total]]
        derivatives = [user for user in users[number] if nodes[user].op == "one_minus_square"]
        are_halves = all(_other_input(nodes, half, "mul", 0.5) in sums for half in halves)
        if nodes[number].op == "tanh" and halves and are_halves and len(sums + derivatives) == len(users[number]):
            tanh_of |= dict.fromkeys(halves + derivatives, number)

    new = _Nodes()
    at: dict[int, int] = {}

    def literal(value: float) -> int:
        return new.add(Node("literal", (), "float32", (("value", LiteralFloat(value)),)))

    def apply(op: str, *inputs: int) -> int:
        return new.add(Node(op, inputs, "float32"))

    for number in sorted(needed):
        node = nodes[number]
        if number in tanh_of:
            of = at[nodes[tanh_of[number]].inputs[0]]
            s = apply("logistic", apply("mul", literal(2), of))
            is_derivative = node.op == "one_minus_square"
            at[number] = apply("mul", literal(4), apply("mul", s, apply("sub", literal(1), s))) if is_derivative else s
        else:
            at[number] = new.add(replace(node, inputs=tuple(at[value] for value in node.inputs)))
    return new.nodes, at


def _other_input(nodes: Sequence[Node], number: int, op: str, literal: float) -> int | None:
    """x, where the node is op(literal, x) in float32."""
    node = nodes[number]
    if node.op == op and node.dtype == "float32":
        for constant, x in (node.inputs, node.inputs[::-1]):
            if nodes[constant].op == "literal" and nodes[constant]["value"] == LiteralFloat(literal):
                return x
    return None


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
