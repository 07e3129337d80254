"""Products of factors that are rounded to 8 bits where they are made, each tensor by one scale.

    x8 = saturate(s x),  w8 = saturate(t w)       s = 2^floor(log2(largest / max |x|)), t alike of w
    y = x8 w8 / (s t)
    g8 = saturate(u dy)                           u of dy as s of x
    dx = g8 w8^T / (u t),  dw = x8^T g8 / (s u)

`largest` is that of the format, 448 for float8_e4m3fn. With delayed scaling s and u come from maxima of earlier steps,
so that x and dy are rounded by the epilogues that make them:

    s = 2^floor(log2(largest / (headroom max_i amax_i)))      of the history amax_1 ... amax_H; 1 where all are 0

A history's cotangent is no derivative: its first entries are max |x| and max |dy|, the second ones 1 where values were
clipped, and all others 0. So they leave a backward pass as a gradient, as in Flax's fp8_ops. Sums of such cotangents,
for a layer that is called twice or for microbatches, bound the maxima, where entire histories would add up.

The derivative treats rounding as the identity and scales as constants, as that of arXiv 2209.05433 does. A scale that
is a power of two adds no rounding of its own. All six factors are contiguous along k, so that x, w and dy each have a
transposed copy; the plan decides where it is made.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import saturate
from coda_jax.epilogue.dtypes import FLOAT32, FLOATS_OF_8_BITS, listed
from coda_jax.epilogue.saturate import saturated_in_memory
from coda_jax.graph.values import Map, Product, Transposed, Value, make_map, transposed

LEAST_AMAX = 2.0**-100  # of an array of zeros: its scale is finite


Bodies = dict[Hashable, Any]  # of maps, by what they compute: equal layers share them


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How products train in 8 bits: both factors and the result's cotangent are rounded, each by one scale.

    Scales are powers of two. With scaling="current" they come from the tensor's own largest value, for which it is read
    once more, and there is no state. With "delayed" they come from the largest value of the `history` steps before, and
    `headroom` times that value is in range (arXiv 2209.05433, section 3.2): x and cotangents are then rounded where
    they are made, and values beyond the range are clipped to it. Weights have current scales in both.

    Attributes:
      scaling: "current" or "delayed".
      history: how many steps.
      headroom: at least 1.
      dtype: of factors, float8_e4m3fn or float8_e5m2.
      gradient_dtype: of cotangents. float8_e5m2 has more range and half the precision.

    Raises:
      TypeError: another dtype.
      ValueError: another scaling, history or headroom.
    """

    scaling: str = "current"
    history: int = 16
    headroom: float = 8.0
    dtype: Any = jnp.float8_e4m3fn
    gradient_dtype: Any = jnp.float8_e4m3fn

    def __post_init__(self) -> None:
        for name in ("dtype", "gradient_dtype"):
            dtype = np.dtype(getattr(self, name))
            if dtype.name not in FLOATS_OF_8_BITS:
                raise TypeError(f"fp8.Recipe: {name} = {dtype}; it must be {listed(FLOATS_OF_8_BITS)}")
            object.__setattr__(self, name, dtype)
        if self.scaling not in ("current", "delayed"):
            raise ValueError(f"fp8.Recipe: scaling = {self.scaling!r}; it must be 'current' or 'delayed'")
        if not (isinstance(self.history, int) and self.history >= 1):
            raise ValueError(f"fp8.Recipe: history = {self.history!r}; it must be an int, at least 1")
        if not 1 <= self.headroom < float("inf"):
            raise ValueError(f"fp8.Recipe: headroom = {self.headroom!r}; it must be at least 1")


@dataclasses.dataclass(frozen=True, eq=False)
class Rounding:
    """How the factors of a product x w and its cotangent are rounded.

    Attributes:
      recipe: the dtypes and the scaling.
      history: (2 H,), of x and of the cotangent of x w; None for none.
      array: the history (2, H), where lines are run as plain JAX.
      scales: of x, w and the cotangent; None for that of a history, or of the tensor's own largest value.
      is_cotangent: which factors are cotangents, of `recipe.gradient_dtype`.
    """

    recipe: Recipe
    history: Value | None = None
    array: jax.Array | None = None
    scales: tuple[Value | None, Value | None, Value | None] = (None, None, None)
    is_cotangent: tuple[bool, bool] = (False, False)


