"""Lowers a product that is sharded over the devices of a mesh: each runs the kernel on its own shards.

Over explicit axes the types say how arrays are sharded, and the lowering is a `jax.shard_map` planned from them. Over
automatic axes only XLA's partitioner knows, and the lowering is a `custom_partitioning`. It gives the partitioner a
rule for the axes that go together, and is called back with its decision. Both follow the same plan.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from coda_jax import ffi
from coda_jax.epilogue import Axis, Halves, Program, ReductionOp, TileStore, is_linear, tile_operand, types_of
from coda_jax.lowering.addressing import unsupported_reason
from coda_jax.lowering.mesh_plan import Plan, axis_sizes, plan, units
from coda_jax.lowering.xla_partitioner import Partition, ShardedArray, partitioned_call
from coda_jax.primitives.axes import Dimension, MatrixAxes, ProductAxes, ProductAxis
from coda_jax.primitives.dtypes import compute_dtype, wire_dtype
from coda_jax.primitives.fallbacks import is_strict
from coda_jax.primitives.gemm_primitive import outputs_of, tiles_of, xla_form, xla_tiles
from coda_jax.primitives.mesh_types import MeshAxes, explicit_axes, explicit_cuts, mesh_axes_of
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.table import chosen_by

# (*arguments) -> stores and reductions of a product
Form = Callable[..., tuple[list[jax.Array], list[jax.Array]]]
# (arguments, spec) -> the form of the product of unsharded arrays or of a device's shards
FormOf = Callable[[Sequence[Any], GemmSpec], Form]

BARE = Program((), Halves(), (), (), (), 0).with_acc()


def on_each_device(*arguments: jax.Array, spec: GemmSpec, plan: Plan, form_of: FormOf) -> list[jax.Array]:
    """Stores and finished reductions of a device's shards, in a region where the plan's mesh axes are manual."""
    n_names, m_names = plan.over(Dimension.N), plan.over(Dimension.M)
    spec = _as_cut(spec, plan)
    over = {Axis.ROW: n_names, Axis.COLUMN: m_names, Axis.ALL: n_names + m_names}
    summed = plan.over(Dimension.K)
    if not summed:
        stores, reductions = _product_tiles(arguments, spec, form_of)
    elif sums_results(arguments, spec, plan):
        stores, reductions = _product_tiles(arguments, spec, form_of)
        stores = [lax.psum(x, summed) for x in stores]
        over = {axis: (*names, *summed) for axis, names in over.items()}
    else:
        stores, reductions = _sum_tiles(arguments, spec, plan, form_of)
    each = zip(spec.matrices.reduction_of_result, reductions, strict=True)
    return [*stores, *(across(reduction.op, x, over[reduction.axis]) for reduction, x in each)]


def _as_cut(spec: GemmSpec, plan: Plan) -> GemmSpec:
    """The product of a device: a general one where the mesh cuts the rows or columns of a symmetric one."""
    return spec.general() if spec.symmetric and (plan.over(Dimension.N) or plan.over(Dimension.M)) else spec


def sums_results(arguments: Sequence[Any], spec: GemmSpec, plan: Plan) -> bool:
    """True if each device runs the epilogue on the product of its k slice, and the results are summed over the devices.

    That is so where the epilogue is linear in acc, the results have the dtype in which products are summed and are no
    larger than the products, all devices keep the entire sum, and the device's product can be a kernel: as for a
    weight's gradient with a norm's scale, under data parallelism.

    Args:
      arguments: the device's shards, or their types.
    """
    dtype = wire_dtype(spec, compute_dtype(arguments[0], arguments[len(spec.matrices.a)]))
    keeps_all = not any(plan.scatters.values())
    if not (keeps_all and is_linear(spec.program) and all(x == dtype for x in spec.store_dtypes)):
        return False
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    shard = _shard(types, spec)
    if unsupported_reason(shard.matrices.flat_types(types), shard.matrices.spec_of_matrices) is not None:
        return False
    stores, accs = (
        jax.eval_shape(functools.partial(xla_tiles, spec=x), *x_types)[0]
        for x, x_types in ((shard, types), (bare(spec, types), bare_arguments(spec, types)))
    )
    return sum(x.size for x in stores) <= sum(x.size for x in accs)


def _shard(arguments: Sequence[Any], spec: GemmSpec) -> GemmSpec:
    """The product, with its epilogue, of these shards."""
    return _narrowed(spec, sum(spec.matrices.factor_sizes(arguments).pieces)).replace(out_sharding=None)


def _product_tiles(arguments: Sequence[jax.Array], spec: GemmSpec, form_of: FormOf) -> Any:
    return device_form(arguments, _shard(arguments, spec), form_of)(*arguments)


def _sum_tiles(arguments: Sequence[jax.Array], spec: GemmSpec, plan: Plan, form_of: FormOf) -> Any:
    """The epilogue, by XLA, on the shard that this device keeps of the products' sum over the devices."""
    matrices = spec.matrices
    factors, operands = arguments[: matrices.num_factors], arguments[matrices.num_factors :]
    bare_shards = bare_arguments(spec, arguments)
    accs, _ = device_form(bare_shards, bare(spec, factors), form_of)(*bare_shards)
    summed = [_summed(acc, axes, plan) for acc, axes in zip(accs, matrices.acc_axes, strict=True)]
    return tiles_of(summed, operands, _narrowed(spec, sum(x.shape[-1] for x in summed)))


