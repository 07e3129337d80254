"""The arrays over a vocabulary that a loss and its derivative make of logits, as sums of five with factors of rows.

    z (the logits)      p = exp(z - lse)      l = p (z - lse)      h (1 at the label, else 0)      1

With a number of each token before each, these are all that logits become: shifted logits, exponentials, one-hot arrays
and their cotangents. Sums over the vocabulary, and what is picked at the labels, are then numbers of each token, of the
statistics lse, target, total and entropy, which is the sum of -l. The cotangent of the logits itself is
a p - d l + b h + c: b, c and d are the cotangents of target, total and entropy, and a + d entropy is that of lse.

Logits may also be compared with the label's; the number of those that are larger is the statistic rank.

The largest logit, which only shifts, is taken to be lse; `shifts` says whether all else is free of it.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.losses.ends import kind_of_end
from coda_jax.fusion.losses.logits import Logits
from coda_jax.fusion.makers import FLIPPED, VIEWS, Makers, among, kept_columns
from coda_jax.fusion.picks import CLIPPED, is_along_last, is_over_last, one_hot, puts_along_last
from coda_jax.jaxprs.def_use import variables
from coda_jax.primitives.mesh_types import explicit_cuts

Z, P, L, H, ONE = "z", "p", "l", "h", "one"
_VIEWS = VIEWS | {"stop_gradient"}


class Unknown(Exception):
    """An array that is no such sum."""


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A number of each token, or one of all, as a function of others, of variables and of statistics' names."""

    of: tuple[Any, ...]
    function: Callable[..., jax.Array] | None = None

    def value(self, values: dict[Any, Any], rows: Sequence[Any]) -> jax.Array:
        """The array, of these rows or ()."""
        if self not in values:
            inputs = [_value(x, values, rows) for x in self.of]
            values[self] = inputs[0] if self.function is None else self.function(*inputs)
        made: jax.Array = values[self]
        return made


Factor = Row | float


def _value(x: Any, values: dict[Any, Any], rows: Sequence[Any]) -> Any:
    if isinstance(x, Row):
        return x.value(values, rows)
    if isinstance(x, float | str):
        return values[x] if isinstance(x, str) else x
    array = jnp.asarray(values[x])
    return array.reshape(()) if array.size == 1 else array.reshape(rows)


def array_of(factor: Factor, values: dict[Any, Any], rows: Sequence[Any]) -> jax.Array:
    """The factor of each token, float32."""
    return jnp.broadcast_to(jnp.asarray(_value(factor, values, rows), jnp.float32), rows)


def _plus(a: Factor, b: Factor) -> Factor:
    if isinstance(a, float) and isinstance(b, float):
        return a + b
    return b if a == 0.0 else a if b == 0.0 else Row((a, b), jnp.add)


def _times(a: Factor, b: Factor) -> Factor:
    if isinstance(a, float) and isinstance(b, float):
        return a * b
    if 0.0 in (a, b):
        return 0.0
    return b if a == 1.0 else a if b == 1.0 else Row((a, b), jnp.multiply)


def _over(a: Factor, b: Factor) -> Factor:
    return a if b == 1.0 else 0.0 if a == 0.0 else Row((a, b), jnp.divide)


_NAMES = ("lse", "target", "total", "entropy", "best", "rank")
LSE, TARGET, TOTAL, ENTROPY, BEST, RANK = (Row((name,)) for name in _NAMES)
OUTSIDE, PADDING = Row(("outside",)), Row(("padding",))  # bool, of labels: in no column, in padding


@dataclasses.dataclass(frozen=True, eq=False)
class Sum:
    """An array over the vocabulary, or over those of more rows and columns, where it is 0.

    Attributes:
      terms: the factors of Z, P, L, H and ONE.
      grown: how many slices of the logits its rows and columns are behind.
      slope: of a cap c tanh(z / c): what it is multiplied with, "1 - t", "t - t^2" or "1 - t^2" with t the tanh; and
        the sum that was first.
      is_masked: whether padding was set to 0.
      is_turned: whether the columns come first.
    """

    terms: dict[str, Factor]
    grown: int = 0
    slope: tuple[str, Any] | None = None
    is_masked: bool = False
    is_turned: bool = False

    def factor(self, name: str) -> Factor:
        """The factor of one of the arrays."""
        return self.terms.get(name, 0.0)

    def with_terms(self, terms: dict[str, Factor]) -> Sum:
        return dataclasses.replace(self, terms={name: x for name, x in terms.items() if x != 0.0})

    def map(self, function: Callable[[Factor], Factor]) -> Sum:
        return self.with_terms({name: function(x) for name, x in self.terms.items()})

    @property
    def is_plain(self) -> bool:
        """Whether it is a function of each token's columns, that is, not yet behind a slice or a cap."""
        return not self.grown and self.slope is None and not self.is_turned

    def row(self) -> Factor:
        """The number of each token that all columns are."""
        if not self.is_plain or not self.terms.keys() <= {ONE}:
            raise Unknown
        return self.factor(ONE)


