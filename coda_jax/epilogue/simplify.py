"""Identities that make programs cheaper or more exact without changing their meaning."""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.epilogue.program import Node, needed_nodes
from coda_jax.epilogue.values import LiteralFloat


def simplify(nodes: Sequence[Node], roots: Iterable[int]) -> tuple[list[Node], dict[int, int]]:
    """Applies all identities of this file, one after the other.

    Args:
      nodes: inputs before users.
      roots: the nodes that are stored or reduced.

    Returns:
      The new nodes, inputs before users, and the new number of each of `roots`.
    """
    new, at = list(nodes), {root: root for root in roots}
    for identity in (derivative_of_tanh, halved_tanh_to_logistic, angles, literals_of_products):
        new, new_numbers = identity(new, needed_nodes(new, at.values()))
        at = {root: new_numbers[number] for root, number in at.items()}
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

    `rule` gets the new nodes, the new numbers of the nodes before it, and the number of an old node. It adds the node's
    replacement and returns the new number, or None if the node is kept.
    """
    new = _Nodes()
    at: dict[int, int] = {}
    for number in sorted(needed):
        result = rule(new, at, number)
        if result is None:
            result = new.add(replace(nodes[number], inputs=tuple(at[value] for value in nodes[number].inputs)))
        at[number] = result
    return new.nodes, at


def _users(nodes: Sequence[Node], needed: Iterable[int]) -> defaultdict[int, list[int]]:
    """For each node the needed nodes that read it, once for each time."""
    users = defaultdict[int, list[int]](list)
    for number in sorted(needed):
        for value in nodes[number].inputs:
            users[value].append(number)
    return users


def derivative_of_tanh(nodes: Sequence[Node], needed: Collection[int]) -> Rewritten:
    """Rewrites d + d * t for d = g * (1 - t) as g * ((1 + t) * (1 - t)).

    Older versions of JAX write the derivative of t = tanh(u) in the first form, newer ones in the second.

    Args:
      nodes: inputs before users.
      needed: the nodes that are used.

    Returns:
      The new nodes, inputs before users, and the new number of each needed old one.
    """

    def others(number: int, op: str, one: int) -> list[int]:
        """[x] if the node is op(x, one) or op(one, x) in float32; else []."""
        node = nodes[number]
        inputs = list(node.inputs) if node.op == op and node.dtype == FLOAT32 else []
        if one not in inputs:
            return []
        inputs.remove(one)
        return inputs

    def is_one_minus(number: int, x: int) -> bool:
        node = nodes[number]
        return node.op == "sub" and node.inputs[1] == x and _is_literal(nodes[node.inputs[0]], 1.0)

    def matches(total: int) -> Iterator[tuple[int, int]]:
        """g and t for each way in which the node has that form."""
        for d in nodes[total].inputs:
            for product in others(total, "add", d):
                for t in others(product, "mul", d):
                    for one_less in nodes[d].inputs:
                        if nodes[t].op == "tanh" and is_one_minus(one_less, t):
                            yield from ((g, t) for g in others(d, "mul", one_less))

    def rule(new: _Nodes, at: Mapping[int, int], number: int) -> int | None:
        for g, t in matches(number):
            return new.apply("mul", at[g], new.apply("one_minus_square", at[t]))
        return None

    return _rewritten(nodes, needed, rule)


def halved_tanh_to_logistic(nodes: Sequence[Node], needed: Collection[int]) -> Rewritten:
    """Rewrites 0.5 * (1 + tanh(u)), as in the GELU's tanh form, as s = logistic(2 * u): a third of the instructions.

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
        u = at[nodes[tanh_of[number]].inputs[0]]
        s = new.apply("logistic", new.apply("mul", new.literal(2), u))
        if nodes[number].op == "one_minus_square":
            return new.apply("mul", new.literal(4), new.apply("sub", s, new.apply("mul", s, s)))
        return s

    return _rewritten(nodes, needed, rule)


def _other_input(nodes: Sequence[Node], number: int, op: str, literal: float) -> int | None:
    """x if the node is op(literal, x) or op(x, literal) in float32; else None."""
    node = nodes[number]
    if node.op == op and node.dtype == FLOAT32:
        for constant, x in (node.inputs, node.inputs[::-1]):
            if _is_literal(nodes[constant], literal):
                return x
    return None


def _is_literal(node: Node, value: float) -> bool:
    return node.op == "literal" and node["value"] == LiteralFloat(value)


