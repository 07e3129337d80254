"""Products that are not coda_jax's, with their sizes and lines, and the products of attention."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from coda_jax.epilogue.dtypes import is_of_8_bits, is_rounded
from coda_jax.fusion.dots import convolution_flops, operations
from coda_jax.jaxprs.graph import LOOPS, Array, Graph, Operation, mark_attentions_own
from coda_jax.jaxprs.source_lines import line_of
from coda_jax.jaxprs.walk import equations, inner_jaxprs
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.tiles.cost_model import GemmShape
from coda_jax.tools.costs import bare_us

OTHERS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
# The einsums of `jax.nn.dot_product_attention`, which maps them over groups of heads.
_EINSUMS = re.compile(r"vmap\((BTNH,BSNH->BNTS|BNTS,BSNH->BTNH)\)")


@dataclasses.dataclass(frozen=True)
class OtherProduct:
    """One kind of product in a function that is neither coda_jax's nor attention's.

    Attributes:
      operation: JAX's name: "dot_general", "ragged_dot_general", "conv_general_dilated".
      a, b, out: types of the factors and of the result.
      flops: of one execution: 2 for each element of a and each of b's columns, the axes that are neither contracted,
        batched nor groups. In a ragged product each row is thus multiplied by one group's matrix, and in the weights'
        gradient each row is in one outer product. None if a size is symbolic, and inside another library's kernel,
        where the number of executions is not known.
      bytes: of the factors, with all groups' matrices, and of the result, each once; None where `flops` is None.
      source: the line that made it, as `coda_jax.jaxprs.source_lines.line_of` finds it; None if JAX knows none.
      is_backward: whether it is in a backward pass.
      us: expected microseconds of the library's kernel without an epilogue for it, by the cost model. In the measured
        steps of plain JAX, XLA's products took 0.89 to 0.92 of it. None where the cost model has no time.
    """

    operation: str
    a: str
    b: str
    out: str
    flops: int | None
    bytes: int | None
    source: str | None
    is_backward: bool
    us: float | None = None


def products_of_others(graphs: Iterable[Graph], device: str | None = None) -> tuple[dict[OtherProduct, int], int]:
    """The products, with times on this kind of device, and how often each is executed; the number of attention's."""
    counts, in_attention = collections.Counter[OtherProduct](), 0
    times_of: dict[Hashable, float | None] = {}
    for graph in graphs:
        for one in graph.operations:
            for equation, times, is_known in _products(one):
                if one.is_attention:
                    in_attention += graph.times * times
                else:
                    counts[_other(equation, one.is_backward, is_known, device, times_of)] += graph.times * times
    return dict(counts), in_attention


def _products(one: Operation) -> Iterator[tuple[core.JaxprEqn, int, bool]]:
    """The equations of products in an operation, how often each is executed, and whether that is known."""
    if one.name in OTHERS:
        yield one.equation, 1, True
    elif one.name not in LOOPS and one.equation.primitive not in PRIMITIVES:
        for inner in inner_jaxprs(one.equation):
            for equation, times in equations(inner):
                if equation.primitive.name in OTHERS:
                    yield equation, times, False


def _other(
    equation: core.JaxprEqn,
    is_backward: bool,
    is_known: bool,
    device: str | None,
    times_of: dict[Hashable, float | None],
) -> OtherProduct:
    """The product that an equation is; `times_of` has the times of products that are alike."""
    avals: list[Any] = [var.aval for var in (*equation.invars[:2], *equation.outvars)]
    a, b, out = (jax.core.ShapedArray(x.shape, x.dtype) for x in avals)
    is_known = is_known and all(isinstance(size, int) for x in (a, b, out) for size in x.shape)
    us, key = None, (equation.primitive, str(equation.params.get("dimension_numbers")), a, b, out)
    if is_known and device:
        us = times_of[key] if key in times_of else times_of.setdefault(key, _us(equation, a, b, out, device))
    return OtherProduct(
        equation.primitive.name,
        a.str_short(),
        b.str_short(),
        out.str_short(),
        _flops(equation, a.shape, b.shape, out.shape) if is_known else None,
        sum(math.prod(x.shape) * x.dtype.itemsize for x in (a, b, out)) if is_known else None,
        line_of(equation),
        is_backward,
        us,
    )


