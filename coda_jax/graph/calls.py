"""Calls: JAX functions of whole arrays in a graph, as attention, which are no maps and have JAX's own derivative."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from coda_jax.epilogue.values import same_shape
from coda_jax.graph.on_mesh import on_mesh, reshaped_as, typed
from coda_jax.graph.values import Value, is_float
from coda_jax.primitives.mesh_types import explicit_cuts, explicit_sharding, placed


class Call:
    """A function of whole arrays, with all axes of the rows, in the dtypes in which values lie in memory.

    Attributes:
      name: of the function, in messages.
      jaxpr: the function.
      inputs: its arguments.
      results: the values that it gives.
      lies_on_mesh: whether it was traced with shardings over explicit mesh axes.
      linear: what it is with what its derivative keeps, by the inputs that are differentiated.
    """

    def __init__(
        self,
        name: str,
        jaxpr: core.ClosedJaxpr,
        inputs: Sequence[Value],
        rows: tuple[Any, ...],
        shapes: Sequence[tuple[Any, ...]] | None = None,
    ):
        """The call; `rows` are all axes that the rows of the block's arrays are, `shapes` those of the results."""
        self.name, self.jaxpr, self.inputs, self.rows = name, jaxpr, tuple(inputs), rows
        self.linear: dict[tuple[bool, ...], Linear] = {}
        self.lies_on_mesh = any(any(explicit_cuts(x)) for x in jaxpr.in_avals)
        given = [None] * len(jaxpr.out_avals) if shapes is None else shapes
        each = enumerate(zip(jaxpr.out_avals, given, strict=True))
        self.results = [
            Result(self, i, x, None, as_matrix(x.shape, rows) if shape is None else shape, begins_with(x.shape, rows))
            for i, (x, shape) in each
        ]


class Result(Value):
    """One result of a call.

    Attributes:
      call: which call.
      index: among the results of the jaxpr that gives it.
      differentiated: whose jaxpr that is, of `Call.linear`; None for the call's own.
      has_rows: whether it has the rows of the block's arrays.
    """

    def __init__(
        self,
        call: Call,
        index: int,
        of: Any,
        differentiated: tuple[bool, ...] | None,
        shape: Sequence[Any],
        has_rows: bool,
    ):
        super().__init__(shape, of.dtype)
        self.call, self.index, self.differentiated, self.inputs = call, index, differentiated, call.inputs
        self.has_rows, self.made_of = has_rows, frozenset({self.dtype})
        self.has_one_row = has_rows and self.shape[:1] == (1,)


@dataclasses.dataclass(frozen=True)
class Linear:
    """A call whose derivative is to be taken: jax.vjp of its function.

    Attributes:
      jaxpr: gives the call's results, and behind them all that is kept.
      tree: of what is kept, the derivative's function.
      keys: the implementation of each array that is kept as the data of random keys; None for others.
      kept: these values; where one is an input or a result, that.
      types: their types, as the function has them.
    """

    jaxpr: core.ClosedJaxpr
    tree: Any
    keys: list[Any]
    kept: list[Value]
    types: list[Any]


def begins_with(shape: Sequence[Any], rows: Sequence[Any]) -> bool:
    """True for an array with the rows' axes, and columns behind them."""
    return len(shape) > len(rows) > 0 and same_shape(shape[: len(rows)], rows)


def as_matrix(shape: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, ...]:
    """The shape of an array as a value: its rows are one axis, and its columns are one."""
    if begins_with(shape, rows):
        return math.prod(rows), math.prod(shape[len(rows) :])
    return (shape[0], math.prod(shape[1:])) if len(shape) > 2 else tuple(shape)


