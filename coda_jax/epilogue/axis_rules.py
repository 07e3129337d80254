"""Rules for operations that change axes: what indexes each axis of the result. Also the list of all rules."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coda_jax.epilogue.analysis import Analysis, Rule
from coda_jax.epilogue.column_rules import COLUMN_RULES
from coda_jax.epilogue.dtypes import NUMBERS
from coda_jax.epilogue.flatten import Equation
from coda_jax.epilogue.reductions import REDUCTIONS, reduce
from coda_jax.epilogue.values import (
    CHANNEL,
    COLUMN,
    HALF,
    HALF_CHANNEL,
    HEAD,
    INDEX,
    ROW,
    SIDE,
    TABLE_ROW,
    Layout,
    Local,
    NeedsLayout,
    NotElementwise,
    Tag,
    same_size,
)


def _shapes(analysis: Analysis, equation: Equation) -> tuple[Any, Any]:
    return analysis.flat.aval(equation.inputs[0]).shape, analysis.flat.avals[equation.outputs[0]].shape


def _place(analysis: Analysis, value: Local, tags: tuple[Tag, ...], shape: Any) -> Local:
    """`value` with new tags; an INDEX tag on the first or the last of several axes is resolved."""
    placed = replace(value, tags=tags)
    if INDEX not in tags or len(tags) < 2:
        return placed
    axis = tags.index(INDEX)
    if axis == len(tags) - 1 and same_size(shape[axis], analysis.n):
        meaning: Tag = COLUMN
    elif axis == len(tags) - 1 and same_size(shape[axis], analysis.half) and not analysis.head:
        analysis.needs_halves()
        meaning = HALF
    elif axis == 0 and same_size(shape[axis], analysis.m):
        meaning = ROW
    else:
        raise NotElementwise("counts along an axis that is neither the rows nor the columns of the product")
    return analysis.resolve(placed, tuple(meaning if tag == INDEX else tag for tag in tags))


def broadcast_in_dim(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    value, (before, after) = inputs[0], _shapes(analysis, equation)
    tags: list[Tag] = [None] * len(after)
    for axis, target in enumerate(equation.params["broadcast_dimensions"]):
        if same_size(before[axis], after[target]):
            tags[int(target)] = value.tags[axis]
    return [_place(analysis, value, tuple(tags), after)]


def reshape(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    """Adds or drops axes of size 1, splits columns into heads and columns of a head, or joins these again."""
    value, (before, after) = inputs[0], _shapes(analysis, equation)
    if equation.params.get("dimensions") is not None:
        raise NotElementwise("changes the order of the axes")
    tags: list[Tag] = [None] * len(after)
    if value.tags[:1] == (ROW,) and same_size(before[0], 1) and len(after) > 1 and same_size(after[0], 1):
        tags[0] = ROW  # one row stays the row
    for old, new in _regrouped(before, after):
        old_tags = [value.tags[axis] for axis in old]
        if len(new) == 1 and old_tags == [HEAD, None] and same_size(before[old[1]], analysis.head):
            value = replace(value, nodes=value.nodes * analysis.halves.count)  # a value for each head, repeated
            new_tags: list[Tag] = [COLUMN]
        else:
            new_tags = _regrouped_tags(analysis, value, old, new, before, after)
        if not new_tags:
            raise NotElementwise(
                f"reshapes {tuple(before)} to {tuple(after)}; only axes of size 1 may be added or dropped, and columns "
                "become (heads, columns of a head) or these columns again"
            )
        columns = analysis.n if value.slice is None else value.slice[1] - value.slice[0]
        if new_tags == [CHANNEL] and len(after) < len(before) and same_size(columns, analysis.head):
            new_tags = [COLUMN]  # the one head is all columns
        for axis, tag in zip(new, new_tags, strict=True):
            tags[axis] = tag
    return [_place(analysis, value, tuple(tags), after)]


def _regrouped_tags(
    analysis: Analysis, value: Local, old: Sequence[int], new: Sequence[int], before: Any, after: Any
) -> list[Tag]:
    """Tags of the axes `new` into which the axes `old` are reshaped; empty if that is not allowed."""
    old_tags = [value.tags[axis] for axis in old]
    if len(old) == len(new) == 1:
        added = len(after) > len(before) and new[0] > 0 and same_size(after[new[0] - 1], 1)
        is_head = value.slice is not None or analysis.layout.one_head
        if old_tags == [COLUMN] and added and value.tile and is_head:  # a slice, or all columns, that are one head
            analysis.needs_heads(int(before[old[0]]))
            return [CHANNEL]
        return old_tags
    if len(old) == 1:
        pairs = len(new) == 2 and after[new[1]] == 2 and len(after) > len(before) + 1
        one_head = pairs and new[0] > 0 and same_size(after[new[0] - 1], 1)
        return _taken_apart(analysis, old_tags[0], [1] * one_head + [after[axis] for axis in new])[one_head:]
    return _JOINED.get(tuple(old_tags), []) if len(new) == 1 else []


_JOINED: dict[tuple[Tag, ...], list[Tag]] = {
    (HEAD, CHANNEL): [COLUMN],
    (HEAD, HALF_CHANNEL, SIDE): [COLUMN],
    (HALF_CHANNEL, SIDE): [CHANNEL],
}


def _taken_apart(analysis: Analysis, tag: Tag, sizes: Sequence[Any]) -> list[Tag]:
    """Tags of the axes into which one axis is split; empty if that is not allowed."""
    if tag == HALF:
        raise NeedsLayout(Layout(slices=True))
    if tag == COLUMN and len(sizes) == 2:
        analysis.needs_heads(int(sizes[1]))
        return [HEAD, CHANNEL]
    if tag == COLUMN and len(sizes) == 3 and sizes[2] == 2:
        analysis.needs_heads(2 * int(sizes[1]))
        analysis.needs_interleaved_halves()
        return [HEAD, HALF_CHANNEL, SIDE]
    if tag == CHANNEL and len(sizes) == 2 and sizes[1] == 2:
        analysis.needs_interleaved_halves()
        return [HALF_CHANNEL, SIDE]
    return []


def _regrouped(before: Sequence[Any], after: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """The axes of a reshape, without those of size 1, in the smallest groups of equal size."""
    old = [axis for axis, size in enumerate(before) if not same_size(size, 1)]
    new = [axis for axis, size in enumerate(after) if not same_size(size, 1)]
    groups: list[tuple[list[int], list[int]]] = []
    while old and new:
        left, right = [old.pop(0)], [new.pop(0)]
        while not same_size(a := math.prod(before[i] for i in left), b := math.prod(after[i] for i in right)):
            known = isinstance(a, int) and isinstance(b, int)
            shorter, rest = (left, old) if known and a < b else (right, new)
            if not known or not rest:
                return [(left + old, right + new)]
            shorter.append(rest.pop(0))
        groups.append((left, right))
    return groups


def tile(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    """The rows of a rope table repeated to M: row r is row r % S of the table. Axes without a tag may be repeated."""
    (value,), (before, after) = inputs, _shapes(analysis, equation)
    tags = list(value.tags)
    for axis, tag in enumerate(value.tags):
        if tag == TABLE_ROW and same_size(after[axis], analysis.m):
            tags[axis] = ROW
        elif tag is not None and not same_size(before[axis], after[axis]):
            raise NotElementwise(f"repeats the {tag}s; a rope table's S rows may be repeated, to M")
    return [replace(value, tags=tuple(tags))]


def squeeze(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    dropped = {int(axis) for axis in equation.params["dimensions"]}
    return [_dropping(inputs[0], dropped)]


def _dropping(value: Local, axes: set[int]) -> Local:
    return replace(value, tags=tuple(tag for axis, tag in enumerate(value.tags) if axis not in axes))


def transpose(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    (value,) = inputs
    tags = tuple(value.tags[int(axis)] for axis in equation.params["permutation"])
    order = [tag for tag in value.tags if tag is not None]
    kept_tags = [tag for tag in tags if tag is not None]
    if kept_tags != order and not (value.tile and len(kept_tags) == 2 and {*kept_tags} in ({ROW, COLUMN}, {ROW, HALF})):
        raise NotElementwise("changes the order of axes that are not the rows and the columns of the product")
    return [replace(value, tags=tags)]


def iota(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    axis, shape = int(equation.params["dimension"]), equation.params["shape"]
    dtype = np.dtype(equation.params["dtype"]).name
    size, rank = shape[axis], len(shape)
    if dtype not in NUMBERS:
        raise NotElementwise(f"makes {dtype} indices; int32 and floats are known")
    if not any(same_size(size, known) for known in (analysis.m, analysis.n, analysis.half)):
        raise NotElementwise(f"counts to {size}, which is neither M, N nor N/2")
    index = analysis.convert(analysis.node(INDEX, (), "int32"), dtype)
    tags: tuple[Tag, ...] = tuple(INDEX if i == axis else None for i in range(rank))
    return [_place(analysis, Local(tags, (index,), False), tags, shape)]


def contraction_order(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    """Puts one axis of a tile into contraction order, or back."""
    (value,), axis = inputs, int(equation.params["axis"])
    tag = value.tags[axis]
    if equation.params["back"]:
        if value.ordered is None or value.ordered != tag:
            raise NotElementwise("takes elements out of an order that they are not in")
        return [replace(value, ordered=None)]
    if not value.tile or tag not in (ROW, COLUMN, HALF):
        raise NotElementwise(f"orders {'a vector' if not value.tile else f'an axis indexed by the {tag}'}")
    if value.ordered is not None:
        raise NotElementwise("orders an array that is in contraction order")
    return [replace(value, ordered=tag)]


RULES: dict[str, Rule] = {
    "contraction_order": contraction_order,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "squeeze": squeeze,
    "tile": tile,
    "transpose": transpose,
    "iota": iota,
    **COLUMN_RULES,
    **dict.fromkeys(REDUCTIONS, reduce),
}