class Wide:
    """The arrays over the vocabulary that are made of logits, each as a sum, and what they end in.

    Attributes:
      rows: the numbers of each token that are made of them, by variable.
      ends: the equations that read the logits' cotangent with what each makes: "dx", "dw", "dbias"; and that cotangent.
      tokens: their number.
      labels: the variable of all labels; None if nothing is picked.
      is_clipped: whether labels are clipped to the columns.
      largest: the variables that are the largest logits.
      rank: the comparison of the logits that are counted with the label's; empty if none are.
      made: the numbers of all equations that are read as such.

    Raises:
      Unknown: something that is made of the logits is none of these.
    """

    def __init__(self, makers: Makers, logits: Logits):
        self.makers, self.logits = makers, logits
        self.rows: dict[Any, Factor] = {}
        self.ends: list[tuple[Equation, str, Sum]] = []
        self.labels: Any = None
        self.is_clipped: bool | None = None
        self.largest: list[Any] = []
        self.rank = ""
        self._sums: dict[Any, Sum] = {}
        self._targets = set[Any]()  # the variables that are the logits of labels, NaN outside of the columns
        self._compared: dict[Any, str] = {}  # the masks, and what these are cast to, by comparison
        self._done: set[int] = set()
        self._queue: list[int] = []
        self._shape = (*logits.rows, logits.columns)
        self.tokens = math.prod(logits.rows)
        self._slices = [e for e in logits.moved if e.primitive.name == "slice"]
        self._own = set(logits.arrays)  # what is made of the logits; the other sums are made of labels and of rows
        own = Sum({Z: 1.0})
        for x in logits.arrays:
            self._found(x, own)
        while self._queue:
            self._read(makers.equations[heapq.heappop(self._queue)])

    @property
    def cotangent(self) -> Sum:
        """The logits' cotangent.

        Raises:
          Unknown: there is none, or it is not that of all logits.
        """
        found = [one for *_, one in self.ends]
        if not found or any(one.terms is not found[0].terms for one in found):
            raise Unknown
        first, has_padding = found[0], self.logits.fill is not None
        if first.factor(Z) != 0.0 or first.is_masked != has_padding:
            raise Unknown
        return first

    @property
    def has_total(self) -> bool:
        return self._reads(TOTAL) or any(one.factor(ONE) != 0.0 for *_, one in self.ends)

    @property
    def has_entropy(self) -> bool:
        return self._reads(ENTROPY) or any(one.factor(L) != 0.0 for *_, one in self.ends)

    @property
    def has_best(self) -> bool:
        return self._reads(BEST)

    @property
    def slopes(self) -> list[Factor]:
        """The cotangents of lse, target, and of total and entropy where they are statistics."""
        made = self.cotangent
        of_entropy = _times(-1.0, made.factor(L))
        slopes = [_plus(made.factor(P), _times(of_entropy, ENTROPY)), made.factor(H)]
        return slopes + [made.factor(ONE)] * self.has_total + [of_entropy] * self.has_entropy

    def _reads(self, statistic: Row) -> bool:
        open_: list[Any] = [*self.rows.values(), *(x for *_, one in self.ends for x in one.terms.values())]
        seen: set[Any] = set()
        while open_:
            row = open_.pop()
            if isinstance(row, Row) and row not in seen:
                seen.add(row)
                open_ += row.of
        return statistic in seen

    # ---- the equations, in order

    def _found(self, x: Any, made: Sum) -> None:
        if x not in self._sums:
            self._sums[x] = made
            self._push_readers(x)

    def _push_readers(self, x: Any) -> None:
        maker = self.makers.maker(x)
        if maker is not None and not self._own.isdisjoint(variables(maker.invars)):
            self._own.add(x)
        for equation in self.makers.readers(x):
            heapq.heappush(self._queue, self.makers.number(equation))

    def _read(self, equation: Equation) -> None:
        """Takes an equation that reads one of the arrays; one that reads none that is made of logits may stay."""
        if id(equation) in self._done or any(x in self._sums for x in equation.outvars):
            return
        try:
            self._take(equation)
        except Unknown:
            if not self._own.isdisjoint(variables(equation.invars)):
                raise
        self._done.add(id(equation))

    def _take(self, equation: Equation) -> None:
        name, (out, *more) = equation.primitive.name, equation.outvars
        if more:
            raise Unknown
        if name in FLIPPED or any(among(x, self._compared) for x in equation.invars):
            self._compare(equation)
        elif name == "dot_general" or (name == "reduce_sum" and not is_over_last(equation)):
            self._end(equation)
        elif name in ("reduce_sum", "reduce_max", "argmax"):
            self.rows[out] = self._reduced(equation)
        elif name == "gather":
            self.rows[out] = self._picked(equation)
        else:
            made = self._made(equation)
            is_whole = out.aval.size == self.tokens * self._shape[-1] and out.aval.dtype.name in FLOATS
            if not made.grown and not is_whole:
                raise Unknown  # it has more rows by broadcasting
            self._found(out, made)

    def sum_of(self, x: Any) -> Sum:
        """The variable as a sum."""
        if not isinstance(x, core.Literal) and x in self._sums:
            return self._sums[x]
        row = self._as_row(x)
        if row is not None:
            return Sum({ONE: row} if row != 0.0 else {})
        equation = self.makers.maker(x)
        if equation is None or x in self.rows or not self._is_wide(x):
            raise Unknown
        hot = one_hot(self.makers, x)
        if hot is not None and jnp.issubdtype(x.aval.dtype, jnp.floating):
            labels, on, off = hot
            self._label(labels, clips=False)
            made = Sum({}).with_terms({H: on - off, ONE: off})
        else:
            made = self._made(equation)
        self._found(x, made)
        return made

    def _is_wide(self, x: Any) -> bool:
        shape = x.aval.shape
        is_whole = x.aval.size == self.tokens * self._shape[-1] and shape[-1:] == self._shape[-1:]
        return bool(is_whole and x.aval.dtype.name in FLOATS)

    def _as_row(self, x: Any) -> Factor | None:
        """The factor that a variable is, of one number for each token, or one for all; None for another one."""
        if isinstance(x, core.Literal):
            return float(x.val) if np.ndim(x.val) == 0 else None
        constant = self.makers.constant(x)
        if constant is not None:
            return constant
        if x.aval.size == 1:
            return Row((x,))
        if x.aval.size == self.tokens and (x.aval.shape[-1:] == (1,) or x.aval.shape == self._shape[:-1]):
            return Row((self._unput(x),))
        equation = self.makers.maker(x)
        if equation is None or equation.primitive.name != "broadcast_in_dim":
            return None
        (source, *_), axes = equation.invars, tuple(equation.params["broadcast_dimensions"])
        if source.aval.size == 1:
            return self._as_row(source)
        rank = x.aval.ndim
        has_rows = source.aval.size == self.tokens == math.prod(x.aval.shape[:-1])
        return Row((self._unput(source),)) if has_rows and axes[: rank - 1] == tuple(range(rank - 1)) else None

    def _unput(self, x: Any) -> Any:
        """The variable whose elements x has: the derivative of v[..., 0] puts them in an array of zeros."""
        equation = self.makers.maker(x)
        if equation is not None and equation.primitive.name == "scatter-add" and x.aval.shape[-1:] == (1,):
            zeros, _, updates = equation.invars
            is_all = tuple(equation.params["dimension_numbers"].inserted_window_dims) == (x.aval.ndim - 1,)
            if is_all and self.makers.constant(zeros) == 0.0 and updates.aval.size == x.aval.size:
                return updates
        return x

    def _label(self, labels: Any, *, clips: bool) -> None:
        """Takes labels as those of all; there are no others."""
        if self.labels is None:
            self.labels, self.is_clipped = labels, clips
        (one, _), (other, _) = map(self.makers.root, (labels, self.labels))
        if self.is_clipped != clips or not self.makers.are_alike(one, other):
            raise Unknown

    # ---- what each makes

    def _made(self, equation: Equation) -> Sum:
        """The sum that an equation makes of others."""
        name, inputs = equation.primitive.name, equation.invars
        if name in _VIEWS:
            return self._view(equation)
        if name == "neg":
            return self.sum_of(inputs[0]).map(lambda x: _times(-1.0, x))
        if name in ("add", "add_any", "sub"):
            return _added(*map(self.sum_of, inputs), sign=-1.0 if name == "sub" else 1.0)
        if name == "mul":
            return self._product(*inputs)
        if name == "div":
            divisor = self.sum_of(inputs[1]).row()
            return self.sum_of(inputs[0]).map(lambda x: _over(x, divisor))
        rules = {
            "exp": self._exponential,
            "select_n": self._selected,
            "scatter-add": self._put,
            "pad": self._grown,
            "transpose": self._transpose,
        }
        if name not in rules:
            raise Unknown
        return rules[name](equation)

    def _view(self, equation: Equation) -> Sum:
        x, (out,) = equation.invars[0], equation.outvars
        made = self.sum_of(x)
        if out.aval.dtype.name not in FLOATS or out.aval.shape[-1] != x.aval.shape[-1] or out.aval.size != x.aval.size:
            raise Unknown
        if out.aval.shape != x.aval.shape and (made.is_turned or any(explicit_cuts(x.aval))):
            raise Unknown
        return made

    def _product(self, x: Any, y: Any) -> Sum:
        for one, other in ((x, y), (y, x)):
            slope = self._slope(other)
            if slope is not None:
                return self._sloped(self.sum_of(one), slope)
        left, right = self.sum_of(x), self.sum_of(y)
        if not right.terms.keys() <= {ONE}:
            left, right = right, left
        if right.is_plain and right.terms.keys() <= {ONE}:
            return left.map(lambda factor: _times(factor, right.factor(ONE)))
        if not right.terms.keys() <= {H, ONE}:
            left, right = right, left
        if not (left.is_plain and right.is_plain):
            raise Unknown
        scaled = left.map(lambda factor: _times(factor, right.factor(ONE)))
        if right.terms.keys() <= {H, ONE}:
            return _added(scaled, Sum({}).with_terms({H: _times(right.factor(H), _at_label(left))}))
        if not right.terms.keys() <= {Z, ONE}:
            left, right = right, left
        return _times_logits(left, right)

    def _slope(self, x: Any) -> str | None:
        """The name of a variable in the derivative of a cap: "t" or "1 - t", or of newer JAX "1 - t^2"."""
        if among(x, self.logits.bounded):
            return "t"
        equation = self.makers.maker(x)
        if equation is not None and equation.primitive.name == "one_minus_square":
            return "1 - t^2" if among(equation.invars[0], self.logits.bounded) else None
        if equation is None or equation.primitive.name != "sub" or not among(equation.invars[1], self.logits.bounded):
            return None
        return "1 - t" if self.makers.constant(equation.invars[0]) == 1.0 else None

    def _sloped(self, made: Sum, slope: str) -> Sum:
        if slope in ("1 - t", "1 - t^2") and made.slope is None:
            return dataclasses.replace(made, slope=(slope, made))
        if slope == "t" and made.slope is not None and made.slope[0] == "1 - t":
            return dataclasses.replace(made, slope=("t - t^2", made.slope[1]))
        raise Unknown

    def _exponential(self, equation: Equation) -> Sum:
        made = self.sum_of(equation.invars[0])
        if not made.is_plain or made.factor(Z) != 1.0 or not made.terms.keys() <= {Z, ONE}:
            raise Unknown
        return Sum({P: Row((_plus(LSE, made.factor(ONE)),), jnp.exp)})

    def _selected(self, equation: Equation) -> Sum:
        mask, *cases = equation.invars
        if len(cases) != 2 or isinstance(mask, core.Literal):
            raise Unknown
        kept = kept_columns(self.makers, mask)
        if kept is not None:
            made, other = self.sum_of(cases[kept[1]]), self.sum_of(cases[not kept[1]])
            if self.logits.fill is None or kept[0] != self.logits.vocabulary or other.terms or made.factor(Z) != 0.0:
                raise Unknown
            inside = Row((PADDING,), jnp.logical_not)
            terms = made.terms | {H: _times(made.factor(H), inside)}
            return dataclasses.replace(made.with_terms(terms), is_masked=True)
        first, second = map(self.sum_of, cases)
        if not (first.is_plain and second.is_plain):
            raise Unknown
        hot = one_hot(self.makers, mask)
        if hot is not None:
            self._label(hot[0], clips=False)
            at_label = _plus(_at_label(second), _times(-1.0, _at_label(first)))
            return _added(first, Sum({}).with_terms({H: at_label}))
        row = self._as_row(mask)
        if not isinstance(row, Row):
            raise Unknown
        names = dict.fromkeys([*first.terms, *second.terms])
        return first.with_terms({x: Row((row, second.factor(x), first.factor(x)), _where) for x in names})

    def _put(self, equation: Equation) -> Sum:
        """Numbers that are added at the labels."""
        operand, labels, updates = equation.invars
        if not puts_along_last(equation):
            raise Unknown
        self._label(labels, clips=_mode(equation) in CLIPPED)
        row = self._as_row(updates)
        if row is None:
            raise Unknown
        return _added(self.sum_of(operand), Sum({}).with_terms({H: row}))

    def _grown(self, equation: Equation) -> Sum:
        """The derivative of a slice of the logits."""
        made, value = self.sum_of(equation.invars[0]), self.makers.constant(equation.invars[1])
        if made.grown >= len(self._slices) or value != 0.0 or made.is_turned:
            raise Unknown
        cut = self._slices[-1 - made.grown]
        (x,), params = cut.invars, cut.params
        steps = params["strides"] or (1,) * x.aval.ndim
        sizes, kept = x.aval.shape, cut.outvars[0].aval.shape
        ends = [
            (low, size - low - (count - 1) * step - 1, step - 1)
            for low, size, count, step in zip(params["start_indices"], sizes, kept, steps, strict=True)
        ]
        if equation.invars[0].aval.shape != kept or [tuple(map(int, one)) for one in _padding(equation)] != ends:
            raise Unknown
        return dataclasses.replace(made, grown=made.grown + 1)

    def _transpose(self, equation: Equation) -> Sum:
        made, axes = self.sum_of(equation.invars[0]), tuple(equation.params["permutation"])
        last = len(axes) - 1
        if made.is_turned or axes != (last, *range(last)):
            raise Unknown
        return dataclasses.replace(made, is_turned=True)

    # ---- what they end in

    def _reduced(self, equation: Equation) -> Factor:
        """A sum, the largest, or its column, over the vocabulary."""
        made, name = self.sum_of(equation.invars[0]), equation.primitive.name
        if not made.is_plain or (name == "argmax" and not is_over_last(equation)):
            raise Unknown
        if name != "reduce_sum":
            if not is_over_last(equation) or made.factor(Z) != 1.0 or not made.terms.keys() <= {Z, ONE}:
                raise Unknown
            if name == "argmax":
                return BEST
            self.largest.append(equation.outvars[0])
            return _plus(LSE, made.factor(ONE))
        if made.factor(Z) != 0.0 and self.logits.fill is not None:
            raise Unknown  # the sum is that of the padding
        inside = Row((OUTSIDE,), jnp.logical_not)
        columns = self.logits.vocabulary if made.is_masked else self._shape[-1]
        total = _plus(_times(made.factor(Z), TOTAL), _times(made.factor(ONE), float(columns)))
        masses = _plus(made.factor(P), _times(_times(-1.0, made.factor(L)), ENTROPY))
        return _plus(_plus(total, masses), _times(made.factor(H), inside))

    def _picked(self, equation: Equation) -> Factor:
        """The numbers that are picked at the labels."""
        operand, labels = equation.invars
        if not is_along_last(equation) or not among(operand, self._sums) or isinstance(labels, core.Literal):
            raise Unknown
        made, mode, fill = self._sums[operand], _mode(equation), equation.params["fill_value"]
        fill = jnp.nan if fill is None else float(fill)
        self._label(labels, clips=mode in CLIPPED)
        if made.is_masked:
            raise Unknown
        picked = _at_label(made)
        if picked is TARGET and (mode in CLIPPED or math.isnan(fill)):
            self._targets |= self.makers.views(equation.outvars[0])
        if mode in CLIPPED:
            return picked
        if mode != "FILL_OR_DROP":
            raise Unknown
        return Row((OUTSIDE, fill, picked), _where)

    def _compare(self, equation: Equation) -> None:
        """A comparison of logits with the label's, a cast of one, or their number."""
        name, inputs, (out,) = equation.primitive.name, equation.invars, equation.outvars
        if name == "reduce_sum" and is_over_last(equation) and self.rank in ("", self._compared[inputs[0]]):
            self.rank = self._compared[inputs[0]]
            self.rows[out] = RANK
            return
        if name in FLIPPED:
            if among(inputs[1], self._own):
                inputs, name = inputs[::-1], FLIPPED[name]
            is_of_targets = among(self.makers.repeated(inputs[1]), self._targets)
            if not is_of_targets or self.logits.fill is not None or self.sum_of(inputs[0]).terms != {Z: 1.0}:
                raise Unknown
            self._compared[out] = name
        elif name == "convert_element_type":
            self._compared[out] = self._compared[inputs[0]]
        else:
            raise Unknown
        self._push_readers(out)

    def _end(self, equation: Equation) -> None:
        (out,) = equation.outvars
        if equation.primitive.name == "reduce_sum":
            made = self.sum_of(equation.invars[0])
            rows = tuple(range(equation.invars[0].aval.ndim - 1))
            if tuple(equation.params["axes"]) != rows or self.logits.bias is None or made.is_turned:
                raise Unknown
            kind = "dbias"
        else:
            made, kind = self._end_of_product(equation)
        is_whole = made.grown == len(self._slices) or kind == "dbias"
        is_capped = made.slope is not None and made.slope[0] == "1 - t^2"
        if not is_whole or (made.slope is None) != (self.logits.cap is None) or (made.slope is not None) != is_capped:
            raise Unknown
        self._done.add(id(equation))
        self.ends.append((equation, kind, made))
        self._sums[out] = made  # it is not looked at again

    def _end_of_product(self, equation: Equation) -> tuple[Sum, str]:
        """The cotangent that a product is of, and whether it is one of the first factor's, dx, or the second's, dw."""
        wide = 0 if among(equation.invars[0], self._sums) else 1
        made = self._sums[equation.invars[wide]]
        kind = kind_of_end(self.makers, self.logits.dot, equation, wide, is_turned=made.is_turned)
        if kind is None:
            raise Unknown
        return made, kind


