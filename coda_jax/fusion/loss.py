"""The loss of a language model: a log-softmax of a product that is read at labels alone is made in chunks of tokens.

    z = x w,   log(sum_v exp(z[v] - c)) + c - z[label],   or (z - c - log(sum_v exp(z[v] - c)))[label]

Both are the token's log-probability, whatever c is: JAX subtracts the largest logit. The label is picked by a gather
along the vocabulary, or by a sum with its one-hot array. It becomes `token_logprobs`; where it is only summed over all
tokens, times weights or under a mask, `linear_cross_entropy`, which forms the gradient in the forward pass. No array of
all logits is made then, forward or backward.

For a label that is not in the vocabulary a number is picked that has no gradient: 0 of a one-hot array, the fill value
of a gather, by default NaN. Beside it the first form keeps the log-sum-exp, with its gradient, and the second one,
picked from the difference, keeps nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from coda_jax.epilogue.dtypes import FLOATS
from coda_jax.fusion.dots import Dot, Equation, dot_of, dots_in, variables
from coda_jax.fusion.straight import applied, at_line
from coda_jax.jaxprs.evaluate import read
from coda_jax.operators.head.any_label import logprobs_of_any, loss_sum_of_any

_LEAST_VOCABULARY = 1024  # with fewer columns an array of logits is no larger than others
_VIEWS = frozenset({"broadcast_in_dim", "reshape", "squeeze", "copy", "convert_element_type"})
_CLIPPED = frozenset({"CLIP", "PROMISE_IN_BOUNDS"})  # modes of a gather; of the latter JAX defines no result outside


@dataclasses.dataclass(frozen=True)
class _Found:
    """A loss without its product.

    Attributes:
      result: the variable that is the log-probability, or its negative.
      sign: 1 or -1.
      labels: a variable of integers, one a token.
      outside: the number that is picked for labels that are not in the vocabulary; None where they are clipped to it.
      is_of_logits: whether it is picked of logits, beside their log-sum-exp, and not of log-probabilities.
    """

    result: Any
    sign: int
    labels: Any
    outside: float | None
    is_of_logits: bool


@dataclasses.dataclass(frozen=True)
class _Site:
    """A loss.

    Attributes:
      found: the log-probability.
      result: its variable; or that of the sum over all tokens.
      sign: 1, or -1 where the result is its negative.
      dot: the product.
      product: its equation.
      factors: of each token's loss in the sum, variables and numbers; None where it is not summed.
      masks: variables, and which of their values keeps a token; the others count as zero.
    """

    found: _Found
    result: Any
    sign: int
    dot: Dot
    product: Equation
    factors: tuple[Any, ...] | None = None
    masks: tuple[tuple[Any, bool], ...] = ()

    @property
    def operator(self) -> str:
        """The name of what it becomes."""
        return "token_logprobs" if self.factors is None else "linear_cross_entropy"


def with_losses(closed: core.ClosedJaxpr, *, sums: bool) -> tuple[core.ClosedJaxpr, list[tuple[Equation, str]]]:
    """A straight jaxpr whose losses are calls of the operators, where their logits are then read by nothing.

    Args:
      sums: whether a loss that is summed may form its gradients in the forward pass. In a loop each step would keep
        its own, as large as w.

    Returns:
      The jaxpr, and the products that it lacks, each with the operator that it is part of.
    """
    sites = list(_Sites(closed.jaxpr, sums).found())
    while sites:
        changed = _replaced(closed, {site.result: site for site in sites})
        if len(dots_in(changed.jaxpr)) == len(dots_in(closed.jaxpr)) - len(sites):
            return changed, [(site.product, site.operator) for site in sites]
        sites.pop()  # something else reads its logits, or those of another
    return closed, []


def _replaced(closed: core.ClosedJaxpr, sites: dict[Any, _Site]) -> core.ClosedJaxpr:
    def function(*arrays: Any) -> list[Any]:
        values = dict(zip(closed.jaxpr.invars, arrays, strict=True))
        for equation in closed.jaxpr.eqns:
            inputs = [read(values, x) for x in equation.invars]
            site = sites.get(equation.outvars[0]) if equation.outvars else None
            if site is None:
                outputs: Sequence[Any] = applied(equation, inputs)
            else:
                outputs = [at_line(equation, _logprob if site.factors is None else _sum, site, values)]
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(values, x) for x in closed.jaxpr.outvars]

    whole = jax.make_jaxpr(function)(*closed.in_avals)
    needed, _ = partial_eval.dce_jaxpr(whole.jaxpr, [True] * len(whole.out_avals), instantiate=True)
    return core.ClosedJaxpr(needed, whole.consts)


def _arguments(site: _Site, values: dict[Any, Any]) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The product's factors; the labels, clipped where the loss has them so; which are not in the vocabulary."""
    dot = site.dot
    x, w = values[dot.a], values[dot.b]
    rows, vocabulary = x.shape[: dot.rows_a], w.shape[0] if dot.transpose_b else w.shape[-1]
    w = w.reshape(vocabulary, -1) if dot.transpose_b else w.reshape(-1, vocabulary)
    labels = values[site.found.labels].reshape(rows)
    known = jnp.clip(labels, 0, vocabulary - 1)
    labels = known if site.found.outside is None else labels
    return x.reshape(*rows, -1), w, labels, labels != known


