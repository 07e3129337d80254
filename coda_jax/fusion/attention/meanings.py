"""The meanings of the variables behind a product of scores: their maximum, exponentials, sums, probabilities.

Each variable gets one of a few meanings, forward from the product:

    score           a function of the product's result and of operands; joined with a column, which is a sink
    row             a number of each row, made of scores: what is subtracted from them, which a softmax does not see
    exp, sum        exp(score - rows), and its sum along keys
    inverse sum, log sum, logsumexp, log p, p
    unnormalised    exp times values, to be divided by the sum

An operand that depends on the scores in another way, an axis that the scores do not have, and an operation that is not
listed end the search of that branch, with the reason.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from coda_jax.fusion.attention.axes import (
    VIEWS,
    Atom,
    Label,
    Labels,
    Unlike,
    atoms_of,
    labels_of,
    moved,
    new_label,
    whole,
)
from coda_jax.fusion.attention.trees import LOCAL, SAME, Node, beside, constant
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.straight import line_of
from coda_jax.graph.constraint import CONSTRAINTS, is_constraint
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.def_use import variables

_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Factor:
    """A factor of exponentials or of probabilities.

    Attributes:
      op: "mul" or "div" by the node; "select" where it is 0 but where the node, a mask, is `keeps`.
      node: an expression without scores.
    """

    op: str
    node: Node
    keeps: bool = True

    def is_same(self, other: Factor) -> bool:
        """True for a factor of the same operand."""
        own, others = (self.node.var, self.node.labels), (other.node.var, other.node.labels)
        is_one = self.node is other.node or (self.node.op == other.node.op == "operand" and own == others)
        return (self.op, self.keeps) == (other.op, other.keeps) and is_one


@dataclasses.dataclass(frozen=True, eq=False)
class ValuesProduct:
    """The product of probabilities, or of exponentials, with values: its equation, the values, and the keys' atoms."""

    equation: Equation
    v: Any
    v_labels: Labels
    keys: Label


@dataclasses.dataclass(frozen=True, eq=False)
class Meaning:
    """The meaning of a variable.

    Attributes:
      kind: a word of the module's docstring.
      labels: of its axes.
      x: the score that the exponential is of.
      shifts: the rows that were subtracted, by number.
      number: of a row.
      factors: of exponentials and probabilities.
      divided: how many of them stand in front of the division by the sum.
      sum_factors: those in the sum.
      reduced: the atoms that the sum is over.
      product: with values.
      sink: the column that the scores are joined with; of a sum and of probabilities the one in the sum.
    """

    kind: str
    labels: Labels
    x: Node | None = None
    shifts: tuple[int, ...] = ()
    number: int = -1
    factors: tuple[Factor, ...] = ()
    divided: int = 0
    sum_factors: tuple[Factor, ...] = ()
    reduced: Label = ()
    product: ValuesProduct | None = None
    sink: Node | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """softmax(x) v, as it stands in a jaxpr.

    Attributes:
      product: the equation of the scores' product.
      q, k, v: variables, with labels.
      x: the scores.
      factors: of the probabilities, and behind how many of them the division by the sum stands.
      sum_factors: masks of exponentials in the sum.
      keys: the atoms that the softmax is over.
      values: the product with values.
      equation: that whose result the attention's result is.
      labels: of this result.
      meant: all variables that have a meaning.
      constraints: the shardings that are asked of scores and probabilities, with labels.
      sink: a score of each row that has no value.
    """

    product: Equation
    q: tuple[Any, Labels]
    k: tuple[Any, Labels]
    v: tuple[Any, Labels]
    x: Node
    factors: tuple[Factor, ...]
    divided: int
    sum_factors: tuple[Factor, ...]
    keys: Label
    values: Equation
    equation: Equation
    labels: Labels
    meant: frozenset[Any]
    constraints: tuple[tuple[Equation, Labels], ...]
    sink: Node | None = None

    @property
    def result(self) -> Any:
        """The variable of the result."""
        return self.equation.outvars[0]