def called(results: Sequence[Result], arrays: Sequence[jax.Array]) -> dict[Result, jax.Array]:
    """These results of one call, of the arrays of its inputs; in its shapes and dtypes."""
    call = results[0].call
    linear = [call.linear[x.differentiated].jaxpr for x in results if x.differentiated is not None]
    jaxpr = linear[0] if linear else call.jaxpr
    each = zip(arrays, call.jaxpr.in_avals, strict=True)
    given = [reshaped_as(x, of.shape).astype(of.dtype) for x, of in each]
    if call.lies_on_mesh:  # it was traced for arrays that lie so
        placed_so = (placed(x, explicit_sharding(of)) for x, of in zip(given, call.jaxpr.in_avals, strict=True))
        outputs = core.jaxpr_as_fun(jaxpr)(*placed_so)
    else:
        outputs = on_mesh(jaxpr, given)
    return {x: outputs[x.index] for x in results}


def pulled_back(call: Call, cotangents: Mapping[int, Value], is_differentiated: tuple[bool, ...]) -> list[Value | None]:
    """The cotangents of a call's inputs from those of its results, by their index; others are zeros."""
    if is_differentiated not in call.linear:
        call.linear[is_differentiated] = _linearized(call, is_differentiated)
    linear, outs = call.linear[is_differentiated], call.jaxpr.out_avals
    present = sorted(cotangents)

    def backward(*arrays: jax.Array) -> list[jax.Array]:
        kept, given = arrays[: len(linear.kept)], iter(arrays[len(linear.kept) :])
        of_outputs = [next(given) if i in present else _zeros(of) for i, of in enumerate(outs)]
        leaves = (
            x if of is None else jax.random.wrap_key_data(x, impl=of) for x, of in zip(kept, linear.keys, strict=True)
        )
        return list(jax.tree.unflatten(linear.tree, leaves)(of_outputs))

    types = [*linear.types, *(typed(outs[i]) for i in present)]
    jaxpr = jax.make_jaxpr(backward)(*types)
    wanted = [x for x, flag in zip(call.inputs, is_differentiated, strict=True) if flag]
    inputs, shapes = [*linear.kept, *(cotangents[i] for i in present)], [x.shape for x in wanted]
    made = iter(Call(f"the derivative of {call.name}", jaxpr, inputs, call.rows, shapes).results)
    return [next(made) if flag else None for flag in is_differentiated]


def _linearized(call: Call, is_differentiated: tuple[bool, ...]) -> Linear:
    trees: list[Any] = []
    function: Callable[..., Any] = core.jaxpr_as_fun(call.jaxpr)

    def forward(*arrays: jax.Array) -> list[jax.Array]:
        def of_some(*some: jax.Array) -> Any:
            given = iter(some)
            return function(*(next(given) if flag else x for flag, x in zip(is_differentiated, arrays, strict=True)))

        outputs, pullback = jax.vjp(of_some, *(x for flag, x in zip(is_differentiated, arrays, strict=True) if flag))
        leaves, tree = jax.tree.flatten(pullback)
        keys = [jax.random.key_impl(x) if is_key(x) else None for x in leaves]
        trees.append((tree, keys))
        return [*outputs, *(x if of is None else jax.random.key_data(x) for x, of in zip(leaves, keys, strict=True))]

    closed = jax.make_jaxpr(forward)(*map(typed, call.jaxpr.in_avals))
    of, count = closed.jaxpr, len(call.results)
    known: dict[Any, Value] = {}
    for var, value in (*zip(of.outvars[:count], call.results, strict=True), *zip(of.invars, call.inputs, strict=True)):
        if not isinstance(var, core.Literal):
            known[var] = value
    kept, avals = [], closed.out_avals[count:]
    for i, (var, aval) in enumerate(zip(of.outvars[count:], avals, strict=True), count):
        value = Result(call, i, aval, is_differentiated, aval.shape, has_rows=False)
        kept.append(value if isinstance(var, core.Literal) else known.setdefault(var, value))
    types = list(map(typed, avals))
    tree, keys = trees[-1]
    return Linear(closed, tree, keys, kept, types)


def is_key(x: Any) -> bool:
    """True for an array of keys of `jax.random`."""
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def data_of(x: Any) -> Any:
    """The data of an array of keys of `jax.random`; another array as it is."""
    return jax.random.key_data(x) if is_key(x) else x


def _zeros(of: Any) -> Any:
    return jnp.zeros(of.shape, of.dtype) if is_float(of.dtype) else np.zeros(of.shape, jax.dtypes.float0)
