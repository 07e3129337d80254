"""The parts of a softmax's scores: a scale, a curve, added terms, and masks with the scores that they put."""

from __future__ import annotations

import dataclasses

from coda_jax.fusion.attention.axes import Label, Unlike
from coda_jax.fusion.attention.linear import identity
from coda_jax.fusion.attention.logic import TwoValued, logic, two_valued
from coda_jax.fusion.attention.meanings import Factor, Site
from coda_jax.fusion.attention.trees import SAME, Node, Trees, constant_of
from coda_jax.graph.values import is_float

MASKED = -1e4  # a score of this or less, where a constant says it, is that of a masked key
WHERE, ADDED, SUMMED = "where", "added", "summed"
_CURVES = frozenset({"tanh", "clamp", "logistic", "abs", "max", "min", "square", "integer_pow"})
_ARITHMETIC = SAME | {"add", "sub", "mul", "div", "neg", "convert_element_type"}


@dataclasses.dataclass(frozen=True)
class Mask:
    """A condition under which a query sees a key.

    Attributes:
      condition: an expression of `logic`.
      sees: the value that it has where the query sees the key.
      fill: what the score is, or what is added to it, where it does not; 0 where the exponential is set to 0.
      kind: "where" if the fill is in the score's place, "added" if it is added, "summed" for an exponential.
      is_innermost: whether nothing is added to the scores behind it.
      bias: the term that is added.
    """

    condition: Node
    sees: bool
    fill: float
    kind: str
    is_innermost: bool = True
    bias: Node | None = None


@dataclasses.dataclass
class Terms:
    """The scores x = curve(scale s) + biases, where masks let a query see a key.

    Attributes:
      scale: a number.
      curve: an expression of the scaled scores, numbers and arrays, and its factor; None for the scores themselves.
      row_factors: expressions without keys that the product is multiplied with, (node, whether it divides).
      biases: added terms, each with its factor.
      masks: all masks; those whose fill is added stand in `biases` too.
      result_factors: expressions without keys that the probabilities are multiplied with, (node, whether it divides).
      zeroes: which masks the probabilities are set to 0 by, too: "all", "some" or "none".
      sink: a score of each head that has no value; None where there is none.
    """

    scale: float = 1.0
    curve: tuple[Node, float] | None = None
    row_factors: list[tuple[Node, bool]] = dataclasses.field(default_factory=list)
    biases: list[tuple[Node, float]] = dataclasses.field(default_factory=list)
    masks: list[Mask] = dataclasses.field(default_factory=list)
    result_factors: list[tuple[Node, bool]] = dataclasses.field(default_factory=list)
    zeroes: str = "none"
    sink: Node | None = None


def terms_of(site: Site, trees: Trees) -> Terms:
    """The parts of a site's scores.

    Raises:
      Unlike: they are something else.
    """
    found = _Walk(Terms(), site.keys, [])
    found.walk(trees.expanded(site.x), 1.0)
    if found.gates:
        raise Unlike("the scores are multiplied by an array of rows and keys")
    _add_factors(found.terms, site, trees)
    found.terms.sink = None if site.sink is None else trees.expanded(site.sink)
    return found.terms


@dataclasses.dataclass
class _Walk:
    """The work of `terms_of`; gates: conditions that the scores are multiplied with, and when they are."""

    terms: Terms
    keys: Label
    gates: list[tuple[Node, bool]]

    def walk(self, node: Node, factor: float) -> None:
        """Adds what an expression is made of, which is multiplied with this factor."""
        if node.op == "score":
            self.terms.scale = factor
        elif node.op in SAME or node.op in ("convert_element_type", "reduce_precision"):
            self.walk(node.args[0], factor)
        elif _has_curve(node) and not self.terms.row_factors and _is_curve(node):
            self.terms.curve = node, factor
        elif node.op == "select_n" and len(node.args) == 3:
            self._masked(node, factor)
        elif node.op in ("add", "sub", "add_any"):
            self._added(node, factor)
        elif node.op == "neg":
            self.walk(node.args[0], -factor)
        elif node.op in ("mul", "div"):
            self._scaled(node, factor)
        else:
            raise Unlike(f"scores pass through {node.op}, a function that coda.attention does not take")

    def _masked(self, node: Node, factor: float) -> None:
        condition, if_false, if_true = node.args
        sees = if_true.has_score
        inner, other = (if_true, if_false) if sees else (if_false, if_true)
        fill = None if other.has_score or condition.has_score else constant_of(other)
        if fill is None:
            raise Unlike("a choice between scores and others")
        if self.terms.row_factors:
            raise Unlike("masked scores are multiplied by an array")
        if not fill * factor <= MASKED:
            raise Unlike(f"a mask puts {fill * factor:g} in the place of scores")
        is_innermost = not self.terms.biases
        self.terms.masks.append(Mask(logic(condition), sees, fill * factor, WHERE, is_innermost))
        self.walk(inner, factor)

    def _added(self, node: Node, factor: float) -> None:
        first, second = node.args
        if first.has_score and second.has_score:
            raise Unlike("two products of scores are added")
        inner, other = (first, second) if first.has_score else (second, first)
        if self.terms.row_factors:
            raise Unlike("scores with a bias are multiplied by an array")
        signs = (1, -1 if node.op == "sub" else 1)
        inner_sign, sign = signs if first.has_score else signs[::-1]
        number = constant_of(other)
        if number is not None and abs(number * factor) <= -MASKED:  # of all scores, which a softmax does not see
            self.walk(inner, inner_sign * factor)
            return
        if other.atoms().isdisjoint(self.keys):
            raise Unlike("something is added to all scores of a row")
        before = len(self.gates)
        added = [self._summand(one, its_sign * factor) for one, its_sign in _summands(other, sign)]
        self.walk(inner, inner_sign * factor)
        for bias, mask in added:
            if len(self.gates) > before and mask is not None:
                self._close_gate(bias, mask)

    def _summand(self, node: Node, factor: float) -> tuple[tuple[Node, float], Mask | None]:
        """Adds a bias, and the mask that it is, if it is one."""
        bias, found = (node, factor), two_valued(node)
        mask = None if found is None else _added_mask(found, factor, is_innermost=not self.terms.biases)
        self.terms.biases.append(bias)
        if mask is not None:
            mask = dataclasses.replace(mask, bias=node)
            self.terms.masks.append(mask)
        return bias, mask

    def _close_gate(self, bias: tuple[Node, float], mask: Mask) -> None:
        """s m + c (1 - m) is a mask like one of `where`."""
        condition, sees = self.gates[-1]
        if identity(condition) == identity(mask.condition) and sees == mask.sees:
            self.gates.pop()
            self.terms.biases.remove(bias)
            place = self.terms.masks.index(mask)
            self.terms.masks[place] = dataclasses.replace(mask, kind=WHERE)

    def _scaled(self, node: Node, factor: float) -> None:
        first, second = node.args
        if first.has_score and second.has_score:
            raise Unlike("scores are multiplied by scores")
        inner, other = (first, second) if first.has_score else (second, first)
        divides = node.op == "div"
        if divides and inner is second:
            raise Unlike("scores are divided by")
        number = constant_of(other)
        if number is not None:
            if divides and number == 0:
                raise Unlike("scores are divided by 0")
            self.walk(inner, factor / number if divides else factor * number)
            return
        if not other.atoms().isdisjoint(self.keys):
            found = two_valued(other)
            if found is None or divides or {found.if_false, found.if_true} != {0.0, 1.0}:
                raise Unlike("the scores are multiplied by an array of rows and keys")
            self.gates.append((found.condition, found.if_true == 1.0))
        else:
            self.terms.row_factors.append((other, divides))
        self.walk(inner, factor)


