"""The passes that XLA does between products: why no kernel does them, and at which line of the program."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from coda_jax.jaxprs.graph import Array, Graph, Operation
from coda_jax.jaxprs.source_lines import line_of, users_line
from coda_jax.tools.others import OTHERS
from coda_jax.tools.passes import COLLECTIVES, MadePass, Pass, is_pass

BESIDE = "between products that are left"
_COPIES = {
    *("convert_element_type", "broadcast_in_dim", "transpose", "slice", "squeeze", "expand_dims", "concatenate", "pad"),
    *("split", "rev", "copy", "iota", "tile"),
}
_INDEXED = ("gather", "scatter", "dynamic_slice", "dynamic_update_slice")
_RANDOM = ("random_", "threefry2x32", "rng_")
_ALONG_AN_AXIS = ("sort", "top_k", "approx_top_k", "argmax", "argmin", "cum", "reduce_window")
_OF_OTHERS = ("ffi_call", "pure_callback", "io_callback", "debug_callback", "custom_partitioning", "pallas_call")
# By how the names of operations begin; the first that fits.
_REASONS: Sequence[tuple[Sequence[str], str]] = (
    (_OF_OTHERS, "kernels and callbacks of others"),
    (_RANDOM, "random numbers are drawn"),
    (_INDEXED, "rows or slices are gathered or scattered"),
    (_ALONG_AN_AXIS, "sorts, ranks and running sums along an axis"),
    (tuple(COLLECTIVES), "arrays are sent between devices"),
    (("rsqrt",), "norms, which need sums of whole rows first"),
    (("reduce_max", "log", "exp"), "softmax and log-sum-exp, which need maxima and sums of whole rows first"),
    (("reduce_",), "sums over rows or columns"),
)


@dataclasses.dataclass(frozen=True)
class Left:
    """One pass of XLA's.

    Attributes:
      why: why no kernel does it.
      source: its line in the program; None if JAX knows none.
      product: the line of a product that is left, between which and others the pass stands; else None.
      bytes: read and written.
      kernel: the name of the kernel whose result alone it casts or copies; else None. The library's functions make
        such passes, and JAX may have traced these for another line.
    """

    why: str
    source: str | None
    product: str | None
    bytes: int
    kernel: str | None = None


def left_in(graph: Graph, passes: Iterable[MadePass]) -> dict[Left, int]:
    """The passes in one execution of a graph, with their counts."""
    around = _Neighbours(graph)
    counts = collections.Counter[Left]()
    for one, makers in passes:
        product = around.product(makers)
        why = BESIDE if product is not None else _reason(one)
        source = next((line for maker in reversed(makers) if (line := around.line(maker))), None)
        line = None if product is None else line_of(product.equation)
        is_copy = len(one.after) == 1 and _COPIES.issuperset(one.operation.split("+"))
        kernel = one.after[0] if is_copy and not {"input", *OTHERS}.intersection(one.after) else None
        counts[Left(why, source and users_line(source), line and users_line(line), one.bytes, kernel)] += 1
    return dict(counts)


def _reason(one: Pass) -> str:
    names = one.operation.split("+")
    for starts, why in _REASONS:
        if any(name.startswith(tuple(starts)) for name in names):
            return why
    if one.after == ("input",):
        return "made of arguments alone, as weights that are cast or scaled"
    if _COPIES.issuperset(names):
        return f"copies: {', '.join(dict.fromkeys(names))}"
    return "elementwise, of arrays that are no product's tiles"


class _Neighbours:
    """The products of other libraries that passes read of and make arrays for."""

    def __init__(self, graph: Graph):
        self._before: dict[Array, Operation] = {}  # one that the array is made of, directly or through other passes
        self._behind: dict[Array, Operation] = {}  # one that reads what is made of it
        for one in graph.operations:
            made_of = one if one.name in OTHERS else _first(self._before, one.inputs) if is_pass(one) else None
            if made_of is not None:
                self._before |= dict.fromkeys(one.outputs, made_of)
        for one in reversed(graph.operations):
            read_by = one if one.name in OTHERS else _first(self._behind, one.outputs) if is_pass(one) else None
            if read_by is not None:
                self._behind |= dict.fromkeys(one.inputs, read_by)

    def product(self, makers: Sequence[Operation]) -> Operation | None:
        """A product of another library beside a pass; None if there is none."""
        arrays = [x for maker in makers for x in maker.outputs]
        return _first(self._before, arrays) or _first(self._behind, arrays)

    def line(self, maker: Operation) -> str | None:
        """The line of an operation, or of the nearest one before it that has one, in passes or just before them."""
        open_, seen = collections.deque([maker]), {maker}
        while open_:
            one = open_.popleft()
            if line := line_of(one.equation):
                return line
            made = [x.maker for x in one.inputs if x.maker is not None] if is_pass(one) else []
            open_ += [x for x in dict.fromkeys(made) if x not in seen]
            seen |= set(made)
        return None


def _first(found: dict[Array, Operation], arrays: Iterable[Array]) -> Operation | None:
    return next((found[x] for x in arrays if x in found), None)
