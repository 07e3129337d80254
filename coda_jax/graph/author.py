"""The values that the author of a block writes with: arrays with all their axes, lazy, and the operations on them.

A `Value` is a value of the graph with the shape and the dtype that the array has, and where a block runs as
plain JAX the array itself.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from coda_jax.epilogue.dtypes import FLOAT32, TABLE, is_of_8_bits, listed
from coda_jax.epilogue.user_code import default_types
from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.graph import values as nodes
from coda_jax.graph.arithmetic import Arithmetic
from coda_jax.graph.calls import as_matrix, begins_with, data_of
from coda_jax.graph.lazy import Lazy
from coda_jax.graph.matmul import Matmul
from coda_jax.graph.plan import has_rows
from coda_jax.graph.pullbacks import Pullback
from coda_jax.graph.rounded import Recipe
from coda_jax.graph.shapes import broadcast, checked_inverse, is_variable, named
from coda_jax.graph.stated import Stated
from coda_jax.graph.values import Leaf, Product, is_float, make_map, set_spec, transposed
from coda_jax.primitives.accumulate import without_unread
from coda_jax.primitives.mesh_types import constrained


class BlockTrace:
    """A block while its author's function runs.

    Attributes:
      name: of the block, in messages.
      dtype: of the products' factors.
      rows: the sizes of the axes of the first argument's array but its last.
      is_plain: the author's lines are run as plain JAX, on arrays.
      recipe: by which factors of products are rounded to 8 bits; None for none.
      stated: a list to which the pullbacks and inverses of maps are added, with the arrays; None to add none.
      arrays: those of the arguments, by number.
      leaves: the leaves that the graph reads of them, by the argument's number and the shape as a value.
      row_flags: which arguments have the rows; None for those that begin with their axes.
    """

    def __init__(
        self,
        name: str,
        dtype: Any,
        rows: Sequence[Any],
        *,
        is_plain: bool,
        recipe: Recipe | None = None,
        stated: list[Stated] | None = None,
        row_flags: Sequence[bool] | None = None,
    ):
        self.stated, self.row_flags, self.recipe = stated, row_flags, recipe
        self.name, self.dtype, self.rows, self.is_plain = name, np.dtype(dtype), tuple(rows), is_plain
        self.arrays: list[Any] = []
        self.captured: list[Any] = []  # by the function; they are arguments after those of the call
        self.leaves: dict[tuple[int, tuple[Any, ...]], Leaf] = {}
        self._numbers = itertools.count()
        self._captured_arguments: dict[int, tuple[Any, Argument]] = {}  # by id, with the array, so that it stays unique

    def argument(self, x: Any) -> Argument:
        """The value of one more array; for an array of keys, of its `data_of`."""
        data, number = data_of(x), next(self._numbers)
        self.arrays.append(data)
        begins = begins_with(data.shape, self.rows) or same_shape(data.shape, self.rows)
        return Argument(
            self,
            number,
            data.shape,
            data.dtype,
            data if self.is_plain else None,
            None if data is x else jax.random.key_impl(x),
            begins if self.row_flags is None else number < len(self.row_flags) and self.row_flags[number],
        )

    def value(self, x: Any) -> Value:
        """x as a value: an array that the function captures becomes one more argument, which has a gradient."""
        if isinstance(x, Value):
            if x._trace is not self:
                raise ValueError(f"block '{self.name}': a value of block '{x._trace.name}' is used in it")
            return x
        if is_variable(x) and not isinstance(x, jax.Array):
            return self.value(x[...])
        if not isinstance(x, jax.Array | np.ndarray | np.generic):
            raise TypeError(f"block '{self.name}': got {type(x).__name__} for an array or a value of the block")
        if id(x) not in self._captured_arguments:
            with default_types():
                array = x if isinstance(x, jax.Array) else jnp.asarray(x)
            self._captured_arguments[id(x)] = x, self.argument(array)
            self.captured.append(array)
        return self._captured_arguments[id(x)][1]

    def shape_of(self, node: nodes.Value) -> tuple[Any, ...]:
        """The shape of a value's array."""
        return (*self.rows, *node.shape[1:]) if len(self.rows) > 1 and has_rows(node) else node.shape


