"""Lowers a product that is split over the devices of a mesh: each runs the kernel on its own part.

Over explicit axes the types say how arrays lie: a `jax.shard_map` of the lowering's own, planned from them. Over
automatic axes only XLA knows, after its partitioner has decided: a `custom_partitioning`, which tells the partitioner
by a rule which dimensions go together, and is called back with what it decided. Both follow the same plan.
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
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from coda_jax import ffi
from coda_jax.epilogue import Axis, Halves, Program, ReductionOp, TileStore, is_linear, types_of
from coda_jax.lowering.addressing import unsupported_reason
from coda_jax.lowering.mesh_plan import (
    Axes,
    Dims,
    Plan,
    argument_dims,
    axes_of,
    dimension_sizes,
    plan,
    product_dims,
    result_dims,
    units,
)
from coda_jax.lowering.xla_partitioner import Laid, Split, call_that_is_split
from coda_jax.primitives.fallbacks import is_strict
from coda_jax.primitives.gemm_primitive import compute_dtype, outputs_of, tiles_of, xla_form, xla_tiles
from coda_jax.primitives.matrices import (
    FactorAxes,
    argument_groups,
    argument_parts,
    flat_spec,
    flat_types,
    num_stored,
    product_parts,
    reductions_of,
    result_groups,
)
from coda_jax.primitives.mesh_types import explicit_axes
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.table import chosen_by

# (*arguments, spec=) -> stores and reductions, of whole arrays or of a device's parts
Tiles = Callable[..., tuple[list[jax.Array], list[jax.Array]]]

BARE = Program((), Halves(), (), (), (), 0).with_acc()


def on_each_device(*arguments: jax.Array, spec: GemmSpec, plan: Plan, tiles: Tiles) -> list[jax.Array]:
    """Stores and finished reductions of a device's part, in a region where the plan's mesh axes are manual."""
    over = {Axis.ROW: plan.over("n"), Axis.COLUMN: plan.over("m")}
    if not plan.over("k"):
        stores, reductions = _of_product(arguments, spec, tiles)
    elif sums_results(arguments, spec, plan):
        stores, reductions = _of_product(arguments, spec, tiles)
        stores = [lax.psum(x, plan.over("k")) for x in stores]
        over = {axis: (*axes, *plan.over("k")) for axis, axes in over.items()}
    else:
        stores, reductions = _of_sum(arguments, spec, plan, tiles)
    each = zip(reductions_of(spec), reductions, strict=True)
    return [*stores, *(across(reduction.op, x, over[reduction.axis]) for reduction, x in each)]


def sums_results(arguments: Sequence[Any], spec: GemmSpec, plan: Plan) -> bool:
    """Whether a device runs the whole epilogue on its part of k, and the results are summed over the devices.

    It may where the epilogue is linear in acc, the results have the dtype in which products are summed and are no
    larger than these, all devices keep the whole sum, and the part can be a kernel: as of a weight's gradient with a
    norm's scale, under data parallelism.

    Args:
      arguments: the device's parts, or their types.
    """
    dtype = wire_dtype(spec, compute_dtype(arguments[0], arguments[len(argument_parts(spec)[0])]))
    keeps_whole = not any(plan.scatters.values())
    if not (keeps_whole and is_linear(spec.program) and all(x == dtype for x in spec.store_dtypes)):
        return False
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    part = _part(types, spec)
    if unsupported_reason(flat_types(types, part), flat_spec(part)) is not None:
        return False
    stores, accs = (
        jax.eval_shape(functools.partial(xla_tiles, spec=of_one), *types[: len(of_one.batched)])[0]
        for of_one in (part, bare(spec, types))
    )
    return sum(x.size for x in stores) <= sum(x.size for x in accs)


def _part(arguments: Sequence[Any], spec: GemmSpec) -> GemmSpec:
    """The product, with its epilogue, of these parts."""
    return _narrowed(spec, sum(FactorAxes.of(arguments, spec).parts)).replace(out_sharding=None)


def _of_product(arguments: Sequence[jax.Array], spec: GemmSpec, tiles: Tiles) -> Any:
    return tiles(*arguments, spec=_part(arguments, spec))


def _of_sum(arguments: Sequence[jax.Array], spec: GemmSpec, plan: Plan, tiles: Tiles) -> Any:
    """The epilogue of the products' sum over the devices, by XLA, on the part of it that this device keeps."""
    of_a, of_b = map(len, argument_parts(spec)[:2])
    factors, operands = arguments[: of_a + of_b], arguments[of_a + of_b :]
    (accs, _) = tiles(*factors, spec=bare(spec, factors))
    summed = [_summed(acc, dims, plan) for acc, dims in zip(accs, product_dims(spec), strict=True)]
    return tiles_of(summed, operands, _narrowed(spec, sum(x.shape[-1] for x in summed)))


