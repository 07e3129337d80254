"""Any JAX function inside of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from coda_jax.graph.author import Argument, BlockTrace, Computed, Value
from coda_jax.graph.calls import Call, is_key
from coda_jax.graph.function import Graph
from coda_jax.graph.on_mesh import are_on_explicit_axes, reshaped_as, typed
from coda_jax.graph.run import run
from coda_jax.graph.values import has_captured
from coda_jax.jaxprs.evaluate import without_constants


def opaque(f: Callable[..., Any], *values: Any) -> Any:
    """f(*values) in a block, any JAX function of entire arrays, with JAX's own derivative: attention, a router.

    It is called unchanged, on arrays with all their axes in the dtypes that the values have; nothing of it is fused.
    The arrays that f captures have their gradients too.

    Args:
      values: values of the block, at least one, or arrays.

    Returns:
      Values, in the structure of what f returns.

    Raises:
      TypeError: no argument is a value of a block.
    """
    trace = next((x._trace for x in values if isinstance(x, Value)), None)
    name = getattr(f, "__name__", type(f).__name__)
    if trace is None:
        raise TypeError(f"opaque: no argument of '{name}' is a value of a block; call it as it is")
    inputs = [trace.value(x) for x in values]
    types = _types_of(trace, inputs)
    function = _on_key_data(f, inputs)
    closed, out_types = jax.make_jaxpr(function, return_shape=True)(*types)
    outs, tree = jax.tree.flatten(out_types)
    plain = [None] * len(outs)
    if trace.is_plain:
        plain = jax.tree.leaves(function(*(x._array().astype(x.dtype) for x in inputs)))
    if any(map(is_key, outs)):
        raise TypeError(f"opaque: '{name}' returns random keys; return jax.random.key_data of them")
    if has_captured(closed):
        captured = [trace.value(x) for x in closed.consts]
        types = _types_of(trace, captured) + types
        inputs = captured + inputs
        closed = jax.make_jaxpr(_on_key_data(core.jaxpr_as_fun(without_constants(closed)), inputs))(*types)
    results = Call(f"'{name}'", closed, [x._opaque_node for x in inputs], trace.rows).results
    each = zip(results, plain, outs, strict=True)
    return jax.tree.unflatten(tree, [Computed(trace, node, array, out.shape) for node, array, out in each])


def _types_of(trace: BlockTrace, inputs: Sequence[Value]) -> list[jax.ShapeDtypeStruct]:
    """The types of values; over explicit mesh axes with the shardings that the arrays will have."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    arrays = trace.arrays
    if trace.is_plain or not are_on_explicit_axes(arrays):
        return types
    outputs = [x._opaque_node for x in inputs]
    sources = [number for number, _ in trace.leaves]
    rows = trace.rows if len(trace.rows) > 1 else ()
    graph = Graph(trace.name, list(trace.leaves.values()), outputs, trace.dtype, [x.dtype for x in inputs], rows)

    def function(*arrays: jax.Array) -> list[jax.Array]:
        known, options = graph.known([arrays[number] for number in sources]), graph.pass_options(graph.plan)
        results = run(graph.plan, known, out_dtypes=graph.out_dtypes, **options)
        return [reshaped_as(x, type_.shape) for x, type_ in zip(results, types, strict=True)]

    sharded_types: list[jax.ShapeDtypeStruct] = jax.eval_shape(function, *map(typed, arrays))
    return sharded_types


def _on_key_data(f: Callable[..., Any], inputs: Sequence[Value]) -> Callable[..., Any]:
    """f as a function of arrays; for arrays of keys, of their data."""
    implementations = [x.key_impl if isinstance(x, Argument) else None for x in inputs]

    def function(*arrays: jax.Array) -> Any:
        each = zip(arrays, implementations, strict=True)
        return f(*(x if impl is None else jax.random.wrap_key_data(x, impl=impl) for x, impl in each))

    return function