@dataclasses.dataclass(frozen=True, eq=False)
class Scales:
    """The scales with which a product's factors were rounded, and how its cotangent is rounded.

    Attributes:
      a, b: the factors' scales.
      cotangent_scale: the cotangent's scale; None for that of its own largest value.
      recipe: how the cotangent is rounded.
      history: (2 H,), of a and of the cotangent; None for none.
      amax: of a.
    """

    a: Value
    b: Value
    cotangent_scale: Value | None
    recipe: Recipe
    history: Value | None
    amax: Value


def multiplied(x: Value, w: Value, rounding: Rounding) -> Value:
    """x w for x (M, K) and w (K, N)."""
    return product_and_result(x, w, rounding, {})[1]


def product_and_result(x: Value, w: Value, rounding: Rounding, bodies: Bodies) -> tuple[Product, Value]:
    """The product of the factors in 8 bits, and x w for x (M, K) and w (K, N).

    Args:
      bodies: the table of bodies of the graph, in which equal ones are found.
    """
    recipe, history = rounding.recipe, rounding.history
    is_transposed = isinstance(w, Transposed)
    rows, weight = x.inputs[0] if isinstance(x, Transposed) else x, w.inputs[0] if is_transposed else w
    is_kept = weight.is_factor
    if is_kept:  # the rounded weight is kept, not the one in the products' dtype
        weight = weight.inputs[0] if isinstance(weight, Map) and weight.is_weight else weight
        weight.is_factor = False
    x_scale, w_scale, dy_scale = rounding.scales
    if history is not None and recipe.scaling == "delayed":
        own, dy_scale = _history_scales(history, recipe, bodies)
        x_scale = own if x_scale is None else x_scale
    dtypes = [_dtype_of(recipe, flag) for flag in rounding.is_cotangent]
    x8, x_scale = rounded(rows, dtypes[0], bodies, x_scale)
    w8, w_scale = rounded(weight, dtypes[1], bodies, w_scale)
    w8.is_factor = is_kept
    x8 = x8 if rows is x else transposed(x8)
    acc = Product(x8, w8 if is_transposed else transposed(w8), transpose_b=True)
    acc.scales = Scales(x_scale, w_scale, dy_scale, recipe, history, amax_of(rows, bodies))
    y = _map("product", _unscaled, bodies, acc, x_scale, w_scale, pullback=_of_product, derived="scale")
    return acc, y


def rounded(x: Value, dtype: np.dtype[Any], bodies: Bodies, scale: Value | None = None) -> tuple[Value, Value]:
    """The tensor in 8 bits by this scale, or by its own, and the scale: the same values each time."""
    key = dtype, scale
    if key not in x.rounded:
        if scale is None:
            own_scale = functools.partial(scale_of, dtype=dtype)
            scale = _map(("scale of", dtype), own_scale, bodies, amax_of(x, bodies), derived="scale")
        round_ = functools.partial(_rounded, dtype=dtype, saturate=saturated_in_memory)  # products alone read it
        x8 = _map(("round", dtype), round_, bodies, x, scale, pullback=_straight_through, derived="round")
        x.rounded[key] = x8, scale
    return x.rounded[key]


def _of_product(y: Any, acc: Any, x_scale: Any, w_scale: Any, dy: Any) -> tuple[Any, None, None]:
    """The cotangent of a product in 8 bits is that of its result without scales: `cotangents` has these."""
    return dy, None, None


def _straight_through(x8: Any, x: Any, scale: Any, dy: Any) -> tuple[Any, None]:
    """The cotangent of what is rounded is that of the result."""
    return dy, None


def amax_of(x: Value, bodies: Bodies) -> Value:
    """max |x|, the same value each time."""
    if x.amax is None:
        x.amax = _map("amax", largest, bodies, x, derived="amax")
    return x.amax


def _map(key: Hashable, f: Callable[..., Any], bodies: Bodies, *inputs: Value, **options: Any) -> Any:
    """A map of f, which is traced once for this key and these types."""
    return make_map(f, *inputs, shared=(bodies, ("in 8 bits", key)), **options)


def _history_scales(history: Value, recipe: Recipe, bodies: Bodies) -> tuple[Value, Value]:
    """The scales of x and of the cotangent."""

    def scales(history: jax.Array) -> list[jax.Array]:
        return [history_scale(of, recipe, is_cotangent=bool(i)) for i, of in enumerate(jnp.split(history, 2))]

    x_scale, dy_scale = _map(("scales", recipe), scales, bodies, history, derived="scales")
    return x_scale, dy_scale


