"""Rules for operations that move axes about: which axis of the result is indexed by what."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coda_jax.epilogue.analysis import Analysis, Rule
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
    Stacked,
    Tag,
    Value,
    same_size,
)


def _shapes(analysis: Analysis, equation: Equation) -> tuple[Any, Any]:
    return analysis.flat.aval(equation.inputs[0]).shape, analysis.flat.avals[equation.outputs[0]].shape


def _placed(analysis: Analysis, value: Local, tags: tuple[Tag, ...], shape: Any) -> Local:
    """`value` with new tags; an index along what is now the first or the last of several axes is resolved."""
    placed = replace(value, tags=tags)
    if INDEX not in tags or len(tags) < 2:
        return placed
    axis = tags.index(INDEX)
    if axis == len(tags) - 1 and same_size(shape[axis], analysis.n):
        meaning: Tag = COLUMN
    elif axis == len(tags) - 1 and same_size(shape[axis], analysis.half) and not analysis.head:
        analysis.halves()
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
    return [_placed(analysis, value, tuple(tags), after)]


def reshape(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    """Axes of size 1 may come and go, columns become heads and what is in them, or these columns again."""
    value, (before, after) = inputs[0], _shapes(analysis, equation)
    if equation.params.get("dimensions") is not None:
        raise NotElementwise("changes the order of the axes")
    tags: list[Tag] = [None] * len(after)
    if value.tags[:1] == (ROW,) and same_size(before[0], 1) and len(after) > 1 and same_size(after[0], 1):
        tags[0] = ROW  # one row stays the row
    for old, new in _regrouped(before, after):
        given = [value.tags[axis] for axis in old]
        found: list[Tag] | None = None
        if len(old) == len(new) == 1:
            found = given
            added = len(after) > len(before) and new[0] > 0 and same_size(after[new[0] - 1], 1)
            is_head = value.part is not None or analysis.layout.one_head
            if given == [COLUMN] and added and value.tile and is_head:  # a part, or all columns, that are one head
                analysis.heads(int(before[old[0]]))
                found = [CHANNEL]
        elif len(old) == 1:
            pairs = len(new) == 2 and after[new[1]] == 2 and len(after) > len(before) + 1
            one_head = pairs and new[0] > 0 and same_size(after[new[0] - 1], 1)
            found = _taken_apart(analysis, given[0], [1] * one_head + [after[axis] for axis in new])[one_head:]
        elif len(new) == 1:
            found = _JOINED.get(tuple(given))
            if given == [HEAD, None] and same_size(before[old[1]], analysis.head):  # a value for each head, repeated
                value, found = replace(value, nodes=value.nodes * analysis.ways), [COLUMN]
        if not found:
            raise NotElementwise(
                f"reshapes {tuple(before)} to {tuple(after)}; only axes of size 1 may be added or dropped, and columns "
                "become (heads, columns of a head) or these columns again"
            )
        columns = analysis.n if value.part is None else value.part[1] - value.part[0]
        if found == [CHANNEL] and len(after) < len(before) and same_size(columns, analysis.head):
            found = [COLUMN]  # the one head is all columns
        for axis, tag in zip(new, found, strict=True):
            tags[axis] = tag
    return [_placed(analysis, value, tuple(tags), after)]


_JOINED: dict[tuple[Tag, ...], list[Tag]] = {
    (HEAD, CHANNEL): [COLUMN],
    (HEAD, HALF_CHANNEL, SIDE): [COLUMN],
    (HALF_CHANNEL, SIDE): [CHANNEL],
}


def _taken_apart(analysis: Analysis, tag: Tag, sizes: Sequence[Any]) -> list[Tag]:
    """Tags of the axes that an axis becomes; none if it cannot."""
    if tag == HALF:
        raise NeedsLayout(Layout(parts=True))
    if tag == COLUMN and len(sizes) == 2:
        analysis.heads(int(sizes[1]))
        return [HEAD, CHANNEL]
    if tag == COLUMN and len(sizes) == 3 and sizes[2] == 2:
        analysis.heads(2 * int(sizes[1]))
        analysis.neighbours()
        return [HEAD, HALF_CHANNEL, SIDE]
    if tag == CHANNEL and len(sizes) == 2 and sizes[1] == 2:
        analysis.neighbours()
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
    """The rows of a head table repeated to M: row r is row r % S of the table. What does not vary stays as it is."""
    (value,), (before, after) = inputs, _shapes(analysis, equation)
    tags = list(value.tags)
    for axis, tag in enumerate(value.tags):
        if tag == TABLE_ROW and same_size(after[axis], analysis.m):
            tags[axis] = ROW
        elif tag is not None and not same_size(before[axis], after[axis]):
            raise NotElementwise(f"repeats the {tag}s; a head table's S rows may be repeated, to M")
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
    if [tag for tag in tags if tag is not None] != order:
        raise NotElementwise("exchanges the rows and columns of the product")
    return [replace(value, tags=tags)]


def iota(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    axis, shape = int(equation.params["dimension"]), equation.params["shape"]
    dtype = np.dtype(equation.params["dtype"]).name
    size, rank = shape[axis], len(shape)
    if dtype not in ("int32", "float32", "bfloat16", "float16"):
        raise NotElementwise(f"makes {dtype} indices; int32 and floats are known")
    if not any(same_size(size, known) for known in (analysis.m, analysis.n, analysis.half)):
        raise NotElementwise(f"counts to {size}, which is neither M, N nor N/2")
    index = analysis.convert(analysis.node(INDEX, (), "int32"), dtype)
    tags: tuple[Tag, ...] = tuple(INDEX if i == axis else None for i in range(rank))
    return [_placed(analysis, Local(tags, (index,), False), tags, shape)]


def _half_size(analysis: Analysis, value: Local, axis: int, size: Any) -> Any:
    """Half of `size`, that of an axis whose halves can be taken apart; None if it has none."""
    tag = value.tags[axis]
    is_head = tag == CHANNEL or (tag == COLUMN and value.part is not None and same_size(size, analysis.head))
    is_whole = tag == COLUMN and value.part is None and not analysis.head and not analysis.layout.parts
    return size // 2 if is_head else analysis.half if is_whole else None


def _half(analysis: Analysis, value: Local, axis: int, way: int, size: Any) -> Local:
    """Half `way` of a value along `axis`, which has that size: of all columns, or of each head."""
    in_head = value.tags[axis] == CHANNEL or value.part is not None
    if in_head and way >= len(value.nodes):  # of a table, met before acc is seen as heads
        analysis.heads(size)
    if in_head:
        analysis.halves_of_heads()
    else:
        analysis.halves()
    tags = tuple((HALF_CHANNEL if in_head else HALF) if i == axis else tag for i, tag in enumerate(value.tags))
    return replace(value, tags=tags, nodes=(value.nodes[way],))


def _side(analysis: Analysis, value: Local, axis: int, side: int, size: int) -> Local:
    """The even (0) or the odd (1) columns of each head, along an axis of that size."""
    if value.tags[axis] == COLUMN or side >= len(value.nodes):
        analysis.heads(size)  # of which there is one, or of a table
    analysis.neighbours()
    tag = None if value.tags[axis] == SIDE else HALF_CHANNEL
    return replace(value, tags=(*value.tags[:axis], tag, *value.tags[axis + 1 :]), nodes=(value.nodes[side],))


def _part(analysis: Analysis, value: Local, axis: int, start: int, stop: int) -> Local:
    """Columns, or heads, start:stop of a value."""
    scale = analysis.head if value.tags[axis] == HEAD else 1
    return replace(value, part=analysis.part(value, start * scale, stop * scale))


def _offset(analysis: Analysis, value: Local, start: int, stride: int) -> Local:
    """A one-dimensional function of the index i becomes that function of start + stride * i."""
    index = analysis.node(INDEX, (), "int32")
    if stride != 1:
        index = analysis.node("mul", (index, analysis.literal(stride, "int32")), "int32")
    index = analysis.node("add", (index, analysis.literal(start, "int32")), "int32")
    return replace(value, nodes=(analysis.substitute(value.nodes[0], index, {}),))


def _take(
    analysis: Analysis, value: Local, before: Any, starts: Sequence[Any], limits: Sequence[Any], strides: Sequence[int]
) -> list[Local]:
    for axis, (start, limit, stride) in enumerate(zip(starts, limits, strides, strict=True)):
        tag = value.tags[axis]
        if tag is None or (same_size(start, 0) and same_size(limit, before[axis]) and stride == 1):
            continue
        if tag == INDEX and isinstance(start, int | np.integer):
            value = _offset(analysis, value, int(start), int(stride))
            continue
        if tag == HALF and not analysis.layout.acc_is_half:  # not one of two halves, then, but a part
            raise NeedsLayout(Layout(parts=True))
        half = _half_size(analysis, value, axis, before[axis])
        first = same_size(start, 0) and same_size(limit, half)
        second = same_size(start, half) and same_size(limit, before[axis])
        static = all(isinstance(x, int | np.integer) for x in (start, limit))
        every_second = static and stride == 2 and same_size((limit - start + 1) // 2, before[axis] // 2)
        if tag == SIDE or (tag in (CHANNEL, COLUMN) and every_second):
            value = _side(analysis, value, axis, int(start), int(before[axis]))
            continue
        if stride == 1 and (first or second):
            value = _half(analysis, value, axis, int(second), before[axis])
        elif stride == 1 and static and tag in (COLUMN, HEAD):
            value = _part(analysis, value, axis, int(start), int(limit))
        else:
            stop = f"{start}:{limit}" + (f":{stride}" if stride != 1 else "")
            raise NotElementwise(f"takes {stop} of the {before[axis]} {tag}s")
    return [value]


def slice_(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    before, params = _shapes(analysis, equation)[0], equation.params
    strides = params["strides"] or (1,) * len(before)
    return _take(analysis, inputs[0], before, params["start_indices"], params["limit_indices"], strides)


def gather(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    """A slice with a constant start: what indexing with static slices becomes where the other dimension is symbolic."""
    (value, index), before = inputs, _shapes(analysis, equation)[0]
    dimensions, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    axis, start = _window(analysis, index, dimensions.start_index_map, dimensions.offset_dims, len(before))
    starts = tuple(start if i == axis else 0 for i in range(len(before)))
    limits = tuple(start + size if i == axis else size for i, size in enumerate(sizes))
    return _take(analysis, value, before, starts, limits, (1,) * len(before))


def _window(
    analysis: Analysis, index: Local, indexed: Sequence[int], window: Sequence[int], rank: int
) -> tuple[int, int]:
    """Axis and start of a gather or scatter that moves one block of full rank."""
    constant = analysis.nodes[index.nodes[0]]
    if constant.op != "literal" or index.tags != (None,) or len(indexed) != 1 or tuple(window) != tuple(range(rank)):
        raise NotElementwise("uses elements by an index")
    return int(indexed[0]), int(constant["value"])


def scatter_add(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    """Adds to one half: x.at[:, :N // 2].add(y), and the derivative of `gather`."""
    (value, index, update), shape = inputs, _shapes(analysis, equation)[0]
    size = analysis.flat.aval(equation.inputs[2]).shape
    dimensions = equation.params["dimension_numbers"]
    indexed, window = dimensions.scatter_dims_to_operand_dims, dimensions.update_window_dims
    axis, start = _window(analysis, index, indexed, window, len(shape))
    halves = same_size(shape[axis], analysis.n) and same_size(size[axis], analysis.half)
    others = all(same_size(a, b) for i, (a, b) in enumerate(zip(shape, size, strict=True)) if i != axis)
    if axis != len(shape) - 1 or not (halves and others) or start not in (0, analysis.half):
        raise NotElementwise(f"adds to {start}:{start + size[axis]} of {shape[axis]} elements")
    dtype = analysis.nodes[update.nodes[0]].dtype
    zero = Local((None,) * len(shape), (analysis.literal(0, dtype),), False)
    padded = _join(analysis, zero, update, axis) if start else _join(analysis, update, zero, axis)
    return [analysis.map([value, padded], lambda nodes: analysis.node("add", nodes, dtype))]


def split(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    (value,), axis, sizes = inputs, int(equation.params["axis"]), equation.params["sizes"]
    if value.tags[axis] is None or len(sizes) == 1:
        return [value] * len(sizes)
    if value.tags[axis] == HALF and not analysis.layout.acc_is_half:
        raise NeedsLayout(Layout(parts=True))
    size = _shapes(analysis, equation)[0][axis]
    half = _half_size(analysis, value, axis, size)
    if len(sizes) == 2 and all(same_size(int(size), half) for size in sizes):
        return [_half(analysis, value, axis, way, size) for way in range(2)]
    if value.tags[axis] not in (COLUMN, HEAD):
        raise NotElementwise(f"takes the {value.tags[axis]}s apart into {tuple(int(s) for s in sizes)}")
    ends = list(itertools.accumulate(map(int, sizes)))
    return [_part(analysis, value, axis, start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _join(analysis: Analysis, first: Local, second: Local, axis: int) -> Local:
    """Two halves, of all columns or of each head, or even and odd columns, side by side along `axis`."""
    whole: Tag
    half: Tag
    if HALF_CHANNEL in (first.tags[axis], second.tags[axis]):
        analysis.halves_of_heads()
        whole, half = CHANNEL, HALF_CHANNEL
    elif _are_sides(first, second, axis):
        analysis.neighbours()
        whole, half = SIDE, None
    else:
        analysis.halves()
        whole, half = COLUMN, HALF
    others = [None if i == axis else analysis.unify([first.tags[i], second.tags[i]]) for i in range(len(first.tags))]
    tags = tuple(whole if i == axis else tag for i, tag in enumerate(others))
    out = analysis.local(tags, (), [first, second])
    target = tuple(half if i == axis else tag for i, tag in enumerate(others))
    nodes = tuple(analysis.resolve(value, target, out.part).nodes[0] for value in (first, second))
    return replace(out, nodes=nodes)


def _are_sides(first: Local, second: Local, axis: int) -> bool:
    """Whether the values are those of neighbouring columns, stacked along a new last axis."""
    last = axis == len(first.tags) - 1
    return last and axis > 0 and HALF_CHANNEL in (first.tags[axis - 1], second.tags[axis - 1])


def concatenate(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    axis = int(equation.params["dimension"])
    sizes = [analysis.flat.aval(atom).shape[axis] for atom in equation.inputs]
    last = axis == len(inputs[0].tags) - 1
    if last and len(inputs) == 2 and all(same_size(size, analysis.n) for size in sizes):
        analysis.twice()
    found = [value.tags[axis] for value in inputs]
    half, known = (analysis.head // 2, HALF_CHANNEL) if HALF_CHANNEL in found else (analysis.half, HALF)
    if len(inputs) == 2 and found == [None, None] and sizes == [1, 1] and _are_sides(inputs[0], inputs[1], axis):
        return [_join(analysis, inputs[0], inputs[1], axis)]
    halves = len(inputs) == 2 and all(same_size(size, half) for size in sizes)
    if not halves or not last or any(tag not in (known, None) for tag in found):
        raise NotElementwise(f"joins {' and '.join(map(str, sizes))} elements along axis {axis}")
    return [_join(analysis, inputs[0], inputs[1], axis)]


def pad(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    (value, filling), config = inputs, equation.params["padding_config"]
    for axis, (low, high, interior) in enumerate(config):
        if (low, high, interior) == (0, 0, 0):
            continue
        half = analysis.head // 2 if value.tags[axis] == HALF_CHANNEL else analysis.half
        if (
            value.tags[axis] not in (HALF, HALF_CHANNEL, None)
            or interior
            or not any(same_size(int(a), half) and int(b) == 0 for a, b in ((low, high), (high, low)))
        ):
            raise NotElementwise(f"pads axis {axis} by {int(low)} and {int(high)}")
        if not same_size(_shapes(analysis, equation)[0][axis], half) or axis != len(config) - 1:
            raise NotElementwise(f"pads axis {axis}")
        blank = Local((None,) * len(value.tags), filling.nodes, False)
        value = _join(analysis, blank, value, axis) if low else _join(analysis, value, blank, axis)
    return [value]


def stack(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Value]:
    axis = int(equation.params["axis"])
    if len(inputs) == 2 and axis == len(inputs[0].tags):
        first, second = (replace(value, tags=(*value.tags, None)) for value in inputs)
        if _are_sides(first, second, axis):
            return [_join(analysis, first, second, axis)]
    if axis != 0:
        raise NotElementwise("stacks arrays")
    return [Stacked(tuple(inputs))]


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "squeeze": squeeze,
    "tile": tile,
    "transpose": transpose,
    "iota": iota,
    "slice": slice_,
    "split": split,
    "concatenate": concatenate,
    "pad": pad,
    "stack": stack,
    "gather": gather,
    "scatter-add": scatter_add,
    **dict.fromkeys(REDUCTIONS, reduce),
}
