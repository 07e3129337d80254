"""XLA's passes in the forward pass that epilogues of one fused function would make, and LayerNorms in blocks."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from coda_jax.epilogue.dtypes import FACTORS
from coda_jax.epilogue.elementwise import OPERATIONS
from coda_jax.jaxprs.graph import Array, Graph, Operation
from coda_jax.jaxprs.source_lines import is_in_a_block, line_of
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.tools.others import OTHERS
from coda_jax.tools.passes import MadePass, Pass, is_any_attention, is_pass, label

# Operations that an epilogue supports, on a tile or over its rows, beside elementwise ones.
_LOCAL = {
    *("convert_element_type", "broadcast_in_dim", "transpose", "slice", "squeeze", "expand_dims", "iota", "reduce_sum"),
    *("split", "concatenate", "square", "integer_pow", "stop_gradient", "copy", "pow", "tile"),
}


class Unfused(NamedTuple):
    """A pass between products.

    Attributes:
      operation: as `Pass.operation`.
      source: its line, as `line_of` finds it; None if JAX knows none.
      between: the products before and after it.
      has_kernels: whether one of these is coda_jax's.
      bytes: read and written.
      is_layer_norm: whether it is a LayerNorm in a block or a fused function, where an RMSNorm would be no pass.
    """

    operation: str
    source: str | None
    between: tuple[str, ...]
    has_kernels: bool
    bytes: int
    is_layer_norm: bool = False


def unfused(graph: Graph, passes: Iterable[MadePass]) -> dict[Unfused, int]:
    """The unfused passes in one execution of a graph, with their counts.

    Such a pass reads a product's result, or is a norm, and a product or attention reads its result, directly or through
    other passes. It consists of elementwise operations and sums over rows. A block's own passes are left out but for
    LayerNorms, as its plan explains them, and so are passes of the backward pass and after it, such as an optimizer's.
    """
    late = _late(graph)
    readers = _read_by(graph, late)
    kernels = {label(one) for one in graph.operations if one.equation.primitive in PRIMITIVES}
    counts = collections.Counter[Unfused]()
    for one, makers in passes:
        before = kernels.union(OTHERS).intersection(one.after)
        written = [array for maker in makers for array in maker.outputs]
        after = frozenset[str]().union(*(readers[array] for array in written))
        between = tuple(sorted(before | kernels.union(OTHERS).intersection(after)))
        has_kernels = not kernels.isdisjoint(between)
        is_in_block = any(is_in_a_block(maker.equation) for maker in makers)
        is_layer_norm = is_in_block and _is_layer_norm(one, makers)
        is_local = _is_local(one, must_be_norm=not (before or is_layer_norm))
        if not (after and between and is_local and late.isdisjoint(written)):
            continue
        if not (has_kernels or _has_products(graph, late)) or (is_in_block and not is_layer_norm):
            continue
        source = line_of(makers[-1].equation)
        if source is None or not source.startswith("optax/"):
            counts[Unfused(one.operation, source, between, has_kernels, one.bytes, is_layer_norm)] += 1
    return dict(counts)


def _is_local(one: Pass, *, must_be_norm: bool) -> bool:
    """Whether an epilogue supports all its operations, and it is a norm if it must be one."""
    steps = one.operation.split("+")
    return all(step in OPERATIONS or step in _LOCAL for step in steps) and (not must_be_norm or "rsqrt" in steps)


def _is_layer_norm(one: Pass, makers: Sequence[Operation]) -> bool:
    """Whether it applies a norm, with a difference in it, or in a pass before it: of a mean."""
    telling = {"sub", "rsqrt"}
    found = telling.intersection(one.operation.split("+"))
    open_, seen = list(makers) if found else [], set(makers)
    while open_:
        operation = open_.pop()
        found |= telling & {operation.name}
        before = {x.maker for x in operation.inputs if x.maker is not None and is_pass(x.maker)} - seen
        seen |= before
        open_ += before
    return found == telling


def _has_products(graph: Graph, late: set[Array]) -> bool:
    """Whether the forward pass has a product of another library with a dtype that the kernels support."""
    forward = (one for one in graph.operations if one.name in OTHERS and late.isdisjoint(one.outputs))
    return any(one.inputs[0].dtype.name in FACTORS for one in forward)


def _late(graph: Graph) -> set[Array]:
    """The results of the backward pass, and all arrays computed from them."""
    arrays: set[Array] = set()
    for one in graph.operations:
        if one.is_backward or not arrays.isdisjoint(one.inputs):
            arrays.update(one.outputs)
    return arrays


def _read_by(graph: Graph, late: set[Array]) -> dict[Array, frozenset[str]]:
    """For each array, the products and attention of the forward pass that read it, directly or through passes."""
    readers: dict[Array, frozenset[str]] = collections.defaultdict(frozenset)
    for one in reversed(graph.operations):
        if one.is_backward or not late.isdisjoint(one.outputs):
            continue
        for array in one.inputs:
            readers[array] |= _readers(one, [readers[x] for x in one.outputs])
    return readers


def _readers(one: Operation, readers: Sequence[frozenset[str]]) -> frozenset[str]:
    if is_pass(one):
        return frozenset[str]().union(*readers)
    is_product = is_any_attention(one) or one.name in OTHERS or one.equation.primitive in PRIMITIVES
    return frozenset({label(one)}) if is_product else frozenset()
