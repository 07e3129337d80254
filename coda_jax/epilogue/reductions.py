"""Reductions of the tile: the kernel's reductions, and the equations that finish their results.

The kernel reduces along columns for all columns; XLA reduces over the heads, of rows and heads both.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue.analysis import Analysis
from coda_jax.epilogue.dtypes import BOOL, FLOATS
from coda_jax.epilogue.flatten import Atom, Constants, Equation, Literal, flatten
from coda_jax.epilogue.halves import Width
from coda_jax.epilogue.program import Axis, Reduction, ReductionOp
from coda_jax.epilogue.values import (
    CHANNEL,
    COLUMN,
    HALF,
    HALF_CHANNEL,
    HEAD,
    ROW,
    SIDE,
    Finished,
    Local,
    NotElementwise,
    Tag,
    Value,
    same_shape,
    same_size,
)

REDUCTIONS = {
    "reduce_sum": ReductionOp.SUM,
    "reduce_max": ReductionOp.MAX,
    "reduce_min": ReductionOp.MIN,
    "reduce_or": ReductionOp.MAX,
    "reduce_and": ReductionOp.MIN,
    "reduce_logsumexp": ReductionOp.LOGSUMEXP,
}


def reduce(analysis: Analysis, equation: Equation, inputs: list[Local]) -> list[Value]:
    """A reduction of the tile: of each row, of each column, of all elements, or of each row and later over the rows."""
    (value,) = inputs
    axes = tuple(int(axis) for axis in equation.params["axes"])
    aval = analysis.flat.aval(equation.inputs[0])
    reduced = [value.tags[axis] for axis in axes]
    if not value.tile:
        raise NotElementwise("is a reduction of vectors")
    if any(tag is None and not same_size(aval.shape[axis], 1) for axis, tag in zip(axes, reduced, strict=True)):
        raise NotElementwise("reduces an axis that is neither the rows nor the columns of the product")
    if all(tag is None for tag in reduced):
        kept = tuple(tag for axis, tag in enumerate(value.tags) if axis not in axes)
        return [replace(value, tags=kept)]
    if (within := _within_heads(analysis, REDUCTIONS[equation.name], value, aval, reduced)) is not None:
        kept = tuple(tag for axis, tag in enumerate(value.tags) if axis not in axes)
        return [Local(kept, (analysis.convert(within, np.dtype(aval.dtype).name),), True, value.slice)]
    in_heads = {HEAD, CHANNEL, HALF_CHANNEL}.intersection(value.tags)
    is_of_heads = in_heads == {HEAD, CHANNEL} <= set(reduced) or _keeps_columns_of_heads(analysis, in_heads, reduced)
    if value.slice is not None or (in_heads and not is_of_heads):
        raise NotElementwise("is a reduction of a slice of the columns; reduce whole rows, whole columns or each head")
    if any(
        tag is None and axis not in axes and not same_size(aval.shape[axis], 1) for axis, tag in enumerate(value.tags)
    ):
        raise NotElementwise("is a reduction of repeated rows or columns")
    _check_dtype(analysis, value, aval)
    index = _number(analysis, _reduction(analysis, REDUCTIONS[equation.name], value, reduced))
    _complete(analysis, equation, index, over_rows=ROW in reduced, over_heads=HEAD in reduced)
    return [Finished(f"the reduction {equation.where()}", from_reduction=True)]


def _within_heads(analysis: Analysis, op: ReductionOp, value: Local, aval: Any, reduced: list[Tag]) -> int | None:
    """The node that reduces each head, or one half of each head, to one value; None for another reduction."""
    over = set(reduced) - {None}
    if over not in ({CHANNEL}, {HALF_CHANNEL}, {HALF_CHANNEL, SIDE}) or (SIDE in value.tags and SIDE not in over):
        return None
    _check_dtype(analysis, value, aval)
    nodes = analysis.converted(value.nodes, "float32")
    if op is not ReductionOp.LOGSUMEXP:
        return analysis.node(f"head_{op.value}", nodes, "float32")
    largest = analysis.node("head_max", nodes, "float32")
    zero = analysis.literal(0, "float32")
    finite = analysis.node("is_finite", (largest,), "bool")
    shift = analysis.node("select_n", (finite, zero, largest), "float32")
    shifted = [analysis.node("sub", (node, shift), "float32") for node in nodes]
    exponentials = tuple(analysis.node("exp", (node,), "float32") for node in shifted)
    total = analysis.node("head_sum", exponentials, "float32")
    return analysis.node("add", (shift, analysis.node("log", (total,), "float32")), "float32")


def _keeps_columns_of_heads(analysis: Analysis, in_heads: set[str], reduced: list[Tag]) -> bool:
    """Whether a reduction over rows has a value for each column of a head, of each head or over all heads."""
    is_of_all = in_heads == {HEAD, CHANNEL} or (in_heads == {CHANNEL} and same_size(analysis.n, analysis.head))
    return is_of_all and ROW in reduced and CHANNEL not in reduced


def _reduction(analysis: Analysis, op: ReductionOp, value: Local, reduced: list[Tag]) -> Reduction:
    nodes = analysis.converted(value.nodes, "float32")
    if COLUMN in reduced or HALF in reduced or CHANNEL in reduced:
        is_whole = ROW in reduced and op is ReductionOp.MAX
        return Reduction(op, Axis.ALL if is_whole else Axis.ROW, Width.FULL, nodes)
    if op is ReductionOp.LOGSUMEXP:
        raise NotElementwise("is a log-sum-exp along columns, and the kernel takes it along rows only")
    return Reduction(op, Axis.COLUMN, Width.HALF if HALF in value.tags else Width.FULL, nodes)


def _number(analysis: Analysis, reduction: Reduction) -> int:
    """Position of the reduction, shared with an equal one."""
    if reduction not in analysis.reductions:
        analysis.reductions.append(reduction)
    return analysis.reductions.index(reduction)


def _check_dtype(analysis: Analysis, value: Local, aval: Any) -> None:
    dtype = np.dtype(aval.dtype).name
    if dtype in FLOATS or dtype == BOOL:
        return
    if not all(_is_count(analysis, node) for node in value.nodes):
        raise NotElementwise(
            f"is a reduction of {dtype} values, and reductions are float32. Convert them to float32 first"
        )


def _is_count(analysis: Analysis, number: int) -> bool:
    """Whether the integer node is -1, 0 or 1, so that its float32 sum is exact up to 2^24 terms."""
    node = analysis.nodes[number]
    if node.op == "literal":
        return bool(abs(node["value"]) <= 1)
    if node.op == "convert_element_type":
        return analysis.nodes[node.inputs[0]].dtype == BOOL
    return node.op == "select_n" and all(_is_count(analysis, case) for case in node.inputs[1:])


def _complete(analysis: Analysis, equation: Equation, index: int, *, over_rows: bool, over_heads: bool) -> None:
    """Defines the equation's output from the kernel's: also reduced over rows, or heads, and converted."""
    reduction = analysis.reductions[index]
    columns = analysis.n if reduction.width is Width.FULL else analysis.half
    shape = {Axis.ROW: (analysis.m,), Axis.COLUMN: (columns,), Axis.ALL: ()}[reduction.axis]
    out = analysis.flat.avals[equation.outputs[0]]
    both = over_rows and reduction.axis is Axis.ROW

    def complete(x: jax.Array) -> jax.Array:
        if both and out.dtype == jnp.int32:  # a count of all elements may exceed 2^24
            x = x.astype(jnp.int32)
        if both:
            x = reduction.op.reduce(x, axis=0)
        if over_heads and reduction.axis is Axis.COLUMN:
            x = reduction.op.reduce(x.reshape(-1, analysis.head), axis=0)
        x = x if same_shape(x.shape, out.shape) else x.reshape(out.shape)
        return x.astype(out.dtype)

    source = analysis.flat.new(jax.ShapeDtypeStruct(shape, jnp.float32))
    analysis.sources[source] = ("reduction", index)
    _define(analysis, equation.outputs[0], complete, source)


def _define(analysis: Analysis, output: int, f: Callable[[jax.Array], jax.Array], source: int) -> None:
    """Defines variable `output` as f(source), evaluated after the kernel."""
    flat = analysis.flat
    body = flatten(jax.make_jaxpr(f)(flat.avals[source]), Constants(), inline_custom_derivatives=True)
    names: dict[int, int] = {0: source}
    (result,) = body.outputs
    if result == 0:
        analysis.sources[output] = analysis.sources[source]

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else names[atom]

    renumbered: list[Equation] = []
    for inner in body.equations:
        for variable in inner.outputs:
            names[variable] = output if variable == result else flat.new(body.avals[variable])
        outputs = tuple(names[variable] for variable in inner.outputs)
        renumbered.append(replace(inner, inputs=tuple(map(read, inner.inputs)), outputs=outputs))
    analysis.sequence[-1:] = renumbered