class Value(Arithmetic, Matmul, Lazy):
    """An array of a block, of which nothing is computed before the block ends.

    Values are multiplied, `x @ w`, and go through functions of entire arrays, `x.map(f)`. Maps that an epilogue of a
    product can compute are computed there, in the backward pass too.

    Attributes:
      shape: of the array, with all axes.
      dtype: in which the array would be stored in memory.
    """

    shape: tuple[Any, ...]
    dtype: np.dtype[Any]
    _trace: BlockTrace
    _plain: jax.Array | None  # the array itself, where the author's lines are run as plain JAX

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def T(self) -> Value:
        """The transpose of a matrix (M, N). As a factor it costs nothing."""
        if self.ndim != 2:
            raise ValueError(f"block '{self._trace.name}': .T of a value of shape {self.shape}; it must be a matrix")
        plain = None if self._plain is None else self._plain.T
        return Computed(self._trace, transposed(self._node), plain, self.shape[::-1])

    def map(
        self,
        f: Callable[..., Any],
        *operands: Any,
        pullback: Pullback | None = None,
        inverse: Callable[..., Any] | None = None,
    ) -> Any:
        """f(self, *operands), a function of entire arrays; where it is local to tiles, in a product's epilogue.

        As an epilogue of `coda.gemm` f sees matrices (M, N), M all rows; (N,) of columns, (M, 1) of rows, (); floats
        as float32. It may return a pytree of arrays. A map that no epilogue can compute is a pass of XLA's, as
        `coda.explain` says.

        Args:
          operands: values of the block, or arrays.
          pullback: pullback(y, x, *operands, dy), for the one result y: the cotangents of x and of the operands, None
            for one that has none. It replaces JAX's derivative of f, for instance because it is shorter in y.
          inverse: inverse(*results, *operands) is x, so that the backward pass computes x from the results.

        Raises:
          TypeError: f captures a traced array beside a pullback; a pullback of several results.
        """
        return mapped_values(self._trace, f, [self, *map(self._trace.value, operands)], pullback, inverse)

    def named(self, name: str) -> Value:
        """The value; the array that is kept for it has this name for the policies of `jax.checkpoint`."""
        self._node.name = name
        return self

    def kept(self) -> Value:
        """A weight, in the products' dtype, which is kept for the backward pass and not cast again.

        A weight that automatic mesh axes shard, as FSDP's do, is gathered once for both passes, for a copy's memory. If
        an RMSNorm's scale is multiplied into it, the scaled weight is kept.
        """
        return Computed(self._trace, nodes.kept_weight(self._as_weight()), self._plain, self.shape)

    def constrained(self, spec: jax.P | None) -> Value:
        """The value, sharded by `spec` over the mesh of `jax.set_mesh` where it is in memory; its cotangent is too."""
        if spec is not None and len(spec) > self.ndim:
            raise ValueError(
                f"block '{self._trace.name}': constrained({spec}) has {len(spec)} entries; the value has shape "
                f"{self.shape}"
            )
        set_spec(self._node, spec)
        if self._plain is not None:
            self._plain = constrained(self._plain, spec)
        return self

    def ragged_dot(self, w: Any, group_sizes: Any) -> Value:
        """As `jax.lax.ragged_dot`: the rows, sorted by group, each times its group's matrix.

        Args:
          w: (G, K, N).
          group_sizes: (G,) int32, how many rows each group has.
        """
        w, sizes = self._trace.value(w), self._trace.value(group_sizes)
        if w.ndim != 3 or self.ndim != 2:
            raise ValueError(
                f"block '{self._trace.name}': ragged_dot of shapes {self.shape} and {w.shape}; they must be (M, K) and "
                "(G, K, N)"
            )
        node, plain = Product(self._node, w._viewed(w.shape), groups=sizes._node), None
        if self._trace.is_plain:
            rows = sizes._array()
            read = without_unread(w._as_factor(), rows)
            plain = lax.ragged_dot(self._as_factor(), read, rows, preferred_element_type=np.dtype(FLOAT32))
        return Computed(self._trace, node, plain)

    @property
    def _opaque_node(self) -> nodes.Value:
        """The node as an input of `coda.opaque`: its dtype may be one that maps do not read."""
        return self._node

    def _computed(self, node: nodes.Value, plain: jax.Array | None, shape: Sequence[Any]) -> Value:
        """A value of the same block that is this node."""
        return Computed(self._trace, node, plain, shape)

    def _viewed(self, shape: Sequence[Any]) -> nodes.Value:
        """The node in this shape."""
        node = self._node
        if same_shape(node.shape, shape):
            return node
        reshaped: nodes.Value = make_map(lambda x: jnp.reshape(x, tuple(shape)), node, derived="reshape")
        return reshaped

    def _as_weight(self, lead: int = 1, halves: bool = True) -> nodes.Value:
        """The node as a weight: (K, N), or with lead = 2 (G, K, N). halves: whether (2, F) stay two axes."""
        return self._viewed((*self.shape[:lead], math.prod(self.shape[lead:])))

    def _array(self) -> jax.Array:
        """The array where the author's lines are run as plain JAX."""
        assert self._plain is not None
        return self._plain

    def _as_factor(self) -> jax.Array:
        x = self._array()
        return x.astype(jnp.bfloat16 if is_of_8_bits(x.dtype) else self._trace.dtype)

    def _as_seen(self) -> jax.Array:
        """The array as a map sees it: a matrix, float32."""
        x = self._array().reshape(self._node.shape)
        return x.astype(FLOAT32) if is_float(x.dtype) else x

    def _with(self, operation: Callable[..., Any], *others: Any, swapped: bool = False) -> Any:
        name, (other, *_) = operation.__name__, others or (None,)
        if not others:
            return mapped_values(self._trace, operation, [self], shape=self.shape)
        if isinstance(other, numbers.Real):
            f = named(name, (lambda x: operation(other, x)) if swapped else (lambda x: operation(x, other)))
            return mapped_values(self._trace, f, [self], shape=self.shape)
        if not (isinstance(other, Value | jax.Array | np.ndarray | np.generic) or is_variable(other)):
            return NotImplemented
        pair = [self, self._trace.value(other)]
        pair = pair[::-1] if swapped else pair
        return mapped_values(
            self._trace,
            operation,
            pair,
            shape=broadcast(f"block '{self._trace.name}': {name}", *(x.shape for x in pair)),
        )

    def __repr__(self) -> str:
        return f"Value({self.dtype}{list(self.shape)} of block '{self._trace.name}')"


