"""The work of XLA between products: passes over memory, as far as a jaxpr tells, and what is kept for going back.

XLA is taken to fuse all elementwise operations into the pass that needs their result, and to make an array again where
that reads no more than keeping it would. A pass ends at a reduction, and at what a product, attention, a loop or the
caller reads. Passes that read the same array and do not need each other are one. Each array that a pass reads or
writes counts once, at its whole width.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from coda_jax.jaxprs.graph import LOOPS, Array, Graph, Operation
from coda_jax.jaxprs.walk import inner_jaxprs
from coda_jax.tools.others import OTHERS

_PRODUCTS = {"coda_gemm", *OTHERS}
_COLLECTIVES = {
    *("psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "all_gather", "all_gather_invariant"),
    *("all_to_all", "reduce_scatter", "psum_scatter"),
}
# A kernel of their own each, whatever stands around them.
_ALONE = {
    *("sort", "top_k", "cumsum", "cumlogsumexp", "cummax", "cummin", "cumprod", "reduce_window", "reduce_window_sum"),
    *("reduce_window_max", "reduce_window_min", "scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_max"),
    *("scatter_min", "rng_bit_generator", "random_bits", "threefry2x32", "fft", "cholesky", "triangular_solve"),
    *("ffi_call", "pure_callback", "io_callback", "debug_callback", "custom_partitioning", "eigh", "lu", "qr", "svd"),
}
_TAKES_PART = {"slice", "dynamic_slice", "gather", "split"}  # of what it reads, as much as it makes
_TRIVIAL = {"convert_element_type", "broadcast_in_dim", "transpose", "slice", "squeeze", "expand_dims", "iota"}

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Pass:
    """One kernel of XLA's that is no product and no attention.

    Attributes:
      operation: what it does: "mul", "exp+sub+mul"; of casts, broadcasts and the like only where it does nothing else.
      array: the type of the largest array that it reads or writes.
      after: the products, attention and loops that make what it reads, through other passes or directly; "input" for
        the function's arguments.
      before: those that read what it makes; "output" for the function's results.
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
        """Read and written."""
        return self.bytes_read + self.bytes_written


