"""A block: a function of arrays, written with values, of which both passes are planned together."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue.dtypes import FLOATS, listed
from coda_jax.graph.author import BlockTrace, Value
from coda_jax.graph.calls import data_of
from coda_jax.graph.function import Graph
from coda_jax.graph.rounded import Recipe
from coda_jax.graph.stated import Stated
from coda_jax.graph.values import Leaf
from coda_jax.primitives.call_arguments import check_implementation
from coda_jax.primitives.mesh_types import explicit_cuts

_SIGNATURES = 64  # of a block, whose graphs are kept


@overload
def block(f: Callable[..., Any], /) -> Block: ...


@overload
def block(
    *,
    dtype: Any = None,
    rows: str | None = None,
    name: str | None = None,
    implementation: str = "auto",
    fp8: Recipe | None = None,
) -> Callable[[Callable[..., Any]], Block]: ...


def block(
    f: Callable[..., Any] | None = None,
    /,
    *,
    dtype: Any = None,
    rows: str | None = None,
    name: str | None = None,
    implementation: str = "auto",
    fp8: Recipe | None = None,
) -> Any:
    """A function of arrays that is written with values: products, functions of tiles, norms, and any other JAX code.

        @coda.block
        def feed_forward(x, scale, up, down):
            h = coda.rms_norm(x, scale)
            return x + (h @ up).map(swiglu) @ down

    When it is called with arrays f runs once, on `coda.Value`s. Its backward pass is derived, both passes are planned
    together, and what is local to tiles runs in the epilogues of the products. A block that is called with the values
    of another becomes a part of it. It works under jit, grad, vmap, scan, remat and shard_map.

    f runs again for other shapes, dtypes or arguments that are no arrays, as under jax.jit; and each time where it
    captures arrays, which then have gradients.

    Args:
      f: the function. Its arguments are pytrees of arrays, and anything hashable.
      dtype: of the products' factors, and of tiles that are made of products; default that of the rows' array.
      rows: the name of the argument whose array (..., D) has the block's rows; default the first. Other arrays that
        begin with the same axes have these rows too.
      name: in messages and in the kernels' names; default that of f.
      implementation: "auto" and "cuda" are as in `coda.gemm`, for its products. "xla" runs f's lines as
        they are, on arrays, with JAX's own derivative, to compare with and to debug.
      fp8: a `coda.fp8.Recipe` for all products but those of groups; their factors are rounded where they are made.

    Raises:
      TypeError: an argument that is neither array nor hashable; the rows' array is no floating array.
      ValueError: the rows' array has no rows.
    """
    if f is None:
        return functools.partial(block, dtype=dtype, rows=rows, name=name, implementation=implementation, fp8=fp8)
    check_implementation("block", implementation)
    name = name or str(getattr(f, "__name__", type(f).__name__)).strip("<>")
    if not isinstance(fp8, Recipe | None):
        raise TypeError(f"block: fp8 = {fp8!r}; it must be a coda.fp8.Recipe or None")
    return Block(f, dtype, rows, name, implementation, is_plain=implementation == "xla", recipe=fp8)


class Block:
    """A function that `block` was applied to; it is called as the function is.

    With is_plain its lines are run as plain JAX; else the graph's products have this implementation. `row_flags` says
    which arrays have the rows, where their shapes are not to say it.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        dtype: Any,
        rows: str | None,
        name: str,
        implementation: str,
        *,
        is_plain: bool = False,
        recipe: Recipe | None = None,
        row_flags: tuple[bool, ...] | None = None,
    ):
        if not callable(f):
            raise TypeError(f"block: f = {f!r}; it must be a function")
        if rows is not None and rows not in inspect.signature(f).parameters:
            raise ValueError(f"block '{name}': rows = {rows!r}; it must be the name of an argument of the function")
        functools.update_wrapper(self, f)
        self._parameters = inspect.signature(f)
        self._f, self._dtype, self._rows, self.name, self._implementation = f, dtype, rows, name, implementation
        self._is_plain, self._recipe, self._row_flags = is_plain, recipe, row_flags
        self._graphs: collections.OrderedDict[Hashable, _Traced] = collections.OrderedDict()
        self._stated: list[Stated] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """f(*args, **kwargs)."""
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=_is_value)
        leaves = [jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x for x in leaves]
        if any(map(_is_value, leaves)):  # a part of the block that these are of
            return self._f(*args, **kwargs)
        given = [data_of(x) for x in leaves if is_array(x)]
        flags = self._row_flags
        rows, dtype = self._rows_of(given[flags.index(True)] if flags else self._first(args, kwargs))
        if self._is_plain:
            trace = BlockTrace(self.name, dtype, rows, is_plain=True, recipe=self._recipe, stated=self._stated)
            return self._plain(leaves, tree, trace)
        mesh = jax.sharding.get_abstract_mesh()  # equations have that in which they were traced
        key = (tree, dtype, rows, mesh, tuple(map(self._signature, leaves)))
        traced = self._graphs.get(key)
        if traced is None:
            traced, captured = self._traced(leaves, tree, dtype, rows)
            given += map(data_of, captured)
            if not captured:  # they are others the next time
                self._graphs[key] = traced
                if len(self._graphs) > _SIGNATURES:
                    self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(key)
        return traced.results(traced.graph(*traced.arguments(given)))

    def in_plain_jax(self, dtype: Any, stated: list[Stated]) -> Block:
        """The block with implementation="xla" and this dtype, None for its own; it adds to `stated`."""
        options: dict[str, Any] = {"is_plain": True, "recipe": self._recipe, "row_flags": self._row_flags}
        plain = Block(self._f, dtype or self._dtype, self._rows, self.name, "xla", **options)
        plain._stated = stated
        return plain

    def __deepcopy__(self, memo: Any) -> Block:
        return self  # as functions are

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The array whose rows the block has."""
        arguments = self._parameters.bind(*args, **kwargs).arguments
        if self._rows is None:
            given = [x for x in arguments.values() if is_array(getattr(x, "x", x))]
            which = "the first argument that is an array"
        else:
            given, which = [arguments.get(self._rows)], f"the argument '{self._rows}'"
        x = next(iter(jax.tree.leaves(given)), None)
        if x is None or not is_array(x):
            raise TypeError(
                f"block '{self.name}': {which} is missing, which has the block's rows. Give rows= the name of another"
            )
        if x.ndim < 2:
            raise ValueError(f"block '{self.name}': {which} has shape {x.shape}; it must be (..., D) with rows")
        return x

    def _rows_of(self, x: Any) -> tuple[tuple[Any, ...], np.dtype[Any]]:
        """The rows of the block, and the dtype of its products."""
        dtype = x.dtype if self._dtype is None else np.dtype(self._dtype)
        if getattr(dtype, "name", None) not in FLOATS:
            raise TypeError(f"block '{self.name}': dtype = {dtype}; it must be {listed(FLOATS)}")
        return tuple(x.shape[:-1]), np.dtype(dtype)

    def _signature(self, x: Any) -> Hashable:
        if is_array(x):
            return tuple(x.shape), x.dtype, explicit_cuts(x)
        try:
            hash(x)
        except TypeError:
            raise TypeError(
                f"block '{self.name}': an argument is {type(x).__name__}, which is neither an array nor hashable"
            ) from None
        return type(x), x

    def _values(self, leaves: Sequence[Any], tree: Any, trace: BlockTrace) -> tuple[list[Value], Any]:
        """The values that f returns, and their structure."""
        inputs = [trace.argument(x) if is_array(x) or isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        args, kwargs = jax.tree.unflatten(tree, inputs)
        outputs, out_tree = jax.tree.flatten(self._f(*args, **kwargs), is_leaf=_is_value)
        return [trace.value(x) for x in outputs], out_tree

    def _plain(self, leaves: Sequence[Any], tree: Any, trace: BlockTrace) -> Any:
        outputs, out_tree = self._values(leaves, tree, trace)
        return jax.tree.unflatten(out_tree, [x._array().astype(x.dtype) for x in outputs])

    def _traced(self, leaves: Sequence[Any], tree: Any, dtype: Any, rows: Sequence[Any]) -> tuple[_Traced, list[Any]]:
        row_flags = self._row_flags
        trace = BlockTrace(self.name, dtype, rows, is_plain=False, recipe=self._recipe, row_flags=row_flags)
        outputs, out_tree = self._values(leaves, tree, trace)
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x for x in leaves]

        def of_batch(size: Any) -> Graph:
            assert row_flags is not None
            flags, whole = iter(row_flags), [*types]
            for i, x in enumerate(types):
                if isinstance(x, jax.ShapeDtypeStruct) and next(flags):
                    whole[i] = jax.ShapeDtypeStruct((size, *x.shape), x.dtype)
            return self._traced(whole, tree, dtype, (size, *rows))[0].graph

        nodes, out_dtypes = [x._node for x in outputs], [x.dtype for x in outputs]
        axes = tuple(rows) if len(rows) > 1 else ()
        graph = Graph(
            self.name,
            list(trace.leaves.values()),
            nodes,
            trace.dtype,
            out_dtypes,
            axes,
            self._implementation,
            None if row_flags is None else of_batch,
        )
        sources = [(number, leaf) for (number, _), leaf in trace.leaves.items()]
        return _Traced(graph, sources, [x.shape for x in outputs], out_tree), trace.captured


@dataclasses.dataclass(frozen=True, eq=False)
class _Traced:
    """A block at a signature.

    Attributes:
      graph: what it is.
      sources: for each leaf the number of the array that it is of.
      shapes, tree: of the results.
    """

    graph: Graph
    sources: Sequence[tuple[int, Leaf]]
    shapes: Sequence[tuple[Any, ...]]
    tree: Any

    def arguments(self, arrays: Sequence[Any]) -> list[Any]:
        """The graph's arguments, of the block's arrays."""
        return [arrays[number] for number, _ in self.sources]

    def results(self, outputs: Sequence[jax.Array]) -> Any:
        """The block's results, of the graph's."""
        return jax.tree.unflatten(self.tree, [x.reshape(shape) for x, shape in zip(outputs, self.shapes, strict=True)])


def _is_value(x: Any) -> bool:
    return isinstance(x, Value)


def is_array(x: Any) -> bool:
    """True for what a block takes as an array."""
    return isinstance(x, jax.Array | np.ndarray | np.generic)
