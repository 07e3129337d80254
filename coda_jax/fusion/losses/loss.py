"""The loss of a language model: a log-softmax of a product that is read at labels alone is made in chunks of tokens.

    z = x w,   log(sum_v exp(z[v] - c)) + c,   z[label],   (z - c - log(sum_v exp(z[v] - c)))[label]

These are the log-sum-exp, the label's logit and the log-probability, whatever c is: JAX subtracts the largest logit.
Beside these sum_v p[v] log(p[v]) and sum_v p[v] z[v], of the probabilities p, may be read: the entropy says them.
The label is picked by a gather along the vocabulary, or by a sum with its one-hot array. `logits` says what may be done
to the product before. They become the statistics of `token_logprobs`; where a function of each token's is only summed
over all tokens, `linear_cross_entropy`, which forms the gradient in the forward pass. No array of all logits is made
then, forward or backward.

For a label that is not in the vocabulary a number is picked that has no gradient: 0 of a one-hot array, the fill value
of a gather, by default NaN. Beside it the log-sum-exp of logits keeps its gradient, and a log-probability, picked from
the difference, has none. In padding the padding's number is picked.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from coda_jax.fusion.dots import Dot, Equation, dots_in
from coda_jax.fusion.losses.logits import Logits, logits_of, result_of
from coda_jax.fusion.losses.row_gradients import RowGradient, row_gradients
from coda_jax.fusion.losses.row_losses import RowLoss, row_losses
from coda_jax.fusion.losses.token_sums import TokenSum, as_coefficients, token_sum
from coda_jax.fusion.makers import FLIPPED, Makers, among
from coda_jax.fusion.picks import CLIPPED, is_along_last, is_over_last, one_hot
from coda_jax.fusion.straight import at_line
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.evaluate import without_dead_code
from coda_jax.jaxprs.splice import Splice
from coda_jax.operators.head.any_label import statistics_of_any, sum_of_any
from coda_jax.operators.head.arrays import Statistics

LEAST_VOCABULARY = 1024  # with fewer columns an array of logits is no larger than others


@dataclasses.dataclass(frozen=True)
class _Pick:
    """The number that is picked at a label of each token.

    Attributes:
      labels: a variable of integers, one a token.
      outside: the number that is picked for labels that are in no column; None where they are clipped to the columns.
      is_of_logits: whether it is picked of logits, and not of log-probabilities.
      on, off: what is picked is multiplied with, and what all others are that are added to it, as where a label is
        smoothed; 1 and 0 without that.
    """

    labels: Any
    outside: float | None
    is_of_logits: bool
    on: float = 1.0
    off: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Total:
    """A sum over the vocabulary; `is_of_logits` as in `_Pick`."""

    is_of_logits: bool


@dataclasses.dataclass(frozen=True)
class _Mean:
    """The sum of logits or log-probabilities, each times its probability; `is_of_logits` as in `_Pick`."""

    is_of_logits: bool


@dataclasses.dataclass(frozen=True)
class _Best:
    """The column of the largest logit."""


@dataclasses.dataclass(frozen=True)
class _Rank:
    """The number of logits that compare so, as "gt", with the label's."""

    comparison: str


_Read = _Pick | _Total | _Mean | _Best | _Rank | None  # None for a log-sum-exp


@dataclasses.dataclass(frozen=True)
class _Site:
    """A loss.

    Attributes:
      logits: what it reads.
      reads: the variables that are numbers of each token, and what they are.
      sum: the sum over all tokens that alone reads them; None if there is none.
    """

    logits: Logits
    reads: dict[Any, _Read]
    sum: TokenSum | None = None

    @property
    def operator(self) -> str:
        """The name of what it becomes."""
        return "token_logprobs" if self.sum is None else "linear_cross_entropy"

    @property
    def products(self) -> Sequence[Equation]:
        """The products that it makes."""
        return [self.logits.product]

    @property
    def results(self) -> Sequence[Any]:
        """The variables that it makes."""
        return list(self.reads) if self.sum is None else [self.sum.result]

    def outputs(self, values: dict[Any, Any]) -> list[jax.Array]:
        """The values of these."""
        return _logprobs(self, values) if self.sum is None else _sum(self, values)

    @property
    def arguments(self) -> list[Any]:
        """The variables that it reads."""
        others = [] if self.sum is None else self.sum.arguments
        return [*self.logits.arguments, self.labels, *others]

    @property
    def labels(self) -> Any:
        """The variable of all picks' labels."""
        return next(one.labels for one in self.reads.values() if isinstance(one, _Pick))

    @property
    def has_total(self) -> bool:
        """Whether a sum over the vocabulary is read."""
        return any(isinstance(one, _Total) or (isinstance(one, _Pick) and one.off != 0) for one in self.reads.values())

    @property
    def has_entropy(self) -> bool:
        """Whether a mean by the probabilities is read."""
        return any(isinstance(one, _Mean) for one in self.reads.values())

    @property
    def has_best(self) -> bool:
        """Whether the largest logit is looked for."""
        return any(isinstance(one, _Best) for one in self.reads.values())

    @property
    def rank(self) -> str:
        """The comparison of the logits that are counted with the label's; empty if none are."""
        return next((one.comparison for one in self.reads.values() if isinstance(one, _Rank)), "")