def _summed(acc: jax.Array, dims: Dims, plan: Plan) -> jax.Array:
    scattered: Axes = ()
    for i, dim in enumerate(dims):
        if axes := plan.scatters.get(dim or "", ()):
            acc = lax.psum_scatter(acc, axes, scatter_dimension=acc.ndim - len(dims) + i, tiled=True)
            scattered += axes
    rest = tuple(axis for axis in plan.over("k") if axis not in scattered)
    return lax.psum(acc, rest) if rest else acc


def _narrowed(spec: GemmSpec, columns: int) -> GemmSpec:
    """The product of a part of the columns, of each of the arrays that N is joined of the same share."""
    program = spec.program
    if spec.axes.joined != "n" or not program.columns or program.columns == columns:
        return spec
    parts = program.columns // columns

    def narrow(store: TileStore) -> TileStore:
        first, end = store.slice or (0, 0)
        return dataclasses.replace(store, slice=(first // parts, end // parts) if store.slice else None)

    stores = tuple(map(narrow, program.stores))
    return spec.replace(program=dataclasses.replace(program, columns=columns, stores=stores))


def bare(spec: GemmSpec, arguments: Sequence[Any]) -> GemmSpec:
    """The product alone of the factors among `arguments`, in the dtype in which it is summed."""
    of_a, of_b = map(len, argument_parts(spec)[:2])
    dtype = wire_dtype(spec, compute_dtype(arguments[0], arguments[of_a]))
    columns = product_parts(spec)[0][1].axes
    return spec.replace(
        program=BARE,
        out_dtypes=(dtype,),
        batched=spec.batched[: of_a + of_b],
        axes=spec.axes._replace(n=columns, halves=False),
        config=None,
        input_output_aliases=(),
        out_sharding=None,
    )


def wire_dtype(spec: GemmSpec, dtype: np.dtype) -> np.dtype:
    """The dtype in which products are summed over devices, as Megatron does: bfloat16 where all results are.

    float32 where a result is, as a gradient of float32 parameters; where the product has no tiles; and for float16,
    which a part of a sum may overflow though the sum does not.
    """
    is_short = dtype == jnp.bfloat16 and spec.store_dtypes and all(x == dtype for x in spec.store_dtypes)
    return np.dtype(dtype if is_short else np.float32)


def across(op: ReductionOp, x: jax.Array, axes: Axes) -> jax.Array:
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


def lower_explicit(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec, tiles: Tiles) -> Any:
    """A shard_map over the explicit axes, as the types of arguments and results say."""
    avals_in: Sequence[Any] = ctx.avals_in
    mesh = next(aval.sharding.mesh for aval in avals_in if not aval.sharding.mesh.empty)
    names = explicit_axes(mesh)
    made = plan_of_types(avals_in, ctx.avals_out, spec)
    in_specs = made.argument_specs(spec, [aval.ndim for aval in avals_in])

    def whole(*arguments: jax.Array) -> list[jax.Array]:
        with jax.sharding.use_abstract_mesh(mesh):
            each = jax.shard_map(
                functools.partial(on_each_device, spec=spec, plan=made, tiles=tiles),
                in_specs=in_specs,
                out_specs=list(made.result_specs(spec)),
                axis_names=set(names),
                check_vma=False,
            )
            moved = [jax.sharding.reshard(x, NamedSharding(mesh, p)) for x, p in zip(arguments, in_specs, strict=True)]
            outputs = outputs_of(each(*moved), arguments, spec)
            return [jax.sharding.reshard(x, aval.sharding) for x, aval in zip(outputs, ctx.avals_out, strict=True)]

    return mlir.lower_fun(whole, multiple_results=True)(ctx, *arguments)


def plan_of_types(avals_in: Sequence[Any], avals_out: Sequence[Any], spec: GemmSpec) -> Plan:
    """The plan for arrays whose types say how they lie over explicit axes."""
    mesh = next(aval.sharding.mesh for aval in avals_in if not aval.sharding.mesh.empty)
    explicit = explicit_axes(mesh)

    def cut(aval: Any) -> list[Axes]:
        entries = axes_of(aval.sharding.spec, aval.ndim)
        return [tuple(axis for axis in axes if axis in explicit) for axes in entries]

    dims, stores = result_dims(spec), spec.program.stores
    results: list[list[Axes]] = [[()] * len(of_one) for of_one in dims]
    if num_stored(spec) == len(stores):  # else some are joined, of parts that no type names
        results[: len(stores)] = [cut(avals_out[store.output]) for store in stores]
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return plan(spec, [aval.shape for aval in avals_in], [cut(aval) for aval in avals_in], results, sizes)


def parts_of(avals: Sequence[Any], spec: GemmSpec, plan: Plan) -> list[Any]:
    """Types of the arguments' parts on a device; of the factors those of the product, before it is summed."""
    mesh = next(aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    specs = plan.argument_specs(spec, [aval.ndim for aval in avals])
    parts = []
    for aval, of_aval in zip(avals, specs, strict=True):
        cuts = [math.prod(sizes[axis] for axis in axes) for axes in axes_of(of_aval, aval.ndim)]
        shape = tuple(size // cut for size, cut in zip(aval.shape, cuts, strict=True))
        parts.append(jax.core.ShapedArray(shape, aval.dtype))
    return parts


def part_of_types(avals: Sequence[Any], spec: GemmSpec) -> tuple[list[Any], GemmSpec]:
    """Types of the arguments' parts on a device, as those of the whole say over explicit axes; what it multiplies.

    Where the epilogue is of a sum over devices that is the product of the factors alone, the first of the parts.
    """
    mesh = next(aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty)
    with jax.sharding.use_abstract_mesh(mesh):
        made = plan_of_types(avals, types_of(functools.partial(xla_form, spec=spec), *avals), spec)
    parts = parts_of(avals, spec, made)
    is_whole = not made.over("k") or sums_results(parts, spec, made)
    return parts, spec if is_whole else bare(spec, parts)


def lower_automatic(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec, tiles: Tiles) -> Any:
    """A call that XLA's partitioner asks how it is split."""

    def unsplit(*arguments: jax.Array) -> list[jax.Array]:
        stores, reductions = xla_tiles(*arguments, spec=spec)
        return [*stores, *reductions]

    def split(arguments: Sequence[Laid], results: Sequence[Laid], sizes: Mapping[str, int]) -> Split:
        shapes = [x.shape for x in arguments]
        made = plan(spec, shapes, [x.cuts for x in arguments], [x.cuts for x in results], sizes)
        each = functools.partial(on_each_device, spec=spec, plan=made, tiles=tiles)
        return Split(made.argument_specs(spec, [len(shape) for shape in shapes]), made.result_specs(spec), each)

    avals: Sequence[Any] = ctx.avals_in
    call = call_that_is_split(ctx, unsplit, split, sharding_rule(spec, [aval.shape for aval in avals]))

    def whole(*arguments: jax.Array) -> list[jax.Array]:
        # The persistent cache's key holds shapes and rule, but not what the callback will put in the call's place.
        with set_xla_metadata(coda_gemm=_digest(spec)):
            results = call(*arguments)
        return outputs_of(results, arguments, spec)

    return mlir.lower_fun(whole, multiple_results=True)(ctx, *arguments)


def sharding_rule(spec: GemmSpec, shapes: Sequence[Sequence[int]]) -> SdyShardingRule:
    """Which axes of the arguments and the results go together, for Shardy's propagation."""
    dims = argument_dims(spec, [len(shape) for shape in shapes])
    unit_of = units(spec, dimension_sizes(dims, shapes))
    whole: list[str] = []  # the factors that are never cut, in the order in which Shardy meets them
    sizes: dict[str, Any] = {}

    def factors(dims: Dims, shape: Sequence[int] | None, part: int) -> ArrayMapping:
        mapping: list[Any] = []
        for i, dim in enumerate(dims):
            unit = unit_of[dim] if dim else 0
            if dim and dim[0] == spec.axes.joined:  # parts have sizes of their own
                dim = f"{dim}_{part}"
            if dim and unit == 1:
                mapping.append(dim)
            elif dim and unit:
                if f"{dim}_unit" not in sizes:
                    assert shape is not None
                    sizes[dim], sizes[f"{dim}_unit"] = shape[i] // unit, unit
                    whole.append(f"{dim}_unit")
                mapping.append(CompoundFactor(dim, f"{dim}_unit"))
            else:
                whole.append(f"whole_{len(whole)}")
                mapping.append(whole[-1])
        return ArrayMapping(*mapping)

    of_arguments = [max((group.part for group in groups), default=0) for groups in argument_groups(spec)]
    of_results = [max((group.part for group in groups), default=0) for groups in result_groups(spec)]
    arguments = tuple(factors(*of_one) for of_one in zip(dims, shapes, of_arguments, strict=True))
    results = tuple(factors(of_one, None, part) for of_one, part in zip(result_dims(spec), of_results, strict=True))
    parts = [f"_{i}" for i in range(spec.axes.parts)] if spec.axes.joined == "k" else [""]
    summed = tuple(f"k{i}{part}" for i in range(spec.axes.k) for part in parts)
    return SdyShardingRule(arguments, results, reduction_factors=summed, need_replication_factors=tuple(whole), **sizes)


def _digest(spec: GemmSpec) -> str:
    """Names what a call computes on given arguments, whoever made it."""
    options = (spec.transpose_a, spec.transpose_b, spec.implementation, spec.config, spec.input_output_aliases)
    # Strict or not: else a strict program would be taken from the cache with a product that fell back. What tiles are
    # chosen by: else with the tiles of another table.
    made = (is_strict(), ffi.headers_hash(), chosen_by())
    return digest_of((str(spec.program), spec.out_dtypes, spec.batched, spec.axes, options, *made))


def digest_of(*parts: Any) -> str:
    """The same for the same text in every process."""
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]