def scale_of_all(histories: Sequence[Value], recipe: Recipe, bodies: Bodies) -> Value:
    """The scale of an array that several products read, each with a history (2 H,): that of the largest maximum."""

    def scale(*histories: jax.Array) -> jax.Array:
        largest_of_each = [jnp.max(_finite(jnp.split(history, 2)[0])) for history in histories]
        return history_scale(jnp.stack(largest_of_each), recipe)

    value: Value = _map(("scale of all", recipe), scale, bodies, *histories, derived="scale")
    return value


def cotangents(y: Product, dy: Value, bodies: Bodies) -> list[tuple[Value, Value]]:
    """Pairs: a product's factors and the cotangents of the unrounded ones; its history and this step's maxima."""
    assert y.scales is not None
    dy8, dy_scale = rounded(dy, y.scales.recipe.gradient_dtype, bodies, y.scales.cotangent_scale)
    da, db = factor_cotangents(y, dy8)
    is_copy = isinstance(db, Transposed)
    unscaled = functools.partial(_map, "unscaled", _unscaled, bodies, derived="scale")
    dw = unscaled(transposed(db) if is_copy else db, y.scales.a, dy_scale)
    pairs = [
        (y.a, unscaled(da, dy_scale, y.scales.b)),
        (y.b, transposed(dw) if is_copy else dw),
    ]
    if y.scales.history is not None:
        inputs = y.scales.history, y.scales.amax, amax_of(dy, bodies), y.scales.a
        recipe = y.scales.recipe
        maxima = functools.partial(history_gradient, recipe=recipe)
        pairs.append((y.scales.history, _map(("history", recipe), maxima, bodies, *inputs, derived="history")))
    return pairs


def history_gradient(
    history: jax.Array, amax: jax.Array, cotangent_amax: jax.Array, scale: jax.Array | None = None, *, recipe: Recipe
) -> jax.Array:
    """The cotangent of a history (2 H,): the maxima, and where H leaves room for it whether values were clipped.

    Args:
      history: of a product.
      amax, cotangent_amax: this step's maxima, of the product's input and of its result's cotangent.
      scale: of the input; None for that of the history.
      recipe: of the product.
    """
    steps = history.shape[0] // 2
    rows = []
    for i, (row, largest_one) in enumerate(zip(jnp.split(history, 2), (amax, cotangent_amax), strict=True)):
        own = scale if scale is not None and not i else history_scale(row, recipe, is_cotangent=bool(i))
        is_beyond = largest_one * own > float(jnp.finfo(_dtype_of(recipe, bool(i))).max)
        is_clipped = jnp.float32(0) if recipe.scaling == "current" else is_beyond.astype(FLOAT32)
        rows += [jnp.stack([_finite(largest_one), is_clipped])[:steps], jnp.zeros(max(steps - 2, 0))]
    return jnp.concatenate(rows)


def _dtype_of(recipe: Recipe, is_cotangent: bool) -> np.dtype[Any]:
    return np.dtype(recipe.gradient_dtype if is_cotangent else recipe.dtype)


def _finite(amax: jax.Array) -> jax.Array:
    return jnp.where(amax < jnp.inf, amax, 0.0)


def next_history(history: jax.Array, gradient: jax.Array) -> jax.Array:
    """The history of the next step, (..., 2, H), from this step's and its gradient.

    The gradient's maxima come first, and the oldest are dropped. A history without a new maximum is unchanged, as that
    of a layer that did not contribute to the loss or whose values were not finite.
    """
    amax = _finite(gradient[..., :1])
    return jnp.where(amax > 0, jnp.concatenate([amax, history[..., :-1]], axis=-1), history)


def factor_cotangents(y: Product, dy: Value) -> tuple[Value, Value]:
    """The products that are the factors' cotangents, of (M, K) and (N, K), as the kernel reads 8 bits."""
    a = transposed(y.a) if y.transpose_a else y.a
    b = y.b if y.transpose_b else transposed(y.b)
    a_factors = (transposed(b), dy) if y.transpose_a else (dy, transposed(b))
    is_copy = isinstance(y.b, Transposed)  # then the transposed array has the cotangent, which is not stored transposed
    b_factors = (transposed(dy), transposed(a)) if y.transpose_b != is_copy else (transposed(a), transposed(dy))
    da = Product(*a_factors, transpose_b=True, like=y.a)
    db = Product(*b_factors, transpose_b=True, like=y.b.inputs[0] if is_copy else y.b)
    return da, transposed(db) if is_copy else db