_AnySite = _Site | RowLoss | RowGradient


def with_losses(
    closed: core.ClosedJaxpr, *, sums: bool, rules: bool
) -> tuple[core.ClosedJaxpr, list[tuple[Equation, str]]]:
    """A straight jaxpr whose losses are calls of the operators, where their logits are then read by nothing.

    Args:
      sums: whether a loss that is summed may form its gradients in the forward pass. In a loop each step would keep
        its own, as large as w.
      rules: whether a loss with a rule of its own is one of chunks: not in a chunk.

    Returns:
      The jaxpr, and the products that it lacks, each with the operator that it is part of.
    """
    makers = Makers(closed.jaxpr)
    sites = list[_AnySite]()
    candidates: list[_AnySite] = list(_sites(makers, sums))
    if rules:
        by_rules = row_losses(makers, LEAST_VOCABULARY, sums)
        candidates += [one for _, one in by_rules if isinstance(one, RowLoss)]
        candidates += row_gradients(makers, LEAST_VOCABULARY)
    for site in candidates:
        if any(site.logits.product is one.logits.product for one in sites):
            continue
        order = _order(makers, [*sites, site])
        if order is not None and not any(x is site.logits.product for x in order):
            sites.append(site)
    order = _order(makers, sites) if sites else None
    if order is None:
        return closed, []
    return _replaced(closed, order), [(product, site.operator) for site in sites for product in site.products]


def _order(makers: Makers, sites: Sequence[_AnySite]) -> list[Equation | _AnySite] | None:
    """The losses and the equations that are needed beside them, in an order; None if one waits for itself."""
    made = {x: site for site in sites for x in site.results}
    needed: dict[int, Any] = {}
    open_: list[Any] = [e for e in makers.equations if e.effects]
    open_ += [one for x in variables(makers.jaxpr.outvars) if (one := made.get(x, makers.maker(x))) is not None]
    waits: dict[int, set[int]] = {}
    while open_:
        one = open_.pop()
        if id(one) in needed:
            continue
        needed[id(one)] = one
        inputs = one.arguments if isinstance(one, _AnySite) else variables(one.invars)
        before = [maker for x in inputs if (maker := made.get(x, makers.maker(x))) is not None]
        waits[id(one)] = set(map(id, before))
        open_ += before
    effects = [id(e) for e in makers.equations if e.effects]
    for first, second in itertools.pairwise(effects):
        waits[second].add(first)
    return _sorted(needed, waits, {id(one): _place(makers, one) for one in needed.values()})


def _place(makers: Makers, one: Equation | _AnySite) -> int:
    """The place where an equation stands; a loss stands where its product does."""
    return makers.number(one.logits.product if isinstance(one, _AnySite) else one)


