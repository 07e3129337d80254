"""An estimate from a jaxpr of XLA's passes over memory between products, and of the arrays kept for the backward pass.

The model: XLA fuses all elementwise operations into the pass that needs their result, and computes an array again if
that reads no more than storing it would; of a chain of operations the last array is stored. A pass ends at a reduction,
and at arrays that a product, attention, a loop or the caller reads. Passes that read the same array and do not depend
on each other are one. Each array that a pass reads or writes counts once, at its full size.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from coda_jax.attend.primitive import FORMS
from coda_jax.jaxprs.graph import LOOPS, Array, Graph, Operation
from coda_jax.tools.others import OTHERS

_OWN_ATTENTION = {primitive.name for primitive in FORMS}
_PRODUCTS = {"coda_gemm", *_OWN_ATTENTION, *OTHERS}
COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant"),
    *("all_to_all", "reduce_scatter", "psum_scatter"),
}
# Operations that are always kernels of their own.
_ALONE = {
    *("sort", "top_k", "cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "reduce_window", "reduce_window_sum"),
    *("reduce_window_max", "reduce_window_min", "scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_max"),
    *("scatter_min", "rng_bit_generator", "random_bits", "threefry2x32", "fft", "cholesky", "triangular_solve"),
    *("ffi_call", "pure_callback", "io_callback", "debug_callback", "custom_partitioning", "eigh", "lu", "qr", "svd"),
}
_NO_PASS = {*LOOPS, *_PRODUCTS, *COLLECTIVES}
_NEVER_ALONE = {*_NO_PASS, "reduce"}
_READS_SLICES = {"slice", "dynamic_slice", "gather", "split"}  # they read no more of their input than they write
_TRIVIAL = {"convert_element_type", "broadcast_in_dim", "transpose", "slice", "squeeze", "expand_dims", "iota"}

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Pass:
    """One kernel of XLA's that is no product and no attention.

    Attributes:
      operation: its operations: "mul", "exp+sub+mul"; casts, broadcasts and the like only if there are no others.
      array: the type of the largest array that it reads or writes.
      after: the products, attention and loops from which it reads, directly or through other passes; "input" for the
        function's arguments.
      before: those that read its results; "output" for the function's results.
      bytes_read, bytes_written: of one execution.
      is_backward: whether it is in a backward pass.
    """

    operation: str
    array: str
    after: tuple[str, ...]
    before: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    is_backward: bool

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that the forward pass makes and the backward pass reads.

    Attributes:
      name: its name from `checkpoint_name`; None if it has none.
      array: its type.
      maker: the operation that makes it.
      bytes: of one such array.
    """

    name: str | None
    array: str
    maker: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of `jax.nn.dot_product_attention`, which is one kernel if cuDNN supports it.

    Attributes:
      bytes_read, bytes_written: the least that such a kernel reads and writes: its arguments and results, once.
      is_backward: whether it is in a backward pass.
    """

    bytes_read: int
    bytes_written: int
    is_backward: bool


class MadePass(NamedTuple):
    """A pass of a graph, and the operations whose results it writes."""

    of: Pass
    makers: list[Operation]


class Moved(NamedTuple):
    """The arrays that an operation, with all that is fused into it, reads in memory and writes there."""

    by: Operation
    read: list[Array]
    written: list[Array]
    in_place: bool  # whether it may write into an array of which it is the last reader: passes, loops, scatters


class LeftToXla(NamedTuple):
    """The work of one execution of a graph: passes, counts of attentions and kept arrays, and its traffic in order."""

    passes: list[MadePass]
    attention: dict[Attention, int]
    kept: dict[Kept, int]
    moved: list[Moved]


def left_to_xla(graph: Graph) -> LeftToXla:
    """The work that one execution of a graph leaves to XLA."""
    fusion = _Fusion(graph)
    return LeftToXla(fusion.passes(), fusion.attention(), fusion.kept(), fusion.moved())


class _Fusion:
    """The arrays of a graph that are in memory, and from which of them each other array is computed."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._fused = [one for one in graph.operations if _is_fused(one)]
        self._in_memory = self._read_elsewhere()
        self._read_by = self._readers()
        self._leaves: dict[
            Array, dict[Array, int]
        ] = {}  # array -> arrays in memory that it is computed from, bytes read
        self._steps: dict[Array, dict[str, None]] = {}  # array -> names of the operations that compute it from these
        reached = self._reached()
        for one in self._fused:
            from_memory = self._made_from(one)
            reads_more = sum(from_memory.values()) > sum(array.bytes for array in one.outputs)
            for array in one.outputs:
                self._leaves[array] = from_memory
                self._steps[array] = self._names(one)
                if len(reached[array]) > 1 and reads_more and not self._is_passed_on(array):
                    self._in_memory.add(array)

    def _read_elsewhere(self) -> set[Array]:
        """The arrays of fused operations that other operations read, and results of reductions."""
        fused = set(self._fused)
        reduced = {array for one in self._fused if _is_reduction(one) for array in one.outputs}
        arrays = {array for array in reduced | set(self._graph.results) if not array.is_constant}
        # Zeros with which a loop begins are written. Attention makes its mask inside its kernel.
        arrays |= {x for one in self._graph.operations if one not in fused and not one.is_attention for x in one.inputs}
        arrays |= {x for one in self._graph.operations if one.is_attention for x in one.inputs if not x.is_constant}
        return {array for array in arrays if array.maker in fused and (array.shape or array in reduced)}

    def _readers(self) -> dict[Array, list[Operation]]:
        """The operations that read an array."""
        readers: dict[Array, list[Operation]] = collections.defaultdict(list)
        for one in self._graph.operations:
            for array in dict.fromkeys(one.inputs):
                readers[array].append(one)
        return readers

    def _is_passed_on(self, array: Array) -> bool:
        """True if one fused operation alone reads the array, and makes no more bytes of it: that is stored instead."""
        readers = self._read_by[array]
        if len(readers) != 1 or not _is_fused(readers[0]) or readers[0].name == "dynamic_update_slice":
            return False
        return sum(x.bytes for x in readers[0].outputs) <= array.bytes

    def _reached(self) -> dict[Array, frozenset[Array]]:
        """For each array, the arrays in memory that fused operations compute from it."""
        reached: dict[Array, frozenset[Array]] = collections.defaultdict(frozenset)
        for one in reversed(self._fused):
            result_sets = (frozenset({x}) if x in self._in_memory else reached[x] for x in one.outputs)
            into = frozenset[Array]().union(*result_sets)
            for array in one.inputs:
                reached[array] |= into
        return reached

    def _made_from(self, one: Operation) -> dict[Array, int]:
        """The arrays in memory from which an operation's results are computed, and the bytes that are read of each."""
        sources: dict[Array, int] = {}
        result_bytes = sum(array.bytes for array in one.outputs)
        inputs = one.inputs[1:] if one.name == "dynamic_update_slice" else one.inputs  # in place
        for array in inputs:
            if array.is_constant:
                continue
            most = min(array.bytes, result_bytes) if one.name in _READS_SLICES else array.bytes
            is_there = array in self._in_memory or array not in self._leaves
            for leaf, size in ({array: most} if is_there else self._leaves[array]).items():
                sources[leaf] = max(sources.get(leaf, 0), min(size, most) if one.name in _READS_SLICES else size)
        return sources

    def _names(self, one: Operation) -> dict[str, None]:
        """The names of an operation and of those before it in the same pass."""
        names: dict[str, None] = {}
        for array in one.inputs:
            if array in self._steps and array not in self._in_memory:
                names |= self._steps[array]
        return names | {one.name: None}

    def passes(self) -> list[MadePass]:
        """The passes of fused operations, and of operations that are kernels of their own."""
        after, before = self._neighbours()

        def pass_of(makers: Sequence[Operation], read: Mapping[Array, int], written: Mapping[Array, int]) -> Pass:
            largest = max([*read, *written], key=lambda array: array.bytes)
            steps = {name: None for array in written for name in self._steps.get(array, {makers[0].name: None})}
            telling = [name for name in steps if name not in _TRIVIAL]
            return Pass(
                "+".join(telling or steps),
                str(largest),
                tuple(sorted(frozenset[str]().union(*(after[array] for array in read)))),
                tuple(sorted(frozenset[str]().union(*(before[array] for array in written)))),
                sum(read.values()),
                sum(written.values()),
                any(one.is_backward for one in makers),
            )

        passes: list[MadePass] = []
        for arrays in self._groups():
            read: dict[Array, int] = {}
            for array in arrays:
                for leaf, size in self._leaves[array].items():
                    read[leaf] = max(read.get(leaf, 0), size)
            makers = [array.maker for array in arrays if array.maker is not None]
            passes.append(MadePass(pass_of(makers, read, {array: _written(array) for array in arrays}), makers))
        for one in self._graph.operations:
            if _is_alone(one) and not one.is_attention:
                is_scatter = one.name.startswith("scatter")  # it updates its first input in place
                read = {x: x.bytes for x in one.inputs[is_scatter:] if not x.is_constant}
                updated_bytes = one.inputs[-1].bytes if is_scatter else 0
                passes.append(MadePass(pass_of([one], read, {x: updated_bytes or x.bytes for x in one.outputs}), [one]))
        return passes

    def _neighbours(self) -> tuple[dict[Array, frozenset[str]], dict[Array, frozenset[str]]]:
        """`Pass.after` and `Pass.before` of arrays."""
        nothing = frozenset[str]()
        operations = self._graph.operations
        after: dict[Array, frozenset[str]] = collections.defaultdict(lambda: frozenset({"input"}))
        for one in operations:
            makers = [after[array] for array in one.inputs if not array.is_constant]
            names = nothing.union(*makers) if is_pass(one) else frozenset({label(one)})
            after |= dict.fromkeys(one.outputs, names)
        before: dict[Array, frozenset[str]] = collections.defaultdict(frozenset)
        for array in self._graph.results:
            before[array] |= {"output"}
        for one in reversed(operations):
            readers = nothing.union(*(before[array] for array in one.outputs))
            for array in one.inputs:
                before[array] |= readers if is_pass(one) else {label(one)}
        return after, before

    def _groups(self) -> list[list[Array]]:
        """The arrays in memory that one pass writes together: of one depth, and computed from a common array."""
        depth: dict[Array, int] = collections.defaultdict(int)
        together = _Sets()
        first: dict[tuple[int, Array], Array] = {}
        written: dict[Array, None] = {}
        fused = set(self._fused)
        for one in self._graph.operations:
            for array in one.outputs:
                before = self._leaves[array] if one in fused else one.inputs
                depth[array] = 1 + max((depth[x] for x in before), default=0)
                if one in fused and array in self._in_memory:
                    written[array] = None
                    for leaf in self._leaves[array]:
                        together.join(array, first.setdefault((depth[array], leaf), array))
        return together.of(written)

    def attention(self) -> dict[Attention, int]:
        """The kernels of attention: its connected operations, forward or backward."""
        ours = [one for one in self._graph.operations if one.is_attention]
        together = _Sets()
        for one in ours:
            for array in one.inputs:
                if array.maker and array.maker.is_attention and array.maker.is_backward == one.is_backward:
                    together.join(one, array.maker)
        counts = collections.Counter[Attention]()
        for group in together.of(ours):
            if not any(_has_product(one) for one in group):  # a mask, which may be made before a loop
                continue
            inputs = _inputs_of(group)
            outputs = {x: None for one in group for x in one.outputs if not x.is_of_attention}
            read = sum(x.bytes for x in inputs if x.maker not in group)
            counts[Attention(read, sum(x.bytes for x in outputs), group[0].is_backward)] += 1
        return dict(counts)

    def kept(self) -> dict[Kept, int]:
        """The earlier arrays that the backward pass reads, and the sources of those that it computes again."""
        arrays: dict[Array, None] = {}
        for one in self._graph.operations:
            if one.is_backward:
                for array in one.inputs:
                    is_there = array in self._in_memory or array not in self._leaves or _is_updated(array)
                    arrays |= dict.fromkeys([array] if is_there else self._leaves[array])
        counts = collections.Counter[Kept]()
        for array in arrays:
            maker = array.maker
            if maker is None or maker.is_backward or not array.bytes or array.is_constant or array.is_of_attention:
                continue
            counts[Kept(array.name, str(array), label(maker), array.bytes)] += 1
        return dict(counts)

    def moved(self) -> list[Moved]:
        """The arrays read and written, in the order of the operations. Attention's own arrays are never written."""
        fused, moves = set(self._fused), []
        for one in self._graph.operations:
            if one in fused:
                written = [x for x in one.outputs if x in self._in_memory]
                read = {leaf: None for x in written for leaf in self._leaves[x]}
            else:
                written = [x for x in one.outputs if not x.is_of_attention and not x.is_constant]
                read = dict.fromkeys(one.inputs)
            in_place = one in fused or one.name in LOOPS or one.name.startswith("scatter")
            moves.append(Moved(one, list(read), written, in_place))
        return moves


