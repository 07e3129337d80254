"""Numbers of each token that are made of its logits, and their sum, in chunks of tokens.

    z = x w,    y[t] = f(z[t], ...)
    dz = the derivative of f at dy        dx = dz w^T        dw = sum of x^T dz over the chunks

Rows of a chunk are as far apart as there are chunks: where tokens are sharded, each device has a part of every chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from coda_jax.epilogue import logsumexp
from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.fusion.custom import CUSTOM_VJPS
from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers, among
from coda_jax.fusion.picks import is_over_last
from coda_jax.fusion.rows import SHAPES
from coda_jax.graph.values import is_float
from coda_jax.jaxprs.calls import CALLS, CUSTOM_DERIVATIVES
from coda_jax.jaxprs.evaluate import bound, inlined, read, run, without_dead_code
from coda_jax.operators.multiply import accumulate, multiply

Lists = tuple[list[jax.Array], list[jax.Array]]  # of arrays with the tokens in front, and of others


# A rule whose forward function calls the function itself gives its results with their derivative.
_OPENED = CALLS | CUSTOM_DERIVATIVES - CUSTOM_VJPS


@dataclasses.dataclass(frozen=True)
class Product:
    """The product of x (M, D) and w, (D, V) or with transpose_w (V, D), which is rounded to a dtype and cast."""

    transpose_w: bool
    dtype: Any
    dtype_of_logits: Any

    def __call__(
        self, x: jax.Array, w: jax.Array, names: Collection[str], scale: _Scale | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The logits (M, V), and of each row their "max", as they have it, and their log-sum-"exp", in float32, (M, 1).

        Args:
          x, w: the factors.
          names: which of both there are.
          scale: what both are of: the logits divided by a number, or multiplied with one, in float32.
        """
        sums = {"max": functools.partial(jnp.max, axis=1), "exp": functools.partial(logsumexp, axis=1)}
        asked = [name for name in sums if name in names]

        def logits(acc: jax.Array) -> list[jax.Array]:
            z = acc.astype(self.dtype).astype(jnp.float32)  # the sums are those of the logits that are stored
            y = z if scale is None else scale(z)
            return [z, *(sums[name](y) for name in asked)]

        dtypes = [self.dtype, *[jnp.float32] * len(asked)]
        z, *rows = multiply(
            x, w, epilogue=logits, out_dtypes=dtypes, transpose_b=self.transpose_w, implementation="auto"
        )
        found = {name: y.reshape(-1, 1) for name, y in zip(asked, rows, strict=True)}
        if "max" in found and scale is None:
            found["max"] = found["max"].astype(self.dtype).astype(self.dtype_of_logits)
        return z.astype(self.dtype_of_logits), found

    def pulled_back(
        self, x: jax.Array, w: jax.Array, dz: jax.Array, dw: Any, dtype: Any = FLOAT32
    ) -> tuple[jax.Array, jax.Array]:
        """The cotangent of x, in its dtype, and of w, in this one, added in place to dw, if that is not None."""
        dz = dz.astype(x.dtype)
        a, b = (dz, x) if self.transpose_w else (x, dz)
        total = _multiplied(a, b, dtype, dw, transpose_a=True)
        return _multiplied(dz, w, x.dtype, transpose_b=not self.transpose_w), total


def _multiplied(a: jax.Array, b: jax.Array, dtype: Any, total: Any = None, **options: Any) -> jax.Array:
    """The product in this dtype, added in place to `total`, if that is not None."""
    if total is not None:
        options |= {"epilogue": accumulate, "input_output_aliases": ((0, 0),)}
    terms = [] if total is None else [total]
    return multiply(a, b, *terms, out_dtypes=[dtype], implementation="auto", **options)[0]