def _sorted(needed: dict[int, Any], waits: dict[int, set[int]], places: dict[int, int]) -> list[Any] | None:
    """All that is needed, each after those that it waits for, otherwise by its place."""
    users: dict[int, list[int]] = {}
    for one, before in waits.items():
        for other in before:
            users.setdefault(other, []).append(one)
    left = {one: len(before) for one, before in waits.items()}
    ready = [(places[one], one) for one, count in left.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, one = heapq.heappop(ready)
        order.append(needed[one])
        for user in users.get(one, ()):
            left[user] -= 1
            if not left[user]:
                heapq.heappush(ready, (places[user], user))
    return order if len(order) == len(needed) else None


def _replaced(closed: core.ClosedJaxpr, order: Sequence[Equation | _AnySite]) -> core.ClosedJaxpr:
    splice = Splice(closed)
    for one in order:
        if isinstance(one, _AnySite):
            splice.put(functools.partial(at_line, one.logits.product, one.outputs), one.arguments, one.results)
        else:
            splice.keep(one)
    return without_dead_code(splice.rewritten())


def arguments_of(
    logits: Logits, labels: Any, values: dict[Any, Any], *, is_clipped: bool
) -> tuple[tuple[jax.Array, ...], dict[str, Any], tuple[jax.Array, jax.Array]]:
    """The arguments x, w, labels of the head, its options, and which labels are in no column, and which in padding.

    Labels are clipped where the loss has them so.
    """
    x, w, options = logits.factors(values)
    labels = values[labels].reshape(x.shape[:-1])
    known = jnp.clip(labels, 0, logits.columns - 1)
    labels = known if is_clipped else labels
    return (x, w, labels), options, (labels != known, known >= logits.vocabulary)


def _arguments(site: _Site, values: dict[Any, Any]) -> Any:
    """`arguments_of` a loss."""
    is_clipped = any(isinstance(one, _Pick) and one.outside is None for one in site.reads.values())
    arrays, options, masks = arguments_of(site.logits, site.labels, values, is_clipped=is_clipped)
    options |= {"has_total": site.has_total, "has_entropy": site.has_entropy, "has_best": site.has_best}
    return arrays, options | {"rank": site.rank, "rounded_to": site.logits.dtype}, masks


def _numbers(site: _Site, stats: Statistics, is_outside: Any, is_padding: Any) -> list[jax.Array]:
    """The numbers of each token that the site's variables are."""
    fill = site.logits.fill
    target = stats.target if fill is None else jnp.where(is_padding, fill, stats.target)
    stats = stats._replace(target=target)
    return [_number(one, site.logits.vocabulary, stats, is_outside) for one in site.reads.values()]


def _number(one: _Read, vocabulary: Any, stats: Statistics, is_outside: jax.Array) -> jax.Array:
    if one is None:
        lse: jax.Array = stats.lse
        return lse
    if isinstance(one, _Best | _Rank):
        number: jax.Array = stats.best if isinstance(one, _Best) else stats.rank
        return number
    if isinstance(one, _Mean):
        mean: jax.Array = stats.lse - stats.entropy if one.is_of_logits else -stats.entropy
        return mean
    if isinstance(one, _Total):
        total: jax.Array = stats.total if one.is_of_logits else stats.total - vocabulary * stats.lse
        return total
    picked: jax.Array = stats.target if one.is_of_logits else stats.target - stats.lse
    picked = picked if one.outside is None else jnp.where(is_outside, one.outside, picked)
    if (one.on, one.off) == (1.0, 0.0):
        return picked
    others = one.off * _number(_Total(one.is_of_logits), vocabulary, stats, is_outside) if one.off else 0.0
    return (one.on - one.off) * picked + others


def _sum(site: _Site, values: dict[Any, Any]) -> list[jax.Array]:
    """The value of the sum over all tokens."""
    assert site.sum is not None
    arrays, options, masks = _arguments(site, values)
    masks = masks if site.logits.fill is not None else masks[:1]
    others = as_coefficients(site.sum.others, values, arrays[2].shape)
    weights = site.sum.weights(values)
    # So that float16 holds the gradients that are formed; all are scaled by it again.
    scale = jax.lax.stop_gradient(functools.reduce(jnp.maximum, map(jnp.abs, weights)))
    scale = jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1.0)
    weights = [x / scale for x in weights] if site.sum.combined else []
    function, ends = site.sum.value(list(site.reads)), (len(masks), len(masks) + len(weights))

    def value(stats: Statistics, *coefficients: jax.Array) -> jax.Array:
        is_outside, is_padding = [*(x != 0 for x in coefficients[: ends[0]]), None][:2]
        numbers = _numbers(site, stats, is_outside, is_padding)
        return function(numbers, coefficients[ends[0] : ends[1]], coefficients[ends[1] :])

    coefficients = [*(x.astype(jnp.float32) for x in masks), *weights, *others]
    total = sum_of_any(value, *arrays, *coefficients, **options)
    return [((scale * total) if site.sum.combined else total).astype(site.sum.result.aval.dtype)]


def _logprobs(site: _Site, values: dict[Any, Any]) -> list[jax.Array]:
    """The values of the numbers of each token."""
    arrays, options, (is_outside, is_padding) = _arguments(site, values)
    stats = statistics_of_any(*arrays, **options)
    numbers = _numbers(site, stats, is_outside, is_padding)
    types = (x.aval for x in site.reads)
    return [x.astype(aval.dtype).reshape(aval.shape) for x, aval in zip(numbers, types, strict=True)]


def heads(makers: Makers) -> Iterator[Logits]:
    """The logits that a loss may read: results of products that may be heads, and what becomes of them."""
    for equation in dots_in(makers.jaxpr).values():
        z, dot = result_of(makers, equation)
        if not isinstance(dot, Dot) or dot.transpose_a or dot.order_b is not None:
            continue
        if z.aval.ndim == dot.rows_a + 1 and z.aval.shape[-1] >= LEAST_VOCABULARY:
            yield from (one for one in logits_of(makers, equation, z, dot) if one.vocabulary >= LEAST_VOCABULARY)