class Computed(Value):
    """A value that a block computes."""

    def __init__(
        self,
        trace: BlockTrace,
        node: nodes.Value,
        plain: jax.Array | None = None,
        shape: Sequence[Any] | None = None,
    ):
        self._trace, self._own_node = trace, node
        self.shape = trace.shape_of(node) if shape is None else tuple(shape)
        self.dtype = node.stored_as(trace.dtype)
        self._plain = None if plain is None else plain.reshape(self.shape)

    @property
    def _node(self) -> nodes.Value:
        return self._own_node


class Argument(Value):
    """An argument of the block; it becomes a leaf of the graph when something reads it.

    Attributes:
      has_rows: whether it begins with the block's rows.
      has_halves: whether its last two axes, (2, N / 2), are columns that stay two axes.
    """

    def __init__(
        self,
        trace: BlockTrace,
        number: int,
        shape: Sequence[Any],
        dtype: Any,
        plain: jax.Array | None,
        key_impl: Any,
        has_rows: bool,
    ):
        self._trace, self.shape, self._number, self._plain = trace, tuple(shape), number, plain
        self.dtype, self.key_impl, self.has_rows, self.has_halves = np.dtype(dtype), key_impl, has_rows, False

    @property
    def _node(self) -> nodes.Value:
        if self.dtype.name not in TABLE:
            raise TypeError(
                f"block '{self._trace.name}': an array of shape {self.shape} has dtype {self.dtype}; it must be "
                f"{listed(list(TABLE))}"
            )
        return self._opaque_node

    @property
    def _opaque_node(self) -> nodes.Value:
        return self._viewed(as_matrix(self.shape, self._trace.rows if self.has_rows else ()))

    def _as_weight(self, lead: int = 1, halves: bool = True) -> nodes.Value:
        self.has_halves |= halves and self.ndim == lead + 2 and same_size(self.shape[-2], 2)
        return super()._as_weight(lead)

    def _viewed(self, shape: Sequence[Any]) -> nodes.Value:
        leaves, key = self._trace.leaves, (self._number, tuple(shape))
        if key not in leaves:
            rows = self._trace.rows
            has_rows = len(rows) > 1 and self.has_rows and same_size(shape[0], math.prod(rows))
            has_halves = self.has_halves and same_size(shape[-1], math.prod(self.shape[-2:]))
            is_row = self.has_rows and key[1][:1] == (1,)
            leaves[key] = Leaf(shape, self.dtype, has_rows=has_rows, has_halves=has_halves, has_one_row=is_row)
        return leaves[key]


def mapped_values(
    trace: BlockTrace,
    f: Callable[..., Any],
    inputs: Sequence[Value],
    pullback: Pullback | None = None,
    inverse: Callable[..., Any] | None = None,
    shape: Sequence[Any] | None = None,
    derived: str = "",
) -> Any:
    """The results of a map, with arrays of `shape`, or of the shape of an input that is such a matrix."""
    input_nodes = [x._node for x in inputs]
    results = make_map(f, *input_nodes, pullback=pullback, captured=lambda x: trace.value(x)._node, derived=derived)
    result_nodes, tree = jax.tree.flatten(results)
    if inverse is not None:
        input_nodes[0].recovered = make_map(
            checked_inverse(inverse, input_nodes[0].shape), *result_nodes, *input_nodes[1:]
        )
    plain: Sequence[Any] = [None] * len(result_nodes)
    if trace.is_plain:
        arrays = [x._as_seen() for x in inputs]
        with default_types():
            plain = jax.tree.leaves(f(*arrays))
        if trace.stated is not None and not (pullback is None and inverse is None):
            known = [jax.lax.stop_gradient(x) for x in arrays]
            trace.stated.append(Stated(getattr(f, "__name__", type(f).__name__), f, pullback, inverse, known))
    each = zip(result_nodes, plain, strict=True)
    shapes = [shape or _shape_alike(trace, node, inputs) for node in result_nodes]
    results = [
        Computed(trace, node, array, result_shape) for (node, array), result_shape in zip(each, shapes, strict=True)
    ]
    return jax.tree.unflatten(tree, results)


def _shape_alike(trace: BlockTrace, node: nodes.Value, inputs: Sequence[Value]) -> tuple[Any, ...]:
    """The shape of a result's array: that of the first input whose matrix has the result's shape."""
    alike = (x.shape for x in inputs if len(node.shape) > 1 and same_shape(x._node.shape, node.shape))
    return next(alike, None) or trace.shape_of(node)
