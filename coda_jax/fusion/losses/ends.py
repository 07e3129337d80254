"""The products that a derivative ends in, of the cotangent of a product's result with its factors.

z = x w        dx = dz w^T        dw = x^T dz
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend import core

from coda_jax.fusion.dots import Dot, Equation
from coda_jax.fusion.makers import Makers


def kind_of_end(makers: Makers, dot: Dot, equation: Equation, wide: int, *, is_turned: bool = False) -> str | None:
    """Whether a product with a cotangent is the first factor's, "dx", or the second's, "dw"; None if it is neither.

    Args:
      makers: of the jaxpr.
      dot: the product whose result has the cotangent.
      equation: the product with the cotangent.
      wide: which of its factors that is.
      is_turned: whether the cotangent's columns come first.
    """
    other = equation.invars[1 - wide]
    sums, batch = equation.params["dimension_numbers"]
    rank = equation.invars[wide].aval.ndim
    order = [rank - 1, *range(rank - 1)] if is_turned else list(range(rank))
    own, others = [order[axis] for axis in sums[wide]], list(sums[1 - wide])
    if batch[0] or isinstance(other, core.Literal):
        return None
    last = dot.b.aval.ndim - 1
    if other in makers.casts(dot.b) and own == [rank - 1] and others == [0 if dot.transpose_b else last]:
        return "dx"
    rows = list(range(dot.rows_a))
    is_of_rows = rank == dot.rows_a + 1 and sorted(zip(own, others, strict=True)) == [(i, i) for i in rows]
    return "dw" if other in makers.casts(dot.a) and is_of_rows else None


def end_of(makers: Makers, dot: Dot, equation: Equation, kind: str, gradient: jax.Array) -> jax.Array:
    """The array that such a product makes, from the gradient of the variable that it is of; "dbias" is no product's."""
    (out,), axes = equation.outvars, list(range(gradient.ndim))
    if kind == "dx":
        is_first = equation.invars[1] in makers.casts(dot.b)
        axes = axes if is_first else [*axes[dot.rows_a :], *axes[: dot.rows_a]]
    elif kind == "dw":
        is_first = equation.invars[1] in makers.casts(dot.a)
        axes = axes if dot.transpose_b else [axes[-1], *axes[:-1]]  # the columns first
        axes = axes if is_first else [*axes[1:], axes[0]]
    return jnp.transpose(gradient, axes).reshape(out.aval.shape).astype(out.aval.dtype)