class Search:
    """Follows one product forward.

    Attributes:
      sites: those found.
      reason: why the first branch that ended did so; empty if none did.
      has_softmax: whether something of a softmax was found, an exponential or a maximum, or a joined column.
    """

    def __init__(self, makers: Makers, product: Equation):
        self._makers, self._product = makers, product
        self._meanings: dict[Any, Meaning] = {}
        self._row_atoms: dict[int, list[Atom]] = {}
        self._joined: dict[Atom, tuple[Label, int]] = {}  # of keys with a sink: the keys, and where they begin
        self._constraints = list[tuple[Equation, Labels]]()
        self.sites, self.reason, self.has_softmax = list[Site](), "", False
        self._a, self._b, labels = _product_labels(product)
        (out,) = product.outvars
        self._meanings[out] = Meaning("score", labels, Node("score"))
        self._follow(out)

    def _follow(self, start: Any) -> None:
        """Gives the variables behind a product their meanings, in the equations' order."""
        heap = list(self._makers.uses.get(start, ()))
        seen = set(heap)
        while heap:
            equation = self._makers.equations[heapq.heappop(heap)]
            found = self._meaning(equation)
            if isinstance(found, Meaning):
                self._meanings[equation.outvars[0]] = found
                for x in equation.outvars:
                    for number in self._makers.uses.get(x, ()):
                        if number not in seen:
                            seen.add(number)
                            heapq.heappush(heap, number)

    def _is_behind(self, x: Any) -> bool:
        """Whether a variable depends on the product; of what makes it the first equations are looked at first."""
        first, defs = self._makers.number(self._product), self._makers.defs
        heap = [defs.get(x, -1)]
        seen = set(heap)
        while heap:
            number = heapq.heappop(heap)
            if number == first:
                return True
            for y in variables(self._makers.equations[number].invars) if number > first else ():
                if (maker := defs.get(y, -1)) not in seen:
                    seen.add(maker)
                    heapq.heappush(heap, maker)
        return False

    def _meaning(self, equation: Equation) -> Meaning | None:
        ins = [x for x in variables(equation.invars) if x in self._meanings]
        if not ins:
            return None
        try:
            found = self._step(equation, ins)
        except Unlike as why:
            self.reason = self.reason or f"{why}: {equation.primitive.name} at {line_of(equation) or 'an unknown line'}"
            return None
        if isinstance(found, Site):
            self.sites.append(found)
            return None
        return found

    def _step(self, equation: Equation, ins: Sequence[Any]) -> Meaning | Site:
        name, one = equation.primitive.name, self._meanings[ins[0]]
        if name in VIEWS:
            return dataclasses.replace(one, labels=moved(equation, one.labels))
        if name == "convert_element_type":
            if not is_float(equation.outvars[0].aval.dtype):
                raise Unlike(f"{_plural(one.kind)} cast to {equation.outvars[0].aval.dtype}")
            return one
        if name == "sharding_constraint" and not is_constraint(equation):
            raise Unlike(f"{_plural(one.kind)} are asked to have a layout")
        if name in CONSTRAINTS:
            self._constraints.append((equation, labels_of(one.labels)))
            return one
        if name in SAME:
            return one
        if name == "stop_gradient":
            if one.kind != "row":
                raise Unlike(f"the gradient of {_plural(one.kind)} is stopped")
            return one
        if name in ("reduce_max", "reduce_sum"):
            return self._reduced(equation, one)
        if name == "dot_general":
            return self._multiplied(equation, one, ins)
        if name == "concatenate":
            return self._with_sink(equation, one)
        if name == "slice":
            return self._without_sink(equation, one)
        if name not in LOCAL:
            raise Unlike(f"another operation reads {_plural(one.kind)}")
        return self._elementwise(equation, ins)

    def _with_sink(self, equation: Equation, one: Meaning) -> Meaning:
        """Scores that are joined with a column along their keys."""
        self.has_softmax = True
        axis, labels = equation.params["dimension"], labels_of(one.labels)
        others = [x for x in equation.invars if isinstance(x, core.Literal) or self._meanings.get(x) is not one]
        is_column = len(others) == 1 and len(equation.invars) == 2 and others[0].aval.shape[axis] == 1
        if one.kind != "score" or one.shifts or one.sink is not None or not is_column or not labels[axis]:
            raise Unlike(f"{_plural(one.kind)} are joined with others")
        sink = self._operand(others[0], beside(others[0], labels, equation.outvars[0].aval.shape))
        (atom,) = joined = new_label(equation.outvars[0].aval.shape[axis], "joined")
        self._joined[atom] = labels[axis], int(equation.invars[0] is others[0])
        return dataclasses.replace(one, labels=(*labels[:axis], joined, *labels[axis + 1 :]), sink=sink)

    def _without_sink(self, equation: Equation, one: Meaning) -> Meaning:
        """Exponentials or probabilities without those of the sink."""
        labels, params, shape = labels_of(one.labels), equation.params, equation.invars[0].aval.shape
        found = list[Label]()
        for axis, label in enumerate(labels):
            part, whole_axis = (params["start_indices"][axis], params["limit_indices"][axis]), (0, shape[axis])
            keys, start = self._joined.get(label[0], ((), 0)) if len(label) == 1 else ((), 0)
            if keys and one.kind in ("exp", "p") and part == (start, start + shape[axis] - 1):
                found.append(keys)
            elif part == whole_axis:
                found.append(label)
            else:
                raise Unlike(f"a part of {_plural(one.kind)}")
        if params["strides"] is not None and set(params["strides"]) != {1}:
            raise Unlike(f"every other one of {_plural(one.kind)}")
        return dataclasses.replace(one, labels=tuple(found), sink=one.sink if one.kind == "p" else None)

    def _reduced(self, equation: Equation, one: Meaning) -> Meaning:
        axes, shape = equation.params["axes"], equation.invars[0].aval.shape
        own = labels_of(one.labels)
        labels = tuple(label for axis, label in enumerate(own) if axis not in axes)
        gone = tuple(atom for axis in axes for atom in own[axis])
        if any(not own[axis] and shape[axis] > 1 for axis in axes):
            raise Unlike("a sum along equal elements")
        if equation.primitive.name == "reduce_max" and one.kind in ("score", "row"):
            return self._new_row(labels)
        if equation.primitive.name == "reduce_sum" and one.kind == "exp":
            if any(atom in gone for row in one.shifts for atom in whole(self._row_atoms[row])):
                raise Unlike("what is subtracted from scores varies along the sum")
            gone = tuple(key for atom in gone for key in self._joined.get(atom, ((atom,), 0))[0])
            return Meaning("sum", labels, one.x, one.shifts, sum_factors=one.factors, reduced=gone, sink=one.sink)
        raise Unlike(f"{equation.primitive.name.removeprefix('reduce_')} of {_plural(one.kind)}")

    def _new_row(self, labels: Labels) -> Meaning:
        self.has_softmax, number = True, next(_numbers)
        self._row_atoms[number] = atoms_of(labels)
        return Meaning("row", labels, number=number)

    # --- elementwise operations

    def _elementwise(self, equation: Equation, ins: Sequence[Any]) -> Meaning | Site:
        name, out = equation.primitive.name, equation.outvars[0].aval
        labels = self._joined_labels(equation)
        meanings = [None if isinstance(x, core.Literal) else self._meanings.get(x) for x in equation.invars]
        found = [one for one in meanings if one is not None]
        kinds = {one.kind for one in found}

        def operand(x: Any) -> Node:
            return self._operand(x, beside(x, labels, out.shape))

        if kinds == {"row"}:
            for x, one in zip(equation.invars, meanings, strict=True):
                if one is None:
                    operand(x)
            is_same = name == "max" and len(found) == 1  # as with -inf
            return dataclasses.replace(found[0], labels=labels) if is_same else self._new_row(labels)
        if len(found) == 2 and kinds != {"score"}:
            pair = self._of_two(equation, name, found, labels)
            if pair is not None:
                return pair
        elif kinds == {"score"} and name != "exp":
            return self._of_scores(equation, meanings, labels, operand)
        elif len(found) == 1:
            (one,) = found
            if (single := self._of_one(equation, name, one, labels)) is not None:
                return single
            if one.kind in ("exp", "p"):
                factor = self._factor(equation, name, meanings, operand)
                return dataclasses.replace(one, labels=labels, factors=(*one.factors, factor))
        raise Unlike(f"{name} of {' and '.join(sorted(map(_plural, kinds)))}")

    def _joined_labels(self, equation: Equation) -> Labels:
        """The labels of an elementwise equation's result."""
        labels: list[Label] = [()] * equation.outvars[0].aval.ndim
        for x in variables(equation.invars):
            if x not in self._meanings:
                continue
            for axis, label in enumerate(labels_of(self._meanings[x].labels)):
                if label and labels[axis] and labels[axis] != label:
                    raise Unlike("two arrays of scores have other axes")
                labels[axis] = labels[axis] or label
        return tuple(labels)

    def _operand(self, x: Any, labels: Labels) -> Node:
        """An operand with these labels, which is looked into later."""
        if isinstance(x, core.Literal):
            return constant(x)
        if x in self._meanings:
            raise Unlike(f"an operand is made of {_plural(self._meanings[x].kind)}")
        if self._is_behind(x):
            raise Unlike("an operand depends on the scores in another way")
        if any(not label and size > 1 for label, size in zip(labels, x.aval.shape, strict=True)):
            raise Unlike("an operand has an axis that the scores have not")
        return Node("operand", var=x, labels=labels)

    def _of_two(self, equation: Equation, name: str, found: Sequence[Meaning], labels: Labels) -> Meaning | Site | None:
        """The meaning of an operation on two variables with meanings, of other kinds than scores alone."""
        first, second = found
        kinds = first.kind, second.kind
        is_same = first.x is second.x and first.shifts == second.shifts
        if name == "sub" and kinds == ("score", "row"):
            return dataclasses.replace(first, labels=labels, shifts=(*first.shifts, second.number))
        is_whole = kinds == ("score", "logsumexp") and first.x is second.x and not first.shifts
        if name == "sub" and (is_whole or (kinds == ("score", "log sum") and is_same)):
            return dataclasses.replace(second, kind="log p", labels=labels, x=first.x, shifts=())
        if name == "add" and set(kinds) == {"log sum", "row"}:
            total, row = (first, second) if first.kind == "log sum" else (second, first)
            if total.shifts == (row.number,):
                return dataclasses.replace(total, kind="logsumexp", labels=labels, shifts=())
        if name == "mul" and "inverse sum" in kinds:
            numerator, total = (second, first) if first.kind == "inverse sum" else (first, second)
        elif name == "div" and kinds[1] == "sum":
            numerator, total = first, second
        else:
            return None
        if numerator.kind not in ("exp", "unnormalised") or not is_same:
            return None
        if numerator.kind == "unnormalised":
            return self._site(equation, labels, numerator, total)
        count = len(numerator.factors)
        return dataclasses.replace(
            numerator,
            kind="p",
            labels=labels,
            divided=count,
            sum_factors=total.sum_factors,
            reduced=total.reduced,
            sink=total.sink,
        )

    def _of_scores(
        self, equation: Equation, meanings: Sequence[Meaning | None], labels: Labels, operand: Any
    ) -> Meaning:
        found, name = [one for one in meanings if one is not None], equation.primitive.name
        if any(one.sink is not None for one in found):
            raise Unlike("an operation on scores that are joined with a sink")
        if any(one.shifts for one in found):
            if len(found) > 1:
                raise Unlike("two arrays of scores from which something was subtracted")
            if name not in ("select_n", "add", "sub") or (name == "sub" and meanings[0] is None):
                raise Unlike("an operation on scores from which something was subtracted")
        args: Iterable[Any] = (
            operand(x) if one is None else one.x for x, one in zip(equation.invars, meanings, strict=True)
        )
        return dataclasses.replace(found[0], labels=labels, x=Node(name, tuple(args), equation))

    def _of_one(self, equation: Equation, name: str, one: Meaning, labels: Labels) -> Meaning | None:
        """The meaning of an operation on one variable with a meaning, beside constants."""
        if name == "exp" and one.kind in ("score", "log p"):
            self.has_softmax = True
            return dataclasses.replace(one, kind="exp" if one.kind == "score" else "p", labels=labels)
        if name == "abs" and one.kind == "sum":
            return dataclasses.replace(one, labels=labels)
        if name == "log" and one.kind == "sum":
            return dataclasses.replace(one, kind="log sum", labels=labels)
        if one.kind == "sum" and name in ("div", "integer_pow"):
            first = equation.invars[0]
            is_one = name == "div" and isinstance(first, core.Literal) and np.all(np.asarray(first.val) == 1)
            if is_one or equation.params.get("y") == -1:
                return dataclasses.replace(one, kind="inverse sum", labels=labels)
        return None

    def _factor(self, equation: Equation, name: str, meanings: Sequence[Meaning | None], operand: Any) -> Factor:
        """The factor by which an equation multiplies exponentials or probabilities."""
        others = [x for x, one in zip(equation.invars, meanings, strict=True) if one is None]
        if name == "mul":
            return Factor("mul", operand(others[0]))
        if name == "div" and meanings[0] is not None:
            return Factor("div", operand(others[0]))
        if name == "select_n" and len(others) == 2 and meanings[0] is None:
            mask, other = others
            if self._makers.constant(other) == 0:
                return Factor("select", operand(mask), meanings[2] is not None)
        raise Unlike(f"{name} of probabilities")

    # --- products

    def _multiplied(self, equation: Equation, one: Meaning, ins: Sequence[Any]) -> Meaning | Site:
        (sums, batch), (first, second) = equation.params["dimension_numbers"], equation.invars
        if len(ins) != 1 or first is second or one.kind not in ("exp", "p"):
            raise Unlike(f"a product of {_plural(one.kind)}")
        own = 0 if first is ins[0] else 1
        v = equation.invars[1 - own]
        if not sums[0]:
            return self._scaled(equation, one, own, v)
        if isinstance(v, core.Literal) or self._is_behind(v):
            raise Unlike("values that depend on the scores")
        labels, shape = labels_of(one.labels), ins[0].aval.shape
        if any(not label and size > 1 for label, size in zip(labels, shape, strict=True)):
            raise Unlike("probabilities with equal rows or columns")
        v_labels: list[Label] = [()] * v.aval.ndim
        for mine, its in ((sums[own], sums[1 - own]), (batch[own], batch[1 - own])):
            for axis, other in zip(mine, its, strict=True):
                v_labels[other] = labels[axis]
        keys = tuple(atom for axis in sums[own] for atom in labels[axis])
        fixed = {*sums[1 - own], *batch[1 - own]}
        columns = [axis for axis in range(v.aval.ndim) if axis not in fixed]
        for axis in columns:
            v_labels[axis] = new_label(v.aval.shape[axis], "value")
        rows = [label for axis, label in enumerate(labels) if axis not in {*sums[own], *batch[own]}]
        sides = [rows, [v_labels[axis] for axis in columns]]
        out = (*(labels[axis] for axis in batch[own]), *sides[own], *sides[1 - own])
        found = dataclasses.replace(one, labels=out, product=ValuesProduct(equation, v, tuple(v_labels), keys))
        return self._site(equation, out, found, found) if one.kind == "p" else _as_kind(found, "unnormalised")

    def _scaled(self, equation: Equation, one: Meaning, own: int, other: Any) -> Meaning:
        """A product that sums nothing, as "bhts,h->bhts"."""
        _, batch = equation.params["dimension_numbers"]
        labels = labels_of(one.labels)
        if isinstance(other, core.Literal) or other.aval.ndim != len(batch[0]):
            raise Unlike(f"a product of {_plural(one.kind)}")
        other_labels: list[Label] = [()] * other.aval.ndim
        for axis, its in zip(batch[own], batch[1 - own], strict=True):
            other_labels[its] = labels[axis]
        rest = [axis for axis in range(len(labels)) if axis not in batch[own]]
        out = tuple(labels[axis] for axis in (*batch[own], *rest))
        factor = Factor("mul", self._operand(other, tuple(other_labels)))
        return dataclasses.replace(one, labels=out, factors=(*one.factors, factor))

    def _site(self, equation: Equation, labels: Labels, numerator: Meaning, total: Meaning) -> Site:
        product = numerator.product
        assert product is not None and numerator.x is not None
        keys = whole(product.keys)
        if set(whole(total.reduced)) != set(keys):
            raise Unlike("the softmax is over other axes than the product with values")
        if any(atom in keys for atom in atoms_of(labels)):
            raise Unlike("a sum of other rows")
        a, b = self._a, self._b
        left, right = ([x for x in atoms_of(one[1]) if x.kind == kind] for one, kind in ((a, "left"), (b, "right")))
        if set(keys) <= set(right):
            q, k = a, b
        elif set(keys) <= set(left):
            q, k = b, a
        else:
            raise Unlike("the softmax is not over columns of one factor of the scores")
        v = product.v, labels_of(product.v_labels)
        meant = frozenset(self._meanings)
        return Site(
            self._product,
            q,
            k,
            v,
            numerator.x,
            numerator.factors,
            len(numerator.factors) if numerator.kind == "unnormalised" else numerator.divided,
            total.sum_factors,
            keys,
            product.equation,
            equation,
            labels_of(labels),
            meant,
            tuple(self._constraints),
            total.sink,
        )


