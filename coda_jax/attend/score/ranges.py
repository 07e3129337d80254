"""Bounds of a score over tiles of pairs: which tiles it hides entirely, and which not at all.

Interval arithmetic over the nodes, for all tiles at once: each leaf has its least and its greatest value in a tile,
conditions may be false, true or both. Sums of positions and integers with integer factors are kept as such, so that
comparisons of positions are exact. A bound may be loose, and is never wrong but by a float's last digit.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from coda_jax.attend.score.program import HIDDEN, Score
from coda_jax.epilogue.dtypes import BOOL, FLOATS_OF_16_BITS, INT32
from coda_jax.epilogue.program import Node, needed_nodes

_PRODUCT = 2.0**90  # a scaled product of finite queries and keys is less
_MOST = 2**31 - 1
_FITS = 2.0**30  # integers beyond may wrap around

Form = dict[Any, int]  # a sum: of a leaf its factor, of None the constant


@dataclasses.dataclass(frozen=True)
class Number:
    """A number's bounds in each tile, and the sum that it is, if that is known."""

    low: Any
    high: Any
    form: Form | None = None


@dataclasses.dataclass(frozen=True)
class Truth:
    """Whether a condition may be false, and true, in each tile."""

    may_be_false: Any
    may_be_true: Any


Bounds = Number | Truth


class Tiles(NamedTuple):
    """Tiles of pairs: bounds of the rows and the columns in each.

    Attributes:
      xp: numpy, or jax.numpy.
      row, column: (low, high).
      product: of scaled products of queries and keys.
      difference: bounds of row - column, where they are less than those of rows and columns say.
      arrays: of each array of the score.
    """

    xp: Any
    row: tuple[Any, Any]
    column: tuple[Any, Any]
    arrays: Sequence[Bounds]
    product: tuple[float, float] = (-_PRODUCT, _PRODUCT)
    difference: tuple[Any, Any] | None = None


def hidden(score: Score, tiles: Tiles) -> tuple[Any, Any]:
    """Whether each tile is hidden entirely, and whether nothing of it is, as arrays that broadcast to the tiles."""
    value = bounds(score, tiles)
    return value.high <= HIDDEN, value.low > HIDDEN


def bounds(score: Score, tiles: Tiles) -> Number:
    """The bounds of a score in each tile, as arrays that broadcast to the tiles."""
    value = bounds_of(score.nodes, score.value, tiles)
    assert isinstance(value, Number)
    return value


def bounds_of(nodes: Sequence[Node], root: int, tiles: Tiles) -> Bounds:
    """The bounds of a node in each tile, as arrays that broadcast to the tiles."""
    made: dict[int, Bounds] = {}
    with np.errstate(all="ignore"):
        for number in sorted(needed_nodes(nodes, [root])):
            node = nodes[number]
            made[number] = _Evaluation(tiles).of(node, [made[i] for i in node.inputs])
    return made[root]


def unknown(dtype: str, xp: Any) -> Bounds:
    """The bounds of what is not known."""
    if dtype == BOOL:
        return Truth(xp.asarray(True), xp.asarray(True))
    if dtype == INT32:
        return Number(xp.asarray(-_MOST - 1, xp.int32), xp.asarray(_MOST, xp.int32))
    return Number(xp.asarray(-np.inf, xp.float32), xp.asarray(np.inf, xp.float32))


_INCREASING = {
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log1p": "log1p", "sqrt": "sqrt",
    "tanh": "tanh", "floor": "floor", "ceil": "ceil", "sign": "sign", "cbrt": "cbrt", "atan": "arctan",
    "asinh": "arcsinh", "sinh": "sinh",
}  # fmt: skip
_BOUNDED = {"logistic": (0, 1), "erf": (-1, 1), "sin": (-1, 1), "cos": (-1, 1), "erfc": (0, 2)}
_COMPARED = {"lt", "le", "gt", "ge", "eq", "ne"}