def _sites(makers: Makers, sums: bool) -> Iterator[_Site]:
    for logits in heads(makers):
        reads = _reads(makers, logits)
        if any(isinstance(one, _Pick) for one in reads.values()):
            site = _Site(logits, reads)
            if site.has_total and logits.fill is not None:
                continue  # the sum is that of the padding
            is_summed = sums and not (site.has_best or site.rank) and may_sum(logits)
            yield dataclasses.replace(site, sum=token_sum(makers, list(reads)) if is_summed else None)


def may_sum(logits: Logits) -> bool:
    """True where the gradient of w, which a sum keeps, is no more than the logits; False for a symbolic size."""
    tokens, width = math.prod(logits.rows), math.prod(logits.dot.matrix_a[1:])
    return isinstance(tokens, int) and tokens >= width


def _reads(makers: Makers, logits: Logits) -> dict[Any, _Read]:
    """The numbers of each token that are made of these logits; those with another pick's labels are left."""
    logprobs, totals, probabilities = set[Any](), list[Any](), set[Any]()
    for difference in makers.read_by(logits.arrays, "sub"):
        left, shift = difference.invars
        if not among(left, logits.arrays) or isinstance(shift, core.Literal) or shift.aval.shape[-1:] != (1,):
            continue
        (shifted,) = difference.outvars
        for exponentials, sums in _sums_of_exponentials(makers, shifted):
            probabilities |= _with_columns(makers, "div", exponentials, sums)
            for logarithm in _logarithms(makers, sums):
                logprobs |= _with_columns(makers, "sub", {shifted}, logarithm)
                totals += _log_sum_exps(makers, shift, logarithm)
    for total in totals:
        logprobs |= _with_columns(makers, "sub", logits.arrays, makers.views(total))
    if not logprobs and not totals:
        return {}
    picks = dict(_picked_of(makers, logits.arrays, is_of_logits=True))
    picks |= _picked_of(makers, logprobs, is_of_logits=False)
    first = next(iter(picks.values()), None)
    same = {x: one for x, one in picks.items() if first and _are_of_one_label(makers, one, first)}
    of_columns = {x: _Total(True) for x in _sums(makers, logits.arrays)}
    of_columns |= {x: _Total(False) for x in _sums(makers, logprobs)}
    for exponential in makers.read_by(logprobs, "exp"):
        probabilities |= makers.casts(exponential.outvars[0])
    means = {x: _Mean(True) for x in _means(makers, logits.arrays, probabilities)}
    means |= {x: _Mean(False) for x in _means(makers, logprobs, probabilities)}
    best = [e for e in makers.read_by(logits.arrays | logprobs, "argmax") if is_over_last(e)]
    columns = {e.outvars[0]: _Best() for e in best}
    ranks = dict(_ranks(makers, logits, same))
    reads: dict[Any, _Read] = {**dict.fromkeys(totals), **same, **of_columns, **means, **columns, **ranks}
    return reads


def _are_of_one_label(makers: Makers, one: _Pick, other: _Pick) -> bool:
    """True for picks at the same labels, which are clipped to the columns in both or in neither."""
    (label, _), (other_label, _) = makers.root(one.labels), makers.root(other.labels)
    return makers.are_alike(label, other_label) and (one.outside is None) == (other.outside is None)


def _ranks(makers: Makers, logits: Logits, picks: dict[Any, _Pick]) -> Iterator[tuple[Any, _Rank]]:
    """Variables that are numbers of the logits that compare in one way with the label's, which is none outside."""
    own = [x for x, one in picks.items() if one.is_of_logits and (one.on, one.off) == (1.0, 0.0)]
    own = [x for x in own if picks[x].outside is None or math.isnan(picks[x].outside or 0.0)]
    targets, first = set[Any]().union(*map(makers.views, own)), ""
    for equation in makers.read_by(logits.arrays, *FLIPPED) if targets and logits.fill is None else ():
        (left, right), name = equation.invars, equation.primitive.name
        if among(right, logits.arrays):
            left, right, name = right, left, FLIPPED[name]
        first = first or name
        if name == first and among(left, logits.arrays) and among(makers.repeated(right), targets):
            masks = {x for e in makers.read_by(equation.outvars, "convert_element_type") for x in e.outvars}
            yield from ((x, _Rank(name)) for x in _sums(makers, masks))


