"""A loss over a vocabulary with a rule of its own, a `jax.custom_vjp` of logits, evaluated in chunks of tokens.

All equations between the product and the tokens' numbers are evaluated for some tokens at a time, on logits that exist
for these alone, and so is their derivative. The functions of the rule are the user's, of fewer rows; nothing is said of
what they compute. Where a function of the numbers is summed over all tokens, and the rule is linear in its cotangents,
the gradients are formed in the forward pass; else the logits are computed again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from coda_jax.epilogue.dtypes import has_narrow_range
from coda_jax.epilogue.values import same_size
from coda_jax.fusion.custom import CUSTOM_VJPS
from coda_jax.fusion.dots import Dot, Equation, dots_in
from coda_jax.fusion.losses.logits import Logits, logits_of, result_of
from coda_jax.fusion.losses.token_chunks import Product, TokenChunks, cotangents_read
from coda_jax.fusion.losses.token_sums import TokenSum, as_coefficients, token_sum
from coda_jax.fusion.makers import Makers
from coda_jax.fusion.merged import Merged
from coda_jax.fusion.rows import Rows, is_table
from coda_jax.graph.on_mesh import ELEMENTWISE
from coda_jax.graph.values import is_float, is_seen
from coda_jax.jaxprs.def_use import definitions, free_variables, variables
from coda_jax.operators.head.arguments import CHUNK_BYTES
from coda_jax.operators.head.chunks import chunk_size
from coda_jax.primitives.mesh_types import explicit_cuts


@dataclasses.dataclass(frozen=True)
class RowLoss:
    """A loss that is evaluated in chunks of tokens.

    Attributes:
      logits: what it begins with.
      start: the variable that these are.
      equations: between the logits and the numbers.
      numbers: the variables that are one number of each token.
      of_rows, others: the variables that it reads beside the logits: with the tokens' axes in front, and without.
      merged: how its equations are evaluated.
      sum: the sum over all tokens that alone reads those numbers that have a cotangent; None if there is none.
      summed: these numbers.
    """

    logits: Logits
    start: Any
    equations: Sequence[Equation]
    numbers: Sequence[Any]
    of_rows: Sequence[Any]
    others: Sequence[Any]
    merged: Merged
    sum: TokenSum | None = None
    summed: Sequence[Any] = ()

    operator = "chunks of a custom_vjp"

    @property
    def products(self) -> Sequence[Equation]:
        """The products that it makes."""
        return [self.logits.product]

    @property
    def arguments(self) -> list[Any]:
        """The variables that it reads."""
        beside = [] if self.sum is None else self.sum.arguments
        return [*self.logits.arguments, *self.of_rows, *self.others, *beside]

    @property
    def results(self) -> list[Any]:
        """The variables that it makes."""
        return list(self.numbers) if self.sum is None else [self.sum.result, *self._alone]

    @property
    def _alone(self) -> list[Any]:
        """The numbers that are not summed."""
        return [x for x in self.numbers if x not in self.summed]

    def outputs(self, values: dict[Any, Any]) -> list[jax.Array]:
        """The values of the results."""
        chunks, (x, w, of_rows, others) = self.chunks_of(values)
        rows = math.prod(self.logits.rows)
        if self.sum is None:
            found = chunks.of_tokens(x, w, of_rows, others)
        else:
            weights = jnp.stack(self.sum.weights(values))
            coefficients = as_coefficients(self.sum.others, values, (rows,))
            rows_of_sum, others_of_sum = ([y for y in coefficients if y.ndim == n] for n in (1, 0))
            chunks = dataclasses.replace(chunks, numbers=self._with_value)
            found = chunks.summed(x, w, [*of_rows, *rows_of_sum], [*others, *others_of_sum, weights])
        each = zip(found, self.results, strict=True)
        return [y.reshape(out.aval.shape).astype(out.aval.dtype) for y, out in each]

    def chunks_of(
        self, values: dict[Any, Any]
    ) -> tuple[TokenChunks, tuple[jax.Array, jax.Array, list[jax.Array], list[jax.Array]]]:
        """How the numbers of all tokens are made, and of what: x (M, D), w, arrays (M, ...) and others."""
        x, w, options = self.logits.factors(values)
        count, rows = len(self.logits.rows), math.prod(self.logits.rows)
        of_rows = [values[y].reshape(rows, *y.aval.shape[count:]) for y in self.of_rows]
        arrays = x.reshape(rows, -1), w, of_rows, [values[y] for y in self.others]
        return self.chunks(transpose_w=options["transpose_w"]), arrays

    def chunks(self, *, transpose_w: bool = False) -> TokenChunks:
        """How the numbers of all tokens are made."""
        product = Product(transpose_w, self.logits.product.outvars[0].aval.dtype, self.start.aval.dtype)
        size = chunk_size(math.prod(self.logits.rows), 4 * self.logits.columns, CHUNK_BYTES)
        return TokenChunks(self._numbers, product, size)

    def types(self) -> list[Any]:
        """The types of logits of a few tokens, and of the other arrays beside them."""
        count, rows = len(self.logits.rows), 8

        def of(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, *x.aval.shape[count:]), x.aval.dtype)

        others = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in self.others]
        return [of(self.start), [of(x) for x in self.of_rows], others]

    def _numbers(
        self,
        z: jax.Array,
        of_rows: Sequence[jax.Array],
        others: Sequence[jax.Array],
        *,
        has_derivatives: bool = True,
    ) -> list[jax.Array]:
        """The numbers of each token, (rows,) each, or (rows, V), from its logits (rows, V)."""
        rows, merged = z.shape[0], dataclasses.replace(self.merged, has_derivatives=has_derivatives)
        known = {self.start: z} | dict(zip(self.of_rows, of_rows, strict=True))
        known |= dict(zip(self.others, others, strict=True))
        merged.walk.run(self.equations, known, rows)
        found = (jnp.broadcast_to(known[x], (rows, *known[x].shape[1:])) for x in self.numbers)
        return [x.reshape(rows) if same_size(x.size, rows) else x.reshape(z.shape) for x in found]

    def _with_value(
        self, z: jax.Array, of_rows: Sequence[jax.Array], others: Sequence[jax.Array], **options: Any
    ) -> list[jax.Array]:
        """The summed number, (rows,), and those that are not summed."""
        assert self.sum is not None
        own = len(self.of_rows), len(self.others)
        numbers = self._numbers(z, of_rows[: own[0]], others[: own[1]], **options)
        known = dict(zip(self.numbers, numbers, strict=True))
        given, single = iter(of_rows[own[0] :]), iter(others[own[1] : -1])
        coefficients = [next(single if x.aval.size == 1 else given) for x in self.sum.others]
        value = self.sum.value(self.summed)([known[x] for x in self.summed], list(others[-1]), coefficients)
        return [value, *(known[x] for x in self._alone)]


def row_losses(makers: Makers, least: int, sums: bool) -> Iterator[tuple[Equation, RowLoss | str]]:
    """The losses of products of at least so many columns that a rule reads, or why there is none.

    Args:
      makers: of the equations.
      least: columns.
      sums: whether a loss that is summed may form its gradients in the forward pass.
    """
    rules = [e for e in makers.equations if e.primitive.name in CUSTOM_VJPS]
    if not rules:
        return
    for equation in dots_in(makers.jaxpr).values():
        z, dot = result_of(makers, equation)
        if not isinstance(dot, Dot) or dot.transpose_a or dot.order_b is not None:
            continue
        if z.aval.ndim == dot.rows_a + 1 and z.aval.shape[-1] >= least:
            for logits in logits_of(makers, equation, z, dot):
                is_bare = logits.bias is None and logits.cap is None and logits.fill is None
                if is_bare and logits.vocabulary == logits.columns and _are_read_by_one(rules, makers, logits):
                    yield equation, Region(makers, logits, sums).loss()


def _are_read_by_one(rules: Sequence[Equation], makers: Makers, logits: Logits) -> bool:
    """True for logits of which a custom_vjp, that reads them as they are or changed, makes a number of each token."""
    tokens, read = math.prod(logits.rows), list[Any]()
    for equation in rules:
        if any(same_size(x.aval.size, tokens) for x in equation.outvars):
            read += [x for x in variables(equation.invars) if x.aval.shape]
    read = [x for x in read if same_size(x.aval.shape[-1], logits.columns)]
    return bool(read) and not makers.behind(logits.arrays).isdisjoint(read)


class Region:
    """The equations that depend on logits, as far as they treat tokens alone."""

    def __init__(self, makers: Makers, logits: Logits, sums: bool):
        self._makers, self._logits = makers, logits
        self._sums = sums and self._tokens_are_many()
        (self._start,) = (x for x in logits.arrays if not any(y in logits.arrays for y in _sources(makers, x)))
        self._tokens, self._count = math.prod(logits.rows), len(logits.rows)
        self._rows = Rows(makers, {self._start: self._count})

    def loss(self) -> RowLoss | str:
        """The loss; why it is none."""
        reason = self._reason_to_stay()
        if reason:
            return reason
        equations = self._equations()
        every, made = set(map(id, equations)), {self._start, *definitions(equations)}
        numbers = self._read_outside(every, made)
        reason = self._reason_of(equations, made, numbers)
        if reason:
            return reason
        equations = self._with_makers(equations, made)
        beside = [x for x in free_variables(equations) if x is not self._start]
        of_rows, others = ([x for x in beside if bool(self._rows.of(x)) == flag] for flag in (True, False))
        if any(is_table(x, self._logits.rows) for x in others) or not all(is_seen(x.aval.dtype) for x in beside):
            return "an array beside them differs along some axes of the tokens alone"
        merged = Merged(self._rows.counts, is_exact=True, rules=self._rows.rules)
        loss = RowLoss(self._logits, self._start, equations, self._in_order(numbers), of_rows, others, merged)
        return self._summed(loss) if self._sums else loss

    def _in_order(self, numbers: Sequence[Any]) -> Sequence[Any]:
        """The numbers, as the loss has them."""
        return numbers

    def _reason_of(self, equations: Sequence[Equation], made: Collection[Any], numbers: Sequence[Any]) -> str:
        """Why logits stay that these equations read, which make numbers that others read; empty if they do not."""
        every = set(map(id, equations))
        for equation in self._makers.equations:
            wide = [x for x in variables(equation.invars) if x in made and self._is_wide(x)]
            if id(equation) not in every and wide:
                return f"{equation.primitive.name} reads them, which does not treat each token alone"
        if any(self._is_wide(x) or not is_float(x.aval.dtype) for x in numbers):
            return "they are a result, or what is made of them is no float of each token"
        if not numbers or not any(e.primitive.name in CUSTOM_VJPS for e in equations):
            return "no rule reads them that treats each token alone"
        return ""

    def _reason_to_stay(self) -> str:
        """Why logits of this type stay; empty if they do not."""
        aval, factor = self._start.aval, self._logits.dot.a.aval.dtype
        if any(explicit_cuts(aval)) or aval.manual_axis_type.varying:
            return "they have explicit or manual axes of a mesh"
        if not all(isinstance(x, int) for x in aval.shape):
            return "they have a symbolic size"
        if has_narrow_range(factor) and self._logits.product.outvars[0].aval.dtype != factor:
            return f"their cotangent would be rounded to {factor}"
        return ""

    def _tokens_are_many(self) -> bool:
        """True where the gradient of w in float32, which a sum keeps, is no more than the logits."""
        tokens, width = math.prod(self._logits.rows), math.prod(self._logits.dot.matrix_a[1:])
        itemsize = self._logits.product.outvars[0].aval.dtype.itemsize
        return isinstance(tokens, int) and tokens * itemsize >= 4 * width

    def _summed(self, loss: RowLoss) -> RowLoss:
        """The loss with its sum over all tokens, if one alone reads the numbers that have a cotangent."""
        flags = cotangents_read(loss.chunks(), loss.types())
        if flags is None:
            return loss
        with_cotangents = [x for x, flag in zip(loss.numbers, flags, strict=True) if flag]
        for summed in (loss.numbers, with_cotangents):
            found = token_sum(self._makers, summed) if summed else None
            if found is not None and not set(loss.numbers).intersection(found.arguments):
                return dataclasses.replace(loss, sum=found, summed=summed)
        return loss

    def _is_wide(self, x: Any) -> bool:
        """True for a variable with more than one number of each token."""
        return not same_size(x.aval.size, self._tokens)

    def _equations(self) -> list[Equation]:
        """The equations behind the logits that treat tokens alone, without the last ones, of one number of each."""
        inside, found = {self._start}, list[Equation]()
        for equation in self._makers.equations:
            if not inside.isdisjoint(variables(equation.invars)) and self._rows.is_alone(equation, self._count):
                inside |= set(equation.outvars)
                found.append(equation)
        kept, needed = list[Equation](), set[Any]()
        for equation in reversed(found):
            own = [x for x in (*variables(equation.invars), *equation.outvars) if x in inside]
            if any(map(self._is_wide, own)) or not needed.isdisjoint(equation.outvars):
                kept.append(equation)
                needed |= set(variables(equation.invars))
        return kept[::-1]

    def _read_outside(self, every: Collection[int], made: Collection[Any]) -> list[Any]:
        """The variables among those made that others read."""
        others = (x for e in self._makers.equations if id(e) not in every for x in variables(e.invars))
        read = {x for x in (*others, *self._makers.results) if x in made}
        return [x for e in self._makers.equations for x in e.outvars if x in read]

    def _is_number(self, x: Any) -> bool:
        """True for a variable () that is made of numbers alone."""
        maker = None if x.aval.shape else self._makers.maker(x)
        if maker is None or maker.primitive.name not in ELEMENTWISE:
            return False
        return all(map(self._is_number, variables(maker.invars)))

    def _with_makers(self, equations: Sequence[Equation], made: Collection[Any]) -> list[Equation]:
        """The equations with those that make wide arrays beside the logits, as one-hot ones of labels, and numbers."""
        found = {id(e): e for e in equations}
        open_ = [x for e in equations for x in variables(e.invars)]
        while open_:
            x = open_.pop()
            maker = self._makers.maker(x)
            if x in made or maker is None or id(maker) in found:
                continue
            if self._is_number(x):
                found[id(maker)] = maker
                open_ += variables(maker.invars)
            if not (self._rows.of(x) and self._is_wide(x)):
                continue
            if maker.primitive.name not in CUSTOM_VJPS and self._rows.is_alone(maker, self._count):
                found[id(maker)] = maker
                open_ += variables(maker.invars)
        return sorted(found.values(), key=self._makers.number)


def _sources(makers: Makers, x: Any) -> list[Any]:
    """The variables that one is made of."""
    maker = makers.maker(x)
    return [] if maker is None else variables(maker.invars)
