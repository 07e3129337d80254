"""Losses over a vocabulary whose logits stay whole, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jax.extend import core

from coda_jax.epilogue.values import same_size
from coda_jax.fusion.custom import CUSTOM_VJPS
from coda_jax.fusion.dots import Dot, Equation, dots_in, is_derivative
from coda_jax.fusion.losses.logits import logits_of, made_of, result_of
from coda_jax.fusion.losses.loss import LEAST_VOCABULARY, seen_of
from coda_jax.fusion.losses.row_factors import with_factors_behind
from coda_jax.fusion.losses.row_losses import row_losses
from coda_jax.fusion.losses.row_views import with_rows_in_front
from coda_jax.fusion.losses.stops import with_stops_behind
from coda_jax.fusion.makers import Makers, among
from coda_jax.fusion.picks import is_over_last
from coda_jax.fusion.straight import line_of
from coda_jax.jaxprs.def_use import variables

_OF_A_LOG_SUM_EXP = frozenset({"sub", "exp", "reduce_max", "reduce_sum", "stop_gradient"})


@dataclasses.dataclass(frozen=True)
class WholeLogits:
    """Logits that a loss reads, and that are an array.

    Attributes:
      line: of the user's code, that of the product.
      bytes: of the array, in the widest dtype that they are cast to.
      reason: why they are not made in chunks.
    """

    line: str
    bytes: int
    reason: str


def with_losses_in_sight(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """A straight jaxpr whose losses stand as they are looked for: what is in their way is moved."""
    in_front = with_rows_in_front(with_stops_behind(closed, LEAST_VOCABULARY), LEAST_VOCABULARY)
    return with_factors_behind(in_front, LEAST_VOCABULARY)


def whole_logits(
    closed: core.ClosedJaxpr, taken: Sequence[Equation], *, is_exact: bool, chunk_losses: bool
) -> list[WholeLogits]:
    """The logits in a straight jaxpr that stay whole.

    Args:
      closed: a straight one, with its losses as they were written.
      taken: the products whose losses are made in chunks.
      is_exact, chunk_losses: as in `Options`.
    """
    found, makers = list[WholeLogits](), Makers(closed.jaxpr)
    for equation, z, dot, wide in logits_in(makers):
        if not any(equation is one for one in taken):
            size = max(x.aval.size * x.aval.dtype.itemsize for x in makers.casts(z))
            reason = "exact=True" if is_exact else "" if chunk_losses else "chunk_losses=False"
            found.append(WholeLogits(line_of(equation), size, reason or _reason(makers, equation, z, dot, wide)))
    return found


def logits_in(makers: Makers) -> Iterator[tuple[Equation, Any, Dot | str, Collection[Any]]]:
    """The products that are logits of a loss: the equation, its result, the product, and what has the result's columns.

    Args:
      makers: of a straight jaxpr, with its losses as they were written.
    """
    for equation in dots_in(makers.jaxpr).values():
        z, dot = result_of(makers, equation)
        if z.aval.ndim < 2 or z.aval.shape[-1] < LEAST_VOCABULARY:
            continue
        wide = made_of(makers, z)
        if _are_of_a_loss(makers, z, wide):
            yield equation, z, dot, wide


def _are_of_a_loss(makers: Makers, z: Any, wide: Collection[Any]) -> bool:
    """True if the logarithm of a sum of exponentials is made of them, or a number of each token by a custom_vjp."""
    sums = [e for e in makers.read_by(wide, "reduce_sum") if is_over_last(e)]
    sums = [e for e in sums if any(_is_exponential(makers, x) for x in e.invars)]
    if any(makers.read_by(_absolute(makers, e.outvars[0]), "log") for e in sums):
        return True
    tokens = z.aval.size // z.aval.shape[-1]
    rules = [e for e in makers.read_by(wide, *CUSTOM_VJPS) if any(same_size(x.aval.size, tokens) for x in e.outvars)]
    return bool(rules)


def _is_exponential(makers: Makers, x: Any) -> bool:
    while (maker := makers.maker(x)) is not None and maker.primitive.name == "convert_element_type":
        x = maker.invars[0]
    return maker is not None and maker.primitive.name == "exp"


def _absolute(makers: Makers, total: Any) -> set[Any]:
    """A sum, and its magnitude."""
    found = makers.views(total)
    for equation in makers.read_by(found, "abs"):
        found |= makers.views(equation.outvars[0])
    return found


def _reason(makers: Makers, equation: Equation, z: Any, dot: Dot | str, wide: Collection[Any]) -> str:
    """Why logits stay whole."""
    if is_derivative(makers.jaxpr):
        return "the function holds the gradient of the loss; fuse the loss itself"
    if isinstance(dot, str):
        return dot
    if dot.transpose_a or dot.order_b is not None:
        return "a factor of their product would be transposed"
    if z.aval.ndim != dot.rows_a + 1:
        return "their columns are several axes"
    reasons = [one for product, one in row_losses(makers, LEAST_VOCABULARY, False) if product is equation]
    if reasons and isinstance(reasons[-1], str):
        return reasons[-1]
    logits = list(logits_of(makers, equation, z, dot))
    seen = seen_of(makers, logits)
    if not seen.has_numbers:
        return _what_stands_between(makers, set().union(*(one.arrays for one in logits)), wide)
    if not seen.has_label:
        return "no label's logit is picked of them"
    if seen.is_smoothed:
        return "labels are smoothed over a padded vocabulary"
    if seen.needed is None:
        return "what is read beside them depends on their own loss"
    return _other_reader(makers, seen.needed, wide)


def _what_stands_between(makers: Makers, arrays: Collection[Any], wide: Collection[Any]) -> str:
    """The first operation on logits that is none of a log-sum-exp's."""
    for equation in makers.equations:
        name = equation.primitive.name
        is_other = name not in _OF_A_LOG_SUM_EXP and any(among(x, arrays) for x in equation.invars)
        if is_other and any(x in wide and x not in arrays for x in equation.outvars):
            return f"{name} stands between their product and the exponentials: {line_of(equation)}"
    return "no label's logit is picked of their log-probabilities"


def _other_reader(makers: Makers, needed: Sequence[Equation], wide: Collection[Any]) -> str:
    """The first operation beside the loss that reads logits, and makes no other array of their columns."""
    if any(x in wide for x in variables(makers.jaxpr.outvars)):
        return "they are a result, or what is made of them with their columns is"
    reads = [e for e in needed if any(among(x, wide) for x in e.invars) and not any(x in wide for x in e.outvars)]
    others = [e for e in reads if not _is_of_a_log_sum_exp(makers, e)]
    for equation in others or reads:
        return f"{equation.primitive.name} reads them too: {line_of(equation)}"
    return "they are read beside the loss"


def _is_of_a_log_sum_exp(makers: Makers, equation: Equation) -> bool:
    """True for a sum of exponentials, and for the largest of what these are made of."""
    (x, *_), name = equation.invars, equation.primitive.name
    if name == "reduce_max":
        shifted = makers.read_by([x], "sub")
        return any(makers.read_by(e.outvars, "exp") for e in shifted)
    return name == "reduce_sum" and _is_exponential(makers, x)
