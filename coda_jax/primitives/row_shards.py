"""Functions of rows that XLA's partitioner splits as a whole: each device runs them on its own rows.

A loop over chunks of rows would otherwise be split chunk by chunk, with collectives in every step.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax._src import dispatch  # prim_requires_devices_during_lowering has no public name
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from coda_jax import ffi
from coda_jax.primitives.lowering import devices_of, route_of
from coda_jax.primitives.mesh_types import may_be_automatic
from coda_jax.primitives.partition import Axes, axes_of
from coda_jax.primitives.partitioned import digest_of

row_shards_p = jex_core.Primitive("coda_row_shards")
row_shards_p.multiple_results = True
dispatch.prim_requires_devices_during_lowering.add(row_shards_p)


def on_row_shards(f: Callable[..., Any], *arguments: Any, rows: Sequence[Any], sums: Sequence[bool]) -> list[jax.Array]:
    """f(*arguments), its results flat, which on automatic mesh axes each device computes of its own rows.

    Args:
      f: a function that closes over no array. It may be called on a part of the rows.
      *arguments: pytrees of arrays.
      rows: for each argument a prefix of it: whether arrays have the rows as their first axis. The others are whole on
        each device.
      sums: for each result, whether it is a sum over rows; else its first axis has the rows.
    """
    leaves, tree = jax.tree.flatten(arguments)
    unflatten: Callable[..., Any] = tree.unflatten  # type: ignore[attr-defined]
    flags = jax.tree.leaves(jax.tree.broadcast(tuple(rows), arguments))
    if not may_be_automatic(*leaves):
        return jax.tree.leaves(f(*arguments))

    def flat(*leaves: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(f(*unflatten(leaves)))

    # The jaxpr is the function of all rows: what one device runs, and what readers of the program see.
    jaxpr = jax.make_jaxpr(flat)(*leaves)
    results: list[jax.Array] = row_shards_p.bind(*leaves, jaxpr=jaxpr, f=flat, rows=tuple(flags), sums=tuple(sums))
    return results


def _whole(*leaves: jax.Array, jaxpr: jex_core.ClosedJaxpr, **_: Any) -> list[jax.Array]:
    results: list[jax.Array] = jex_core.jaxpr_as_fun(jaxpr)(*leaves)
    return results


def lower(ctx: mlir.LoweringRuleContext, *leaves: Any, **params: Any) -> Any:
    def whole(*leaves: jax.Array) -> list[jax.Array]:
        return _whole(*leaves, **params)

    f: Callable[..., list[jax.Array]] = params["f"]
    avals: Sequence[Any] = ctx.avals_in
    num_devices, has_devices = devices_of(ctx)
    route = route_of(avals, num_devices, for_export=ctx.module_context.lowering_parameters.for_export)
    if not route.is_automatic or route.reason is not None or not has_devices:
        return mlir.lower_fun(whole, multiple_results=True)(ctx, *leaves)
    rows, sums = params["rows"], params["sums"]
    call = custom_partitioning(whole)

    def partition(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        axes = _axes_of_rows(arguments, results, rows, sums, mesh.shape)
        by_rows = PartitionSpec(axes or None)
        of_results = [
            _scattered(x, axes, mesh.shape) if is_sum else by_rows for x, is_sum in zip(results, sums, strict=True)
        ]
        of_arguments = [by_rows if flag else PartitionSpec() for flag in rows]

        def each(*leaves: jax.Array) -> list[jax.Array]:
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # all axes are manual here
                made = zip(f(*leaves), sums, of_results, strict=True)
            return [_summed(x, axes, spec) if is_sum else x for x, is_sum, spec in made]

        def placed(specs: Sequence[PartitionSpec]) -> list[NamedSharding]:
            return [NamedSharding(mesh, spec) for spec in specs]

        return mesh, each, placed(of_results), tuple(placed(of_arguments))

    avals_out: Sequence[Any] = ctx.avals_out
    rule = _rule([aval.ndim for aval in avals], [aval.ndim for aval in avals_out], rows, sums)
    call.def_partition(partition, sharding_rule=rule)

    def marked(*leaves: jax.Array) -> list[jax.Array]:
        program = re.sub("0x[0-9a-f]+", "", str(params["jaxpr"]))  # without addresses
        with set_xla_metadata(coda_row_shards=digest_of(program, rows, sums, ffi.headers_hash())):
            results: list[jax.Array] = call(*leaves)
        return results

    return mlir.lower_fun(marked, multiple_results=True)(ctx, *leaves)


def _axes_of_rows(
    arguments: Sequence[Any], results: Sequence[Any], rows: Sequence[bool], sums: Sequence[bool], sizes: Any
) -> Axes:
    """The mesh axes that cut the rows: of the first array that has them cut."""
    with_rows = [x for x, flag in zip(arguments, rows, strict=True) if flag]
    with_rows += [x for x, is_sum in zip(results, sums, strict=True) if not is_sum]
    return next((axes for x in with_rows if (axes := _dividing(_cut(x)[0], x.shape[0], sizes))), ())


def _cut(x: Any) -> tuple[Axes, ...]:
    return axes_of(getattr(x.sharding, "spec", ()), len(x.shape))


def _dividing(axes: Axes, size: int, sizes: Any) -> Axes:
    """Those of the axes that cut this size evenly."""
    fit: Axes = ()
    for axis in axes:
        if size % math.prod(sizes[name] for name in (*fit, axis)) == 0:
            fit += (axis,)
    return fit


def _scattered(x: Any, axes: Axes, sizes: Any) -> PartitionSpec:
    """How a sum over `axes` lies: cut by those of them that are to cut it."""
    wanted = [tuple(axis for axis in of_one if axis in axes) for of_one in _cut(x)]
    return PartitionSpec(*(_dividing(cut, size, sizes) or None for cut, size in zip(wanted, x.shape, strict=True)))


def _summed(x: jax.Array, axes: Axes, spec: PartitionSpec) -> jax.Array:
    kept = axes_of(spec, x.ndim)
    for dimension, of_one in enumerate(kept):
        if of_one:
            x = lax.psum_scatter(x, of_one, scatter_dimension=dimension, tiled=True)
    rest = tuple(axis for axis in axes if not any(axis in of_one for of_one in kept))
    return lax.psum(x, rest) if rest else x


def _rule(
    ranks: Sequence[int], result_ranks: Sequence[int], rows: Sequence[bool], sums: Sequence[bool]
) -> SdyShardingRule:
    """The rows go together; what else arrays have stays whole; a sum may lie as what reads it wants."""
    whole: list[str] = []

    def mapping(rank: int, has_rows: bool) -> ArrayMapping:
        names = [f"whole_{len(whole) + i}" for i in range(rank - has_rows)]
        whole.extend(names)
        return ArrayMapping(*["rows"] * has_rows, *names)

    arguments = tuple(mapping(rank, flag) for rank, flag in zip(ranks, rows, strict=True))
    results = tuple(
        ArrayMapping(*(f"free_{i}_{axis}" for axis in range(rank))) if is_sum else mapping(rank, True)
        for i, (rank, is_sum) in enumerate(zip(result_ranks, sums, strict=True))
    )
    return SdyShardingRule(arguments, results, need_replication_factors=tuple(whole))


row_shards_p.def_impl(lambda *leaves, **params: jax.jit(functools.partial(_whole, **params))(*leaves))
row_shards_p.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
ad.primitive_jvps[row_shards_p] = lambda primals, tangents, **params: jax.jvp(
    functools.partial(_whole, **params), tuple(primals), tuple(ad.instantiate_zeros(t) for t in tangents)
)


def _batch(leaves: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[int]]:
    results = jax.vmap(functools.partial(_whole, **params), in_axes=tuple(axes))(*leaves)
    return results, [0] * len(results)


batching.primitive_batchers[row_shards_p] = _batch
mlir.register_lowering(row_shards_p, mlir.lower_fun(_whole, multiple_results=True))
mlir.register_lowering(row_shards_p, lower, platform="cuda")
