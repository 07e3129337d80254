"""Identities that make programs cheaper or more exact without changing what they mean."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
    for identity in (derivative_of_tanh, halved_tanh_to_logistic, angles, literals_of_products):
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

    def literal(self, value: float) -> int:
        return self.add(Node("literal", (), "float32", (("value", LiteralFloat(value)),)))

    def apply(self, op: str, *inputs: int) -> int:
        return self.add(Node(op, inputs, "float32"))


Rewritten = tuple[list[Node], dict[int, int]]


def _rewritten(
    nodes: Sequence[Node], needed: Iterable[int], rule: Callable[[_Nodes, Mapping[int, int], int], int | None]
) -> Rewritten:
    """The new nodes, inputs before users, and the new number of each needed old one.

    `rule` adds what an old node becomes, given the new numbers of those before it, and returns its number; None where
    it stays as it is.
    """
    new = _Nodes()
    at: dict[int, int] = {}
    for number in sorted(needed):
        made = rule(new, at, number)
        if made is None:
            made = new.add(replace(nodes[number], inputs=tuple(at[value] for value in nodes[number].inputs)))
        at[number] = made
    return new.nodes, at


def _users(nodes: Sequence[Node], needed: Iterable[int]) -> defaultdict[int, list[int]]:
    """The needed nodes that each is an input of, as often as it is."""
    users = defaultdict[int, list[int]](list)
    for number in sorted(needed):
        for value in nodes[number].inputs:
            users[value].append(number)
    return users


def derivative_of_tanh(nodes: Sequence[Node], needed: Collection[int]) -> Rewritten:
    """Writes d + d * t for d = g * (1 - t), the derivative of t = tanh(u) in older versions of JAX, as in newer ones:
    g * ((1 + t) * (1 - t)).

    Args:
      nodes: inputs before users.
      needed: the nodes that are used.

    Returns:
      The new nodes, inputs before users, and the new number of each needed old one.
    """

    def others(number: int, op: str, one: int) -> list[int]:
        """x, where the node is op(x, one) or op(one, x) in float32; else nothing."""
        node = nodes[number]
        inputs = list(node.inputs) if node.op == op and node.dtype == "float32" else []
        if one not in inputs:
            return []
        inputs.remove(one)
        return inputs

    def is_one_minus(number: int, x: int) -> bool:
        node = nodes[number]
        return node.op == "sub" and node.inputs[1] == x and _is_literal(nodes[node.inputs[0]], 1.0)

    def found(total: int) -> Iterator[tuple[int, int]]:
        """g and t, in one way or in none."""
        for d in nodes[total].inputs:
            for product in others(total, "add", d):
                for t in others(product, "mul", d):
                    for one_less in nodes[d].inputs:
                        if nodes[t].op == "tanh" and is_one_minus(one_less, t):
                            yield from ((g, t) for g in others(d, "mul", one_less))

    def rule(new: _Nodes, at: Mapping[int, int], number: int) -> int | None:
        for g, t in found(number):
            return new.apply("mul", at[g], new.apply("one_minus_square", at[t]))
        return None

    return _rewritten(nodes, needed, rule)


def halved_tanh_to_logistic(nodes: Sequence[Node], needed: Collection[int]) -> Rewritten:
    """Writes 0.5 * (1 + tanh(u)), as in the GELU's tanh form, as s = logistic(2 * u): a third of the instructions.

    The derivative of that tanh, (1 + tanh(u)) * (1 - tanh(u)), becomes 4 * (s - s * s), which a kernel rounds once.

    A tanh with other users is left as it is. Args, Returns: as of `derivative_of_tanh`.
    """
    users = _users(nodes, needed)
    tanh_of: dict[int, int] = {}  # of halved sums and of derivatives
    for number in needed:
        sums = [user for user in users[number] if _other_input(nodes, user, "add", 1.0) == number]
        halves = [half for total in sums for half in users[total]]
        derivatives = [user for user in users[number] if nodes[user].op == "one_minus_square"]
        are_halves = all(_other_input(nodes, half, "mul", 0.5) in sums for half in halves)
        if nodes[number].op == "tanh" and halves and are_halves and len(sums + derivatives) == len(users[number]):
            tanh_of |= dict.fromkeys(halves + derivatives, number)

    def rule(new: _Nodes, at: Mapping[int, int], number: int) -> int | None:
        if number not in tanh_of:
            return None
        of = at[nodes[tanh_of[number]].inputs[0]]
        s = new.apply("logistic", new.apply("mul", new.literal(2), of))
        if nodes[number].op == "one_minus_square":
            return new.apply("mul", new.literal(4), new.apply("sub", s, new.apply("mul", s, s)))
        return s

    return _rewritten(nodes, needed, rule)


def _other_input(nodes: Sequence[Node], number: int, op: str, literal: float) -> int | None:
    """x, where the node is op(literal, x) in float32."""
    node = nodes[number]
    if node.op == op and node.dtype == "float32":
        for constant, x in (node.inputs, node.inputs[::-1]):
            if _is_literal(nodes[constant], literal):
                return x
    return None


def _is_literal(node: Node, value: float) -> bool:
    return node.op == "literal" and node["value"] == LiteralFloat(value)


def angles(nodes: Sequence[Node], needed: Collection[int]) -> Rewritten:
    """Writes sin(x) as sin(angle(x)) and sin(x * y) of float32 values as sin(angle(x, y)); cos likewise.

    The sine and the cosine of an angle share its reduction. That of a product is of the exact one: float32 rounds
    position * frequency by up to 0.03 rad at 10^6.

    Args, Returns: as of `derivative_of_tanh`.
    """

    def rule(new: _Nodes, at: Mapping[int, int], number: int) -> int | None:
        node = nodes[number]
        if node.op not in ("sin", "cos"):
            return None
        source = nodes[node.inputs[0]]
        factors = source.inputs if source.op == "mul" and source.dtype == "float32" else node.inputs
        angle = new.add(Node("angle", tuple(at[value] for value in factors), source.dtype))
        return new.add(replace(node, inputs=(angle,)))

    return _rewritten(nodes, needed, rule)


def literals_of_products(nodes: Sequence[Node], needed: Collection[int]) -> Rewritten:
    """Multiplies the literals of a product with each other: 0.5 * x * (4 * y) is 2 * (x * y), in two instructions.

    Those between 2^-16 and 2^16 that make one of that size, lest what several kept in float32's range leaves it.

    Args, Returns: as of `derivative_of_tanh`.
    """
    users = _users(nodes, needed)

    def is_product(number: int) -> bool:
        return nodes[number].op == "mul" and nodes[number].dtype == "float32"

    def is_moderate(value: float) -> bool:
        return 2**-16 <= abs(value) <= 2**16

    def is_literal(number: int) -> bool:
        return nodes[number].op == "literal" and is_moderate(nodes[number]["value"])

    def factors(number: int) -> list[int]:
        """Of a product, through products that nothing else uses."""
        return [
            factor
            for value in nodes[number].inputs
            for factor in (factors(value) if is_product(value) and len(users[value]) == 1 else [value])
        ]

    def rule(new: _Nodes, at: Mapping[int, int], number: int) -> int | None:
        of = factors(number) if is_product(number) else []
        literals = [float(nodes[factor]["value"]) for factor in of if is_literal(factor)]
        others = [at[factor] for factor in of if not is_literal(factor)]
        literal = math.prod(literals)
        if len(literals) < 2 or not others or not is_moderate(literal):
            return None
        value = functools.reduce(lambda x, y: new.apply("mul", x, y), others)
        return new.apply("mul", new.literal(literal), value)

    return _rewritten(nodes, needed, rule)