def is_pass(one: Operation) -> bool:
    """Whether it is in a pass of XLA's, alone or with others: not a product, attention, a loop or a collective."""
    return _is_fused(one) or _is_alone(one)


def _is_fused(one: Operation) -> bool:
    return not (one.is_attention or _is_alone(one) or one.name in _NO_PASS)


def _is_alone(one: Operation) -> bool:
    """Whether it is a kernel of its own; so is any operation with an inner function, such as a Pallas kernel."""
    return one.name in _ALONE or (one.name not in _NEVER_ALONE and one.has_inner)


def _is_reduction(one: Operation) -> bool:
    return one.name == "reduce" or one.name.startswith(("reduce_", "argm"))


def _has_product(attention: Operation) -> bool:
    return attention.name in OTHERS or attention.name.startswith("dot_product_attention")


def _inputs_of(attention: Sequence[Operation]) -> dict[Array, None]:
    """The arrays that attention reads, but for constants and its own, and the sources of masks made before a loop.

    In the backward pass it has the masks of the forward pass.
    """
    read = dict.fromkeys(x for one in attention for x in one.inputs if not x.is_constant and not x.is_of_attention)
    if not attention[0].is_backward:
        for array in dict.fromkeys(x for one in attention for x in one.inputs if x.outside is not None):
            read |= _sources_of(array)
    return read