@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that the forward pass makes and the backward pass reads.

    Attributes:
      name: that `checkpoint_name` gave it; None if it has none.
      array: its type.
      maker: the operation that makes it.
      bytes: of one.
    """

    name: str | None
    array: str
    maker: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """A call of `jax.nn.dot_product_attention`, which is one kernel where cuDNN has it.

    Attributes:
      bytes_read, bytes_written: what such a kernel moves at least: its arguments and results, once.
      is_backward: whether it is in a backward pass.
    """

    bytes_read: int
    bytes_written: int
    is_backward: bool


class MadePass(NamedTuple):
    """A pass of a graph, and the operations that make what it writes."""

    of: Pass
    makers: list[Operation]


class Moved(NamedTuple):
    """The arrays that an operation, with all that is fused into it, reads in memory and writes there."""

    by: Operation
    read: list[Array]
    written: list[Array]
    in_place: bool  # whether it may write where it reads for the last time: passes, loops, scatters


class LeftToXla(NamedTuple):
    """The work of one execution of a graph: passes, counts of attentions and kept arrays, and what moves in order."""

    passes: list[MadePass]
    attention: dict[Attention, int]
    kept: dict[Kept, int]
    moved: list[Moved]


def left_to_xla(graph: Graph) -> LeftToXla:
    """The work that one execution of a graph leaves to XLA."""
    fusion = _Fusion(graph)
    return LeftToXla(fusion.passes(), fusion.attention(), fusion.kept(), fusion.moved())


class _Fusion:
    """The arrays of a graph that are in memory, and what each array is made from there."""

    def __init__(self, graph: Graph):
        self._graph = graph
        self._fused = [one for one in graph.operations if _is_fused(one)]
        self._in_memory = self._read_elsewhere()
        self._leaves: dict[Array, dict[Array, int]] = {}  # what an array is made from, and bytes read of each
        self._steps: dict[Array, dict[str, None]] = {}  # names of the operations that do it
        reached = self._reached()
        for one in self._fused:
            from_memory = self._made_from(one)
            for array in one.outputs:
                self._leaves[array] = from_memory
                self._steps[array] = self._names(one)
                if len(reached[array]) > 1 and sum(from_memory.values()) > array.bytes:
                    self._in_memory.add(array)

    def _read_elsewhere(self) -> set[Array]:
        """The arrays that fused operations make for others to read, or by a reduction."""
        fused = set(self._fused)
        reduced = {array for one in self._fused if _is_reduction(one) for array in one.outputs}
        found = {array for array in reduced | set(self._graph.results) if not array.is_constant}
        # Zeros that a loop begins with are written; attention has its mask in its kernel.
        found |= {x for one in self._graph.operations if one not in fused and not one.is_attention for x in one.inputs}
        found |= {x for one in self._graph.operations if one.is_attention for x in one.inputs if not x.is_constant}
        return {array for array in found if array.maker in fused and (array.shape or array in reduced)}

    def _reached(self) -> dict[Array, frozenset[Array]]:
        """The arrays in memory that an array goes into, through fused operations alone."""
        reached: dict[Array, frozenset[Array]] = collections.defaultdict(frozenset)
        for one in reversed(self._fused):
            of_results = (frozenset({x}) if x in self._in_memory else reached[x] for x in one.outputs)
            into = frozenset[Array]().union(*of_results)
            for array in one.inputs:
                reached[array] |= into
        return reached

    def _made_from(self, one: Operation) -> dict[Array, int]:
        """Arrays in memory, and how many bytes of each are read."""
        found: dict[Array, int] = {}
        made = sum(array.bytes for array in one.outputs)
        inputs = one.inputs[1:] if one.name == "dynamic_update_slice" else one.inputs  # in place
        for array in inputs:
            if array.is_constant:
                continue
            most = min(array.bytes, made) if one.name in _TAKES_PART else array.bytes
            is_there = array in self._in_memory or array not in self._leaves
            for leaf, size in ({array: most} if is_there else self._leaves[array]).items():
                found[leaf] = max(found.get(leaf, 0), min(size, most) if one.name in _TAKES_PART else size)
        return found

    def _names(self, one: Operation) -> dict[str, None]:
        """The names of an operation and of those before it that go into the same pass."""
        found: dict[str, None] = {}
        for array in one.inputs:
            if array in self._steps and array not in self._in_memory:
                found |= self._steps[array]
        return found | {one.name: None}

    def passes(self) -> list[MadePass]:
        """The passes of fused operations, and of operations that stand alone."""
        after, before = self._neighbours()

        def found_of(makers: Sequence[Operation], read: Mapping[Array, int], written: Mapping[Array, int]) -> Pass:
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

        found: list[MadePass] = []
        for arrays in self._groups():
            read: dict[Array, int] = {}
            for array in arrays:
                for leaf, size in self._leaves[array].items():
                    read[leaf] = max(read.get(leaf, 0), size)
            makers = [array.maker for array in arrays if array.maker is not None]
            found.append(MadePass(found_of(makers, read, {array: _written(array) for array in arrays}), makers))
        for one in self._graph.operations:
            if _is_alone(one) and not one.is_attention:
                is_scatter = one.name.startswith("scatter")  # adds to what is there, in place
                read = {x: x.bytes for x in one.inputs[is_scatter:] if not x.is_constant}
                made = one.inputs[-1].bytes if is_scatter else 0
                found.append(MadePass(found_of([one], read, {x: made or x.bytes for x in one.outputs}), [one]))
        return found

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
        """The arrays in memory that one pass makes together: of one depth, and from an array that they share."""
        depth: dict[Array, int] = collections.defaultdict(int)
        together = _Sets()
        first: dict[tuple[int, Array], Array] = {}
        made: dict[Array, None] = {}
        fused = set(self._fused)
        for one in self._graph.operations:
            for array in one.outputs:
                before = self._leaves[array] if one in fused else one.inputs
                depth[array] = 1 + max((depth[x] for x in before), default=0)
                if one in fused and array in self._in_memory:
                    made[array] = None
                    for leaf in self._leaves[array]:
                        together.join(array, first.setdefault((depth[array], leaf), array))
        return together.of(made)

    def attention(self) -> dict[Attention, int]:
        """The kernels of attention: what hangs together of its operations, forward or backward."""
        ours = [one for one in self._graph.operations if one.is_attention]
        together = _Sets()
        for one in ours:
            for array in one.inputs:
                if array.maker and array.maker.is_attention and array.maker.is_backward == one.is_backward:
                    together.join(one, array.maker)
        found = collections.Counter[Attention]()
        for group in together.of(ours):
            if not any(_has_product(one) for one in group):  # a mask, which may be made before a loop
                continue
            inputs = _given_to(group)
            outputs = {x: None for one in group for x in one.outputs if not x.is_of_attention}
            read = sum(x.bytes for x in inputs if x.maker not in group)
            found[Attention(read, sum(x.bytes for x in outputs), group[0].is_backward)] += 1
        return dict(found)

    def kept(self) -> dict[Kept, int]:
        """The arrays that the backward pass reads and others made; for one that is made again, what it is made from."""
        arrays: dict[Array, None] = {}
        for one in self._graph.operations:
            if one.is_backward:
                for array in one.inputs:
                    is_there = array in self._in_memory or array not in self._leaves
                    arrays |= dict.fromkeys([array] if is_there else self._leaves[array])
        found = collections.Counter[Kept]()
        for array in arrays:
            maker = array.maker
            if maker is None or maker.is_backward or not array.bytes or array.is_constant or array.is_of_attention:
                continue
            found[Kept(array.name, str(array), label(maker), array.bytes)] += 1
        return dict(found)

    def moved(self) -> list[Moved]:
        """The arrays read and written, in the order of the operations. Attention's own arrays are never written."""
        fused, found = set(self._fused), []
        for one in self._graph.operations:
            if one in fused:
                written = [x for x in one.outputs if x in self._in_memory]
                read = {leaf: None for x in written for leaf in self._leaves[x]}
            else:
                written = [x for x in one.outputs if not x.is_of_attention and not x.is_constant]
                read = dict.fromkeys(one.inputs)
            in_place = one in fused or one.name in LOOPS or one.name.startswith("scatter")
            found.append(Moved(one, list(read), written, in_place))
        return found


