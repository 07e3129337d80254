"""The primitive `coda_rounded_dot`: a `dot_general` whose factors are rounded to 8 bits, as `coda.fuse` sees it.

    y = a8 b8 / (s t)      a8 = saturate(s a), b8 = saturate(t b), as `graph.rounded` has it

It has the parameters of `dot_general`, and so is a product wherever `coda.fuse` looks for one. Its derivative is that
of a `dot_general` whose products all round: dy is rounded, and so are a and b again.

    da = dy8 b8^T / (u t),  db = a8^T dy8 / (s u)

A factor of a tensor's own has the scale of its largest value. Others are arguments behind the factors: scales, or a
history, of which the cotangent is as in `graph.rounded`. Under `vmap` with one weight for all, the tensor is the batch.

The primitive stands in traces of `coda.fuse` alone. Elsewhere `fp8_matmul` has a rule that keeps a8 and b8.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.epilogue.saturate import saturated_in_memory
from coda_jax.graph.rounded import Recipe, history_gradient, history_scale, largest, scale_of
from coda_jax.primitives import gemm

rounded_dot_p, largest_p, history_p = map(core.Primitive, ("coda_rounded_dot", "coda_largest", "coda_fp8_history"))
DOTS = frozenset({"dot_general", rounded_dot_p.name})  # names of products


@dataclasses.dataclass(frozen=True)
class RoundedFactors:
    """How a `coda_rounded_dot` rounds: its parameter `rounding`.

    Attributes:
      recipe: the dtypes and the scaling.
      given: what the arguments behind the factors are: "a", "b" and "cotangent" are scales, "history" is one.
      is_cotangent: which factors are cotangents, of `recipe.gradient_dtype`.
      tangent: the number of the factor that is a tangent, in which the product is linear; None for none.
      implementation: as in `gemm`.
    """

    recipe: Recipe
    given: tuple[str, ...] = ()
    is_cotangent: tuple[bool, bool] = (False, False)
    tangent: int | None = None
    implementation: str = "auto"

    @property
    def defers(self) -> bool:
        """Whether a norm may be applied behind the product, which then rounds what is normalised.

        Not with scales that are given: they are those of the normalised array.
        """
        return self.given in ((), ("history",))

    def scale(self, name: str, others: Sequence[Any]) -> Any:
        """The scale of "a", "b" or "cotangent" from the arguments behind the factors; None for the tensor's own."""
        known = dict(zip(self.given, others, strict=True))
        if "history" in known and name != "b" and self.recipe.scaling == "delayed":
            row = int(name == "cotangent")
            return history_scale(known["history"][row], self.recipe, is_cotangent=bool(row))
        return known.get(name)

    def check(self) -> None:
        """Raises NotImplementedError where a factor is a tangent: in forward mode."""
        if self.tangent is not None:
            raise NotImplementedError("fp8.matmul has reverse-mode derivatives only: use jax.grad or jax.vjp")

    def swapped(self) -> RoundedFactors:
        """The same of the factors in the other order."""
        names = {"a": "b", "b": "a"}
        given = tuple(names.get(name, name) for name in self.given)
        return dataclasses.replace(self, given=given, is_cotangent=self.is_cotangent[::-1])


class Quantised(NamedTuple):
    """An array in 8 bits; `unit` times its values is the array."""

    values: jax.Array
    unit: jax.Array

    @property
    def transposed(self) -> Quantised:
        return Quantised(self.values.T, self.unit)


def quantised(x: jax.Array, scale: jax.Array | None, dtype: np.dtype[Any]) -> Quantised:
    """x in 8 bits by this scale, or by its own."""
    scale = scale_of(largest(x).astype(FLOAT32), dtype=dtype) if scale is None else scale
    return Quantised(saturated_in_memory(x.astype(FLOAT32) * scale, dtype), 1 / scale)


