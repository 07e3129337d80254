"""A function as operations on arrays: its jaxpr with all calls inlined, and one more graph for each body of a loop.

Equations that move no bytes, such as reshapes, names and barriers, are no operations: their result is their input.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.jaxprs.inline import Body, Inliner
from coda_jax.jaxprs.walk import executions, inner_jaxprs, num_carried, num_constants

# The result is the argument, in another shape or dtype, or with a property that XLA drops.
_SAME = {
    *("reshape", "squeeze", "expand_dims", "name", "stop_gradient", "optimization_barrier", "copy", "copy_p"),
    *("reduce_precision", "coda_note", "coda_plan_text", "pvary", "pbroadcast", "sharding_constraint", "reshard"),
    *("bitcast_convert_type", "coda_again", "coda_same"),
}
_BESIDE = "coda_beside_attention"  # the results are the first arguments
LOOPS = {"scan", "while", "cond"}
_NOTHING = {"coda_reverse_mode", "create_token"}
_NO_CALLS = _SAME | LOOPS | _NOTHING | {_BESIDE}


@dataclasses.dataclass(eq=False)
class Array:
    """A value of a graph.

    Attributes:
      shape, dtype: as in the jaxpr.
      maker: the operation whose result it is; None for arguments and constants.
      name: its name from `jax.ad_checkpoint.checkpoint_name`.
      is_constant: whether it is a literal of the program, or computed from literals alone.
      is_of_attention: whether only attention reads it and makes it, such as its scores, which its kernel never writes.
      outside: for a constant argument of a scan's body, the array outside the scan.
    """

    shape: tuple[Any, ...]
    dtype: Any
    maker: Operation | None = None
    name: str | None = None
    is_constant: bool = False
    is_of_attention: bool = False
    outside: Array | None = None

    @property
    def bytes(self) -> int:
        """Its size; 0 if a dimension is symbolic, and for a value that is no array."""
        if not all(isinstance(size, int) for size in self.shape):
            return 0
        # Keys of random numbers and the like have dtypes of JAX's own.
        return math.prod(self.shape) * (self.dtype.itemsize if isinstance(self.dtype, np.dtype) else 4)

    def __str__(self) -> str:
        return jax.core.ShapedArray(self.shape, self.dtype).str_short(short_dtypes=False)


@dataclasses.dataclass(eq=False)
class Operation:
    """An equation that moves or computes data.

    Attributes:
      is_backward: whether it is in a transposed function, as every equation of a backward pass is.
      is_attention: whether it is cuDNN's attention, or, on a machine without a GPU, `jax.nn.dot_product_attention` made
        it: on a GPU the equations of that function are one kernel of cuDNN's.
    """

    name: str
    inputs: list[Array]
    outputs: list[Array]
    is_backward: bool
    is_attention: bool
    equation: core.JaxprEqn

    @functools.cached_property
    def has_inner(self) -> bool:
        """Whether it has an inner function."""
        return bool(inner_jaxprs(self.equation))


@dataclasses.dataclass
class Graph:
    """The graph of a function, or of a loop's body, which is executed `times` times.

    Attributes:
      operations: in order.
      results: the returned arrays.
      is_body: whether it is a loop's body.
    """

    operations: list[Operation]
    results: list[Array]
    times: int = 1
    is_body: bool = False


def graphs_of(jaxpr: core.Jaxpr) -> list[Graph]:
    """The function's graph first, then those of the bodies of its loops."""
    graphs: list[Graph] = []
    _Builder(graphs, 1, is_body=False, is_backward=False).graph(jaxpr)
    mark_attentions_own(graphs)
    return graphs


def mark_attentions_own(graphs: Sequence[Graph]) -> None:
    """Marks arrays that only attention reads and makes, across graphs: JAX may make a mask once, before a scan."""
    others: set[Array] = set()  # arrays that other operations read
    for graph in reversed(graphs):  # bodies before the graphs with their loops
        read = set(graph.results)
        for one in graph.operations:
            if one.name == "scan":
                read.update(one.inputs[num_constants(one.equation) :])
            elif not one.is_attention:
                read.update(one.inputs)
        others |= read | {array.outside for array in read if array.outside is not None}
    for graph in graphs:
        for one in graph.operations:
            for array in one.inputs:
                array.is_of_attention |= array.outside is not None and array.outside.is_of_attention
            for array in one.outputs if one.is_attention else ():
                array.is_of_attention |= array not in others


class _Context(NamedTuple):
    """The properties that an inlined function gets from the equation that calls it."""

    is_backward: bool
    is_attention: bool