def _sum(site: _Site, values: dict[Any, Any]) -> jax.Array:
    """The value of the site's variable, the weighted sum of all tokens' losses."""
    assert site.factors is not None
    x, w, labels, is_outside = _arguments(site, values)
    weights = jnp.ones(labels.shape, jnp.float32)
    for factor in site.factors:
        given = factor.val if isinstance(factor, core.Literal) else values[factor]
        weights = weights * (given if jnp.ndim(given) == 0 else given.reshape(labels.shape))
    counts = jnp.ones(labels.shape, bool)
    for mask, keeps in site.masks:
        counts &= values[mask].reshape(labels.shape) == keeps
    weights = jnp.where(counts, weights, 0.0)
    of_lse = weights if site.found.is_of_logits else jnp.where(is_outside, 0.0, weights)
    total = loss_sum_of_any(x, w, labels, of_lse, transpose_w=site.dot.transpose_b)
    if site.found.outside:
        total -= jnp.sum(jnp.where(is_outside & counts, site.found.outside, 0.0) * weights)
    return (-site.sign * total).astype(site.result.aval.dtype)


def _logprob(site: _Site, values: dict[Any, Any]) -> jax.Array:
    """The value of the site's variable."""
    x, w, labels, is_outside = _arguments(site, values)
    logprob, outside = logprobs_of_any(x, w, labels, transpose_w=site.dot.transpose_b), site.found.outside
    if outside is not None and not site.found.is_of_logits:
        logprob = jnp.where(is_outside, outside, logprob)
    elif outside:
        logprob += jnp.where(is_outside, outside, 0.0)
    return (site.sign * logprob).astype(site.result.aval.dtype).reshape(site.result.aval.shape)


