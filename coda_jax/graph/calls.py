"""Calls: JAX functions of entire arrays in a graph, as attention, which are no maps and have JAX's own derivative."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.epilogue.values import same_shape, same_size
from coda_jax.graph.on_mesh import on_mesh, reshaped_as, typed
from coda_jax.graph.values import Value, is_float
from coda_jax.primitives.mesh_types import explicit_cuts, explicit_sharding, vary, with_sharding


class Call:
    """A function of entire arrays, with all axes of the rows, in the dtypes in which values are stored.

    Attributes:
      name: of the function, in messages.
      jaxpr: the function.
      inputs: its arguments.
      results: the values that it gives.
      is_on_mesh: whether it was traced with shardings over explicit mesh axes, or varying over manual ones.
      linear: the function that also gives what its derivative keeps, by the inputs that are differentiated.
      traces: of its derivative, which equal calls share.
    """

    def __init__(
        self,
        name: str,
        jaxpr: core.ClosedJaxpr,
        inputs: Sequence[Value],
        rows: tuple[Any, ...],
        shapes: Sequence[tuple[Any, ...]] | None = None,
        traces: dict[Hashable, Any] | None = None,
    ):
        """The call; `rows` are the sizes of all axes of the rows in the block's arrays, `shapes` are the results'."""
        self.traces: dict[Hashable, Any] = {} if traces is None else traces
        self.name, self.jaxpr, self.inputs, self.rows = name, jaxpr, tuple(inputs), rows
        self.linear: dict[tuple[bool, ...], Linear] = {}
        self.is_on_mesh = any(any(explicit_cuts(x)) or _axes_of(x) for x in jaxpr.in_avals)
        result_shapes = [None] * len(jaxpr.out_avals) if shapes is None else shapes
        each = enumerate(zip(jaxpr.out_avals, result_shapes, strict=True))
        self.results = []
        for i, (x, given) in each:
            shape = as_matrix(x.shape, rows) if given is None else given
            has_rows = begins_with(x.shape, rows) and same_size(shape[0], math.prod(rows))
            self.results.append(Result(self, i, x, None, shape, has_rows))


class Result(Value):
    """One result of a call.

    Attributes:
      call: which call.
      index: among the results of the jaxpr that gives it.
      differentiated: the key of that jaxpr in `Call.linear`; None for the call's own.
      has_rows: whether it has the rows of the block's arrays.
    """

    def __init__(
        self,
        call: Call,
        index: int,
        aval: Any,
        differentiated: tuple[bool, ...] | None,
        shape: Sequence[Any],
        has_rows: bool,
    ):
        super().__init__(shape, aval.dtype)
        self.call, self.index, self.differentiated, self.inputs = call, index, differentiated, call.inputs
        self.has_rows, self.made_of = has_rows, frozenset({self.dtype})
        self.has_one_row = has_rows and self.shape[:1] == (1,)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A call that is differentiated: jax.vjp of its function.

    Attributes:
      jaxpr: gives the call's results, and after them all that is kept.
      tree: the structure of the derivative's function, a pytree of what is kept.
      keys: the implementation of each array that is kept as the data of random keys; None for others.
      kept: the values that are kept; an input or a result of the call where one is that.
      types: their types, as the function has them.
    """

    jaxpr: core.ClosedJaxpr
    tree: Any
    keys: list[Any]
    kept: list[Value]
    types: list[Any]


def begins_with(shape: Sequence[Any], rows: Sequence[Any]) -> bool:
    """True for an array with the rows' axes, and columns after them."""
    return len(shape) > len(rows) > 0 and same_shape(shape[: len(rows)], rows)


def as_matrix(shape: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, ...]:
    """The shape of an array as a value: its rows are one axis, and its columns are one."""
    if begins_with(shape, rows):
        return math.prod(rows), math.prod(shape[len(rows) :])
    return (shape[0], math.prod(shape[1:])) if len(shape) > 2 else tuple(shape)


def results_of_call(results: Sequence[Result], arrays: Sequence[jax.Array]) -> dict[Result, jax.Array]:
    """The arrays of these results of one call, in its shapes and dtypes, from the arrays of its inputs."""
    return called_by(on_mesh, results[0].call, results, arrays)


def called_by(
    evaluated: Callable[[core.ClosedJaxpr, Sequence[jax.Array]], Sequence[Any]],
    call: Call,
    results: Sequence[Result],
    arrays: Sequence[jax.Array],
) -> dict[Result, jax.Array]:
    """`called`, by a function that gives the results of a jaxpr at arrays; there may be no results of the call."""
    linear = [call.linear[x.differentiated].jaxpr for x in results if x.differentiated is not None]
    jaxpr = linear[0] if linear else call.jaxpr
    each = zip(arrays, call.jaxpr.in_avals, strict=True)
    inputs = [reshaped_as(x, aval.shape).astype(aval.dtype) for x, aval in each]
    if call.is_on_mesh:  # it was traced for arrays of these shardings
        outputs: Sequence[Any] = core.jaxpr_as_fun(jaxpr)(*map(_place, inputs, call.jaxpr.in_avals))
    else:
        outputs = evaluated(jaxpr, inputs)
    return {x: jnp.asarray(outputs[x.index]) for x in results}  # a result may be a number