class _Builder:
    """Builds one graph, and those of the loops in it."""

    def __init__(self, graphs: list[Graph], times: int, *, is_body: bool, is_backward: bool):
        self._graphs, self._context = graphs, _Context(is_backward, False)
        self._graph = Graph([], [], times, is_body)
        graphs.append(self._graph)
        self._attention_tracebacks: dict[int, bool] = {}

    def graph(self, jaxpr: core.Jaxpr, arguments: Sequence[Array] | None = None, results: int | None = None) -> None:
        """Fills the graph.

        Args:
          arguments: the jaxpr's arguments as arrays of this graph.
          results: so many of the first results are read outside; by default all.
        """
        arguments = arguments or [_array(var.aval) for var in jaxpr.invars]
        graph = self._graph
        inliner = Inliner(self._results, self._called, lambda literal: _array(literal.aval, is_constant=True))
        graph.results = inliner.results(jaxpr, _constants(jaxpr), arguments, self._context)
        others = {array for one in graph.operations if not one.is_attention for array in one.inputs}
        others.update(graph.results[:results])
        for one in graph.operations:
            for array in one.outputs if one.is_attention else ():
                array.is_of_attention = array not in others

    def _called(self, equation: core.JaxprEqn, context: _Context) -> Body:
        """The jaxpr of a call."""
        if equation.primitive.name in _NO_CALLS or not executions(equation):
            return None
        inner = inner_jaxprs(equation)
        if len(inner) != 1 or not _is_call(equation, inner[0]):
            return None
        return inner[0], _constants(inner[0]), self._inside(equation, context)

    def _inside(self, equation: core.JaxprEqn, context: _Context) -> _Context:
        """The context of what an equation is, or calls."""
        is_backward = context.is_backward or "transpose(" in str(equation.source_info.name_stack)
        return _Context(is_backward, context.is_attention or self._is_attention(equation))

    def _results(self, equation: core.JaxprEqn, inputs: list[Array], context: _Context) -> list[Array]:
        name, avals = equation.primitive.name, [var.aval for var in equation.outvars]
        if name == "name" and inputs[0].name is None:
            inputs[0].name = equation.params["name"]
        if (name in _SAME and len(inputs) == len(avals)) or _moves_nothing(equation):
            return inputs
        if name == _BESIDE:
            return inputs[: len(avals)]
        if (before := _rounded_back(name, inputs, avals)) is not None:
            return [before]
        if not executions(equation):
            return inputs[len(inputs) - len(avals) :]
        if name in _NOTHING:
            return [_array(aval, is_constant=True) for aval in avals]
        outputs = [_array(aval) for aval in avals]
        operation = Operation(name, inputs, outputs, *self._inside(equation, context), equation)
        for array in outputs:
            array.maker = operation
            array.is_constant = all(x.is_constant for x in inputs) and name not in LOOPS
        self._graph.operations.append(operation)
        if name in LOOPS:
            return self._loop(operation, inner_jaxprs(equation))
        return outputs

    def _loop(self, loop: Operation, bodies: Sequence[core.Jaxpr]) -> list[Array]:
        """Adds the bodies' graphs, and returns the loop's results, with names and marks of a scan body's results."""
        scanned = loop.equation.params if loop.name == "scan" else None
        outputs = loop.outputs
        for body in bodies:
            arguments = [_array(var.aval) for var in body.invars]
            carried = None
            if scanned is not None:  # its arguments are its body's, and so are its results
                carried, constants = num_carried(loop.equation), num_constants(loop.equation)
                for i, (inner, outer) in enumerate(zip(arguments, loop.inputs, strict=True)):
                    inner.is_of_attention = outer.is_of_attention
                    if i < constants:
                        inner.is_constant, inner.outside = outer.is_constant, outer
            times = self._graph.times * executions(loop.equation)
            body_graph = _Builder(self._graphs, times, is_body=True, is_backward=loop.is_backward)
            body_graph.graph(body, arguments, carried)
            if scanned is not None:
                outputs = _as_inside(outputs, body_graph._graph.results)
        return outputs

    def _is_attention(self, equation: core.JaxprEqn) -> bool:
        if equation.primitive.name.startswith("dot_product_attention"):
            return True
        traceback: Any = equation.source_info.traceback
        if traceback is None or jax.default_backend() == "gpu":  # on a GPU the equations themselves run
            return False
        if id(traceback) not in self._attention_tracebacks:
            frames = (frame.function_name for frame in traceback.frames)
            self._attention_tracebacks[id(traceback)] = "dot_product_attention" in frames
        return self._attention_tracebacks[id(traceback)]


def _is_call(equation: core.JaxprEqn, inner: core.Jaxpr) -> bool:
    """True if an equation calls this jaxpr once with its arguments; a shard_map does so with their shards."""
    if len(inner.invars) != len(equation.invars):
        return False
    shapes = [[getattr(x.aval, "shape", ()) for x in atoms] for atoms in (equation.invars, inner.invars)]
    return equation.primitive.name == "shard_map" or shapes[0] == shapes[1]


def _as_inside(outputs: Sequence[Array], results: Sequence[Array]) -> list[Array]:
    """A scan's results with the names and marks of its body's; results that are one array there are one array."""
    first: dict[Array, Array] = {}
    for array, inner in zip(outputs, results, strict=True):
        array.name, array.is_of_attention = array.name or inner.name, inner.is_of_attention
        first.setdefault(inner, array)
    return [first[inner] for inner in results]


def _moves_nothing(equation: core.JaxprEqn) -> bool:
    """True if a cast, a broadcast or a transposition changes nothing but axes of one element."""
    if equation.primitive.name not in ("convert_element_type", "broadcast_in_dim", "transpose"):
        return False
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    if equation.primitive.name == "transpose":
        kept = [axis for axis in equation.params["permutation"] if before.shape[axis] != 1]
        return kept == sorted(kept)
    sizes = [[size for size in aval.shape if size != 1] for aval in (before, after)]
    return before.dtype == after.dtype and sizes[0] == sizes[1]


def _rounded_back(name: str, inputs: Sequence[Array], avals: Sequence[Any]) -> Array | None:
    """The array before a widening cast, if another cast returns to its dtype: XLA drops both casts."""
    widened = inputs[0].maker if name == "convert_element_type" else None
    if widened is None or widened.name != "convert_element_type":
        return None
    before, dtypes = widened.inputs[0], (widened.inputs[0].dtype, inputs[0].dtype)
    is_same = before.dtype == avals[0].dtype and all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return before if is_same and dtypes[0].itemsize < dtypes[1].itemsize else None


def _constants(jaxpr: core.Jaxpr) -> list[Array]:
    return [_array(var.aval) for var in jaxpr.constvars]


def _array(aval: Any, *, is_constant: bool = False) -> Array:
    return Array(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(bool)), is_constant=is_constant)