def device_form(arguments: Sequence[jax.Array], spec: GemmSpec, form_of: FormOf) -> Form:
    """The function that makes a product on one device, by a product for each piece of K where these are apart."""
    if not spec.axes.apart:
        return form_of(arguments, spec)
    return lambda *arguments: _tiles_of_pieces(arguments, spec, form_of)


def _tiles_of_pieces(
    arguments: Sequence[jax.Array], spec: GemmSpec, form_of: FormOf
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Stores and reductions by a product for each piece of K.

    The epilogue of each but the first adds what the ones before it have stored, in the dtype of `wire_dtype`.
    """
    count, flags, sums, has_batch = spec.axes.pieces, spec.batched, list[jax.Array](), False
    for i in range(count):
        is_last = i == count - 1
        own, factors = spec if is_last else bare(spec, arguments), [i, count + i]
        read = [*factors, *range(2 * count, len(arguments))] if is_last else factors
        given, given_flags, program = [arguments[j] for j in read], [flags[j] for j in read], own.program
        if sums:
            tile = tile_operand(sums[0].dtype, program.halves.acc)
            given, given_flags, program = [*given, *sums], [*given_flags, has_batch], program.with_tile_added(tile)
        axes = own.axes._replace(joined=None, pieces=1, apart=False)
        own = own.replace(program=program, axes=axes, batched=tuple(given_flags))
        sums, reductions = form_of(given, own)(*given)
        has_batch |= any(flags[j] for j in factors)
    return sums, reductions


def _summed(acc: jax.Array, axes: ProductAxes, plan: Plan) -> jax.Array:
    scattered: MeshAxes = ()
    for i, axis in enumerate(axes):
        if axis and (names := plan.scatters.get(axis, ())):
            acc = lax.psum_scatter(acc, names, scatter_dimension=acc.ndim - len(axes) + i, tiled=True)
            scattered += names
    rest = tuple(name for name in plan.over(Dimension.K) if name not in scattered)
    return lax.psum(acc, rest) if rest else acc


def _narrowed(spec: GemmSpec, columns: int) -> GemmSpec:
    """The product of a shard of the columns, which has the same share of each piece of N."""
    program = spec.program
    if spec.axes.joined is not Dimension.N or not program.columns or program.columns == columns:
        return spec
    shards = program.columns // columns

    def narrow(store: TileStore) -> TileStore:
        first, end = store.slice or (0, 0)
        return dataclasses.replace(store, slice=(first // shards, end // shards) if store.slice else None)

    stores = tuple(map(narrow, program.stores))
    return spec.replace(program=dataclasses.replace(program, columns=columns, stores=stores))


def bare(spec: GemmSpec, arguments: Sequence[Any]) -> GemmSpec:
    """The product of the factors among `arguments` without its epilogue, in the dtype in which it is summed."""
    matrices = spec.matrices
    dtype = wire_dtype(spec, compute_dtype(arguments[0], arguments[len(matrices.a)]))
    columns = matrices.acc[0][1].rank
    groups = () if spec.ragged is None else spec.program.operands[-1:]
    return spec.replace(
        program=dataclasses.replace(BARE, operands=groups) if groups else BARE,
        out_dtypes=(dtype,),
        batched=spec.batched[: matrices.num_factors] + (False,) * len(groups),
        axes=spec.axes._replace(n=columns, halves=False),
        config=None,
        input_output_aliases=(),
        out_sharding=None,
        symmetric=False,
    )


def bare_arguments(spec: GemmSpec, arguments: Sequence[Any]) -> list[Any]:
    """The arguments of `bare`: the factors, and the offsets of groups where there are any."""
    groups = () if spec.ragged is None else arguments[-1:]
    return [*arguments[: spec.matrices.num_factors], *groups]


def across(op: ReductionOp, x: jax.Array, axes: MeshAxes) -> jax.Array:
    """A reduction finished over mesh axes."""
    if not axes:
        return x
    match op:
        case ReductionOp.SUM:
            return lax.psum(x, axes)
        case ReductionOp.MAX:
            return lax.pmax(x, axes)
        case ReductionOp.MIN:
            return lax.pmin(x, axes)
        case ReductionOp.LOGSUMEXP:
            largest = lax.pmax(x, axes)
            largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
            return jnp.log(lax.psum(jnp.exp(x - largest), axes)) + largest


def scattered_sum(x: jax.Array, axes: MeshAxes, spec: Any) -> jax.Array:
    """The sum over these mesh axes, scattered over those of them by which the PartitionSpec `spec` shards it."""
    kept = [tuple(name for name in names if name in axes) for names in mesh_axes_of(spec, x.ndim)]
    for dimension, names in enumerate(kept):
        if names:
            x = lax.psum_scatter(x, names, scatter_dimension=dimension, tiled=True)
    rest = tuple(name for name in axes if not any(name in names for names in kept))
    return lax.psum(x, rest) if rest else x


def lower_explicit(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec, form_of: FormOf) -> Any:
    """A shard_map over the explicit axes, as the types of arguments and results say."""
    avals_in: Sequence[Any] = ctx.avals_in
    plan = plan_of_types(avals_in, ctx.avals_out, spec)
    in_specs = plan.argument_specs(spec, [aval.ndim for aval in avals_in])
    each = functools.partial(on_each_device, spec=spec, plan=plan, form_of=form_of)
    finish = functools.partial(outputs_of, spec=spec)
    return lower_partition(ctx, *arguments, partition=Partition(in_specs, plan.result_specs(spec), each), finish=finish)


def lower_partition(
    ctx: mlir.LoweringRuleContext,
    *arguments: Any,
    partition: Partition,
    finish: Callable[..., list[jax.Array]] = lambda results, _: list(results),
) -> Any:
    """A shard_map over the explicit axes, of which `partition` says what each device has and runs.

    Args:
      finish: (results, arguments) -> the call's results, on unsharded arrays.
    """
    mesh = mesh_of(ctx.avals_in)

    def whole(*arguments: jax.Array) -> list[jax.Array]:
        with jax.sharding.use_abstract_mesh(mesh):
            each = jax.shard_map(
                partition.each,
                in_specs=tuple(partition.arguments),
                out_specs=list(partition.results),
                axis_names=set(explicit_axes(mesh)),
                check_vma=False,
            )
            shardings = (NamedSharding(mesh, in_spec) for in_spec in partition.arguments)
            resharded = map(jax.sharding.reshard, arguments, shardings)
            outputs = finish(each(*resharded), arguments)
            return [jax.sharding.reshard(x, aval.sharding) for x, aval in zip(outputs, ctx.avals_out, strict=True)]

    return mlir.lower_fun(whole, multiple_results=True)(ctx, *arguments)


def mesh_of(avals: Sequence[Any]) -> Any:
    """The mesh of these types; those that are on none are replicated over it."""
    return next(aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty)


def plan_of_types(avals_in: Sequence[Any], avals_out: Sequence[Any], spec: GemmSpec) -> Plan:
    """The plan for arrays whose types say how they are sharded over explicit axes."""
    matrices, stores = spec.matrices, spec.program.stores
    results: list[tuple[MeshAxes, ...]] = [((),) * len(axes) for axes in matrices.result_axes]
    if matrices.num_stores == len(stores):  # else some have several pieces, for which there are no types
        results[: len(stores)] = [explicit_cuts(avals_out[store.output]) for store in stores]
    shapes, mesh_axes = [aval.shape for aval in avals_in], list(map(explicit_cuts, avals_in))
    return plan(spec, shapes, mesh_axes, results, mesh_of(avals_in).shape)


def shards_of(avals: Sequence[Any], spec: GemmSpec, plan: Plan) -> list[Any]:
    """Types of the arguments' shards on a device; factors are those of its own product, before products are summed."""
    return parts_of(avals, plan.argument_specs(spec, [aval.ndim for aval in avals]), mesh_of(avals).shape)


def parts_of(avals: Sequence[Any], specs: Sequence[Any], mesh_sizes: Mapping[str, int]) -> list[Any]:
    """Types of the shards on a device of arrays of these types and shardings."""
    shards = []
    for aval, aval_spec in zip(avals, specs, strict=True):
        counts = [math.prod(mesh_sizes[name] for name in names) for names in mesh_axes_of(aval_spec, aval.ndim)]
        shape = tuple(size // count for size, count in zip(aval.shape, counts, strict=True))
        shards.append(jax.core.ShapedArray(shape, aval.dtype))
    return shards


def shard_of_types(avals: Sequence[Any], spec: GemmSpec) -> tuple[list[Any], GemmSpec]:
    """Types of the arguments' shards on a device, from their types over explicit axes; and the product of the shards.

    They are the product and the arguments of `bare` where the devices' products are summed before the epilogue.
    """
    with jax.sharding.use_abstract_mesh(mesh_of(avals)):
        plan = plan_of_types(avals, types_of(functools.partial(xla_form, spec=spec), *avals), spec)
    shards = shards_of(avals, spec, plan)
    spec = _as_cut(spec, plan)
    has_epilogue = not plan.over(Dimension.K) or sums_results(shards, spec, plan)
    return (shards, spec) if has_epilogue else (bare_arguments(spec, shards), bare(spec, shards))


def lower_automatic(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec, form_of: FormOf) -> Any:
    """A call that calls back when XLA's partitioner has decided how its arrays are sharded."""

    def unsharded(*arguments: jax.Array) -> list[jax.Array]:
        stores, reductions = xla_tiles(*arguments, spec=spec)
        return [*stores, *reductions]

    def partition(
        arguments: Sequence[ShardedArray], results: Sequence[ShardedArray], sizes: Mapping[str, int]
    ) -> Partition:
        shapes = [x.shape for x in arguments]
        planned = plan(spec, shapes, [x.mesh_axes for x in arguments], [x.mesh_axes for x in results], sizes)
        each = functools.partial(on_each_device, spec=spec, plan=planned, form_of=form_of)
        return Partition(planned.argument_specs(spec, list(map(len, shapes))), planned.result_specs(spec), each)

    avals: Sequence[Any] = ctx.avals_in
    call = partitioned_call(ctx, unsharded, partition, sharding_rule(spec, [aval.shape for aval in avals]))

    def whole(*arguments: jax.Array) -> list[jax.Array]:
        # The persistent cache's key holds shapes and rule, but not what the callback will put in the call's place.
        with set_xla_metadata(coda_gemm=_digest(spec)):
            results = call(*arguments)
        return outputs_of(results, arguments, spec)

    return mlir.lower_fun(whole, multiple_results=True)(ctx, *arguments)


def sharding_rule(spec: GemmSpec, shapes: Sequence[Sequence[int]]) -> SdyShardingRule:
    """The rule that tells Shardy's propagation which axes of the arguments and the results go together."""
    matrices, joined = spec.matrices, spec.axes.joined
    argument_axes = matrices.argument_axes([len(shape) for shape in shapes])
    unit_of = units(spec, axis_sizes(argument_axes, shapes))
    replicated: list[str] = []  # the factors that are never sharded, in the order in which Shardy meets them
    sizes: dict[str, Any] = {}

    def factors(axes: ProductAxes, shape: Sequence[int] | None, piece: int) -> ArrayMapping:
        mapping: list[Any] = []
        for i, axis in enumerate(axes):
            unit = unit_of.get(axis, 0) if axis else 0  # no argument has the groups of a ragged K
            # Pieces have sizes of their own.
            name = f"{axis}_{piece}" if axis and axis.dimension is joined else str(axis)
            if unit == 1:
                mapping.append(name)
            elif unit:
                if f"{name}_unit" not in sizes:
                    assert shape is not None
                    sizes[name], sizes[f"{name}_unit"] = shape[i] // unit, unit
                    replicated.append(f"{name}_unit")
                mapping.append(CompoundFactor(name, f"{name}_unit"))
            else:
                replicated.append(f"replicated_{len(replicated)}")
                mapping.append(replicated[-1])
        return ArrayMapping(*mapping)

    def piece(axes: MatrixAxes) -> int:
        return max((axis.piece for axis in axes), default=0)

    each = zip(argument_axes, shapes, map(piece, matrices.arguments), strict=True)
    arguments = tuple(factors(*x) for x in each)
    each_result = zip(matrices.result_axes, map(piece, matrices.results), strict=True)
    results = tuple(factors(axes, None, number) for axes, number in each_result)
    pieces = [f"_{i}" for i in range(spec.axes.pieces)] if joined is Dimension.K else [""]
    k_axes = [ProductAxis(Dimension.K, i) for i in range(spec.axes.k)]
    summed = tuple(f"{axis}{suffix}" for axis in k_axes if unit_of[axis] for suffix in pieces)
    return SdyShardingRule(
        arguments, results, reduction_factors=summed, need_replication_factors=tuple(replicated), **sizes
    )


def _digest(spec: GemmSpec) -> str:
    """A digest of what a call computes of its arguments."""
    options = (spec.transpose_a, spec.transpose_b, spec.implementation, spec.config, spec.input_output_aliases)
    groups = () if spec.ragged is None else (spec.ragged,)
    # Without the first a strict program could come from the cache with a product that fell back; without the last with
    # the tiles of another table.
    settings = (is_strict(), ffi.headers_hash(), chosen_by())
    return digest_of((str(spec.program), spec.out_dtypes, spec.batched, spec.axes, options, *groups, *settings))


def digest_of(*parts: Any) -> str:
    """A digest that is the same for the same text in every process."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]
