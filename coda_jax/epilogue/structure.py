"""Rules for operations that move axes about: which axis of the result is indexed by what."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from coda_jax.epilogue.flatten import Equation
from coda_jax.epilogue.locality import Analysis, Rule
from coda_jax.epilogue.reductions import REDUCTIONS, reduce
from coda_jax.epilogue.values import (
    COLUMN,
    HALF,
    INDEX,
    ROW,
    Local,
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
    placed = Local(tags, value.nodes, value.tile)
    if INDEX not in tags or len(tags) < 2:
        return placed
    axis = tags.index(INDEX)
    if axis == len(tags) - 1 and same_size(shape[axis], analysis.n):
        meaning: Tag = COLUMN
    elif axis == len(tags) - 1 and same_size(shape[axis], analysis.half):
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
    """Only axes of size 1 may come and go."""
    value, (before, after) = inputs[0], _shapes(analysis, equation)
    if equation.params.get("dimensions") is not None:
        raise NotElementwise("changes the order of the axes")
    kept = [axis for axis, size in enumerate(before) if not same_size(size, 1)]
    wide = [axis for axis, size in enumerate(after) if not same_size(size, 1)]
    if len(kept) != len(wide) or not all(same_size(before[a], after[b]) for a, b in zip(kept, wide, strict=True)):
        raise NotElementwise(
            f"reshapes {tuple(before)} to {tuple(after)}, and only axes of size 1 may be added or dropped"
        )
    tags: list[Tag] = [None] * len(after)
    for a, b in zip(kept, wide, strict=True):
        tags[b] = value.tags[a]
    return [_placed(analysis, value, tuple(tags), after)]


def squeeze(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    dropped = {int(axis) for axis in equation.params["dimensions"]}
    return [_dropping(inputs[0], dropped)]


def _dropping(value: Local, axes: set[int]) -> Local:
    return Local(tuple(tag for axis, tag in enumerate(value.tags) if axis not in axes), value.nodes, value.tile)


def transpose(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    (value,) = inputs
    tags = tuple(value.tags[int(axis)] for axis in equation.params["permutation"])
    order = [tag for tag in value.tags if tag is not None]
    if [tag for tag in tags if tag is not None] != order:
        raise NotElementwise("exchanges the rows and columns of the product")
    return [Local(tags, value.nodes, value.tile)]


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


def _half(analysis: Analysis, value: Local, axis: int, way: int) -> Local:
    """Half `way` of a value whose `axis` is the columns."""
    analysis.halves()
    tags = tuple(HALF if i == axis else tag for i, tag in enumerate(value.tags))
    return Local(tags, (value.nodes[way],), value.tile)


def _offset(analysis: Analysis, value: Local, start: int, stride: int) -> Local:
    """A one-dimensional function of the index i becomes that function of start + stride * i."""
    index = analysis.node(INDEX, (), "int32")
    if stride != 1:
        index = analysis.node("mul", (index, analysis.literal(stride, "int32")), "int32")
    index = analysis.node("add", (index, analysis.literal(start, "int32")), "int32")
    return Local(value.tags, (analysis.substitute(value.nodes[0], index, {}),), value.tile)


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
        first = same_size(start, 0) and same_size(limit, analysis.half)
        second = same_size(start, analysis.half) and same_size(limit, analysis.n)
        if tag != COLUMN or stride != 1 or not (first or second):
            stop = f"{start}:{limit}" + (f":{stride}" if stride != 1 else "")
            raise NotElementwise(f"takes {stop} of the {before[axis]} {tag}s")
        value = _half(analysis, value, axis, int(second))
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
    if value.tags[axis] != COLUMN or len(sizes) != 2 or not all(same_size(int(s), analysis.half) for s in sizes):
        raise NotElementwise(f"takes the {value.tags[axis]}s apart into {tuple(int(s) for s in sizes)}")
    return [_half(analysis, value, axis, way) for way in range(2)]


def _join(analysis: Analysis, first: Local, second: Local, axis: int) -> Local:
    """Two halves, side by side along `axis`."""
    analysis.halves()
    others = [None if i == axis else analysis.unify([first.tags[i], second.tags[i]]) for i in range(len(first.tags))]
    tags = tuple(COLUMN if i == axis else tag for i, tag in enumerate(others))
    target = tuple(HALF if i == axis else tag for i, tag in enumerate(others))
    nodes = tuple(analysis.resolve(value, target).nodes[0] for value in (first, second))
    return analysis.local(tags, nodes, first.tile or second.tile)


def concatenate(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    axis = int(equation.params["dimension"])
    sizes = [analysis.flat.aval(atom).shape[axis] for atom in equation.inputs]
    halves = len(inputs) == 2 and all(same_size(size, analysis.half) for size in sizes)
    last = axis == len(inputs[0].tags) - 1
    if last and len(inputs) == 2 and all(same_size(size, analysis.n) for size in sizes):
        analysis.twice()
    if not halves or not last or any(value.tags[axis] not in (HALF, None) for value in inputs):
        raise NotElementwise(f"joins {' and '.join(map(str, sizes))} elements along axis {axis}")
    return [_join(analysis, inputs[0], inputs[1], axis)]


def pad(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Local]:
    (value, filling), config = inputs, equation.params["padding_config"]
    for axis, (low, high, interior) in enumerate(config):
        if (low, high, interior) == (0, 0, 0):
            continue
        if (
            value.tags[axis] not in (HALF, None)
            or interior
            or not any(same_size(int(a), analysis.half) and int(b) == 0 for a, b in ((low, high), (high, low)))
        ):
            raise NotElementwise(f"pads axis {axis} by {int(low)} and {int(high)}")
        if not same_size(_shapes(analysis, equation)[0][axis], analysis.half) or axis != len(config) - 1:
            raise NotElementwise(f"pads axis {axis}")
        blank = Local((None,) * len(value.tags), filling.nodes, False)
        value = _join(analysis, blank, value, axis) if low else _join(analysis, value, blank, axis)
    return [value]


def stack(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Value]:
    if int(equation.params["axis"]) != 0:
        raise NotElementwise("stacks arrays")
    return [Stacked(tuple(inputs))]


RULES: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "squeeze": squeeze,
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