def _added(left: Sum, right: Sum, *, sign: float = 1.0) -> Sum:
    """left + sign right."""
    if left.slope is not None and right.slope is not None and sign == 1.0:
        kinds = {left.slope[0], right.slope[0]}
        if kinds == {"1 - t", "t - t^2"} and left.slope[1] is right.slope[1] and left.terms is right.terms:
            return dataclasses.replace(left, slope=("1 - t^2", left.slope[1]))
    if (left.grown, left.slope, left.is_turned) != (right.grown, right.slope, right.is_turned) or left.slope:
        raise Unknown
    names = dict.fromkeys([*left.terms, *right.terms])
    terms = {x: _plus(left.factor(x), _times(sign, right.factor(x))) for x in names}
    return dataclasses.replace(left.with_terms(terms), is_masked=left.is_masked and right.is_masked)


def _times_logits(made: Sum, logits: Sum) -> Sum:
    """The sum times one of logits and of a number of each token: z p = l + lse p."""
    if not (made.terms.keys() <= {P, H, ONE} and logits.terms.keys() <= {Z, ONE}):
        raise Unknown
    scaled = made.map(lambda factor: _times(factor, logits.factor(ONE)))
    of_z, of_p = logits.factor(Z), _times(logits.factor(Z), made.factor(P))
    terms = {Z: _times(of_z, made.factor(ONE)), L: of_p, P: _times(of_p, LSE)}
    return _added(scaled, Sum({}).with_terms(terms | {H: _times(made.factor(H), _times(of_z, TARGET))}))


def _at_label(made: Sum) -> Factor:
    """The number at a label that is in a column."""
    if not made.is_plain:
        raise Unknown
    logp = _plus(TARGET, _times(-1.0, LSE))
    of_p = _plus(made.factor(P), _times(made.factor(L), logp))
    p = 0.0 if of_p == 0.0 else Row((logp,), jnp.exp)
    logit = _plus(_times(made.factor(Z), TARGET), _times(of_p, p))
    return _plus(_plus(logit, made.factor(H)), made.factor(ONE))


def _where(mask: jax.Array, x: Any, y: Any) -> jax.Array:
    return jnp.where(mask, x, y)


def _mode(equation: Equation) -> str:
    mode = equation.params["mode"]
    return str(getattr(mode, "name", mode))


def _padding(equation: Equation) -> Iterable[Sequence[Any]]:
    padding: Iterable[Sequence[Any]] = equation.params["padding_config"]
    return padding
