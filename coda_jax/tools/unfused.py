"""Passes of the forward pass that epilogues of one `coda.block` would make, and that no block has."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from coda_jax.epilogue.dtypes import FACTORS
from coda_jax.epilogue.elementwise import OPERATIONS
from coda_jax.jaxprs.graph import Array, Graph, Operation
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.tools.others import OTHERS
from coda_jax.tools.passes import MadePass, Pass, is_pass, label
from coda_jax.tools.source_lines import is_in_a_block, line_of

# What an epilogue makes beside elementwise operations, of a tile or of its rows.
_LOCAL = {
    *("convert_element_type", "broadcast_in_dim", "transpose", "slice", "squeeze", "expand_dims", "iota", "reduce_sum"),
    *("split", "concatenate", "square", "integer_pow", "stop_gradient", "copy", "pow", "tile"),
}


class Unfused(NamedTuple):
    """A pass between products.

    Attributes:
      operation: as `Pass.operation`.
      source: its line, as `line_of` finds it; None where JAX knows none.
      between: the products that it stands between.
      has_kernels: whether one of these is coda_jax's.
      bytes: read and written.
    """

    operation: str
    source: str | None
    between: tuple[str, ...]
    has_kernels: bool
    bytes: int


def unfused(graph: Graph, made: Iterable[MadePass]) -> dict[Unfused, int]:
    """How many of each there are in one execution of a graph.

    Such a pass reads what a product makes, or is a norm, and a product or attention reads what it makes, directly or
    through other passes. All that it does is elementwise or a sum over rows. A pass of a block's own is none: its plan
    says why. Nor is one of the backward pass or behind it, as an optimizer's.
    """
    late = _late(graph)
    readers = _read_by(graph, late)
    kernels = {label(one) for one in graph.operations if one.equation.primitive in PRIMITIVES}
    found = collections.Counter[Unfused]()
    for one, makers in made:
        behind = kernels.union(OTHERS).intersection(one.after)
        written = [array for maker in makers for array in maker.outputs]
        ahead = frozenset[str]().union(*(readers[array] for array in written))
        between = tuple(sorted(behind | kernels.union(OTHERS).intersection(ahead)))
        has_kernels = not kernels.isdisjoint(between)
        if not (ahead and between and _is_local(one, must_be_norm=not behind) and late.isdisjoint(written)):
            continue
        if not (has_kernels or _has_products(graph, late)) or any(is_in_a_block(maker.equation) for maker in makers):
            continue
        source = line_of(makers[-1].equation)
        if source is None or not source.startswith("optax/"):
            found[Unfused(one.operation, source, between, has_kernels, one.bytes)] += 1
    return dict(found)


def _is_local(one: Pass, *, must_be_norm: bool) -> bool:
    """Whether all of it is an epilogue's work, and a norm's if it must be one."""
    steps = one.operation.split("+")
    return all(step in OPERATIONS or step in _LOCAL for step in steps) and (not must_be_norm or "rsqrt" in steps)


def _has_products(graph: Graph, late: set[Array]) -> bool:
    """Whether kernels could make a product of the forward pass, by its dtype."""
    forward = (one for one in graph.operations if one.name in OTHERS and late.isdisjoint(one.outputs))
    return any(one.inputs[0].dtype.name in FACTORS for one in forward)


def _late(graph: Graph) -> set[Array]:
    """The arrays that the backward pass makes, and all that are made of them."""
    found: set[Array] = set()
    for one in graph.operations:
        if one.is_backward or not found.isdisjoint(one.inputs):
            found.update(one.outputs)
    return found


def _read_by(graph: Graph, late: set[Array]) -> dict[Array, frozenset[str]]:
    """The forward pass's products and attention that an array goes into, directly or through passes."""
    found: dict[Array, frozenset[str]] = collections.defaultdict(frozenset)
    for one in reversed(graph.operations):
        if one.is_backward or not late.isdisjoint(one.outputs):
            continue
        for array in one.inputs:
            found[array] |= _readers(one, [found[x] for x in one.outputs])
    return found


def _readers(one: Operation, behind: Sequence[frozenset[str]]) -> frozenset[str]:
    if is_pass(one):
        return frozenset[str]().union(*behind)
    is_product = one.is_attention or one.name in OTHERS or one.equation.primitive in PRIMITIVES
    return frozenset({label(one)}) if is_product else frozenset()