class _Sites:
    """The losses of a jaxpr."""

    def __init__(self, jaxpr: core.Jaxpr, sums: bool):
        equations: Sequence[Equation] = jaxpr.eqns
        self._jaxpr, self._sums = jaxpr, sums
        self._makers = {x: equation for equation in equations for x in equation.outvars}
        self._numbers = {id(equation): i for i, equation in enumerate(equations)}
        self._readers: dict[Any, list[Equation]] = {}
        for equation in equations:
            for x in variables(equation.invars):
                self._readers.setdefault(x, []).append(equation)

    def found(self) -> Iterator[_Site]:
        for equation in dots_in(self._jaxpr).values():
            dot = dot_of(equation)
            if not isinstance(dot, Dot) or dot.transpose_a or dot.order_b is not None:
                continue
            (z,) = equation.outvars
            if z.aval.ndim == dot.rows_a + 1 and z.aval.shape[-1] >= _LEAST_VOCABULARY:
                for found in self._of(z):
                    site = _Site(found, found.result, found.sign, dot, equation)
                    tokens, width = z.aval.size // z.aval.shape[-1], dot.a.aval.size * z.aval.shape[-1] // z.aval.size
                    is_less = isinstance(tokens, int) and tokens >= width  # dw than logits; False for a symbolic size
                    yield self._summed(site) if self._sums and is_less else site

    def _of(self, z: Any) -> Iterator[_Found]:
        """The losses of these logits."""
        logits = self._casts(z)
        for difference in self._read_by(logits, "sub"):
            left, shift = difference.invars
            if left not in logits or isinstance(shift, core.Literal) or shift.aval.shape[-1:] != (1,):
                continue
            (shifted,) = difference.outvars
            for sums in self._sums_of_exponentials(shifted):
                for logarithm in self._logarithms(sums):
                    yield from self._of_log_softmax(shifted, logarithm)
                    yield from self._of_log_sum_exp(logits, shift, logarithm)

    def _summed(self, site: _Site) -> _Site:
        """The sum over all tokens, times weights and under masks, where the loss is read by that alone."""
        x, sign, factors, masks = site.result, site.sign, list[Any](), list[tuple[Any, bool]]()
        while len(readers := self._readers.get(x, [])) == 1:
            (equation,) = readers
            name, (out, *others) = equation.primitive.name, equation.outvars
            beside = [y for y in equation.invars if y is not x]
            if others or out.aval.dtype.name not in FLOATS:
                break
            if name == "reduce_sum" and not out.aval.shape:
                return dataclasses.replace(site, result=out, sign=sign, factors=tuple(factors), masks=tuple(masks))
            if out.aval.size != x.aval.size or any(y.aval.size not in (1, x.aval.size) for y in beside):
                break
            if name == "neg":
                sign = -sign
            elif name == "mul" and len(beside) == 1:
                factors += beside
            elif name == "select_n" and self._masks(equation, x):
                masks.append((equation.invars[0], equation.invars[2] is x))
            elif name not in _VIEWS:
                break
            x = out
        return site

    def _masks(self, select: Equation, x: Any) -> bool:
        """True for a choice between x and zeros, by an array of bools."""
        mask, *cases = select.invars
        (other,) = [y for y in cases if y is not x] or (None,)
        is_array = not isinstance(mask, core.Literal) and mask.aval.dtype == bool and mask.aval.size == x.aval.size
        return len(cases) == 2 and is_array and other is not None and self._is_zero(other)

    def _is_zero(self, x: Any) -> bool:
        while not isinstance(x, core.Literal):
            if x not in self._makers or self._makers[x].primitive.name not in _VIEWS:
                return False
            x = self._makers[x].invars[0]
        return not np.any(x.val)

    def _casts(self, x: Any) -> set[Any]:
        """The variable and what it is cast to, among floats of an epilogue's."""
        found, open_ = {x}, [x]
        while open_:
            for equation in self._readers.get(open_.pop(), []):
                if equation.primitive.name == "convert_element_type" and equation.outvars[0].aval.dtype.name in FLOATS:
                    found.add(equation.outvars[0])
                    open_.append(equation.outvars[0])
        return found

    def _read_by(self, arrays: set[Any], *names: str) -> list[Equation]:
        """The equations of these names that read one of the variables, each once, in order."""
        read_by = {id(e): e for x in arrays for e in self._readers.get(x, []) if e.primitive.name in names}
        return [read_by[one] for one in sorted(read_by, key=lambda one: self._numbers[one])]

    def _views(self, x: Any) -> set[Any]:
        """The variable, and what is the same in another shape or by another name."""
        found, open_ = {x}, [x]
        while open_:
            for equation in self._readers.get(open_.pop(), []):
                if equation.primitive.name not in _VIEWS and not self._takes_the_first(equation):
                    continue
                (out,) = equation.outvars
                if out not in found and out.aval.size == x.aval.size and out.aval.dtype.name in FLOATS:
                    found.add(out)
                    open_.append(out)
        return found

    def _sums_of_exponentials(self, shifted: Any) -> Iterator[set[Any]]:
        for exponential in self._read_by({shifted}, "exp"):
            for total in self._read_by(set(exponential.outvars), "reduce_sum"):
                if tuple(total.params["axes"]) == (shifted.aval.ndim - 1,):
                    yield self._views(total.outvars[0])

    def _logarithms(self, sums: set[Any]) -> Iterator[set[Any]]:
        positive = set(sums)
        for absolute in self._read_by(sums, "abs"):
            positive |= self._views(absolute.outvars[0])
        for logarithm in self._read_by(positive, "log"):
            yield self._views(logarithm.outvars[0])

    def _of_log_softmax(self, shifted: Any, logarithm: set[Any]) -> Iterator[_Found]:
        """shifted - logarithm, picked at the labels."""
        for difference in self._read_by({shifted}, "sub"):
            if difference.invars[0] is shifted and difference.invars[1] in logarithm:
                for picked, labels, outside in self._picked(set(difference.outvars)):
                    yield _Found(picked, 1, labels, outside, is_of_logits=False)

    def _of_log_sum_exp(self, logits: set[Any], shift: Any, logarithm: set[Any]) -> Iterator[_Found]:
        """logarithm + shift - the logits picked at the labels, or its negative."""
        totals: set[Any] = set()
        for total in self._read_by(logarithm, "add"):
            if {self._root(x) for x in total.invars if x not in logarithm} == {self._root(shift)}:
                totals |= self._views(total.outvars[0])
        for picked, labels, outside in self._picked(logits):
            views = self._views(picked)
            for difference in self._read_by(totals, "sub"):
                left, right = difference.invars
                if (left in totals and right in views) or (left in views and right in totals):
                    sign = -1 if left in totals else 1
                    yield _Found(difference.outvars[0], sign, labels, outside, is_of_logits=True)

    def _root(self, x: Any) -> tuple[Any, bool]:
        """The variable that one is a view of, and whether its gradient is stopped, as of JAX's largest logit."""
        passed, is_stopped = _VIEWS | {"stop_gradient"}, False
        while not isinstance(x, core.Literal) and x in self._makers and self._makers[x].primitive.name in passed:
            source: Any = self._makers[x].invars[0]
            if isinstance(source, core.Literal) or source.aval.size != x.aval.size:
                break
            is_stopped |= self._makers[x].primitive.name == "stop_gradient"
            x = source
        return x, is_stopped

    def _picked(self, arrays: set[Any]) -> Iterator[tuple[Any, Any, float | None]]:
        """Variables that are one of the arrays at labels along its last axis; the labels; `_Found.outside`."""
        for gather in self._read_by(arrays, "gather"):
            operand, indices = gather.invars
            if operand in arrays and _is_along_last(gather) and not isinstance(indices, core.Literal):
                mode = getattr(gather.params["mode"], "name", str(gather.params["mode"]))
                fill = gather.params["fill_value"]
                if mode in _CLIPPED:
                    yield gather.outvars[0], indices, None
                elif mode == "FILL_OR_DROP":
                    yield gather.outvars[0], indices, jnp.nan if fill is None else float(fill)
        for product in self._read_by(arrays, "mul"):
            others = [x for x in product.invars if x not in arrays]
            for total in self._read_by(set(product.outvars), "reduce_sum") if len(others) == 1 else ():
                labels = self._labels_of_one_hot(others[0])
                if labels is not None and tuple(total.params["axes"]) == (product.outvars[0].aval.ndim - 1,):
                    yield total.outvars[0], labels, 0.0

    def _labels_of_one_hot(self, x: Any) -> Any:
        """The labels of which a variable is the one-hot array along its last axis; None if it is none."""
        if isinstance(x, core.Literal) or x not in self._makers:
            return None
        maker = self._makers[x]
        if maker.primitive.name == "convert_element_type":
            return self._labels_of_one_hot(maker.invars[0])
        if maker.primitive.name != "eq":
            return None
        counts = [y for y in maker.invars if self._counts_along_last(y, x.aval.ndim)]
        labels = [y for y in variables(maker.invars) if y.aval.shape[-1:] == (1,)]
        same_rows = labels and labels[0].aval.shape[:-1] == x.aval.shape[:-1]
        return labels[0] if len(counts) == 1 and same_rows else None

    def _counts_along_last(self, x: Any, rank: int) -> bool:
        """True for integers 0, 1, 2 ... along the last axis, the same for all others."""
        maker = None if isinstance(x, core.Literal) else self._makers.get(x)
        if maker is None or x.aval.ndim != rank:
            return False
        dtype = x.aval.dtype  # of few bits it counts from the start again
        if not jnp.issubdtype(dtype, jnp.integer) or x.aval.shape[-1] - 1 > jnp.iinfo(dtype).max:
            return False
        if maker.primitive.name == "broadcast_in_dim" and not isinstance(maker.invars[0], core.Literal):
            source = self._makers.get(maker.invars[0])
            is_last = tuple(maker.params["broadcast_dimensions"]) == (rank - 1,)
            return source is not None and source.primitive.name == "iota" and is_last
        return maker.primitive.name == "iota" and maker.params["dimension"] == rank - 1

    def _takes_the_first(self, equation: Equation) -> bool:
        """True for x[..., 0] of an x whose last axis has one element."""
        if equation.primitive.name != "gather":
            return False
        x, sizes = equation.invars[0], equation.params["slice_sizes"]
        numbers = equation.params["dimension_numbers"]
        is_first = tuple(numbers.collapsed_slice_dims) == (x.aval.ndim - 1,) == tuple(numbers.start_index_map)
        return is_first and x.aval.shape[-1] == 1 and tuple(sizes) == tuple(x.aval.shape)


def _is_along_last(gather: Equation) -> bool:
    """True for one element of each row along the last axis."""
    x, numbers = gather.invars[0].aval, gather.params["dimension_numbers"]
    last, rows = x.ndim - 1, tuple(range(x.ndim - 1))
    return (
        tuple(numbers.operand_batching_dims) == rows == tuple(numbers.start_indices_batching_dims)
        and tuple(numbers.collapsed_slice_dims) == (last,) == tuple(numbers.start_index_map)
        and all(size == 1 for size in gather.params["slice_sizes"])
        and gather.outvars[0].aval.size * x.shape[last] == x.size
    )
