"""A loss with its gradient: where JAX has derived it, both halves become the operator that the loss would be.

    z = x w,  numbers of each token = f(z),  their functions,  dz = g(z, numbers),  dx = dz w^T,  dw = x^T dz

`wide` reads the cotangent dz as that of the statistics of each token's logits. Then the operator's own derivative makes
dx and dw. Where the statistics' cotangents are functions of each token's own numbers, one loop over chunks makes the
loss and the gradients; else there are two, and the second computes the logits again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval

from coda_jax.fusion.dots import Equation
from coda_jax.fusion.losses.ends import end_of
from coda_jax.fusion.losses.logits import Logits
from coda_jax.fusion.losses.loss import arguments_of, heads, may_sum
from coda_jax.fusion.losses.shifts import is_free_of
from coda_jax.fusion.losses.token_sums import TokenFunction, as_coefficients, token_function
from coda_jax.fusion.losses.wide import Factor, Row, Unknown, Wide, array_of
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.straight import applied, at_line, straight
from coda_jax.jaxprs.def_use import definitions, free_variables, variables
from coda_jax.jaxprs.evaluate import evaluate, read, without_dead_code
from coda_jax.jaxprs.splice import Splice
from coda_jax.operators.head.any_label import statistics_of_any, sum_of_any
from coda_jax.operators.head.arrays import Statistics


def with_loss_gradients(closed: core.ClosedJaxpr) -> tuple[core.ClosedJaxpr, list[tuple[Equation, str]]]:
    """A straight jaxpr in which losses that stand beside their gradients are made in chunks.

    Returns:
      The jaxpr, and the products that it lacks, each with the operator that it is part of.
    """
    done = list[tuple[Equation, str]]()
    while (found := _first(Makers(closed.jaxpr))) is not None:
        done += found.products
        closed = found.replaced(closed)
    return closed, done


def _first(makers: Makers) -> _Site | None:
    """The first loss whose gradient is there too."""
    for logits in heads(makers):
        try:
            wide = Wide(makers, logits)
            site = _Site(makers, logits, wide, wide.slopes)
        except Unknown:
            continue
        if site.is_whole and is_free_of(makers, wide.largest):
            return site
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class _Site:
    """A loss with its gradient.

    Attributes:
      makers: of the jaxpr.
      logits: what it reads.
      wide: the arrays over the vocabulary.
      slopes: the cotangents of the first statistics; the best and the rank have none.
    """

    makers: Makers
    logits: Logits
    wide: Wide
    slopes: list[Factor]

    @property
    def is_whole(self) -> bool:
        """Whether nothing else needs the logits, and they need nothing that is made of them."""
        has_products = any(kind != "dbias" for _, kind, _ in self.wide.ends)
        if self.wide.labels is None or not has_products or id(self.logits.product) in self._needed:
            return False
        with_effects = [e for part in self._parts for e in part if e.effects]
        is_in_order = with_effects == [e for e in self.makers.equations if e.effects]
        late = definitions(self._parts[2])
        has_order = is_in_order and late.isdisjoint([*self._inputs, *self.wide.rows])
        return has_order and self._behind.isdisjoint(self._given) and self.logits.dot.a is not self.logits.dot.b

    @property
    def _given(self) -> list[Any]:
        """The variables that the loss is made of."""
        return [*self.logits.arguments, self.wide.labels]

    @functools.cached_property
    def _needed(self) -> set[int]:
        """The ids of the equations that are needed beside the loss."""
        also = [*self._given, *_leaves([*self.wide.rows.values(), *self.slopes])]
        return self.makers.needed([*self.wide.rows, *self._ends], also)

    @property
    def products(self) -> list[tuple[Equation, str]]:
        """The products that it is made of, with the operator's name."""
        ends = (equation for equation, kind, _ in self.wide.ends if kind != "dbias")
        name = "token_logprobs" if self._token_slopes is None else "linear_cross_entropy"
        return [(equation, name) for equation in (self.logits.product, *ends)]

    @property
    def _ends(self) -> list[Any]:
        """The variables that are made of the cotangent."""
        return [equation.outvars[0] for equation, *_ in self.wide.ends]

    @functools.cached_property
    def _behind(self) -> set[Any]:
        """The variables that depend on the logits, or are sums over the vocabulary beside them."""
        return self.makers.behind([*self.logits.product.outvars, *self.wide.rows])

    @functools.cached_property
    def _parts(self) -> tuple[list[Equation], list[Equation], list[Equation]]:
        """The equations before the loss, those between it and its gradient, and those behind the gradient."""
        needed, behind_ends = self._needed, self.makers.behind(self._ends)
        parts: tuple[list[Equation], ...] = [], [], []
        for equation in self.makers.equations:
            outputs = set(equation.outvars)
            read_or_made = outputs.union(variables(equation.invars))
            is_row = not outputs.isdisjoint(self.wide.rows)
            is_late = not behind_ends.isdisjoint(read_or_made if outputs.isdisjoint(self._ends) else ())
            if is_row or (id(equation) in needed and outputs.isdisjoint(self._ends)):
                is_behind = not self._behind.isdisjoint(read_or_made)
                parts[2 if is_late or (is_behind and equation.effects) else int(is_behind)].append(equation)
        return parts[0], parts[1], parts[2]

    @functools.cached_property
    def _names(self) -> list[str]:
        """The statistics that are read."""
        wide = self.wide
        more = {"total": wide.has_total, "entropy": wide.has_entropy, "best": wide.has_best, "rank": bool(wide.rank)}
        return ["lse", "target", *(name for name, is_read in more.items() if is_read)]

    @functools.cached_property
    def _inputs(self) -> list[Any]:
        """The variables that the equations between the loss and its gradient read, beside what they make."""
        (_, between, _), rows = self._parts, self.wide.rows
        made = definitions(between)
        read = [x for e in between if e.outvars[0] not in rows for x in variables(e.invars)]
        read += _leaves([*(rows[e.outvars[0]] for e in between if e.outvars[0] in rows), *self.slopes])
        return [x for x in dict.fromkeys(read) if x not in made]

    @functools.cached_property
    def _results(self) -> list[Any]:
        """The variables made between the loss and its gradient that are read behind."""
        _, between, after = self._parts
        made, read = definitions(between), [*free_variables(after), *variables(self.makers.jaxpr.outvars)]
        return [x for x in dict.fromkeys(read) if x in made]

    @functools.cached_property
    def _between(self) -> core.ClosedJaxpr:
        """The function of the statistics, of masks of labels and of inputs that gives the results and the slopes."""
        (_, between, _), rows = self._parts, self.wide.rows

        def function(*arrays: Any) -> list[Any]:
            names = [*self._names, "outside", "padding"]
            values: dict[Any, Any] = dict(zip([*names, *self._inputs], arrays, strict=True))
            for equation in between:
                (out, *_) = equation.outvars
                if out in rows:
                    made = array_of(rows[out], values, self.logits.rows)
                    values[out] = made.astype(out.aval.dtype).reshape(out.aval.shape)
                else:
                    outputs = applied(equation, [read(values, x) for x in equation.invars])
                    values.update(zip(equation.outvars, outputs, strict=True))
            slopes = [array_of(x, values, self.logits.rows) for x in self.slopes]
            return [*(values[x] for x in self._results), *slopes]

        row = min((x.aval for x in rows), key=lambda aval: aval.shape != self.logits.rows)
        row = row.update(shape=self.logits.rows)
        numbers = [row.update(dtype=jnp.dtype(jnp.float32), weak_type=False)] * len(self._names)
        masks = [row.update(dtype=jnp.dtype(bool), weak_type=False)] * 2
        types = [*numbers, *masks, *(x.aval for x in self._inputs)]
        return straight(jax.make_jaxpr(function)(*types), types)

    @functools.cached_property
    def _token_slopes(self) -> tuple[core.ClosedJaxpr, TokenFunction] | None:
        """The function that gives the slopes alone, if they are made of each token's own statistics."""
        if not may_sum(self.logits):
            return None
        is_read = [False] * len(self._results) + [True] * len(self.slopes)
        jaxpr, _ = partial_eval.dce_jaxpr(self._between.jaxpr, is_read, instantiate=True)
        function = token_function(Makers(jaxpr), jaxpr.invars[: len(self._names)])
        return None if function is None else (core.ClosedJaxpr(jaxpr, self._between.consts), function)

    def replaced(self, closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
        """The jaxpr with the loss in chunks."""
        (before, _, after), splice = self._parts, Splice(closed)
        for equation in _known(before, splice.values):
            splice.keep(equation)
        made = functools.partial(at_line, self.logits.product, self._made)
        splice.put(made, [*self._given, *self._inputs], [*self._results, *self._ends])
        for equation in _known(after, splice.values):
            splice.keep(equation)
        return without_dead_code(splice.rewritten())

    def _made(self, values: dict[Any, Any]) -> list[Any]:
        """The results and the gradients."""
        logits = self.logits
        varied = [logits.dot.a, logits.dot.b, *([] if logits.bias is None else [logits.bias])]

        def of(*arrays: jax.Array) -> Any:
            known = values | dict(zip(varied, arrays, strict=True))
            found, options, masks = arguments_of(logits, self.wide.labels, known, is_clipped=bool(self.wide.is_clipped))
            has_more = {f"has_{name}": name in self._names for name in ("total", "entropy", "best")}
            return found, options | has_more | {"rank": self.wide.rank, "rounded_to": logits.dtype}, masks

        one_loop = self._token_slopes is not None
        gradients = (self._in_one_loop if one_loop else self._in_two_loops)(of, [values[x] for x in varied], values)
        for equation, kind, _ in self.wide.ends:
            (out,) = equation.outvars
            gradient = gradients[("dx", "dw", "dbias").index(kind)]
            values[out] = end_of(self.makers, logits.dot, equation, kind, gradient)
        return [values[x] for x in (*self._results, *self._ends)]

    def _in_two_loops(self, of: Any, arrays: Sequence[jax.Array], values: dict[Any, Any]) -> Sequence[jax.Array]:
        """Adds the results to the values; the gradients are of logits that are computed again."""

        def statistics(*arrays: jax.Array) -> tuple[list[jax.Array], Any]:
            found, options, masks = of(*arrays)
            numbers, count = self._numbers(statistics_of_any(*found, **options)), len(self.slopes)
            return numbers[:count], (numbers[count:], masks)

        numbers, pullback, (others, masks) = jax.vjp(statistics, *arrays, has_aux=True)
        slopes = self._add_results([*numbers, *others], masks, values)
        gradients: Sequence[jax.Array] = pullback([x.reshape(y.shape) for x, y in zip(slopes, numbers, strict=True)])
        return gradients

    def _in_one_loop(self, of: Any, arrays: Sequence[jax.Array], values: dict[Any, Any]) -> Sequence[jax.Array]:
        """Adds the results to the values; the gradients are formed while a chunk's logits are there.

        The loop sums sum_k (s_k slope_k + c_k s_k), with fixed slopes, and only its derivatives are read: by a
        coefficient c_k, which is 0, that is the statistic s_k.
        """
        assert self._token_slopes is not None
        closed, function = self._token_slopes
        jaxpr, count, fixed = closed.jaxpr, len(self._names), jax.lax.stop_gradient
        found, _, masks = of(*arrays)
        known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        given = [*(x.reshape(self.logits.rows) for x in masks), *(values[x] for x in self._inputs)]
        known |= dict(zip(jaxpr.invars[count:], given, strict=True))
        for equation in _known(jaxpr.eqns, known):
            outputs = applied(equation, [read(known, x) for x in equation.invars])
            known.update(zip(equation.outvars, outputs, strict=True))
        others = as_coefficients(function.others, known, found[2].shape)

        def value(stats: Statistics, *coefficients: jax.Array) -> jax.Array:
            is_padding, *more = coefficients
            factors, others = more[:count], more[count:]
            numbers = self._numbers(stats)
            seeds = self._with_padding(numbers, is_padding != 0)
            made = function.values(jaxpr.invars[:count], [fixed(x) for x in seeds], [fixed(x) for x in others])
            slopes = [read(made, x) for x in jaxpr.outvars]
            terms = [x * slope for x, slope in zip(numbers, slopes, strict=False)]
            terms += [factor * fixed(x) for factor, x in zip(factors, numbers, strict=True)]
            return functools.reduce(jnp.add, terms)

        def total(factors: Sequence[jax.Array], *arrays: jax.Array) -> jax.Array:
            found, options, (_, is_padding) = of(*arrays)
            return sum_of_any(value, *found, is_padding.astype(jnp.float32), *factors, *others, **options)

        zeros = [jnp.zeros_like(found[2], jnp.float32)] * count
        number, pullback = jax.vjp(total, zeros, *arrays)
        numbers, *gradients = pullback(jnp.ones_like(number))
        self._add_results(numbers, masks, values)
        return gradients

    def _numbers(self, stats: Statistics) -> list[Any]:
        """The statistics in the order of their names."""
        return [getattr(stats, name) for name in self._names]

    def _with_padding(self, numbers: Sequence[Any], is_padding: jax.Array) -> list[Any]:
        """The statistics, with the padding's number as the logit of labels in padding."""
        lse, target, *others = numbers
        return [lse, target if self.logits.fill is None else jnp.where(is_padding, self.logits.fill, target), *others]

    def _add_results(
        self, numbers: Sequence[Any], masks: tuple[jax.Array, jax.Array], values: dict[Any, Any]
    ) -> list[jax.Array]:
        """Adds the results to the values, from the statistics and the masks of labels; returns the slopes."""
        numbers = self._with_padding(numbers, masks[1])
        given = [x.reshape(self.logits.rows) for x in (*numbers, *masks)]
        inputs = [*given, *(values[x] for x in self._inputs)]
        outputs = evaluate(self._between.jaxpr, self._between.consts, inputs, applied, ())
        count = len(self._results)
        values.update(zip(self._results, outputs[:count], strict=True))
        return outputs[count:]


def _known(equations: Iterable[Equation], values: Mapping[Any, Any]) -> Iterator[Equation]:
    """The equations whose arguments have values, and whose first result has none, when their turn comes."""
    for equation in equations:
        if all(x in values for x in variables(equation.invars)) and (equation.outvars[:1] or [None])[0] not in values:
            yield equation


def _leaves(factors: Collection[Factor]) -> list[Any]:
    """The variables that factors are functions of."""
    found: dict[Any, None] = {}
    open_: list[Any] = list(factors)
    seen = set[Row]()
    while open_:
        one = open_.pop()
        if isinstance(one, Row) and one not in seen:
            seen.add(one)
            open_ += one.of
        elif not isinstance(one, Row | float | int | str):
            found[one] = None
    return list(found)
