"""Picks of arrays along a vocabulary, at labels: by a gather, or by a sum with a one-hot array."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from coda_jax.fusion.dots import Equation
from coda_jax.fusion.makers import Makers
from coda_jax.jaxprs.def_use import variables

CLIPPED = frozenset({"CLIP", "PROMISE_IN_BOUNDS"})  # modes of a gather; of the latter JAX defines no result outside


def is_over_last(equation: Equation) -> bool:
    """True for a reduction over the last axis."""
    return tuple(equation.params["axes"]) == (equation.invars[0].aval.ndim - 1,)


def one_hot(makers: Makers, x: Any) -> tuple[Any, float, float] | None:
    """The labels of which a variable has one number along its last axis, that number, and all others there."""
    maker = makers.maker(x)
    if maker is None:
        return None
    if (name := maker.primitive.name) in ("add", "mul", "sub", "div"):
        return _scaled_one_hot(makers, maker)
    if name == "select_n" and len(maker.invars) == 3:
        mask, *cases = maker.invars
        found, numbers = one_hot(makers, mask), [makers.constant(case) for case in cases]
        return None if found is None or None in numbers else (found[0], numbers[1], numbers[0])  # type: ignore[return-value]
    if name == "convert_element_type":
        return one_hot(makers, maker.invars[0])
    if name != "eq":
        return None
    counts = [y for y in maker.invars if makers.counts_along_last(y, x.aval.ndim)]
    labels = [y for y in variables(maker.invars) if y.aval.shape[-1:] == (1,)]
    same_rows = labels and labels[0].aval.shape[:-1] == x.aval.shape[:-1]
    return (labels[0], 1.0, 0.0) if len(counts) == 1 and same_rows else None


def _scaled_one_hot(makers: Makers, equation: Equation) -> tuple[Any, float, float] | None:
    """`one_hot` of one that is multiplied with a number, or to which one is added."""
    left, right = equation.invars
    name = equation.primitive.name
    if makers.constant(right) is None and name in ("add", "mul"):
        left, right = right, left
    found, number = one_hot(makers, left), makers.constant(right)
    if found is None or number is None or not jnp.issubdtype(left.aval.dtype, jnp.floating):
        return None
    apply = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}[name]
    return found[0], apply(found[1], number), apply(found[2], number)


def is_along_last(gather: Equation) -> bool:
    """True for one element of each row along the last axis."""
    numbers = gather.params["dimension_numbers"]
    axes = numbers.start_index_map, numbers.operand_batching_dims, numbers.start_indices_batching_dims
    return _is_one_of_each_row(gather.invars[0].aval, gather.outvars[0].aval, *axes)


def puts_along_last(scatter: Equation) -> bool:
    """True for one number that is added to each row along the last axis: the derivative of `is_along_last`."""
    numbers = scatter.params["dimension_numbers"]
    axes = numbers.scatter_dims_to_operand_dims, numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    return _is_one_of_each_row(scatter.invars[0].aval, scatter.invars[2].aval, *axes)


def _is_one_of_each_row(
    x: Any, picked: Any, indexed: Sequence[int], batch: Sequence[int], batch_of_indices: Sequence[int]
) -> bool:
    """True for an index of x's last axis alone, and of each row its own.

    Args:
      x: the type of the array.
      picked: that of what is picked of it, or put into it: all indices' slices, which have one element each.
      indexed: the axes of x that indices are of.
      batch, batch_of_indices: the axes of x, and of the indices, that go together. They are all rows in their order,
        whose axes of one element may be left out.
    """
    last = x.ndim - 1
    rows = [axis for axis in range(last) if axis in batch or x.shape[axis] != 1]
    is_of_rows = list(batch) == rows and list(batch_of_indices) == list(range(len(rows)))
    return is_of_rows and tuple(indexed) == (last,) and bool(picked.size * x.shape[last] == x.size)