def _sums(makers: Makers, arrays: Collection[Any]) -> list[Any]:
    """The sums of the arrays over their last axis."""
    return [e.outvars[0] for e in makers.read_by(arrays, "reduce_sum") if is_over_last(e)]


def _means(makers: Makers, arrays: Collection[Any], probabilities: Collection[Any]) -> Iterator[Any]:
    """The sums over the last axis of the arrays times probabilities."""
    for product in makers.read_by(arrays, "mul"):
        others = [x for x in product.invars if not among(x, arrays)]
        if len(others) == 1 and among(others[0], probabilities):
            yield from _sums(makers, makers.casts(product.outvars[0]))


def _sums_of_exponentials(makers: Makers, shifted: Any) -> Iterator[tuple[set[Any], set[Any]]]:
    """The exponentials, and their sums over the last axis."""
    for exponential in makers.read_by({shifted}, "exp"):
        exponentials = makers.casts(exponential.outvars[0])
        for total in makers.read_by(exponentials, "reduce_sum"):
            if is_over_last(total):
                yield exponentials, makers.views(total.outvars[0])


def _logarithms(makers: Makers, sums: set[Any]) -> Iterator[set[Any]]:
    positive = set(sums)
    for absolute in makers.read_by(sums, "abs"):
        positive |= makers.views(absolute.outvars[0])
    for logarithm in makers.read_by(positive, "log"):
        yield makers.views(logarithm.outvars[0])


def _with_columns(makers: Makers, operation: str, arrays: Collection[Any], columns: set[Any]) -> set[Any]:
    """The results of an operation on the arrays and a column behind them, and what they are cast to."""
    found = set[Any]()
    for equation in makers.read_by(arrays, operation):
        left, right = equation.invars
        if among(left, arrays) and among(right, columns) and right.aval.shape[-1:] == (1,):
            found |= makers.casts(equation.outvars[0])
    return found


def _log_sum_exps(makers: Makers, shift: Any, logarithm: set[Any]) -> list[Any]:
    """logarithm + shift."""
    found = []
    for total in makers.read_by(logarithm, "add"):
        others = [x for x in total.invars if not among(x, logarithm)]
        if len(others) == 1 and makers.root(others[0]) == makers.root(shift):
            found += total.outvars
    return found


def _picked_of(makers: Makers, arrays: Collection[Any], *, is_of_logits: bool) -> Iterator[tuple[Any, _Pick]]:
    """Variables that are one of the arrays at labels along its last axis."""
    for gather in makers.read_by(arrays, "gather"):
        operand, indices = gather.invars
        if among(operand, arrays) and is_along_last(gather) and not isinstance(indices, core.Literal):
            mode = getattr(gather.params["mode"], "name", str(gather.params["mode"]))
            fill = gather.params["fill_value"]
            if mode in CLIPPED:
                yield gather.outvars[0], _Pick(indices, None, is_of_logits)
            elif mode == "FILL_OR_DROP":
                yield gather.outvars[0], _Pick(indices, jnp.nan if fill is None else float(fill), is_of_logits)
    for product in makers.read_by(arrays, "mul"):
        others = [x for x in product.invars if not among(x, arrays)]
        for total in makers.read_by(makers.casts(product.outvars[0]), "reduce_sum") if len(others) == 1 else ():
            hot = one_hot(makers, others[0])
            if hot is not None and is_over_last(total):
                labels, on, off = hot
                yield total.outvars[0], _Pick(labels, 0.0, is_of_logits, on, off)


@dataclasses.dataclass(frozen=True)
class Seen:
    """The parts that are seen of a product's loss.

    Attributes:
      has_numbers: whether a log-sum-exp or a log-probability is.
      has_label: whether a label's logit is.
      is_smoothed: whether a sum over columns is that of a padded vocabulary.
      needed: the equations that are needed beside it; None if one waits for the loss itself.
    """

    has_numbers: bool
    has_label: bool
    is_smoothed: bool
    needed: list[Equation] | None


def seen_of(makers: Makers, logits: Sequence[Logits]) -> Seen:
    """The parts that are seen of a loss, by the logits that a product becomes step by step."""
    sites = [_Site(one, reads) for one in logits if (reads := _reads(makers, one))]
    with_label = [site for site in sites if any(isinstance(one, _Pick) for one in site.reads.values())]
    is_smoothed = any(site.has_total and site.logits.fill is not None for site in with_label)
    order = _order(makers, with_label[-1:]) if with_label else None
    needed = None if order is None else [one for one in order if not isinstance(one, _AnySite)]
    return Seen(bool(sites), bool(with_label), is_smoothed, needed)