@dataclasses.dataclass(frozen=True)
class TokenChunks:
    """How the tokens' numbers are made.

    Attributes:
      numbers: of logits, a list of arrays with their rows in front and one of others, with an option
        `has_derivatives`: whether it is differentiated.
      product: makes the logits of x and w.
      size: tokens of a chunk; None where all are one.
    """

    numbers: Callable[..., list[jax.Array]]
    product: Product
    size: int | None

    def of_tokens(self, x: jax.Array, w: jax.Array, *lists: list[jax.Array]) -> list[jax.Array]:
        """The numbers of all tokens, (M,) each; their logits are computed again for the derivative."""

        def forward(*arrays: Any) -> tuple[list[jax.Array], Any]:
            return self._values(*arrays, is_differentiated=True), arrays

        def backward(arrays: Any, cotangents: Sequence[jax.Array]) -> tuple[Any, ...]:
            return self._gradients(arrays, cotangents)[1]

        function = jax.custom_vjp(self._values)
        function.defvjp(forward, backward)
        results: list[jax.Array] = function(x, w, *lists)
        return results

    def summed(self, x: jax.Array, w: jax.Array, *lists: list[jax.Array]) -> list[jax.Array]:
        """The sum of the first number over all tokens, and the others of all tokens, which have no derivative.

        The gradients are formed in the forward pass: the derivative of the first number is linear in its cotangent.
        """

        def summed(values: Sequence[jax.Array]) -> list[jax.Array]:
            return [jnp.sum(values[0]), *values[1:]]

        def run(*arrays: Any) -> list[jax.Array]:
            return summed(self._values(*arrays))

        def forward(*arrays: Any) -> tuple[list[jax.Array], Any]:
            values, gradients = self._gradients(arrays, None)
            return summed(values), gradients

        def backward(gradients: Any, cotangents: Sequence[jax.Array]) -> Any:
            return jax.tree.map(lambda x: (cotangents[0] * x).astype(x.dtype), gradients)

        function = jax.custom_vjp(run)
        function.defvjp(forward, backward)
        results: list[jax.Array] = function(x, w, *lists)
        return results

    def with_gradients(
        self, x: jax.Array, w: jax.Array, of_rows: list[jax.Array], others: list[jax.Array]
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """The numbers of all tokens but the last, which is the logits' cotangent; and those of x and w."""
        dtype = w.dtype if self._is_one(x.shape[0]) else FLOAT32  # that is a sum over several chunks

        def chunk(dw: Any, x: jax.Array, *own: jax.Array) -> tuple[Any, list[jax.Array]]:
            numbers = functools.partial(self.numbers, has_derivatives=False)  # it holds the derivative
            *values, dz = self._of_logits(numbers, x, w, list(own), others)
            dx, dw = self.product.pulled_back(x, w, dz, dw, dtype)
            return dw, [*values, dx]

        dw, (*values, dx) = self._over_rows(chunk, None, [x, *of_rows])
        return values, dx, dw

    def _values(
        self,
        x: jax.Array,
        w: jax.Array,
        of_rows: list[jax.Array],
        others: list[jax.Array],
        *,
        is_differentiated: bool = False,
    ) -> list[jax.Array]:
        """The numbers of all tokens; where they are differentiated, as the rules' forward functions give them."""

        def chunk(_: Any, x: jax.Array, *of_rows: jax.Array) -> tuple[Any, list[jax.Array]]:
            def numbers(z: jax.Array, *lists: list[jax.Array]) -> list[jax.Array]:
                if is_differentiated:
                    values: list[jax.Array] = _vjp_of_floats(self.numbers, z, *lists)[0]
                    return values
                return self.numbers(z, *lists, has_derivatives=False)

            return (), self._of_logits(numbers, x, w, list(of_rows), others)

        return self._over_rows(chunk, (), [x, *of_rows])[1]

    def _gradients(
        self, arrays: Any, cotangents: Sequence[jax.Array] | None
    ) -> tuple[list[jax.Array], tuple[Any, ...]]:
        """The numbers of all tokens, and cotangents of all arrays: of the numbers', or None for the first one's sum."""
        x, w, of_rows, others = arrays
        given = [] if cotangents is None else list(cotangents)

        def chunk(state: Any, x: jax.Array, *own: jax.Array) -> tuple[Any, list[jax.Array]]:
            dw, before = state

            def derivative(z: jax.Array, *lists: Any) -> tuple[list[jax.Array], Any]:
                values, pullback = _vjp_of_floats(self.numbers, z, *lists[:2])
                first = [jnp.ones_like(values[0]), *map(jnp.zeros_like, values[1:])]
                return values, pullback(lists[2] or first)

            lists = list(own[len(given) :]), others, list(own[: len(given)])
            values, (dz, drows, dothers) = self._of_logits(derivative, x, w, *lists)
            dx, dw = self.product.pulled_back(x, w, dz, dw)
            dothers = dothers if before is None else [a + b for a, b in zip(before, dothers, strict=True)]
            return (dw, dothers), [*values, dx, *drows]

        (dw, dothers), found = self._over_rows(chunk, (None, None), [x, *given, *of_rows])
        count = len(found) - 1 - sum(is_float(y.dtype) for y in of_rows)
        dx, drows = found[count], found[count + 1 :]
        gradients = dx, dw.astype(w.dtype), _beside_integers(of_rows, drows), _beside_integers(others, dothers)
        return found[:count], gradients

    def _of_logits(self, f: Callable[..., Any], x: jax.Array, w: jax.Array, *lists: Any) -> Any:
        """f(logits, *lists), evaluated without the names of derivatives; sums of rows are made with the logits."""
        leaves, tree = jax.tree.flatten(lists)
        trees: list[Any] = []

        def flat(z: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
            results, out_tree = jax.tree.flatten(f(z, *jax.tree.unflatten(tree, arrays)))
            trees.append(out_tree)
            return results

        columns = w.shape[0] if self.product.transpose_w else w.shape[1]
        z_type = jax.ShapeDtypeStruct((x.shape[0], columns), self.product.dtype_of_logits)
        closed = without_dead_code(inlined(jax.make_jaxpr(flat)(z_type, *leaves), _OPENED))
        jaxpr = closed.jaxpr
        sums, scale = _sums_of_rows(jaxpr)
        z, rows = self.product(x, w, set(sums.values()), scale)
        if "exp" in rows:
            rows["exp"] = jnp.exp(rows["exp"] - rows["max"])
        values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, z, *leaves], strict=True))
        values |= {v: rows[name].reshape(v.aval.shape).astype(v.aval.dtype) for v, name in sums.items()}
        run([e for e in jaxpr.eqns if e.outvars[0] not in sums], values, bound, ())
        return jax.tree.unflatten(trees[-1], [read(values, v) for v in jaxpr.outvars])

    def _is_one(self, rows: int) -> bool:
        return self.size is None or self.size >= rows

    def _over_rows(
        self, step: Callable[..., tuple[Any, list[jax.Array]]], state: Any, arrays: Sequence[jax.Array]
    ) -> tuple[Any, list[jax.Array]]:
        """step(state, *chunk) for chunks of the arrays' rows: the last state, and what it gives of all rows.

        Chunk i of n has the rows i, i + n, i + 2 n, ...; what is left makes a shorter one. The first one makes the
        state that the loop over the others carries.
        """
        rows, size = arrays[0].shape[0], self.size
        if size is None or self._is_one(rows):
            return step(state, *arrays)
        count = rows // size
        whole = [x[: count * size].reshape(size, count, *x.shape[1:]) for x in arrays]

        def body(state: Any, i: Any) -> tuple[Any, list[jax.Array]]:
            return step(state, *(lax.dynamic_index_in_dim(x, i, 1, keepdims=False) for x in whole))

        state, first = body(state, 0)
        state, stacked = lax.scan(body, state, jnp.arange(1, count))
        stacked = [jnp.concatenate([y[None], ys]) for y, ys in zip(first, stacked, strict=True)]
        found = [y.swapaxes(0, 1).reshape(count * size, *y.shape[2:]) for y in stacked]
        if count * size == rows:
            return state, found
        state, last = step(state, *(x[count * size :] for x in arrays))
        return state, [jnp.concatenate(pair) for pair in zip(found, last, strict=True)]


