"""Functions of rows that XLA's partitioner shards as one call: each device runs them on its own rows.

A loop over chunks of rows would otherwise be sharded chunk by chunk, with collectives in every step. Loops whose number
of steps is not static have no derivative of JAX's; there the function has that of a twin, with the same results.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import dispatch  # prim_requires_devices_during_lowering has no public name
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from coda_jax import ffi
from coda_jax.jaxprs.walk import equations
from coda_jax.lowering.on_devices import digest_of, scattered_sum
from coda_jax.lowering.record import key_of
from coda_jax.lowering.select import report, route_of, select_shard
from coda_jax.lowering.xla_partitioner import Partition, ShardedArray, devices_of, partitioned_call
from coda_jax.operators.head.loss_head import LossHead
from coda_jax.primitives.fallbacks import is_strict
from coda_jax.primitives.gemm_primitive import PRIMITIVES
from coda_jax.primitives.mesh_types import (
    MeshAxes,
    cutting_evenly,
    may_be_automatic,
    partition_spec,
)
from coda_jax.primitives.reverse_mode import refuse_forward_mode
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.table import chosen_by

row_shards_p = jex_core.Primitive("coda_row_shards")
row_shards_p.multiple_results = True
dispatch.prim_requires_devices_during_lowering.add(row_shards_p)


class Result(NamedTuple):
    """A result of a function of rows: an array with a row for each of its arguments' rows, unless it is a sum.

    Attributes:
      is_sum: whether it is a sum over the rows.
      columns: its axis that is sharded where the columns are; -1: none.
      is_partial: whether a device that has a shard of the columns gives a partial sum over these.
      sent_as: the dtype in which the devices' partial sums over the rows are added; None for its own.
    """

    is_sum: bool = False
    columns: int = -1
    is_partial: bool = False
    sent_as: Any = None


def on_row_shards(
    f: Callable[..., Any],
    head: LossHead,
    arguments: tuple[Any, ...],
    *,
    name: str,
    rows: Sequence[Any],
    columns: Sequence[Any],
    results: Any,
    twin: LossHead | None = None,
) -> Any:
    """f(head, *arguments), which on automatic mesh axes each device computes of its own rows.

    Mesh axes that do not shard the rows may shard columns: an axis of some arguments that have no rows. There f is
    called with the head of a device's columns, `head.on_shard`.

    Args:
      f: a function that closes over no array. It may be called on some of the rows.
      arguments: pytrees of arrays.
      name: of the operator, for the error of a forward mode.
      rows: for each argument a prefix of it: whether arrays have the rows as their first axis. The others are
        replicated on each device, but for their columns.
      columns: for each argument a prefix of it: the axis of the columns, or -1.
      results: what f returns, with a `Result` in the place of each array.
      twin: a head of which f has the same results, where JAX cannot differentiate f(head, ...); it differentiates
        f(twin, ...) in its place.
    """
    leaves, tree = jax.tree.flatten(arguments)
    if not may_be_automatic(*leaves) and twin is None:
        return f(head, *arguments)
    kinds, structure = jax.tree.flatten(results, is_leaf=lambda x: isinstance(x, Result))
    flags, axes = (jax.tree.leaves(jax.tree.broadcast(tuple(x), arguments)) for x in (rows, columns))

    def flat(head: LossHead, *leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(f(head, *jax.tree.unflatten(tree, leaves)))

    outputs = row_shards_p.bind(
        *leaves,
        # The function of all rows: what one device runs, and what readers of the program see.
        jaxpr=jax.make_jaxpr(functools.partial(f, head))(*arguments),
        of_shard=lambda columns: functools.partial(flat, head.on_shard(*columns) if columns else head),
        differentiated=None if twin is None else functools.partial(flat, twin),
        name=name,
        places=Places(tuple(flags), tuple(axes), tuple(kinds)),
    )
    return jax.tree.unflatten(structure, outputs)


class Places(NamedTuple):
    """For each flat argument whether its first axis is the rows, and which axis is the columns; each result's kind."""

    rows: tuple[bool, ...]
    columns: tuple[int, ...]
    results: tuple[Result, ...]


def _unsharded(*leaves: jax.Array, jaxpr: jex_core.ClosedJaxpr, **_: Any) -> list[jax.Array]:
    results: list[jax.Array] = jex_core.jaxpr_as_fun(jaxpr)(*leaves)
    return results