def _us(equation: core.JaxprEqn, a: Any, b: Any, out: Any, device: str) -> float | None:
    """`OtherProduct.us`, for products of matrices with 16 bits; else None."""
    dtypes = {np.dtype(x.dtype) for x in (a, b)}
    have_16_bits = all(is_rounded(dtype) and not is_of_8_bits(dtype) for dtype in dtypes)
    if equation.primitive.name != "dot_general" or len(dtypes) > 1 or not have_16_bits:
        return None
    (contracted, _), (batched, _) = equation.params["dimension_numbers"]
    k, batch = (math.prod(a.shape[axis] for axis in axes) for axes in (contracted, batched))
    if not (both := k * batch):
        return None
    (dtype,) = dtypes
    shape = GemmShape(math.prod(a.shape) // both, math.prod(b.shape) // both, k, batch=batch)
    return bare_us(shape, dtype, np.dtype(out.dtype), device)


def _flops(equation: core.JaxprEqn, a: Sequence[int], b: Sequence[int], out: Sequence[int]) -> int:
    if equation.primitive.name == "conv_general_dilated":
        flops: int = convolution_flops(equation, b, out)
        return flops
    of_product: int = operations(equation, a, b)
    return of_product


def find_attention(graphs: Sequence[Graph]) -> None:
    """Marks operations of `jax.nn.dot_product_attention` that have lost their line, as in rules of a `jax.custom_vjp`.

    JAX gives the equations of such rules the line of the call. The names of the einsums stay, and operations between
    two of them, with no other product on the way, are attention's. On a machine with a GPU nothing is marked: there the
    equations themselves run.
    """
    if jax.default_backend() == "gpu":
        return
    for graph in graphs:
        lost = [one for one in graph.operations if not one.is_attention and _has_lost_its_line(one)]
        for one in lost:
            one.is_attention = True
        if lost:
            _mark_between(graph)
    mark_attentions_own(graphs)


def _has_lost_its_line(one: Operation) -> bool:
    info = one.equation.source_info
    if not _EINSUMS.search(str(info.name_stack)):
        return False
    traceback: Any = info.traceback
    return traceback is None or all(frame.function_name != "einsum" for frame in traceback.frames)


def _mark_between(graph: Graph) -> None:
    def ends(one: Operation) -> bool:
        return one.name in {*OTHERS, *LOOPS} or one.equation.primitive in PRIMITIVES

    for is_backward in (False, True):
        same = [one for one in graph.operations if one.is_backward == is_backward]
        after: set[Array] = set()  # results of attention's products, and arrays computed from these
        for one in same:
            if one.is_attention or (not ends(one) and not after.isdisjoint(one.inputs)):
                after.update(one.outputs)
        before: set[Array] = set()  # inputs of attention's products, and arrays from which these are computed
        for one in reversed(same):
            if not one.is_attention and not ends(one) and not before.isdisjoint(one.outputs):
                one.is_attention = not after.isdisjoint(one.inputs)
                before.update(one.inputs)
            elif one.is_attention:
                before.update(one.inputs)
    read, others = _read_by(graph)
    for one in reversed(graph.operations):  # masks are broadcast to the size of scores for attention alone
        if one.name == "broadcast_in_dim" and others.isdisjoint(one.outputs) and not read.isdisjoint(one.outputs):
            one.is_attention = True


def _read_by(graph: Graph) -> tuple[set[Array], set[Array]]:
    """The arrays that attention reads, and those that other operations or the graph's caller read."""
    read: tuple[set[Array], set[Array]] = set(), {*graph.results}
    for one in graph.operations:
        read[not one.is_attention].update(one.inputs)
    return read
