"""Norms of the values of a block."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from coda_jax.epilogue.dtypes import FLOAT32
from coda_jax.epilogue.values import same_shape
from coda_jax.graph import norm as norms
from coda_jax.graph import rounded
from coda_jax.graph.author import Computed, Value
from coda_jax.graph.rounded import Rounding
from coda_jax.graph.values import Value as Node


class NormedValue(Value):
    """A norm of a value, x. A product with it is scaled; anything else reads the normalised array."""

    def __init__(
        self,
        norm: norms.NormValues,
        x: Value,
        plain: jax.Array | None,
        plain_factors: tuple[jax.Array, jax.Array] | None = None,  # rstd (..., 1) and scale, of an RMSNorm
    ):
        self._trace, self.shape, self.norm, self.x, self._plain = x._trace, x.shape, norm, x, plain
        self._plain_factors = plain_factors
        self.dtype = norm.x.stored_as(x._trace.dtype)

    @property
    def _node(self) -> Node:
        return self.norm.applied

    def _product(self, b: Node, rounding: Rounding | None) -> Node:
        if rounding is None:
            return self.norm.product(b)
        return self.norm.product(b, functools.partial(rounded.multiplied, rounding=rounding))

    def _plain_product(self, w: Value, rounding: Rounding | None) -> jax.Array:
        if rounding is None or self.norm.is_applied or self._plain_factors is None:
            return super()._plain_product(w, rounding)
        (rstd, scale), axes = self._plain_factors, [1] * (w.ndim - 1)
        y = rounded.in_jax(self.x._array(), scale.reshape(-1, *axes) * w._array().astype(FLOAT32), rounding)
        return y * rstd.reshape(*self.shape[:-1], *axes)


def rms_norm(x: Value, sumsq: Value | None, scale: Any, epsilon: float) -> NormedValue:
    """RMSNorm of a value (..., D); sumsq (...,), the row sums of its squares, where they are known."""
    trace, scale = x._trace, x._trace.value(scale)
    _check_width("rms_norm", x, scale=scale)
    sums = None if sumsq is None else sumsq._viewed((x._node.shape[0], 1))
    norm, plain, factors = norms.rms_norm(x._node, sums, scale._node, float(epsilon), trace.dtype), None, None
    if trace.is_plain:
        wide = x._array().astype(FLOAT32)
        factors = (
            lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + float(epsilon)),
            scale._array().astype(FLOAT32),
        )
        plain = wide * factors[0] * factors[1]
    return NormedValue(norm, x, plain, factors)


def layer_norm(x: Value, scale: Any, bias: Any, epsilon: float) -> NormedValue:
    """LayerNorm of a value (..., D)."""
    trace, scale = x._trace, x._trace.value(scale)
    bias = None if bias is None else trace.value(bias)
    _check_width("layer_norm", x, scale=scale, bias=bias)
    bias_node = None if bias is None else bias._node
    norm, plain = norms.layer_norm(x._node, scale._node, bias_node, float(epsilon), trace.dtype), None
    if trace.is_plain:
        wide = x._array().astype(FLOAT32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        rstd = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + float(epsilon))
        plain = centred * rstd * scale._array().astype(FLOAT32)
        plain = plain if bias is None else plain + bias._array().astype(FLOAT32)
    return NormedValue(norm, x, plain)


def _check_width(name: str, x: Value, **vectors: Value | None) -> None:
    if x.ndim < 2:
        raise ValueError(f"{name}: x has shape {x.shape}; it must have rows and columns")
    for argument, vector in vectors.items():
        if vector is not None and not same_shape(vector.shape, x.shape[-1:]):
            raise ValueError(
                f"{name}: {argument} has shape {vector.shape}; beside x {x.shape} it must be {x.shape[-1:]}"
            )


def sum_of_squares(x: Value, *, is_column: bool = True) -> Value:
    """(...,), the row sums of the squares of a value (..., D), through which no gradient flows.

    In the graph they are a column (M, 1), as norms read them; or a vector, for which a batch of rows is more rows.
    """
    plain = None
    if x._trace.is_plain:
        plain = jnp.sum(jnp.square(lax.stop_gradient(x._array()).astype(FLOAT32)), axis=-1)
    return Computed(x._trace, norms.sum_of_squares(x._node, is_column=is_column), plain, x.shape[:-1])
