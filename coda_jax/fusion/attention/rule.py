"""Attention in a straight jaxpr: its sites are found, and become calls of `coda.attention`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from coda_jax.fusion.attention import cudnn
from coda_jax.fusion.attention.axes import Unlike, moved
from coda_jax.fusion.attention.call import Call, call_of
from coda_jax.fusion.attention.gradient import Equations, Gradients, gradients_of
from coda_jax.fusion.attention.meanings import Search, Site
from coda_jax.fusion.attention.trees import Trees
from coda_jax.fusion.dots import Equation, dots_in
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.straight import at_line, line_of, straight
from coda_jax.jaxprs.def_use import variables
from coda_jax.jaxprs.splice import Splice


@dataclasses.dataclass(frozen=True, eq=False)
class Attentions:
    """The attention in a piece.

    Attributes:
      taken: the products that it lacks, each with the operator that it is part of.
      left: products of scores, and calls of cuDNN's attention, that stay, and why.
    """

    taken: Sequence[tuple[Equation, str]] = ()
    left: Sequence[tuple[Equation, str]] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class _Replaced:
    """A site that is replaced, with its gradients where the jaxpr has these too."""

    call: Call
    gradients: Gradients | None = None

    @property
    def products(self) -> list[Equation]:
        """The products that it makes."""
        return [*self.call.products, *(() if self.gradients is None else self.gradients.products)]

    @property
    def results(self) -> list[Any]:
        """The variables that it makes."""
        return [self.call.site.result, *(() if self.gradients is None else self.gradients.variables)]


def with_attention(
    closed: core.ClosedJaxpr, constants: Mapping[Any, Any], *, implementation: str
) -> tuple[core.ClosedJaxpr, Attentions]:
    """A straight jaxpr in which attention is a call of `coda.attention`, where nothing else reads its probabilities.

    Calls of cuDNN's attention are such attention too.

    Args:
      closed: a straight jaxpr.
      constants: the values of those of its variables that are known.
      implementation: as in `gemm`.
    """
    calls = cudnn.calls_in(closed.jaxpr)
    left, reasons = set[int](), dict[int | None, str]()
    while len(left) < len(calls):
        written_out = cudnn.with_calls_written_out(closed, calls, left)
        made, attentions = _with_attention(written_out, _known(written_out, closed, constants), implementation)
        taken = {cudnn.number_of(product) for product, _ in attentions.taken}
        if taken >= set(range(len(calls))) - left:
            break
        reasons |= {cudnn.number_of(equation): reason for equation, reason in attentions.left}
        left = {number for number in range(len(calls)) if number not in taken}
    else:
        made, attentions = _with_attention(closed, constants, implementation)
    stay = [
        (calls[i].equation, f"it stays cuDNN's: {reasons.get(i, 'its attention is not known')}") for i in sorted(left)
    ]
    return made, dataclasses.replace(attentions, left=[*attentions.left, *stay])


def _known(made: core.ClosedJaxpr, closed: core.ClosedJaxpr, constants: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The values of those of a jaxpr's variables that are known, where it was made of another with known values."""
    known: dict[Any, Any] = dict(zip(made.jaxpr.constvars, made.consts, strict=True))
    pairs = zip(made.jaxpr.invars, closed.jaxpr.invars, strict=True)
    return known | {x: constants[y] for x, y in pairs if y in constants}


def _with_attention(
    closed: core.ClosedJaxpr, constants: Mapping[Any, Any], implementation: str
) -> tuple[core.ClosedJaxpr, Attentions]:
    """`with_attention`, of attention that is written out."""
    if not any(e.primitive.name == "exp" for e in closed.jaxpr.eqns):
        return closed, Attentions()
    makers = Makers(closed.jaxpr)
    of_softmax = makers.in_front_of({"exp"}, {"dot_general"})
    with_reason = makers.in_front_of({"exp", "reduce_max", "concatenate"}, {"dot_general"})
    sites = _Sites(makers, Trees(makers, constants), None if implementation == "auto" else implementation)
    found, left = list[_Replaced](), list[tuple[Equation, str]]()
    for product in dots_in(closed.jaxpr).values():
        if not _may_be_scores(product) or any(product is x for one in found for x in one.products):
            continue
        if product.outvars[0] not in (with_reason if _has_heads(product) else of_softmax):
            continue
        search = Search(makers, product)
        reason = search.reason if search.has_softmax and _has_heads(product) else ""
        for site in search.sites:
            try:
                one = sites.replaced(site)
            except Unlike as why:
                reason = str(why)
                left.append((site.values, reason))
                continue
            found.append(one)
            reason = ""
        if reason:
            left.append((product, reason))
    if not found:
        return closed, Attentions((), left)
    taken = [(product, "attention") for one in found for product in one.products]
    return _without(closed, found), Attentions(taken, left)


