"""Rules for operations that split columns and join them: halves, heads, even and odd columns, slices."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coda_jax.epilogue.analysis import Analysis, Rule
from coda_jax.epilogue.flatten import Equation
from coda_jax.epilogue.halves import Width
from coda_jax.epilogue.values import (
    CHANNEL,
    COLUMN,
    HALF,
    HALF_CHANNEL,
    HEAD,
    INDEX,
    SIDE,
    Layout,
    Local,
    NeedsLayout,
    NotElementwise,
    Stacked,
    Tag,
    Value,
    same_size,
)


def _before(analysis: Analysis, equation: Equation) -> Any:
    return analysis.flat.aval(equation.inputs[0]).shape


def _half_size(analysis: Analysis, value: Local, axis: int, size: Any) -> Any:
    """Half of `size`, if the axis of this size can be split into halves; else None."""
    tag = value.tags[axis]
    is_head = tag == CHANNEL or (tag == COLUMN and value.slice is not None and same_size(size, analysis.head))
    is_whole = tag == COLUMN and value.slice is None and not analysis.head and not analysis.layout.slices
    return size // 2 if is_head else analysis.half if is_whole else None


def _half(analysis: Analysis, value: Local, axis: int, half: int, size: Any) -> Local:
    """Half `half` of a value along `axis`, of this size: a half of all columns, or of each head."""
    in_head = value.tags[axis] == CHANNEL or value.slice is not None
    if in_head and half >= len(value.nodes):  # a table that is read before acc is reshaped to heads
        analysis.needs_heads(size)
    if in_head:
        analysis.needs_halves_of_heads()
    else:
        analysis.needs_halves()
    tags = tuple((HALF_CHANNEL if in_head else HALF) if i == axis else tag for i, tag in enumerate(value.tags))
    return replace(value, tags=tags, nodes=(value.nodes[half],))


def _side(analysis: Analysis, value: Local, axis: int, side: int, size: int) -> Local:
    """The even (0) or the odd (1) columns of each head, along an axis of that size."""
    if value.tags[axis] == COLUMN or side >= len(value.nodes):
        analysis.needs_heads(size)  # all columns are one head, or the value is a table
    analysis.needs_interleaved_halves()
    tag = None if value.tags[axis] == SIDE else HALF_CHANNEL
    return replace(value, tags=(*value.tags[:axis], tag, *value.tags[axis + 1 :]), nodes=(value.nodes[side],))


def _columns(analysis: Analysis, value: Local, axis: int, start: int, stop: int) -> Local:
    """Columns, or heads, start:stop of a value."""
    scale = analysis.head if value.tags[axis] == HEAD else 1
    return replace(value, slice=analysis.slice(value, start * scale, stop * scale))


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
        if tag == HALF and analysis.halves.acc is Width.FULL:  # a slice of a half: the halves are slices, too
            raise NeedsLayout(Layout(slices=True))
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
            value = _columns(analysis, value, axis, int(start), int(limit))
        else:
            stop = f"{start}:{limit}" + (f":{stride}" if stride != 1 else "")
            raise NotElementwise(f"takes {stop} of the {before[axis]} {tag}s")
    return [value]


def slice_(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    before, params = _before(analysis, equation), equation.params
    strides = params["strides"] or (1,) * len(before)
    return _take(analysis, inputs[0], before, params["start_indices"], params["limit_indices"], strides)


def gather(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    """A slice with a constant start: JAX's form of indexing with static slices where the other size is symbolic."""
    (value, index), before = inputs, _before(analysis, equation)
    dimensions, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    axis, start = _window(analysis, index, dimensions.start_index_map, dimensions.offset_dims, len(before))
    starts = tuple(start if i == axis else 0 for i in range(len(before)))
    limits = tuple(start + size if i == axis else size for i, size in enumerate(sizes))
    return _take(analysis, value, before, starts, limits, (1,) * len(before))


def _window(
    analysis: Analysis, index: Local, indexed: Sequence[int], window: Sequence[int], rank: int
) -> tuple[int, int]:
    """Axis and start of a gather or scatter of one block of full rank."""
    constant = analysis.nodes[index.nodes[0]]
    if constant.op != "literal" or index.tags != (None,) or len(indexed) != 1 or tuple(window) != tuple(range(rank)):
        raise NotElementwise("uses elements by an index")
    return int(indexed[0]), int(constant["value"])


def scatter_add(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    """Adds to one half: x.at[:, :N // 2].add(y), and the derivative of `gather`."""
    (value, index, update), shape = inputs, _before(analysis, equation)
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
    if value.tags[axis] == HALF and analysis.halves.acc is Width.FULL:
        raise NeedsLayout(Layout(slices=True))
    size = _before(analysis, equation)[axis]
    half = _half_size(analysis, value, axis, size)
    if len(sizes) == 2 and all(same_size(int(size), half) for size in sizes):
        return [_half(analysis, value, axis, half, size) for half in range(2)]
    if value.tags[axis] not in (COLUMN, HEAD):
        raise NotElementwise(f"takes the {value.tags[axis]}s apart into {tuple(int(s) for s in sizes)}")
    ends = list(itertools.accumulate(map(int, sizes)))
    return [_columns(analysis, value, axis, start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _join(analysis: Analysis, first: Local, second: Local, axis: int) -> Local:
    """Two halves, of all columns or of each head, or even and odd columns, joined along `axis`."""
    full: Tag
    half: Tag
    if HALF_CHANNEL in (first.tags[axis], second.tags[axis]):
        analysis.needs_halves_of_heads()
        full, half = CHANNEL, HALF_CHANNEL
    elif _are_sides(first, second, axis):
        analysis.needs_interleaved_halves()
        full, half = SIDE, None
    else:
        analysis.needs_halves()
        full, half = COLUMN, HALF
    others = [None if i == axis else analysis.unify([first.tags[i], second.tags[i]]) for i in range(len(first.tags))]
    tags = tuple(full if i == axis else tag for i, tag in enumerate(others))
    out = analysis.local(tags, (), [first, second])
    target = tuple(half if i == axis else tag for i, tag in enumerate(others))
    nodes = tuple(analysis.resolve(value, target, out.slice).nodes[0] for value in (first, second))
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
        analysis.needs_twice_n()
    tags = [value.tags[axis] for value in inputs]
    half, known = (analysis.head // 2, HALF_CHANNEL) if HALF_CHANNEL in tags else (analysis.half, HALF)
    if len(inputs) == 2 and tags == [None, None] and sizes == [1, 1] and _are_sides(inputs[0], inputs[1], axis):
        return [_join(analysis, inputs[0], inputs[1], axis)]
    halves = len(inputs) == 2 and all(same_size(size, half) for size in sizes)
    if not halves or not last or any(tag not in (known, None) for tag in tags):
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
        if not same_size(_before(analysis, equation)[axis], half) or axis != len(config) - 1:
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


COLUMN_RULES: dict[str, Rule] = {
    "slice": slice_,
    "split": split,
    "concatenate": concatenate,
    "pad": pad,
    "stack": stack,
    "gather": gather,
    "scatter-add": scatter_add,
}