def angles(nodes: Sequence[Node], needed: Collection[int]) -> Rewritten:
    """Rewrites sin(x) as sin(angle(x)) and sin(x * y) of float32 values as sin(angle(x, y)); cos likewise.

    The sine and the cosine of an angle share its range reduction. A product is reduced from its exact value, as float32
    rounds position * frequency by up to 0.03 rad at 10^6.

    Args, Returns: as of `derivative_of_tanh`.
    """

    def rule(new: _Nodes, at: Mapping[int, int], number: int) -> int | None:
        node = nodes[number]
        if node.op not in ("sin", "cos"):
            return None
        source = nodes[node.inputs[0]]
        factors = source.inputs if source.op == "mul" and source.dtype == FLOAT32 else node.inputs
        angle = new.add(Node("angle", tuple(at[value] for value in factors), source.dtype))
        return new.add(replace(node, inputs=(angle,)))

    return _rewritten(nodes, needed, rule)


class _Scaled(NamedTuple):
    """literal * value; the value is an old node, or the product of one or two of these."""

    literal: float
    value: "int | tuple[_Scaled, ...]"

    def literals(self) -> int:
        """The number of multiplications by literals."""
        return (self.literal != 1) + (0 if isinstance(self.value, int) else sum(x.literals() for x in self.value))


def literals_of_products(nodes: Sequence[Node], needed: Collection[int]) -> Rewritten:
    """Multiplies the literals of a product with each other: 0.5 * x * (4 * y) is x * (2 * y), in two instructions.

    No intermediate overflows or becomes subnormal unless one of f does: x and y are multiplied in the order of f, and
    the size of each intermediate is between those of f's own. So 0.01 * x * (0.01 * y) stays: with 1e-4 in the place of
    the first literal, or after x * y, large or small x and y would leave float32's range. Literals and their products
    are between 2^-16 and 2^16, so that a value that overflows in f still does.

    Args, Returns: as of `derivative_of_tanh`.
    """
    users = _users(nodes, needed)

    def is_product(number: int) -> bool:
        return nodes[number].op == "mul" and nodes[number].dtype == FLOAT32

    def is_moderate(value: float) -> bool:
        return 2**-16 <= abs(value) <= 2**16

    def is_literal(number: int) -> bool:
        return nodes[number].op == "literal" and is_moderate(nodes[number]["value"])

    def is_inner(number: int) -> bool:
        """Whether it is a product that only one other node reads."""
        return is_product(number) and len(users[number]) == 1

    def literals(number: int) -> int:
        return sum(is_literal(value) or (literals(value) if is_inner(value) else 0) for value in nodes[number].inputs)

    def factor(number: int) -> _Scaled:
        return product(number) if is_inner(number) else _Scaled(1.0, number)

    def product(number: int) -> _Scaled:
        inputs = nodes[number].inputs
        for constant, other in (inputs, inputs[::-1]):
            if is_literal(constant):
                return scaled(float(nodes[constant]["value"]), factor(other))
        x, y = map(factor, inputs)
        x_literal, y_literal = _join_literals(x.literal, y.literal)
        return _Scaled(1.0, (x._replace(literal=x_literal), y._replace(literal=y_literal)))

    def scaled(literal: float, term: _Scaled) -> _Scaled:
        if not is_moderate(literal * term.literal):
            return _Scaled(literal, (term,))
        literal *= term.literal
        if isinstance(term.value, int):
            return _Scaled(literal, term.value)
        factors = []
        for x in term.value:
            literal, x_literal = _join_literals(literal, x.literal)
            factors.append(x._replace(literal=x_literal))
        return _Scaled(literal, tuple(factors))

    def rule(new: _Nodes, at: Mapping[int, int], number: int) -> int | None:
        def added(term: _Scaled) -> int:
            if isinstance(term.value, int):
                value = at[term.value]
            else:
                value = functools.reduce(lambda x, y: new.apply("mul", x, y), map(added, term.value))
            return value if term.literal == 1 else new.apply("mul", new.literal(term.literal), value)

        term = product(number) if is_product(number) else None
        return None if term is None or term.literals() == literals(number) else added(term)

    return _rewritten(nodes, needed, rule)


def _join_literals(one: float, other: float) -> tuple[float, float]:
    """Two literals of a product, or their product and 1, if the size of one is above 1 and of the other below.

    Their product is between 1 and the literal that is further from it, and takes that literal's place.
    """
    one_log, other_log = math.log(abs(one)), math.log(abs(other))
    if one_log * other_log > 0:
        return one, other
    return (one * other, 1.0) if abs(one_log) > abs(other_log) else (1.0, one * other)