class _Evaluation:
    """The bounds of nodes over some tiles."""

    def __init__(self, tiles: Tiles) -> None:
        self.tiles, self.xp = tiles, tiles.xp

    def of(self, node: Node, inputs: Sequence[Bounds]) -> Bounds:
        """The bounds of a node, from those of its inputs."""
        if not node.inputs:
            return self.leaf(node)
        if node.op == "entry":  # any of the table's, or what is beside it
            has_others = dict(node.attributes).get("fill") is not None
            return self.unknown(node) if has_others else self.tiles.arrays[node["index"]]
        numbers = [x for x in inputs if isinstance(x, Number)]
        if node.op in _COMPARED and len(numbers) == 2:
            return self.compared(node.op, *numbers)
        if node.op == "select_n":
            return self.chosen(inputs)
        if node.op == "convert_element_type":
            return self.converted(inputs[0], node.dtype)
        if not numbers:
            return self.logical(node.op, [x for x in inputs if isinstance(x, Truth)])
        if len(numbers) < len(inputs):
            return self.unknown(node)
        if node.dtype == INT32 and (form := sum_of(node.op, [x.form for x in numbers])) is not None:
            return self.of_form(form)
        found = self.number(node, numbers)
        if found is None:
            return self.unknown(node)
        return self.checked(node, *found)

    def leaf(self, node: Node) -> Bounds:
        match node.op:
            case "row" | "column":
                return self.of_form({node.op: 1})
            case "score":
                return Number(*(self.xp.asarray(x, self.xp.float32) for x in self.tiles.product))
            case "operand":
                bounds = self.tiles.arrays[node["index"]]
                is_int = isinstance(bounds, Number) and node.dtype == INT32
                return dataclasses.replace(bounds, form={node["index"]: 1}) if is_int else bounds
        if node.dtype == BOOL:
            return Truth(self.xp.asarray(not node["value"]), self.xp.asarray(bool(node["value"])))
        if node.dtype == INT32:
            return self.of_form({None: int(node["value"])})
        value = self.xp.asarray(float(node["value"]), self.xp.float32)
        return Number(value, value)

    def unknown(self, node: Node) -> Bounds:
        return unknown(node.dtype, self.xp)

    def checked(self, node: Node, low: Any, high: Any) -> Number:
        """The bounds; unknown where there is NaN or an integer may have wrapped around."""
        if node.dtype == INT32:
            is_known = (self.xp.abs(low.astype(self.xp.float32)) < _FITS) & (
                self.xp.abs(high.astype(self.xp.float32)) < _FITS
            )
            return Number(self.xp.where(is_known, low, -_MOST - 1), self.xp.where(is_known, high, _MOST))
        is_known = (low == low) & (high == high)
        return Number(self.xp.where(is_known, low, -np.inf), self.xp.where(is_known, high, np.inf))

    def of_form(self, form: Form) -> Number:
        """The bounds of a sum, leaf by leaf; rows and columns together where their difference is known better."""
        xp, rest = self.xp, dict(form)
        low = high = xp.asarray(rest.pop(None, 0), xp.int32)
        size = xp.abs(low.astype(xp.float32))
        terms = []
        if self.tiles.difference is not None and "row" in rest:
            factor = rest.pop("row")
            rest["column"] = rest.get("column", 0) + factor
            terms.append((factor, self.tiles.difference))
        for leaf, factor in rest.items():
            if leaf in ("row", "column"):
                terms.append((factor, getattr(self.tiles, leaf)))
            else:
                bounds = self.tiles.arrays[leaf]
                assert isinstance(bounds, Number)
                terms.append((factor, (bounds.low, bounds.high)))
        for factor, (least, most) in terms:
            ends = [xp.asarray(x, xp.int32) * xp.int32(factor) for x in (least, most)]
            low, high = low + xp.minimum(*ends), high + xp.maximum(*ends)
            size = size + abs(factor) * xp.maximum(xp.abs(1.0 * xp.asarray(least)), xp.abs(1.0 * xp.asarray(most)))
        fits = size < _FITS
        return Number(xp.where(fits, low, -_MOST - 1), xp.where(fits, high, _MOST), form)

    def compared(self, op: str, a: Number, b: Number) -> Truth:
        if a.form is not None and b.form is not None:
            difference = self.of_form(sum_of("sub", [a.form, b.form]) or {})
            zero = self.xp.zeros_like(difference.low)
            a, b = difference, Number(zero, zero)
        match op:
            case "lt" | "ge":
                no, yes = a.low >= b.high, a.high < b.low
            case "gt" | "le":
                no, yes = a.high <= b.low, a.low > b.high
            case _:
                no = (a.high < b.low) | (a.low > b.high)
                yes = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
        truth = Truth(~yes, ~no)
        return Truth(truth.may_be_true, truth.may_be_false) if op in ("ge", "le", "ne") else truth

    def logical(self, op: str, given: Sequence[Truth]) -> Truth:
        if op == "not":
            return Truth(given[0].may_be_true, given[0].may_be_false)
        a, b = given
        match op:
            case "and" | "min" | "mul":
                return Truth(a.may_be_false | b.may_be_false, a.may_be_true & b.may_be_true)
            case "or" | "max":
                return Truth(a.may_be_false & b.may_be_false, a.may_be_true | b.may_be_true)
        differ = (a.may_be_true & b.may_be_false) | (a.may_be_false & b.may_be_true)
        agree = (a.may_be_true & b.may_be_true) | (a.may_be_false & b.may_be_false)
        if op in ("ne", "xor"):
            return Truth(agree, differ)
        if op == "eq":
            return Truth(differ, agree)
        return Truth(self.xp.asarray(True), self.xp.asarray(True))

    def chosen(self, inputs: Sequence[Bounds]) -> Bounds:
        xp, which, cases = self.xp, inputs[0], inputs[1:]
        may = [which.may_be_false, which.may_be_true] if isinstance(which, Truth) else [xp.asarray(True)] * len(cases)
        each = list(zip(may, cases, strict=True))
        truths = [(flag, x) for flag, x in each if isinstance(x, Truth)]
        if truths:
            may_be_false = [flag & x.may_be_false for flag, x in truths]
            may_be_true = [flag & x.may_be_true for flag, x in truths]
            return Truth(*(functools.reduce(operator.or_, flags) for flags in (may_be_false, may_be_true)))
        numbers = [(flag, x) for flag, x in each if isinstance(x, Number)]
        is_int = numbers[0][1].low.dtype == INT32
        most = _MOST if is_int else np.inf
        lows = [xp.where(flag, x.low, most) for flag, x in numbers]
        highs = [xp.where(flag, x.high, -most) for flag, x in numbers]
        return Number(_least(xp, lows), _greatest(xp, highs))

    def converted(self, x: Bounds, dtype: str) -> Bounds:
        xp = self.xp
        if isinstance(x, Truth):
            if dtype == BOOL:
                return x
            of = xp.int32 if dtype == INT32 else xp.float32
            return Number((~x.may_be_false).astype(of), x.may_be_true.astype(of))
        if dtype == BOOL:
            zero = xp.zeros_like(x.low)
            return self.compared("ne", Number(x.low, x.high), Number(zero, zero))
        if dtype == INT32:
            if x.low.dtype == INT32:
                return x
            bounds = [xp.clip(xp.trunc(one), -_FITS, _FITS).astype(xp.int32) for one in (x.low, x.high)]
            is_known = (xp.abs(x.low) < _FITS) & (xp.abs(x.high) < _FITS)
            return Number(xp.where(is_known, bounds[0], -_MOST - 1), xp.where(is_known, bounds[1], _MOST))
        if dtype in FLOATS_OF_16_BITS:  # rounding moves a bound by less than this
            return Number(x.low - xp.abs(x.low) * 2.0**-8 - 1e-6, x.high + xp.abs(x.high) * 2.0**-8 + 1e-6)
        return Number(x.low.astype(xp.float32), x.high.astype(xp.float32))

    def number(self, node: Node, given: Sequence[Number]) -> tuple[Any, Any] | None:
        """The bounds of an operation on numbers; None if they are not known."""
        xp, a, b = self.xp, given[0], given[-1]
        match node.op:
            case "add" | "add_any":
                return a.low + b.low, a.high + b.high
            case "sub":
                return a.low - b.high, a.high - b.low
            case "neg":
                return -a.high, -a.low
            case "max":
                return xp.maximum(a.low, b.low), xp.maximum(a.high, b.high)
            case "min":
                return xp.minimum(a.low, b.low), xp.minimum(a.high, b.high)
            case "clamp":
                least, x, most = given
                return (
                    xp.minimum(xp.maximum(x.low, least.low), most.low),
                    xp.minimum(xp.maximum(x.high, least.high), most.high),
                )
            case "abs":
                size = self.size(a)
                return size.low, size.high
            case "mul":
                return self.product(node, a, b)
            case "square":
                return self.product(node, self.size(a), self.size(a))
            case "div" if node.dtype != INT32:
                is_apart = (b.low > 0) | (b.high < 0)
                each = [x / xp.where(is_apart, y, 1) for x in (a.low, a.high) for y in (b.low, b.high)]
                return (
                    xp.where(is_apart, _least(xp, each), -np.inf),
                    xp.where(is_apart, _greatest(xp, each), np.inf),
                )
            case "div" | "rem":
                return self.divided(node.op, a, b)
        if node.op in _BOUNDED:
            return tuple(xp.asarray(x, xp.float32) for x in _BOUNDED[node.op])
        if node.op in _INCREASING and (node.dtype != INT32 or node.op == "sign"):
            return tuple(getattr(xp, _INCREASING[node.op])(x) for x in (a.low, a.high))
        return None

    def size(self, a: Number) -> Number:
        xp, ends = self.xp, (self.xp.abs(a.low), self.xp.abs(a.high))
        return Number(xp.where((a.low <= 0) & (a.high >= 0), 0, xp.minimum(*ends)), xp.maximum(*ends))

    def product(self, node: Node, a: Number, b: Number) -> tuple[Any, Any]:
        xp = self.xp
        each = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        if node.dtype == INT32:
            of = [(1.0 * x) * (1.0 * y) for x in (a.low, a.high) for y in (b.low, b.high)]
            fits = (_least(xp, of) > -_FITS) & (_greatest(xp, of) < _FITS)
            return xp.where(fits, _least(xp, each), -_MOST - 1), xp.where(fits, _greatest(xp, each), _MOST)
        return _least(xp, each), _greatest(xp, each)

    def divided(self, op: str, a: Number, b: Number) -> tuple[Any, Any]:
        """Integers from 0 on, by one number."""
        xp = self.xp
        is_known = (b.low == b.high) & (b.low > 0) & (a.low >= 0)
        divisor = xp.where(is_known, b.low, 1)
        low, high = a.low // divisor, a.high // divisor
        if op == "rem":
            is_one = low == high
            low = xp.where(is_one, a.low - low * divisor, 0)
            high = xp.where(is_one, a.high - high * divisor, divisor - 1)
        return xp.where(is_known, low, -_MOST - 1), xp.where(is_known, high, _MOST)


def sum_of(op: str, forms: Sequence[Form | None]) -> Form | None:
    """The sum that an operation on sums is; None if it is none."""
    if any(form is None for form in forms):
        return None
    first, *others = (form or {} for form in forms)
    match op:
        case "add" | "sub":
            sign = 1 if op == "add" else -1
            total = dict(first)
            for leaf, factor in others[0].items():
                total[leaf] = total.get(leaf, 0) + sign * factor
            return {leaf: factor for leaf, factor in total.items() if factor or leaf is None}
        case "neg":
            return {leaf: -factor for leaf, factor in first.items()}
        case "mul":
            for one, constant in ((first, others[0]), (others[0], first)):
                if set(constant) <= {None}:
                    return {leaf: factor * constant.get(None, 0) for leaf, factor in one.items()}
    return None


def _least(xp: Any, numbers: Sequence[Any]) -> Any:
    return functools.reduce(xp.minimum, numbers)


def _greatest(xp: Any, numbers: Sequence[Any]) -> Any:
    return functools.reduce(xp.maximum, numbers)
