"""The values of a graph: its leaves, products of two values, and maps of values.

A value is a matrix (M, N), or one for each group, a vector of columns (N,) or (1, N) or of rows (M,) or (M, 1), or a
scalar; leaves that are vectors of rows are (M, 1). A product sums in float32, and a map sees every floating value as
float32. Nothing is computed when a value is made: its function is traced, so that an error is raised at the line that
makes it.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from coda_jax.epilogue.dtypes import FLOAT32, is_of_8_bits, row_of
from coda_jax.epilogue.groups import RowGroups, group_offsets
from coda_jax.epilogue.user_code import default_types, make_jaxpr
from coda_jax.epilogue.values import same_size
from coda_jax.graph.constraint import Constraint
from coda_jax.graph.on_mesh import on_mesh
from coda_jax.graph.pullbacks import Pullback, backward_of, with_pullback
from coda_jax.jaxprs.evaluate import opened_jaxpr, without_constants

_numbers = itertools.count()


class Value:
    """A node of a graph. Two values are the same if they are one object.

    Attributes:
      shape, dtype: of its array.
      inputs: the values that it is a function of; these were made before it.
      number: in the order in which values are made.
      transpose: as `transposed` made it.
      rounded, amax: in 8 bits with the scale, by dtype and scale; its largest magnitude: as `graph.rounded` made them.
      name: for the policies of `jax.checkpoint`, where it or a value that it is computed again from is kept.
      spec: its sharding over the mesh where it is in memory, a PartitionSpec of the array with all its axes, or what an
        equation asks.
      recovered: the same value, computed from the results of a map of it; backward passes read that.
      has_one_row: its rows are the block's, which has one, so that (1, N) is a tile.
      is_factor: it is stored in the dtype of products' factors, and kept for a backward pass that reads it.
      made_of: the dtypes of the floating tiles that a tile is made of; None is that of products.
      cotangent_of: the value of whose shape and rows it is; None for one that is no map's cotangent.
      is_rounded: the function that it is of has it in the products' dtype, and so a pass of XLA's hands it on.
      is_wide: the function has it in float32, of which the products' dtype has not the range: a tile and its cotangents
        are stored so.
      source: the traceback of the equation that it is of, where it is of a function's.
    """

    inputs: tuple[Value, ...] = ()
    transpose: Transposed | None = None
    name: str | None = None
    spec: jax.P | Constraint | None = None
    recovered: Value | None = None
    has_one_row: bool = False
    is_factor: bool = False
    made_of: frozenset[np.dtype[Any] | None] = frozenset({None})
    cotangent_of: Value | None = None
    is_rounded: bool = False
    is_wide: bool = False
    source: Any = None

    def __init__(self, shape: Sequence[Any], dtype: Any):
        self.shape, self.number = tuple(shape), next(_numbers)
        self.rounded: dict[tuple[np.dtype[Any], Value | None], tuple[Value, Value]] = {}
        self.amax: Value | None = None
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._has_columns = len(self.shape) > 1 and not same_size(self.shape[-1], 1)
        self._has_many_rows = len(self.shape) > 1 and not same_size(self.shape[-2], 1)

    def stored_as(self, dtype: Any) -> np.dtype[Any]:
        """The dtype in which it is stored in memory, where products have this dtype.

        A tile has that of the floating tiles with most columns that it is made of; float32 if they differ, as for the
        sum of a float32 stream and a product, or if it is wide. Other floats are float32, and other dtypes are
        unchanged, as are those that maps do not see.
        """
        if not is_float(self.dtype) or is_of_8_bits(self.dtype) or not is_seen(self.dtype):
            return self.dtype
        if self.is_factor:
            return np.dtype(dtype)
        if self.is_wide:
            return np.dtype(FLOAT32)
        dtypes = {np.dtype(dtype if x is None else x) for x in self.made_of}
        return dtypes.pop() if len(dtypes) == 1 and len(self.shape) > 1 else np.dtype(FLOAT32)

    @functools.cached_property
    def type(self) -> jax.ShapeDtypeStruct:
        """The type as a map sees it."""
        return jax.ShapeDtypeStruct(self.shape, FLOAT32 if is_float(self.dtype) else self.dtype)

    @property
    def is_tile(self) -> bool:
        """True if it has elements for rows and columns both."""
        return self._has_columns and (self._has_many_rows or self.has_one_row)


class Leaf(Value):
    """An argument of the graph.

    Attributes:
      has_cotangent: whether it is differentiated.
      has_rows: whether its rows are those of the block's arrays, which may be several axes of these.
      has_halves: whether its columns are two axes of the array, (2, N / 2).
      is_history: whether it holds maxima of earlier steps; its gradient is this step's.
    """

    is_history: bool = False

    def __init__(
        self,
        shape: Sequence[Any],
        dtype: Any,
        *,
        has_cotangent: bool = True,
        has_rows: bool = False,
        has_halves: bool = False,
        has_one_row: bool = False,
    ):
        super().__init__(shape, dtype)
        self.has_one_row = has_one_row
        self.has_cotangent, self.has_rows = has_cotangent and is_float(self.dtype), has_rows
        self.has_halves = has_halves
        self.made_of = frozenset({self.dtype})


class Product(Value):
    """a b, summed in float32: a (M, K), or (K, M) with transpose_a; b (K, N), or (N, K) with transpose_b.

    With groups, rows of a are sorted by group, and the result is as of `coda.ragged_gemm`: b has an axis of groups in
    front. With groups and transpose_a it is as of `coda.ragged_contraction`, (G, M, N): the rows that are summed over
    are those of each group.

    With `added`, further pairs of factors of as many rows and columns, it is the sum of the products of all pairs: over
    a mesh it is summed once. Each device multiplies one pair after the other.

    Attributes:
      pairs: of factors, (a, b) and those that are added.
      groups: (G,) int32, how many rows each has; None for a plain product.
      like: the value whose cotangent the result is, and as which it is sharded over explicit mesh axes; else None.
      out_spec: the sharding over explicit mesh axes as which it is summed; None for `spec`, or what its factors say.
      spec_of_a: the sharding of the first factor, where it is in memory for this product alone; None for its own.
      scales: of factors that `graph.rounded` rounds, with its cotangent; None for others.
      maps_zeros: whether a map of it has, in rows in no group, what it makes of zeros; else it may be zeros there.

    Raises:
      ValueError: factors of other ranks, or that do not fit.
    """

    def __init__(
        self,
        a: Value,
        b: Value,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
        groups: Value | None = None,
        like: Value | None = None,
        added: Sequence[tuple[Value, Value]] = (),
    ):
        has_groups = groups is not None and not transpose_a
        if len(a.shape) != 2 or len(b.shape) != 2 + has_groups:
            kinds = "a matrix and one for each group" if has_groups else "both matrices"
            raise ValueError(f"product: factors have shapes {a.shape} and {b.shape}; they must be {kinds}")
        (m, k), (b_k, n) = _sizes(a.shape, transpose_a), _sizes(b.shape[-2:], transpose_b)
        if not same_size(k, b_k):
            raise ValueError(f"product: factors have shapes {a.shape} and {b.shape}, which sum over {k} and {b_k}")
        if is_of_8_bits(a.dtype) != is_of_8_bits(b.dtype):
            raise ValueError(f"product: factors are {a.dtype} and {b.dtype}; both must be of 8 bits, or neither")
        super().__init__((m, n) if groups is None or has_groups else (*groups.shape, m, n), FLOAT32)
        self.a, self.b, self.transpose_a, self.transpose_b, self.groups = a, b, transpose_a, transpose_b, groups
        self.pairs = ((a, b), *added)
        factors = tuple(itertools.chain(*self.pairs))
        self.inputs, self.like = factors if groups is None else (*factors, groups), like
        self.scales: Any = None
        self.maps_zeros = False
        self.out_spec: jax.P | None = None
        self.spec_of_a: Constraint | None = None
        self.has_one_row = a.has_one_row and not transpose_a


class Body:
    """A traced function of arrays as maps see them. Functions of values that are made alike share one.

    So what equal layers have in common is traced once: functions, their derivatives, and epilogues.

    Attributes:
      jaxpr: the function.
      tree: the structure of its results.
      derived: what was derived of it; a key begins with a word that says what that is.
    """

    def __init__(self, jaxpr: core.ClosedJaxpr, tree: Any):
        self.jaxpr, self.tree = jaxpr, tree
        self.derived: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make`, which is called once for each key."""
        if key not in self.derived:
            self.derived[key] = make()
        return self.derived[key]

    def with_results(self, indices: Sequence[int]) -> tuple[Body, Sequence[bool]]:
        """The function with these results alone, of the arguments that it reads, and which these are."""

        def make() -> tuple[Body, Sequence[bool]]:
            flags = [i in indices for i in range(len(self.jaxpr.out_avals))]
            jaxpr, used = partial_eval.dce_jaxpr(self.jaxpr.jaxpr, flags)
            return Body(core.ClosedJaxpr(jaxpr, self.jaxpr.consts), jax.tree.structure([0] * sum(flags))), used

        made: tuple[Body, Sequence[bool]] = self.once(("results", tuple(indices)), make)
        return made


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A function of values, with several results.

    Attributes:
      body: of the inputs as maps see them.
      inputs: the values.
      name: for messages.
      is_stated: whether an author wrote it; else it is derived.
    """

    body: Body
    inputs: tuple[Value, ...]
    name: str = "map"
    is_stated: bool = True

    def with_results(self, indices: Sequence[int]) -> tuple[Body, list[Value]]:
        """The body with these results alone, and the inputs that it reads."""
        body, used = self.body.with_results(indices)
        return body, list(itertools.compress(self.inputs, used))


class Map(Value):
    """One result of a function of values.

    Attributes:
      body: the function, of `inputs` as maps see them.
      pullback: a derivative that replaces JAX's own; None for JAX's.
      function: of a map with a pullback, of arrays; None for another, which is its jaxpr.
      takes_inner: whether the pullback has one argument more, the last: (M, 1), sum_j y[:, j] dy[:, j].
      origin: the function with all its results, which are differentiated together.
      index: among these.
      is_pass: no epilogue makes it, though the language has one.
      is_weight: true of `kept_weight`.
    """

    def __init__(
        self,
        body: Body,
        inputs: Sequence[Value],
        pullback: Pullback | None = None,
        origin: Function | None = None,
        index: int = 0,
        *,
        takes_inner: bool = False,
        function: Callable[..., Any] | None = None,
    ):
        (out,) = body.jaxpr.out_avals
        super().__init__(out.shape, out.dtype)
        self.body, self.inputs, self.pullback = body, tuple(inputs), pullback
        self.takes_inner, self.function = takes_inner, function
        self.has_one_row = any(x.has_one_row for x in inputs) and self.shape[:1] == (1,)
        self.origin, self.index = Function(body, self.inputs) if origin is None else origin, index
        self.made_of = _made_of(self, [x for x in inputs if is_float(x.dtype) and not is_of_8_bits(x.dtype)])
        self.is_pass = self.is_weight = False

    @property
    def jaxpr(self) -> core.ClosedJaxpr:
        return self.body.jaxpr

    def primal(self) -> tuple[core.ClosedJaxpr, list[bool]]:
        """The function without its pullback, of the inputs that it reads, and which these are."""
        primal: tuple[core.ClosedJaxpr, list[bool]] = self.body.once(("primal",), lambda: opened_jaxpr(self.jaxpr))
        return primal

    def backward(self) -> core.ClosedJaxpr:
        """The pullback as a jaxpr, from the result, the inputs and the result's cotangent to the inputs' cotangents."""
        backward: core.ClosedJaxpr = self.body.once(("pullback",), self._traced_pullback)
        return backward

    def _traced_pullback(self) -> core.ClosedJaxpr:
        assert self.pullback is not None
        rule = backward_of(self.pullback, self.takes_inner)
        types = [self.type, *(x.type for x in self.inputs)]
        with default_types():
            return jax.make_jaxpr(lambda *arrays: rule(arrays[:-1], arrays[-1]))(*types, self.type)

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        """The result for the arrays of its inputs, as maps see them."""
        out: jax.Array
        (out,) = on_mesh(self.jaxpr, arrays, self.function)
        return out


def _made_of(value: Value, inputs: Sequence[Value]) -> frozenset[np.dtype[Any] | None]:
    """`Value.made_of` of a map of these floating values."""
    if value.is_tile:
        tiles = [x for x in inputs if x.is_tile]
        widest = max((x.shape[-1] for x in tiles), default=0)  # others are tables of heads, or halves
        return frozenset().union(*(x.made_of for x in tiles if x.shape[-1] == widest)) or Value.made_of
    alike = [x.made_of for x in inputs if len(x.shape) > 1 and x.shape == value.shape]  # one row, or one column
    return frozenset().union(*alike) or frozenset({np.dtype(FLOAT32)})


class ForEachRow(Map):
    """The row of x (G, N) that each of M rows in groups has, (M, N); zeros for rows in no group.

    The epilogue of a product of these groups reads x itself, for it is a vector of columns, another for each group, and
    no tile. A pass of XLA's takes the rows.

    Attributes:
      groups: (G,) int32, how many rows each group has.
    """

    def __init__(self, x: Value, groups: Value, rows: Any):
        def taken(x: jax.Array, sizes: jax.Array) -> jax.Array:
            return RowGroups.of(group_offsets(sizes, rows), rows).for_each_row(x)

        body = _body(lambda *arrays: [taken(*arrays)], [x.type, groups.type], "for_each_row")
        inputs = (x, groups)
        super().__init__(body, inputs, origin=Function(body, inputs, "for_each_row", is_stated=False))
        self.groups, self.is_pass, self.made_of = groups, True, frozenset({np.dtype(FLOAT32)})

    @property
    def is_tile(self) -> bool:
        return False


class Transposed(Value):
    """The transpose of a matrix, for a product that sums over its other axis."""

    def __init__(self, x: Value):
        rows, columns = x.shape
        super().__init__((columns, rows), x.dtype)
        self.inputs, self.made_of, self.is_wide = (x,), x.made_of, x.is_wide


def transposed(x: Value) -> Value:
    """The transpose of x, the same value each time."""
    if isinstance(x, Transposed):
        return x.inputs[0]
    if x.transpose is None:
        x.transpose = Transposed(x)
    return x.transpose


def make_map(
    f: Callable[..., Any],
    *inputs: Value,
    pullback: Pullback | None = None,
    captured: Callable[[jax.Array], Value] | None = None,
    takes_inner: bool = False,
    derived: str = "",
    shared: tuple[dict[Hashable, Any], Hashable] | None = None,
) -> Any:
    """f(*inputs): a value for each array that f returns, in the structure that it has.

    Args:
      f: a JAX function of entire arrays.
      pullback: a function of f's one result, its inputs and the result's cotangent that gives the inputs' cotangents
        in their order, None for one that has none. It replaces JAX's derivative of f, for instance because it is
        shorter in terms of the result.
      takes_inner: as in `Map`.
      derived: a name, where no author wrote f.
      captured: makes an input of a traced array that f closes over.
      shared: a table of bodies, and the key of this one beside the inputs' types: f is traced if the table has none.

    Raises:
      TypeError: f closes over an array that is traced elsewhere; a pullback of several results.
    """
    name = getattr(f, "__name__", type(f).__name__).strip("<>")
    function = f if pullback is None else with_pullback(f, pullback, takes_inner)
    types = [value.type for value in inputs]
    if shared is None:
        body = _body(function, types, name)
    else:
        table, key = shared
        key = key, tuple((x.shape, x.dtype) for x in types)
        body = table.get(key) or table.setdefault(key, _body(function, types, name))
    closed = body.jaxpr
    if has_captured(closed) if captured is not None else any(isinstance(x, jax.core.Tracer) for x in closed.consts):
        if captured is None or pullback is not None:
            raise TypeError(f"map '{name}' closes over an array; give it as an operand of the map")
        inputs = (*map(captured, closed.consts), *inputs)
        body = Body(without_constants(closed), body.tree)
    count = len(closed.out_avals)
    origin = Function(body, tuple(inputs), derived or name, not derived)
    if pullback is None:
        return jax.tree.unflatten(body.tree, [_result(origin, i) for i in range(count)])
    if count != 1:
        raise TypeError(f"map '{name}' has a pullback and {count} results; a pullback is of one")
    flat_function = functools.partial(_leaves, function)
    one = Map(body, inputs, pullback, origin, takes_inner=takes_inner, function=flat_function)  # of all inputs
    return jax.tree.unflatten(body.tree, [one])


def _body(f: Callable[..., Any], types: Sequence[Any], name: str) -> Body:
    trees: list[Any] = []

    def flat(*arrays: jax.Array) -> list[Any]:
        leaves, tree = jax.tree.flatten(f(*arrays))
        trees.append(tree)
        return leaves

    closed = make_jaxpr(flat, types, name)
    return Body(closed, trees[-1])


def kept_weight(w: Value) -> Value:
    """w, in the dtype of products' factors, which is kept for a backward pass."""
    weight: Map = make_map(lambda w: w, w, pullback=lambda y, w, dy: (dy,), derived="weight")
    weight.is_factor = weight.is_weight = True
    return weight