def _as_kind(one: Meaning, kind: str) -> Meaning:
    return dataclasses.replace(one, kind=kind)


def _plural(kind: str) -> str:
    words = {"score": "scores", "row": "rows' maxima", "exp": "exponentials", "p": "probabilities"}
    return words.get(kind, {"unnormalised": "unnormalised results"}.get(kind, f"the {kind}"))


def _product_labels(product: Equation) -> tuple[tuple[Any, Labels], tuple[Any, Labels], Labels]:
    """Both factors of a product with labels of their axes, and those of its result."""
    (a, b), ((sums_a, sums_b), (batch_a, batch_b)) = product.invars, product.params["dimension_numbers"]
    labels_a: list[Label] = [()] * a.aval.ndim
    labels_b: list[Label] = [()] * b.aval.ndim
    for pairs, kind in ((zip(batch_a, batch_b, strict=True), "batch"), (zip(sums_a, sums_b, strict=True), "sum")):
        for i, j in pairs:
            labels_a[i] = labels_b[j] = new_label(a.aval.shape[i], kind)
    left = [axis for axis in range(a.aval.ndim) if axis not in (*sums_a, *batch_a)]
    right = [axis for axis in range(b.aval.ndim) if axis not in (*sums_b, *batch_b)]
    for labels, axes, x, kind in ((labels_a, left, a, "left"), (labels_b, right, b, "right")):
        for axis in axes:
            labels[axis] = new_label(x.aval.shape[axis], kind)
    out = (*(labels_a[i] for i in batch_a), *(labels_a[i] for i in left), *(labels_b[i] for i in right))
    return (a, tuple(labels_a)), (b, tuple(labels_b)), out