def lower(ctx: mlir.LoweringRuleContext, *leaves: Any, **params: Any) -> Any:
    def unsharded(*leaves: jax.Array) -> list[jax.Array]:
        return _unsharded(*leaves, **params)

    avals: Sequence[Any] = ctx.avals_in
    num_devices, has_devices = devices_of(ctx)
    route = route_of(avals, num_devices, for_export=ctx.module_context.lowering_parameters.for_export)
    places: Places | None = params["places"]
    if places is None or not route.is_automatic or route.reason is not None or not has_devices:
        return mlir.lower_fun(unsharded, multiple_results=True)(ctx, *leaves)
    strict = is_strict()  # now: XLA's partitioner calls back later, and on threads of its own

    def partition(
        arguments: Sequence[ShardedArray], results: Sequence[ShardedArray], sizes: Mapping[str, int]
    ) -> Partition:
        rows, columns = _axes_of(places, arguments, results, sizes)
        argument_specs = [
            PartitionSpec(rows or None) if has_rows else _with_columns(axis, columns)
            for has_rows, axis in zip(places.rows, places.columns, strict=True)
        ]
        result_specs = [
            _scattered(x, rows, sizes, result.columns, columns) if result.is_sum else PartitionSpec(rows or None)
            for x, result in zip(results, places.results, strict=True)
        ]
        column_shards = (columns, math.prod(sizes[name] for name in columns)) if columns else None

        def each(*leaves: jax.Array) -> list[jax.Array]:
            jaxpr = jax.make_jaxpr(params["of_shard"](column_shards))(*leaves)
            _record(params["jaxpr"], jaxpr)
            if strict:
                _refuse_fallbacks(jaxpr)
            outputs = jex_core.jaxpr_as_fun(jaxpr)(*leaves)
            sent = _as_sent(outputs, places.results) if rows else outputs
            all_summed = []
            for x, output, result, spec in zip(sent, outputs, places.results, result_specs, strict=True):
                if result.is_sum:
                    x = scattered_sum(x, rows, spec)
                all_summed.append((lax.psum(x, columns) if result.is_partial and columns else x).astype(output.dtype))
            return all_summed

        return Partition(argument_specs, result_specs, each)

    avals_out: Sequence[Any] = ctx.avals_out
    rule = _rule([aval.ndim for aval in avals], [aval.ndim for aval in avals_out], places)
    call = partitioned_call(ctx, unsharded, partition, rule)

    def marked(*leaves: jax.Array) -> list[jax.Array]:
        program = re.sub("0x[0-9a-f]+", "", str(params["jaxpr"]))  # without addresses
        with set_xla_metadata(coda_row_shards=digest_of(program, places, is_strict(), ffi.headers_hash(), chosen_by())):
            return call(*leaves)

    return mlir.lower_fun(marked, multiple_results=True)(ctx, *leaves)


def _record(unsharded: Any, shard: Any) -> None:
    """Records what a device multiplies: its function has the products of the unsharded one, in their order."""
    products, shards = products_of(unsharded.jaxpr), products_of(shard.jaxpr)
    if len(products) == len(shards):  # else a shard has another function, and nothing is known
        for (avals, spec), (shard_avals, shard_spec) in zip(products, shards, strict=True):
            select_shard(shard_avals, shard_spec, key=key_of(avals, spec))


def _refuse_fallbacks(shard: Any) -> None:
    """Raises the error that the lowering of a device's function raises in strict mode."""
    for avals, spec in products_of(shard.jaxpr):
        if spec.implementation == "auto" and (reason := select_shard(avals, spec).reason) is not None:
            report(avals, spec, reason, strict=True)


def products_of(jaxpr: jex_core.Jaxpr) -> list[tuple[list[Any], GemmSpec]]:
    """Types of the arguments and the spec of each product."""
    products = (equation for equation, _ in equations(jaxpr) if equation.primitive in PRIMITIVES)
    return [([v.aval for v in equation.invars], equation.params["spec"]) for equation in products]


def _axes_of(
    places: Places, arguments: Sequence[ShardedArray], results: Sequence[ShardedArray], sizes: Mapping[str, int]
) -> tuple[MeshAxes, MeshAxes]:
    """The mesh axes that shard the rows, of the first array that has them sharded; and those of the columns."""
    with_rows = [x for x, flag in zip(arguments, places.rows, strict=True) if flag]
    with_rows += [x for x, result in zip(results, places.results, strict=True) if not result.is_sum]
    rows = next((axes for x in with_rows if (axes := cutting_evenly(x.mesh_axes[0], sizes, x.shape[0]))), ())
    with_columns, axis = next((x, axis) for x, axis in zip(arguments, places.columns, strict=True) if axis >= 0)
    others = tuple(name for name in with_columns.mesh_axes[axis] if name not in rows)
    return rows, cutting_evenly(others, sizes, with_columns.shape[axis])