def scale_of(amax: jax.Array, *, dtype: Any) -> jax.Array:
    """The scale of a tensor whose largest magnitude is amax."""
    quotient = float(jnp.finfo(dtype).max) / jnp.maximum(amax.astype(FLOAT32), LEAST_AMAX)
    exponent = jax.lax.bitcast_convert_type(quotient, jnp.int32) & 0x7F800000  # exact, as exp2 is not everywhere
    return jnp.where(jnp.isnan(quotient), quotient, jax.lax.bitcast_convert_type(exponent, FLOAT32))


def history_scale(history: jax.Array, recipe: Recipe, *, is_cotangent: bool = False) -> jax.Array:
    """The scale (...,) from the maxima (..., H) of earlier steps; 1 where all are 0, as before the first step.

    Maxima that are not finite are ignored, and the headroom ends with float32's range, so that each scale is finite and
    above 0.

    Args:
      history: of a product's input, or of its result's cotangent.
      recipe: with delayed scaling.
      is_cotangent: whether it is the cotangent's.
    """
    amax = jnp.max(_finite(history), axis=-1)
    wanted = jnp.minimum(recipe.headroom * amax, jnp.finfo(FLOAT32).max)
    return jnp.where(amax > 0, scale_of(wanted, dtype=_dtype_of(recipe, is_cotangent)), 1.0)


def in_jax(x: jax.Array, w: jax.Array, rounding: Rounding) -> jax.Array:
    """x w for x (..., K) and w (K, ...) in plain JAX, float32."""
    rows = x.astype(FLOAT32).reshape(math.prod(x.shape[:-1]), x.shape[-1])
    columns = w.astype(FLOAT32).reshape(w.shape[0], math.prod(w.shape[1:]))
    return _product(rounding.recipe, rows, columns, rounding.array).reshape(*x.shape[:-1], *w.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(recipe: Recipe, x: jax.Array, w: jax.Array, history: jax.Array | None) -> jax.Array:
    return _forward(recipe, x, w, history)[0]


def _forward(recipe: Recipe, x: jax.Array, w: jax.Array, history: jax.Array | None) -> tuple[jax.Array, Any]:
    (x8, s), (w8, t) = _in_8_bits(x, recipe.dtype, recipe, history, 0), _in_8_bits(w, recipe.dtype)
    return _unscaled(_wide(x8) @ _wide(w8), s, t), (x8, s, w8, t, history, largest(x))


def _backward(recipe: Recipe, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    x8, s, w8, t, history, amax = kept
    g8, u = _in_8_bits(dy, recipe.gradient_dtype, recipe, history, 1)
    dx, dw = _unscaled(_wide(g8) @ _wide(w8).T, u, t), _unscaled(_wide(x8).T @ _wide(g8), s, u)
    if history is None:
        return dx, dw, None
    return dx, dw, history_gradient(history.ravel(), amax, largest(dy), recipe=recipe).reshape(history.shape)


_product.defvjp(_forward, _backward)


def _in_8_bits(
    x: jax.Array, dtype: Any, recipe: Recipe | None = None, history: jax.Array | None = None, row: int = 0
) -> tuple[jax.Array, jax.Array]:
    if recipe is None or history is None or recipe.scaling == "current":
        scale = scale_of(largest(x), dtype=dtype)
    else:
        scale = history_scale(history[row], recipe, is_cotangent=bool(row))
    return _rounded(x, scale, dtype=dtype), scale


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(FLOAT32)


def largest(x: jax.Array) -> jax.Array:
    """The largest magnitude, (), without a gradient; 0 of no values."""
    if any(isinstance(size, int) and size == 0 for size in x.shape):
        return jnp.zeros((), x.dtype)
    return jnp.max(jnp.abs(jax.lax.stop_gradient(x)))


def _rounded(x: jax.Array, scale: jax.Array, *, dtype: Any, saturate: Callable[..., jax.Array] = saturate) -> jax.Array:
    return saturate(x * scale, dtype)


def _unscaled(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return acc * (1 / (a * b))
