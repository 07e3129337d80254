"""Products that train in fp8: both factors and the cotangent are quantised, each by one scale.

`matmul` replaces `jnp.matmul`, and `DotGeneral` replaces `jax.lax.dot_general` in a Flax layer. Their three products,
of the result and of both gradients, have factors of eight bits. Under `coda.fuse` the epilogues that make x and dy
round them. Elsewhere each copy is made by a pass, for a single product does not know what comes before and after it.
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

from coda_jax.epilogue.dtypes import FLOAT32, FLOATS_OF_8_BITS, listed
from coda_jax.graph.rounded import Recipe, history_gradient, largest
from coda_jax.operators.enclosing import is_fused
from coda_jax.operators.rounded_dot import RoundedFactors, contracting_last, evaluated, multiply, quantised, rounded_dot
from coda_jax.primitives.call_arguments import check_implementation
from coda_jax.primitives.dtypes import check_floats
from coda_jax.primitives.layout import spec_of_sum
from coda_jax.primitives.mesh_types import sharding_over_explicit, vary, varying_axes


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    recipe: Recipe | None = None,
    history: jax.Array | None = None,
    x_scale: Any = None,
    w_scale: Any = None,
    gradient_scale: Any = None,
    dtype: Any = jnp.float8_e4m3fn,
    gradient_dtype: Any = jnp.float8_e4m3fn,
    out_dtype: Any = None,
    implementation: str = "auto",
) -> jax.Array:
    """x w, with both factors and, in the backward pass, the result's cotangent rounded to fp8.

        q(x) = saturate(x s_x, dtype)      s_x = 2^floor(log2(largest / max |x|)), largest: 448 in e4m3, 57344 in e5m2
        y = (q(x) q(w)) / (s_x s_w)
        dx = (q(dy) q(w)^T) / (s_dy s_w),  dw = (q(x)^T q(dy)) / (s_x s_dy)

    This is current scaling, a scale a tensor (arXiv 2209.05433, section 3.2, with the scale of the tensor itself). The
    derivative treats rounding as the identity, and ignores the clipping and the scales. Sums are float32.
    Kept for the backward pass are q(x) and q(w): a byte an element.

    In a function under `coda.fuse` the epilogues that make x and dy round them, and store the copies that the three
    products read. There a batch of `jax.vmap` that shares w has one scale; elsewhere each of the batch has its own. And
    where x is an RMSNorm that `coda.fuse` defers, x = r h s with r of rows and s of columns, the product is that of h:

        y = r (q(h) q(s w)) / (s_h s_sw),  dy is rounded as q(r dy),  and a history is of h and of r dy

    Products that read one x, each with a history, have one scale of it, of the largest maximum in these. Neither is so
    under `exact=True`, or where scales are given; `defer_norms=False` defers no norm.

    Args:
      x: (..., K) bfloat16, float16 or float32.
      w: (K, N) of such a dtype, or (K, ...) with columns in several axes. K, N and the product of the leading axes of x
        are multiples of 16 for the kernel.
      recipe: the dtypes and the scaling; default `Recipe(dtype=dtype, gradient_dtype=gradient_dtype)`.
      history: float32 (2, H), the maxima of x and of dy in the H steps before, the latest first, 0 where there is none.
        With a recipe of delayed scaling s_x and s_dy come from it. Its gradient is no derivative: it holds this step's
        maxima, from which `coda.fp8.next_history` makes the next step's history.
      x_scale, w_scale: float32 scalars that replace s_x and s_w, for instance from the maxima of earlier steps. Values
        beyond the largest one are then clipped to it. They have no gradient.
      gradient_scale: the same for s_dy.
      dtype: of q(x) and q(w), float8_e4m3fn or float8_e5m2; a recipe has its own.
      gradient_dtype: of q(dy). float8_e5m2 has more range and half the precision; beside a scale of the tensor itself
        the range is seldom needed.
      out_dtype: of the result; default the promotion of x and w.
      implementation: as in `gemm`.

    Returns:
      (..., N), with the axes that w has behind K. The cotangents of x and w have the dtypes of x and w.

    Raises:
      TypeError: an array or dtype that is not as above; a recipe beside other dtypes, or a history beside scales.
      ValueError: shapes that do not fit; delayed scaling without a history.
    """
    check_implementation("fp8.matmul", implementation)
    check_floats("fp8.matmul", x=x, w=w)
    if x.ndim < 1 or w.ndim < 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"fp8.matmul: x has shape {x.shape} and w {w.shape}; they must be (..., K) and (K, N)")
    named = {"a": ("x_scale", x_scale), "b": ("w_scale", w_scale), "cotangent": ("gradient_scale", gradient_scale)}
    given = {name: _checked_scale(*scale) for name, scale in named.items() if scale[1] is not None}
    recipe = _checked_recipe(recipe, dtype, gradient_dtype)
    if history is not None:
        if given:
            raise TypeError("fp8.matmul: a history is given, and a scale; it must be one of both")
        given["history"] = _checked_history(history)
    elif recipe.scaling == "delayed":
        raise ValueError(f"fp8.matmul: history is None beside {recipe}; it must be float32 (2, H)")
    rounding = RoundedFactors(recipe, tuple(given), implementation=implementation)
    out_dtype = np.dtype(out_dtype or jnp.promote_types(x.dtype, w.dtype))
    x, w, *others = vary(varying_axes(x, w, *given.values()), x, w, *given.values())
    if is_fused():
        dtype = next((one.dtype for one in (x, w) if one.dtype.itemsize == 2), x.dtype)  # factors of one dtype
        factors = jnp.atleast_2d(x).astype(dtype), w.astype(dtype)
        sums, sharding = ((factors[0].ndim - 1,), (0,)), sharding_over_explicit(spec_of_sum(*factors))
        y = rounded_dot(*factors, *others, sums=sums, rounding=rounding, out_dtype=out_dtype, out_sharding=sharding)
        return y.reshape(*x.shape[:-1], *w.shape[1:])
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) if x.ndim != 2 else x
    columns = w.reshape(w.shape[0], math.prod(w.shape[1:])) if w.ndim != 2 else w
    return _product(_Options(rounding, out_dtype), rows, columns, others).reshape(*x.shape[:-1], *w.shape[1:])


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """`jax.lax.dot_general` by `matmul`, for layers that take one.

    `flax.nnx.Linear(..., dot_general=coda.fp8.DotGeneral())`, `flax.linen.Dense(..., dot_general_cls=
    coda.fp8.DotGeneral)`. All scales are those of the tensors.

    Attributes:
      dtype, gradient_dtype, implementation: as in `matmul`.
    """

    dtype: Any = jnp.float8_e4m3fn
    gradient_dtype: Any = jnp.float8_e4m3fn
    implementation: str = "auto"

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]],
        precision: Any = None,
        preferred_element_type: Any = None,
        **options: Any,
    ) -> jax.Array:
        """The sum over the contracting axes of lhs and rhs: other axes of lhs, then those of rhs.

        Args:
          lhs, rhs: bfloat16, float16 or float32, of any number of axes.
          dimension_numbers: as in `jax.lax.dot_general`, without batch axes.
          precision: None or jax.lax.Precision.DEFAULT; fp8 has no other.
          preferred_element_type: dtype of the result; default the promotion of lhs and rhs.
          **options: what else a layer gives must be None.

        Raises:
          ValueError: batch axes, another precision, or an option.
        """
        contracting, batch = dimension_numbers
        if any(batch):
            raise ValueError(f"fp8.DotGeneral: batch axes {batch}; use jax.vmap for a batch of products")
        precisions = precision if isinstance(precision, tuple | list) else (precision,)
        if any(one not in (None, "default", lax.Precision.DEFAULT) for one in precisions):
            raise ValueError(f"fp8.DotGeneral: precision = {precision}; it must be None, fp8 has no other")
        if unsupported := {name: value for name, value in options.items() if value is not None}:
            raise ValueError(f"fp8.DotGeneral: {unsupported}; these options are not supported and must be None")
        x, rows = contracting_last(lhs, contracting[0])
        w, columns = contracting_last(rhs, contracting[1])
        y = matmul(
            x,
            w.T,
            dtype=self.dtype,
            gradient_dtype=self.gradient_dtype,
            out_dtype=preferred_element_type,
            implementation=self.implementation,
        )
        return y.reshape(*rows, *columns)


class _Options(NamedTuple):
    rounding: RoundedFactors
    out_dtype: np.dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(options: _Options, x: jax.Array, w: jax.Array, others: list[Any]) -> jax.Array:
    return _forward(options, x, w, others)[0]


def _forward(options: _Options, x: jax.Array, w: jax.Array, others: list[Any]) -> tuple[jax.Array, Any]:
    rounding, dtype = options.rounding, options.rounding.recipe.dtype
    qx, qw = (quantised(one, rounding.scale(name, others), dtype) for one, name in ((x, "a"), (w, "b")))
    y = multiply(qx, qw.transposed, options.out_dtype, rounding.implementation)
    empty = jnp.empty((0,), x.dtype), jnp.empty((0,), w.dtype)  # their dtypes, for the backward pass
    return y, (qx, qw, largest(x) if "history" in rounding.given else None, *empty, others)


def _backward(options: _Options, kept: Any, dy: jax.Array) -> tuple[Any, ...]:
    (qx, qw, amax, like_x, like_w, others), rounding = kept, options.rounding
    qdy = quantised(dy, rounding.scale("cotangent", others), rounding.recipe.gradient_dtype)
    dx = multiply(qdy, qw, like_x.dtype, rounding.implementation)
    dw = multiply(qx.transposed, qdy.transposed, like_w.dtype, rounding.implementation)
    if amax is None:
        return dx, dw, list(map(jnp.zeros_like, others))
    (history,) = others
    maxima = amax.astype(FLOAT32), largest(dy).astype(FLOAT32)
    return dx, dw, [history_gradient(history.ravel(), *maxima, recipe=rounding.recipe).reshape(history.shape)]


_product.defvjp(_forward, _backward)


def product_of(inputs: Sequence[Any], *, rounding: RoundedFactors, **params: Any) -> jax.Array:
    """The result of a `coda_rounded_dot` of these parameters; it is differentiable where no factor is a cotangent."""
    if rounding.tangent is not None or any(rounding.is_cotangent):
        return evaluated(*inputs, rounding=rounding, **params)
    (a, b, *others), (sums, _) = inputs, params["dimension_numbers"]
    (a, rows), (b, columns) = (contracting_last(x, axes) for x, axes in zip((a, b), sums, strict=True))
    y = _product(_Options(rounding, params["preferred_element_type"]), a, b.T, others)
    return y.reshape(*rows, *columns)


def _checked_recipe(recipe: Recipe | None, dtype: Any, gradient_dtype: Any) -> Recipe:
    if not isinstance(recipe, Recipe | None):
        raise TypeError(f"fp8.matmul: recipe = {recipe!r}; it must be a coda.fp8.Recipe or None")
    default, own = np.dtype(jnp.float8_e4m3fn), {"dtype": np.dtype(dtype), "gradient_dtype": np.dtype(gradient_dtype)}
    for name, x in own.items():
        if x.name not in FLOATS_OF_8_BITS:
            raise TypeError(f"fp8.matmul: {name} = {x}; it must be {listed(FLOATS_OF_8_BITS)}")
        if recipe is not None and x not in (default, getattr(recipe, name)):
            raise TypeError(f"fp8.matmul: {name} = {x} beside {recipe}; a recipe has its own dtypes")
    return Recipe(**own) if recipe is None else recipe


def _checked_history(history: Any) -> jax.Array:
    history = jnp.asarray(history)
    if history.ndim != 2 or history.shape[0] != 2 or history.dtype != FLOAT32:
        raise ValueError(f"fp8.matmul: history is {history.dtype} of shape {history.shape}; it must be float32 (2, H)")
    return history


def _checked_scale(name: str, scale: Any) -> jax.Array:
    scale = jnp.float32(scale) if isinstance(scale, int | float) else jnp.asarray(scale)
    if scale.shape != () or scale.dtype != FLOAT32:
        raise TypeError(f"fp8.matmul: {name} is {scale.dtype} of shape {scale.shape}; it must be a float32 scalar")
    return scale