def _summands(node: Node, sign: float) -> list[tuple[Node, float]]:
    """The terms of a sum without scores, with their signs, where one of them has two values, as a mask; else itself."""
    if node.op in SAME or node.op == "convert_element_type":
        parts = _summands(node.args[0], sign)
        return parts if len(parts) > 1 else [(node, sign)]
    if node.op not in ("add", "sub", "add_any") or two_valued(node) is not None:
        return [(node, sign)]
    first, second = node.args
    parts = [*_summands(first, sign), *_summands(second, -sign if node.op == "sub" else sign)]
    return parts if any(two_valued(one) is not None for one, _ in parts) else [(node, sign)]


def _has_curve(node: Node) -> bool:
    """True for a curve of scores, and for one that an array is a factor of."""
    if node.op in _CURVES:
        return True
    if node.op not in ("mul", "div") or any(constant_of(x) is not None for x in node.args):
        return False
    return any(one.op in _CURVES and one.has_score for one in node.walk())


def _is_curve(node: Node) -> bool:
    """True for a function of each score, of numbers and of arrays of floats."""
    if node.op in ("score", "constant") or constant_of(node) is not None:
        return True
    if node.op == "leaf":
        return is_float(node.var.aval.dtype)
    return node.op in _CURVES | _ARITHMETIC and all(map(_is_curve, node.args))


def _added_mask(found: TwoValued, factor: float, *, is_innermost: bool) -> Mask | None:
    """The mask that an added term of two values is, if these are 0 and a large negative number."""
    values = (found.if_false * factor if found.if_false else 0.0, found.if_true * factor if found.if_true else 0.0)
    for sees, (kept, fill) in ((True, values[::-1]), (False, values)):
        if kept == 0 and fill <= MASKED:
            return Mask(found.condition, sees, fill, ADDED, is_innermost)
    return None


def _add_factors(terms: Terms, site: Site, trees: Trees) -> None:
    """Adds what the exponentials and the probabilities are multiplied with."""
    for factor in site.sum_factors:
        if not any(factor.is_same(one) for one in site.factors):
            raise Unlike("the sum has a mask or a weight of its own")
        mask = _as_mask(factor, trees)
        if mask is None:
            raise Unlike("exponentials are weighted")
        terms.masks.append(mask)
    seen = {identity(mask.condition): mask.sees for mask in terms.masks}
    zeros = set()
    for place, factor in enumerate(site.factors):
        is_behind = place >= site.divided
        if not is_behind and any(factor.is_same(one) for one in site.sum_factors):
            continue
        mask = _as_mask(factor, trees)
        if mask is not None and seen.get(identity(mask.condition)) == mask.sees:
            zeros |= {identity(mask.condition)} if is_behind else set()
            continue
        node = trees.expanded(factor.node)
        if mask is not None or not node.atoms().isdisjoint(site.keys):
            raise Unlike("probabilities are multiplied by an array of rows and keys, as in dropout")
        terms.result_factors.append((node, factor.op == "div"))
    terms.zeroes = "all" if zeros == set(seen) else "some" if zeros else "none"


def _as_mask(factor: Factor, trees: Trees) -> Mask | None:
    """A factor that is a condition; None for another one."""
    node = trees.expanded(factor.node)
    if factor.op == "select":
        return Mask(logic(node), factor.keeps, 0.0, SUMMED)
    found = two_valued(node) if factor.op == "mul" else None
    if found is None or {found.if_false, found.if_true} != {0.0, 1.0}:
        return None
    return Mask(found.condition, found.if_true == 1.0, 0.0, SUMMED)