def is_pass(one: Operation) -> bool:
    """Whether XLA makes it in a pass, alone or with others; not a product, attention, a loop or a collective."""
    return _is_fused(one) or _is_alone(one)


def _is_fused(one: Operation) -> bool:
    return not (one.is_attention or _is_alone(one) or one.name in {*LOOPS, *_PRODUCTS, *_COLLECTIVES})


def _is_alone(one: Operation) -> bool:
    """Whether it is a kernel of its own, as what has a function for parts of its arguments: a Pallas kernel."""
    of_others = {*LOOPS, *_PRODUCTS, *_COLLECTIVES, "reduce"}
    return one.name in _ALONE or (one.name not in of_others and bool(inner_jaxprs(one.equation)))


def _is_reduction(one: Operation) -> bool:
    return one.name == "reduce" or one.name.startswith(("reduce_", "argm"))


def _has_product(attention: Operation) -> bool:
    return attention.name in OTHERS or attention.name.startswith("dot_product_attention")


def _given_to(attention: Sequence[Operation]) -> dict[Array, None]:
    """The arrays that attention reads, not its own or constant, and what its masks made before a loop are made of.

    Going back it has its masks from going forward.
    """
    found = dict.fromkeys(x for one in attention for x in one.inputs if not x.is_constant and not x.is_of_attention)
    if not attention[0].is_backward:
        for array in dict.fromkeys(x for one in attention for x in one.inputs if x.outside is not None):
            found |= _made_of(array)
    return found


def _made_of(array: Array) -> dict[Array, None]:
    """The arrays that attention reads to make one of its own, before the loops that it is read in."""
    while array.is_of_attention and array.outside is not None:
        array = array.outside
    if array.is_of_attention and array.maker is not None:
        return {x: None for one in array.maker.inputs for x in _made_of(one)}
    return {} if array.is_constant else {array: None}


def _written(array: Array) -> int:
    """The bytes that are written of an array: of one that is updated in place, those of the update."""
    if array.maker is not None and array.maker.name == "dynamic_update_slice":
        return array.maker.inputs[1].bytes
    return array.bytes


def label(one: Operation) -> str:
    """The name by which a user knows an operation."""
    if one.is_attention:
        return "attention"
    if one.name == "coda_gemm":
        return str(one.equation.params["spec"].name)
    return "loop" if one.name in LOOPS else one.name


class _Sets:
    """Disjoint sets, which `join` makes fewer."""

    def __init__(self) -> None:
        self._parent: dict[object, object] = {}

    def _root(self, x: object) -> object:
        while (above := self._parent.get(x, x)) is not x:
            x = above
        return x

    def join(self, x: object, y: object) -> None:
        self._parent[self._root(x)] = self._root(y)

    def of(self, xs: Iterable[_T]) -> list[list[_T]]:
        """These, those of one set together, in order."""
        found: dict[object, list[_T]] = {}
        for x in xs:
            found.setdefault(self._root(x), []).append(x)
        return list(found.values())
