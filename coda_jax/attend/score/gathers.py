"""Gathers, as jnp's indexing, jnp.take and embeddings make them: which entry of a table each pair reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from coda_jax.epilogue.flatten import Equation
from coda_jax.epilogue.values import NotElementwise, same_size

MOST_ENTRIES = 256  # of a table


class Component(NamedTuple):
    """This entry of an axis, in the place of an axis of the scores: one of the numbers that an index is made of."""

    number: int


Place = int | Component | None
Places = tuple[Place, ...]


class Reads(NamedTuple):
    """The entries that one of a gather's output is read from.

    Attributes:
      indices: the places at which the array of indices is read, for each number of an index.
      table: for each axis of the table the place whose index it is, or the index's number that counts it.
      counted: the axes of the table that numbers of the index count, in the order of these.
    """

    indices: tuple[tuple[Any, ...], ...]
    table: tuple[Any, ...]
    counted: tuple[int, ...]


def reads(equation: Any, shapes: Sequence[Sequence[Any]], places: Sequence[Any]) -> Reads:
    """The entries that a gather's output at `places` is read from.

    Args:
      equation: the gather, of a jaxpr or of a `Flat`.
      places: of its output, or whatever else there is for each of its axes.
      shapes: of the table and of the indices, whose last axis has the numbers of an index.

    Raises:
      NotElementwise: it reads slices of more than one entry.
    """
    of, (table, indices) = equation.params["dimension_numbers"], shapes
    batch = [place for axis, place in enumerate(places) if axis not in of.offset_dims]
    whole = iter([places[axis] for axis in sorted(of.offset_dims)])
    of_batch = dict(zip(of.operand_batching_dims, of.start_indices_batching_dims, strict=True))
    numbers = {int(axis): number for number, axis in enumerate(of.start_index_map)}
    found: list[Any] = []
    for axis, (size, of_slice) in enumerate(zip(table, equation.params["slice_sizes"], strict=True)):
        if axis in of_batch:
            found.append(batch[of_batch[axis]])
            continue
        place = None if axis in of.collapsed_slice_dims else next(whole)
        if axis in numbers:
            if not same_size(of_slice, 1):
                raise NotElementwise("reads slices of an array at computed places")
            place = Component(numbers[axis])
        elif not same_size(of_slice, size):
            raise NotElementwise("reads a part of an array")
        found.append(place)
    count = len(numbers)
    has_one = same_size(indices[-1], 1)
    of_indices = tuple((*batch, None if has_one else Component(number)) for number in range(count))
    return Reads(of_indices, tuple(found), tuple(map(int, of.start_index_map)))


def has_pairs(equation: Equation, shapes: Sequence[Sequence[Any]], places: Places) -> bool:
    """Whether the entry that a gather reads is another one for each pair of a query and a key."""
    return {2, 3} <= {place for one in reads(equation, shapes, places).indices for place in one}


def of_concatenated(equation: Equation, shapes: Sequence[Sequence[Any]], places: Places) -> list[Places | None]:
    """The places at which a concatenation of numbers of an index reads its inputs: one of them alone."""
    axis = int(equation.params["dimension"])
    wanted = places[axis]
    if not isinstance(wanted, Component):
        raise NotElementwise("joins arrays along an axis of the scores")
    found: list[Places | None] = []
    rest = wanted.number
    for shape in shapes:
        is_there = 0 <= rest < shape[axis]
        place = None if same_size(shape[axis], 1) else Component(rest)
        found.append((*places[:axis], place, *places[axis + 1 :]) if is_there else None)
        rest -= shape[axis]
    return found


def fill_of(equation: Equation, dtype: Any) -> Any:
    """The value of a gather at an index that is out of range; None where XLA has the nearest entry there."""
    if equation.params["mode"] != lax.GatherScatterMode.FILL_OR_DROP:
        return None
    dtype, fill = np.dtype(dtype), equation.params["fill_value"]
    if fill is not None:
        return np.asarray(fill).astype(dtype)
    if dtype == np.bool_:
        return np.asarray(True)
    is_int = np.issubdtype(dtype, np.integer)
    return np.asarray(np.iinfo(dtype).min if is_int else np.nan).astype(dtype)