def _sources_of(array: Array) -> dict[Array, None]:
    """The arrays from which attention makes one of its own, outside of the loops in which it reads that."""
    while array.is_of_attention and array.outside is not None:
        array = array.outside
    if array.is_of_attention and array.maker is not None:
        return {x: None for one in array.maker.inputs for x in _sources_of(one)}
    return {} if array.is_constant else {array: None}


def _is_updated(array: Array) -> bool:
    """Whether it is an array in memory of which a slice was written in place."""
    return array.maker is not None and array.maker.name == "dynamic_update_slice"


def _written(array: Array) -> int:
    """The bytes that are written of an array: only those of the update if it is updated in place."""
    if array.maker is not None and _is_updated(array):
        return array.maker.inputs[1].bytes
    return array.bytes


def is_any_attention(one: Operation) -> bool:
    """Whether it is attention, by `jax.nn.dot_product_attention` or `coda.attention`."""
    return one.is_attention or one.name in _OWN_ATTENTION


def label(one: Operation) -> str:
    """The name by which a user knows an operation."""
    if is_any_attention(one):
        return "attention"
    if one.name == "coda_gemm":
        return str(one.equation.params["spec"].name)
    return "loop" if one.name in LOOPS else one.name


class _Sets:
    """Disjoint sets, two of which `join` merges."""

    def __init__(self) -> None:
        self._parent: dict[object, object] = {}

    def _root(self, x: object) -> object:
        while (above := self._parent.get(x, x)) is not x:
            x = above
        return x

    def join(self, x: object, y: object) -> None:
        self._parent[self._root(x)] = self._root(y)

    def of(self, xs: Iterable[_T]) -> list[list[_T]]:
        """These elements as a list for each set, in order."""
        sets: dict[object, list[_T]] = {}
        for x in xs:
            sets.setdefault(self._root(x), []).append(x)
        return list(sets.values())