def pulled_back(call: Call, cotangents: Mapping[int, Value], is_differentiated: tuple[bool, ...]) -> list[Value | None]:
    """The cotangents of a call's inputs, from those of its results by index; results without one have zeros."""
    if is_differentiated not in call.linear:
        call.linear[is_differentiated] = _linearized(call, is_differentiated)
    linear, outs = call.linear[is_differentiated], call.jaxpr.out_avals
    present = sorted(cotangents)
    key = "backward", is_differentiated, tuple(present)
    if key not in call.traces:
        call.traces[key] = traced_backward(linear.tree, linear.keys, linear.types, outs, present)
    jaxpr = call.traces[key]
    differentiated = [x for x, flag in zip(call.inputs, is_differentiated, strict=True) if flag]
    inputs, shapes = [*linear.kept, *(cotangents[i] for i in present)], [x.shape for x in differentiated]
    derivatives = iter(Call(f"the derivative of {call.name}", jaxpr, inputs, call.rows, shapes).results)
    return [next(derivatives) if flag else None for flag in is_differentiated]


def _linearized(call: Call, is_differentiated: tuple[bool, ...]) -> Linear:
    key = "linear", is_differentiated
    if key not in call.traces:
        call.traces[key] = traced_linear(call.jaxpr, is_differentiated)
    closed, tree, keys = call.traces[key]
    jaxpr, count = closed.jaxpr, len(call.results)
    known: dict[Any, Value] = {}
    for var, value in (
        *zip(jaxpr.outvars[:count], call.results, strict=True),
        *zip(jaxpr.invars, call.inputs, strict=True),
    ):
        if not isinstance(var, core.Literal):
            known[var] = value
    kept, avals = [], closed.out_avals[count:]
    for i, (var, aval) in enumerate(zip(jaxpr.outvars[count:], avals, strict=True), count):
        value = Result(call, i, aval, is_differentiated, aval.shape, has_rows=False)
        kept.append(value if isinstance(var, core.Literal) else known.setdefault(var, value))
    return Linear(closed, tree, keys, kept, list(map(typed, avals)))


def traced_linear(
    jaxpr: core.ClosedJaxpr, is_differentiated: Sequence[bool]
) -> tuple[core.ClosedJaxpr, Any, list[Any]]:
    """`Linear.jaxpr`, `tree` and `keys` of a function, differentiated by these arguments."""
    trees: list[Any] = []
    function: Callable[..., Any] = core.jaxpr_as_fun(jaxpr)

    def forward(*arrays: jax.Array) -> list[jax.Array]:
        def partial_function(*varied: jax.Array) -> Any:
            remaining = iter(varied)
            return function(
                *(next(remaining) if flag else x for flag, x in zip(is_differentiated, arrays, strict=True))
            )

        outputs, pullback = jax.vjp(
            partial_function, *(x for flag, x in zip(is_differentiated, arrays, strict=True) if flag)
        )
        leaves, tree = jax.tree.flatten(pullback)
        keys = [jax.random.key_impl(x) if is_key(x) else None for x in leaves]
        trees.append((tree, keys))
        return [
            *outputs,
            *(x if impl is None else jax.random.key_data(x) for x, impl in zip(leaves, keys, strict=True)),
        ]

    closed = jax.make_jaxpr(forward)(*map(typed, jaxpr.in_avals))
    tree, keys = trees[-1]
    return closed, tree, keys


def traced_backward(
    tree: Any,
    keys: Sequence[Any],
    types: Sequence[Any],
    outs: Sequence[Any],
    present: Sequence[int],
    read: Callable[[Sequence[Any]], Sequence[Any]] = lambda kept: kept,
) -> core.ClosedJaxpr:
    """The cotangents that a derivative gives, from what it keeps and the cotangents of these results; others are zeros.

    Args:
      tree, keys: as `traced_linear` gives them.
      types: of what is kept.
      outs: the types of all results.
      present: the results that have a cotangent, by number.
      read: what the derivative reads, of what is kept.
    """

    def backward(*arrays: jax.Array) -> list[jax.Array]:
        kept, remaining = read(arrays[: len(types)]), iter(arrays[len(types) :])
        cotangents = [next(remaining) if i in present else _zeros(aval) for i, aval in enumerate(outs)]
        leaves = (
            x if impl is None else jax.random.wrap_key_data(x, impl=impl) for x, impl in zip(kept, keys, strict=True)
        )
        return list(jax.tree.unflatten(tree, leaves)(cotangents))

    return jax.make_jaxpr(backward)(*types, *(typed(outs[i]) for i in present))


def is_key(x: Any) -> bool:
    """True for an array of keys of `jax.random`."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def key_impl_of(aval: Any) -> Any:
    """The implementation of an array of keys, from its type."""
    found: list[Any] = []

    def look(keys: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(keys))
        return keys

    jax.eval_shape(look, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return found[0]


def data_of(x: Any) -> Any:
    """The data of an array of keys of `jax.random`; another array unchanged."""
    return jax.random.key_data(x) if is_key(x) else x


def _zeros(aval: Any) -> Any:
    if not is_float(aval.dtype):
        return np.zeros(aval.shape, jax.dtypes.float0)
    return _place(jnp.zeros(aval.shape, aval.dtype), aval)


def _place(x: jax.Array, aval: Any) -> jax.Array:
    """x, sharded over explicit mesh axes as this type, and varying over its manual ones."""
    (x,) = vary(_axes_of(aval), with_sharding(x, explicit_sharding(aval)))
    return x


def _axes_of(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which an array of this type varies."""
    return frozenset(aval.manual_axis_type.varying)