def multiply(a: Quantised, b: Quantised, out_dtype: Any, implementation: str) -> jax.Array:
    """a b^T: a (M, K), b (N, K)."""
    unit = a.unit * b.unit
    options: dict[str, Any] = {"out_dtype": out_dtype, "transpose_b": True, "implementation": implementation}
    y: jax.Array = gemm(a.values, b.values, unit, epilogue=scaled, **options)
    return y


def scaled(acc: jax.Array, unit: jax.Array) -> jax.Array:
    """Epilogue: the product of the arrays, from that of their quantised values."""
    return acc * unit


def rounded_dot(
    a: jax.Array,
    b: jax.Array,
    *others: Any,
    sums: Any,
    rounding: RoundedFactors,
    out_dtype: Any,
    out_sharding: Any = None,
) -> jax.Array:
    """The product by the primitive.

    Args:
      a, b: the factors, of one dtype.
      others: scales and a history, as `rounding.given` names them.
      sums: the axes of both that are summed over.
      rounding: how they are rounded.
      out_dtype: of the result.
      out_sharding: of the result, over explicit mesh axes; None where the factors' types say it.
    """
    numbers = (tuple(map(tuple, sums)), ((), ()))
    params: dict[str, Any] = {"dimension_numbers": numbers, "precision": None, "out_sharding": out_sharding}
    y: jax.Array = rounded_dot_p.bind(
        a, b, *others, **params, preferred_element_type=np.dtype(out_dtype), rounding=rounding
    )
    return y


def evaluated(a: jax.Array, b: jax.Array, *others: Any, rounding: RoundedFactors, **params: Any) -> jax.Array:
    """The product by other operations: a pass that rounds each factor, and a product of 8 bits.

    Raises:
      NotImplementedError: a factor is a tangent: forward mode.
    """
    rounding.check()
    (sums_a, sums_b), _ = params["dimension_numbers"]
    (a, rows), (b, columns) = contracting_last(a, sums_a), contracting_last(b, sums_b)
    recipe = rounding.recipe
    a8, b8 = (
        quantised(x, rounding.scale(name, others), recipe.gradient_dtype if flag else recipe.dtype)
        for x, name, flag in zip((a, b), "ab", rounding.is_cotangent, strict=True)
    )
    y = multiply(a8, b8, params["preferred_element_type"], rounding.implementation)
    return y.reshape(*rows, *columns)


def contracting_last(x: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, tuple[int, ...]]:
    """x as a matrix (others, contracting), and the sizes of the others."""
    others = [axis for axis in range(x.ndim) if axis not in axes]
    sizes = tuple(x.shape[axis] for axis in others)
    k = math.prod(x.shape[axis] for axis in axes)
    return x.transpose(*others, *axes).reshape(math.prod(sizes), k), sizes


def _types(a: Any, b: Any, *_: Any, rounding: RoundedFactors, **params: Any) -> Any:
    aval, _ = lax.dot_general_p.abstract_eval(a, b, **params)
    return aval


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, rounding: RoundedFactors, **params: Any) -> Any:
    (a, b, *others), (da, db, *of_others) = primals, tangents
    y = rounded_dot_p.bind(a, b, *others, rounding=rounding, **params)
    terms = []
    for number, (dx, factors) in enumerate(((da, (da, b)), (db, (a, db)))):
        if not isinstance(dx, ad.Zero):
            tangent = dataclasses.replace(rounding, tangent=number)
            terms.append(rounded_dot_p.bind(*factors, *others, rounding=tangent, **params))
    if rounding.given == ("history",) and not isinstance(of_others[0], ad.Zero):
        inputs = of_others[0], largest_p.bind(a), others[0]
        terms.append(history_p.bind(*inputs, recipe=rounding.recipe, result=jax.typeof(y)))
    return y, functools.reduce(ad.add_tangents, terms) if terms else ad.Zero(jax.typeof(y))