def _vjp_of_floats(f: Callable[..., list[jax.Array]], z: jax.Array, *lists: list[jax.Array]) -> tuple[Any, Any]:
    """jax.vjp of f(z, *lists) for z and the floats in the lists."""
    floats = [[x for x in arrays if is_float(x.dtype)] for arrays in lists]

    def function(z: jax.Array, *floats: list[jax.Array]) -> list[jax.Array]:
        return f(z, *(_beside_integers(arrays, own, arrays) for arrays, own in zip(lists, floats, strict=True)))

    return jax.vjp(function, z, *floats)


def _beside_integers(arrays: Sequence[Any], floats: Sequence[Any], integers: Sequence[Any] | None = None) -> list[Any]:
    """The floats in the places that these have among the arrays, and the integers, or None, in the others."""
    given, others = iter(floats), integers or [None] * len(arrays)
    return [next(given) if is_float(x.dtype) else y for x, y in zip(arrays, others, strict=True)]


def _sums_of_rows(jaxpr: core.Jaxpr) -> tuple[dict[Any, str], _Scale | None]:
    """The variables that are the largest of each row's logits, "max", or the sum of exp(z - max) in float32, "exp".

    And what both are of, where logits are scaled.
    """
    makers = Makers(jaxpr)
    logits = makers.casts(jaxpr.invars[0])
    found = _sums_of(makers, logits)
    if found:
        return found, None
    for scaled in makers.read_by(logits, "mul", "div"):
        (out,), number = scaled.outvars, _positive(makers, scaled.invars[1])
        if number is not None and among(scaled.invars[0], logits) and out.aval.dtype == FLOAT32:
            found = _sums_of(makers, makers.casts(out))
            if found:
                return found, _Scale(scaled.primitive.name == "div", number)
    return {}, None


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Logits divided by a number, or multiplied with it."""

    divides: bool
    number: float

    def __call__(self, z: jax.Array) -> jax.Array:
        return z / self.number if self.divides else z * self.number


def _positive(makers: Makers, x: Any) -> float | None:
    """The number above 0 that all elements of an array are, maybe as a square root; None for another array."""
    number = makers.scalar(x)
    maker = None if number is None or isinstance(number, float) else makers.maker(makers.root(number)[0])
    if maker is not None and maker.primitive.name in ("sqrt", "rsqrt"):
        number = _positive(makers, maker.invars[0])
        root = None if number is None else float(np.sqrt(np.float32(number)))
        return root if root is None or maker.primitive.name == "sqrt" else 1 / root
    return number if isinstance(number, float) and 0 < number < math.inf else None


def _sums_of(makers: Makers, logits: Collection[Any]) -> dict[Any, str]:
    """`_sums_of_rows` of these logits."""
    largest = [e.outvars[0] for e in makers.read_by(logits, "reduce_max") if is_over_last(e)]
    found = dict.fromkeys(largest, "max")
    for difference in makers.read_by(logits, "sub") if largest else ():
        left, shift = difference.invars
        (shifted,) = difference.outvars
        if among(left, logits) and shifted.aval.dtype == FLOAT32 and among(_column(makers, shift), largest):
            exponentials = [e.outvars[0] for e in makers.read_by([shifted], "exp")]
            totals = filter(is_over_last, makers.read_by(exponentials, "reduce_sum"))
            found |= dict.fromkeys((e.outvars[0] for e in totals), "exp")
    return found


def _column(makers: Makers, x: Any) -> Any:
    """The variable of one number of each row that an array has in all columns, with its gradient or without."""
    maker = makers.maker(x)
    if maker is not None and maker.primitive.name == "broadcast_in_dim" and maker.invars[0].aval.shape[-1:] == (1,):
        x = maker.invars[0]
    x = makers.root(x)[0]
    maker = makers.maker(x)
    if maker is not None and maker.primitive.name == "max" and makers.constant(maker.invars[0]) == -math.inf:
        x = makers.root(maker.invars[1])[0]  # as JAX has the largest logit, which it begins with the least number
    return x


def cotangents_read(chunks: TokenChunks, types: Sequence[Any]) -> list[bool] | None:
    """Flags of the numbers whose cotangents the derivative reads; None where it is not linear in these.

    Args:
      types: of some logits, and of lists of other arrays.
    """
    results = jax.eval_shape(chunks.numbers, *types)

    def derivative(cotangents: list[jax.Array], *arrays: Any) -> Any:
        return _vjp_of_floats(chunks.numbers, *arrays)[1](cotangents)

    jaxpr = without_dead_code(inlined(jax.make_jaxpr(derivative)(results, *types))).jaxpr
    makers, count = Makers(jaxpr), len(results)
    linear = makers.behind(jaxpr.invars[:count])
    if not all(_is_linear(makers, e, linear) for e in makers.equations if not linear.isdisjoint(e.outvars)):
        return None
    behind = ([*makers.behind([x])] for x in jaxpr.invars[:count])
    return [any(among(y, one) for y in jaxpr.outvars) for one in behind]


def _is_linear(makers: Makers, equation: Equation, linear: Collection[Any]) -> bool:
    """True for an operation that is linear in those of its arguments that are among some."""
    name, flags = equation.primitive.name, [among(x, linear) for x in equation.invars]
    if name in ("mul", "div"):
        return flags in ([True, False], [False, True]) if name == "mul" else flags == [True, False]
    if name in ("add", "sub", "add_any", "select_n"):
        terms = list(zip(equation.invars, flags, strict=True))[name == "select_n" :]
        return all(flag or makers.constant(x) == 0 for x, flag in terms) and not (name == "select_n" and flags[0])
    return name in SHAPES | {"reduce_sum", "convert_element_type", "neg"}