def _with_columns(axis: int, columns: MeshAxes) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, columns or None) if axis >= 0 else PartitionSpec()


def _scattered(
    x: ShardedArray, axes: MeshAxes, sizes: Mapping[str, int], column_axis: int, columns: MeshAxes
) -> PartitionSpec:
    """The sharding of a sum over `axes`: by those of them that are asked for, and of its columns by `columns`."""
    asked = [tuple(name for name in names if name in axes) for names in x.mesh_axes]
    entries = [cutting_evenly(names, sizes, size) for names, size in zip(asked, x.shape, strict=True)]
    if columns and column_axis >= 0:
        entries[column_axis] = columns
    return partition_spec(entries)


def _as_sent(outputs: Sequence[jax.Array], results: Sequence[Result]) -> Sequence[jax.Array]:
    """The outputs in the dtypes in which they are sent; the barrier ends the lifetime of sums in their own dtypes."""
    cast = [
        x if result.sent_as is None else x.astype(result.sent_as) for x, result in zip(outputs, results, strict=True)
    ]
    are_same = all(x.dtype == output.dtype for x, output in zip(cast, outputs, strict=True))
    return outputs if are_same else lax.optimization_barrier(cast)


def _rule(ranks: Sequence[int], result_ranks: Sequence[int], places: Places) -> SdyShardingRule:
    """The rows go together, and so do the columns; other axes are replicated; a sum may be sharded in any way."""
    replicated: list[str] = []

    def mapping(rank: int, has_rows: bool, column_axis: int = -1) -> ArrayMapping:
        names = ["rows"] * has_rows
        for axis in range(has_rows, rank):
            if axis == column_axis:
                names.append("columns")
            else:
                replicated.append(f"replicated_{len(replicated)}")
                names.append(replicated[-1])
        return ArrayMapping(*names)

    def free(i: int, rank: int, column_axis: int) -> ArrayMapping:
        names = [f"free_{i}_{axis}" for axis in range(rank)]
        if column_axis >= 0:
            names[column_axis] = "columns"
        return ArrayMapping(*names)

    arguments = tuple(map(mapping, ranks, places.rows, places.columns))
    results = tuple(
        free(i, rank, result.columns) if result.is_sum else mapping(rank, True)
        for i, (rank, result) in enumerate(zip(result_ranks, places.results, strict=True))
    )
    return SdyShardingRule(arguments, results, need_replication_factors=tuple(replicated))


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], **params: Any
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The results of the function, and the tangents of the one that JAX differentiates in its place."""
    varied = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    differentiated = params["differentiated"]

    def of_varied(*arrays: jax.Array) -> list[jax.Array]:
        leaves = list(primals)
        for i, x in zip(varied, arrays, strict=True):
            leaves[i] = x
        if differentiated is None:
            return _unsharded(*leaves, **params)
        zero = jnp.sum(refuse_forward_mode(params["name"], arrays))  # added, lest nobody reads its tangent
        return [x + zero.astype(x.dtype) for x in differentiated(*leaves)]

    outputs, output_tangents = jax.jvp(of_varied, [primals[i] for i in varied], [tangents[i] for i in varied])
    return outputs if differentiated is None else row_shards_p.bind(*primals, **params), output_tangents


def _batch(leaves: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[int]]:
    """The function of a batch, which is not sharded by its rows."""
    batched = jax.vmap(functools.partial(_unsharded, **params), in_axes=tuple(axes))
    if params["differentiated"] is None:
        results = batched(*leaves)
    else:
        params["differentiated"] = jax.vmap(params["differentiated"], in_axes=tuple(axes))
        results = row_shards_p.bind(*leaves, **params | {"jaxpr": jax.make_jaxpr(batched)(*leaves), "places": None})
    return results, [0] * len(results)


row_shards_p.def_impl(lambda *leaves, **params: jax.jit(functools.partial(_unsharded, **params))(*leaves))
row_shards_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
ad.primitive_jvps[row_shards_p] = _jvp
batching.primitive_batchers[row_shards_p] = _batch
mlir.register_lowering(row_shards_p, mlir.lower_fun(_unsharded, multiple_results=True))
mlir.register_lowering(row_shards_p, lower, platform="cuda")