def _transpose(dy: Any, a: Any, b: Any, *others: Any, rounding: RoundedFactors, **params: Any) -> list[Any]:
    """The cotangent of the factor that is a tangent; its axes come as JAX has those of a dot_general's."""
    number, results = rounding.tangent, list[Any]([None] * (2 + len(others)))
    if isinstance(dy, ad.Zero) or number is None:
        return results
    own, other = (a.aval, b) if number == 0 else (b.aval, a)
    own_sums, other_sums = params["dimension_numbers"][0][:: 1 - 2 * number]
    rest = [axis for axis in range(other.ndim) if axis not in other_sums]
    in_front = 0 if number else own.ndim - len(own_sums)  # the axes of a come first in dy
    scales = {"a": rounding.scale("cotangent", others), "b": rounding.scale("ba"[number], others)}
    given = {name: scale for name, scale in scales.items() if scale is not None}
    product = dataclasses.replace(rounding, given=tuple(given), is_cotangent=(True, False), tangent=None)
    sums = [in_front + i for i in range(len(rest))], rest
    dx = rounded_dot(dy.astype(other.dtype), other, *given.values(), sums=sums, rounding=product, out_dtype=own.dtype)
    left = [axis for axis in range(own.ndim) if axis not in own_sums]
    order = np.argsort([*left, *(axis for _, axis in sorted(zip(other_sums, own_sums, strict=True)))])
    results[number] = lax.transpose(dx, order) if list(order) != sorted(order) else dx
    return results


def _batched(arguments: Sequence[Any], axes: Sequence[Any], *, rounding: RoundedFactors, **params: Any) -> Any:
    """A batch of the first factor alone is more rows; others have a scale for each product."""
    flags = [axis is not None for axis in axes]
    if any(flags[1:]):
        each = functools.partial(evaluated, rounding=rounding, **params)
        return jax.vmap(each, in_axes=[axis if flag else None for axis, flag in zip(axes, flags, strict=True)])(
            *arguments
        ), 0
    (sums_a, sums_b), batch = params["dimension_numbers"]
    moved = jnp.moveaxis(arguments[0], axes[0], 0), *arguments[1:]
    numbers = (tuple(axis + 1 for axis in sums_a), sums_b), batch
    return rounded_dot_p.bind(*moved, rounding=rounding, **{**params, "dimension_numbers": numbers}), 0


rounded_dot_p.def_impl(evaluated)
rounded_dot_p.def_abstract_eval(_types)
ad.primitive_jvps[rounded_dot_p] = _jvp
ad.primitive_transposes[rounded_dot_p] = _transpose
batching.primitive_batchers[rounded_dot_p] = _batched
mlir.register_lowering(rounded_dot_p, mlir.lower_fun(evaluated, multiple_results=False))


def _largest(x: jax.Array) -> jax.Array:
    return largest(x).astype(FLOAT32)


largest_p.def_impl(_largest)
largest_p.def_abstract_eval(lambda x: jax.core.ShapedArray((), FLOAT32, sharding=None))
batching.primitive_batchers[largest_p] = lambda xs, axes: (_largest(xs[0]), None)
ad.primitive_jvps[largest_p] = lambda primals, _: (y := largest_p.bind(*primals), ad.Zero(jax.typeof(y)))
mlir.register_lowering(largest_p, mlir.lower_fun(_largest, multiple_results=False))


def _history_cotangent(dy: Any, _: Any, amax: jax.Array, history: jax.Array, *, recipe: Recipe, result: Any) -> Any:
    if isinstance(dy, ad.Zero):
        return [None] * 3
    found = history_gradient(history.ravel(), amax, largest_p.bind(dy), recipe=recipe)
    return [found.reshape(history.shape), None, None]


def _refused(*_: Any, recipe: Recipe, result: Any) -> Any:
    raise NotImplementedError("an fp8 history has reverse-mode derivatives only: use jax.grad or jax.vjp")


history_p.def_impl(_refused)
history_p.def_abstract_eval(lambda *_, recipe, result: result)
ad.primitive_transposes[history_p] = _history_cotangent
mlir.register_lowering(history_p, mlir.lower_fun(_refused, multiple_results=False))