def has_captured(closed: core.ClosedJaxpr) -> bool:
    """True for a function that closes over arrays of JAX, traced or not, which may be others in the next call."""
    return any(isinstance(x, jax.Array) for x in closed.consts)


def _result(origin: Function, index: int) -> Value:
    """One result, as a map of the inputs that it depends on; the input itself where it is one."""
    body, inputs = origin.with_results([index])
    jaxpr = body.jaxpr.jaxpr
    (out,) = jaxpr.outvars
    if out in jaxpr.invars:
        return inputs[jaxpr.invars.index(out)]
    return Map(body, inputs, origin=origin, index=index)


def _leaves(f: Callable[..., Any], *arrays: jax.Array) -> list[Any]:
    return jax.tree.leaves(f(*arrays))


def set_spec(value: Value, spec: jax.P | None) -> None:
    """Sets the sharding of the value, and of inputs of its shape from which the library derived it."""
    value.spec = spec
    if isinstance(value, Map) and not value.origin.is_stated:
        for x in value.inputs:
            if isinstance(x, Map | Product) and x.shape == value.shape:
                set_spec(x, spec)


def source_of(value: Value) -> Any:
    """The source of a value, or of the nearest that it is the cotangent of, or made of; None where none has one."""
    open_, seen = collections.deque([value]), {value}
    while open_:
        x = open_.popleft()
        if x.source is not None:
            return x.source
        near = [*([] if x.cotangent_of is None else [x.cotangent_of]), *reversed(x.inputs)]
        open_ += [y for y in dict.fromkeys(near) if y not in seen]
        seen |= set(near)
    return None