def _may_be_scores(product: Equation) -> bool:
    """True for a product of two arrays of known sizes."""
    if any(isinstance(x, core.Literal) for x in product.invars) or product.invars[0] is product.outvars[0]:
        return False
    sizes = [size for x in (*product.invars, *product.outvars) for size in x.aval.shape]
    return all(isinstance(size, int) and size > 0 for size in sizes)


def _has_heads(product: Equation) -> bool:
    """True for a batch of matrices: a softmax of one matrix that no values' product reads is a loss."""
    _, (batch, _) = product.params["dimension_numbers"]
    return bool(batch)


class _Sites:
    """Replaces the sites of a jaxpr."""

    def __init__(self, makers: Makers, trees: Trees, implementation: str | None):
        self._makers, self._trees, self._implementation = makers, trees, implementation

    @functools.cached_property
    def _equations(self) -> Equations:
        return Equations(self._makers)

    def replaced(self, site: Site) -> _Replaced:
        """A site that may be replaced: with its gradients, where its probabilities are read by these alone.

        Raises:
          Unlike: something else reads its scores or probabilities.
        """
        call = call_of(_behind_views(site, self._makers), self._trees, self._implementation)
        alone = _Replaced(call)
        if not self._keeps_products(alone):
            return alone
        gradients = gradients_of(call, self._equations)
        if gradients is not None:
            replaced = _Replaced(call, gradients)
            if not self._keeps_products(replaced):
                return replaced
        reader = _reader(alone, self._makers)
        if isinstance(reader, str):
            raise Unlike(reader)
        raise Unlike(f"{reader.primitive.name} reads its scores or probabilities too: {line_of(reader)}")

    def _keeps_products(self, one: _Replaced) -> bool:
        """Whether something needs the products of a site beside it."""
        every: list[Any] = [product.outvars[0] for product in one.products]
        return any(self._makers.is_needed(x, one.results, one.call.arguments) for x in every)


def _behind_views(site: Site, makers: Makers) -> Site:
    """The site with what transposes and reshapes make of its result, if nothing else reads it in front of them."""
    while (reader := makers.only_reader(site.result)) is not None:
        if reader.primitive.name not in ("transpose", "reshape"):
            break
        try:
            site = dataclasses.replace(site, equation=reader, labels=moved(reader, site.labels))
        except Unlike:
            break
    return site


def _reader(one: _Replaced, makers: Makers) -> Equation | str:
    """The equation that needs the products of a site beside it, or the reason."""
    needed = makers.needed(one.results, one.call.arguments)
    meant, own = one.call.site.meant, one.call.site
    if any(x in meant for x in variables(makers.jaxpr.outvars)):
        return "its scores or probabilities are a result"
    for equation in makers.equations:
        reads = id(equation) in needed and any(x in meant for x in variables(equation.invars))
        if reads and not any(x in meant for x in equation.outvars) and equation is not own.equation:
            return equation
    return "its scores are read elsewhere"


def _without(closed: core.ClosedJaxpr, found: Sequence[_Replaced]) -> core.ClosedJaxpr:
    """The jaxpr with calls in the place of sites, and without equations whose results nobody reads."""
    calls = {one.call.site.result: one for one in found}
    with_gradients = {x: one for one in found if one.gradients is not None for x in one.gradients.variables}
    splice, kept = Splice(closed), dict[int, list[Any]]()  # what pullbacks keep, and the structures of these
    trees: dict[int, Any] = {}

    def forward(one: _Replaced, values: dict[Any, Any]) -> list[jax.Array]:
        if one.gradients is None:
            return [one.call.result(values)]
        result, pullback = one.gradients.forward(values)
        leaves, trees[id(one)] = jax.tree.flatten(pullback)
        return [result, *leaves]

    def backward(gradients: Gradients, tree: Any, values: dict[Any, Any], *leaves: jax.Array) -> Sequence[jax.Array]:
        cotangents: Sequence[jax.Array] = jax.tree.unflatten(tree, leaves)(values[gradients.cotangent])
        return cotangents

    every: Sequence[Equation] = closed.jaxpr.eqns
    for equation in every:
        first: Any = next(iter(equation.outvars), None)
        if first in calls:
            one = calls[first]
            of = functools.partial(at_line, one.call.site.product, forward, one)
            kept[id(one)] = splice.put(of, one.call.arguments, [first])
        elif first in with_gradients:
            one = with_gradients[first]
            if one.gradients is not None and first not in splice.values:
                of = functools.partial(at_line, equation, backward, one.gradients, trees[id(one)])
                splice.put(of, [one.gradients.cotangent], one.gradients.variables, kept[id(one)])
        elif not all(x in splice.values for x in equation.outvars):
            splice.keep(equation)
    return straight(splice.rewritten(), closed.in_avals, opens_inner=False)