def inputs_read(value: Value) -> Sequence[Value]:
    """The inputs that are read; a map with a pullback is formally a function of more."""
    if isinstance(value, Map) and value.pullback is not None:
        return list(itertools.compress(value.inputs, value.primal()[1]))
    return value.inputs


def reachable(values: Iterable[Value], known: Iterable[Value] = ()) -> list[Value]:
    """The values and all that they are made of, inputs before users; it stops at values that are `known`."""
    return reachable_until(values, set(known).__contains__)


def reachable_until(values: Iterable[Value], is_known: Callable[[Value], bool]) -> list[Value]:
    """`reachable`, by a function that tells which values are known."""
    reached = set(values)
    open_ = list(reached)
    while open_:
        value = open_.pop()
        new = set() if is_known(value) else set(value.inputs) - reached
        reached |= new
        open_ += new
    return sorted(reached, key=operator.attrgetter("number"))


@functools.cache
def is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


@functools.cache
def is_seen(dtype: Any) -> bool:
    """True for a dtype that maps see: integers of at most 32 bits, bools, and the floats that a kernel knows."""
    if not isinstance(dtype, np.dtype):  # keys of jax.random
        return False
    return row_of(dtype) is not None if is_float(dtype) else dtype.itemsize <= 4


def _sizes(shape: Sequence[Any], is_transposed: bool) -> tuple[Any, Any]:
    rows, columns = shape
    return (columns, rows) if is_transposed else (rows, columns)
