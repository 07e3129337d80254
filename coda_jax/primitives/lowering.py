"""The CUDA lowering: the kernel's custom call and the finish of its reductions, or the XLA form and why."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import mlir

from coda_jax import ffi
from coda_jax.epilogue import Axis, Kind, Operand
from coda_jax.primitives import kernel
from coda_jax.primitives.addressing import unsupported_reason
from coda_jax.primitives.gemm_primitive import PRIMITIVES, lower_xla, outputs_of, split_results, xla_tiles
from coda_jax.primitives.mesh_types import automatic_axes, partitioned_axes, vary, varying_axes
from coda_jax.primitives.notes import is_strict, warn_once
from coda_jax.primitives.partitioned import lower_automatic, lower_explicit, part_of_types
from coda_jax.primitives.partitioner import WAY_OUT, known_devices, with_own_attributes
from coda_jax.primitives.plans import Part, key_of, record, recorded
from coda_jax.primitives.shapes import FactorAxes, flat_arguments, flat_spec, flat_types, shaped_results
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.config import KernelConfig
from coda_jax.tiles.cost_model import GemmShape
from coda_jax.tiles.table import Problem, attached_device, config_for, expected_nanoseconds, named_device

CAPABILITY = "9.0"


@dataclasses.dataclass(frozen=True)
class Selection:
    """What a product is lowered to on a GPU.

    Attributes:
      reason: why it takes the XLA form; None where it is the kernel.
      config: of the kernel; None too where that is known only when XLA has partitioned the program.
      origin: who says so, as `config_for`.
      over: the mesh axes over which each device runs it on its own part.
      parts: the factors of these parts, in every plan that is known; the rest is said of the last one.
    """

    reason: str | None = None
    config: KernelConfig | None = None
    origin: str = ""
    over: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def select(avals: Sequence[Any], spec: GemmSpec, num_devices: int = 1, *, anywhere: bool = False) -> Selection:
    """What this product is lowered to on the attached GPUs (on a Hopper GPU if there are none).

    Args:
      avals: types of the arguments.
      num_devices: how many XLA partitions the program over, if its types are on no mesh.
      anywhere: whether it may run on other devices than those attached, so that no table of tiles has a say.

    Raises:
      ValueError: the user's config is none that a kernel of this product can have.
    """
    if spec.implementation == "xla":
        return Selection("implementation='xla'")
    if reason := _machine_reason():
        return Selection(reason)
    route = route_of(avals, num_devices, for_export=anywhere)
    if route.reason is not None:
        return Selection(route.reason)
    if route.over:
        return _select_of_parts(avals, spec, route, anywhere)
    if reason := unsupported_reason(flat_types(avals, spec), flat_spec(spec)):
        return Selection(reason)
    problem = problem_of(avals, spec)
    try:
        return Selection(None, *config_for(problem, spec.config, None if anywhere else attached_device()))
    except ValueError as error:
        if spec.config is None:
            return Selection(str(error))
        if reason := select(avals, spec.replace(config=None), num_devices, anywhere=anywhere).reason:
            return Selection(reason)
        raise


def _select_of_parts(avals: Sequence[Any], spec: GemmSpec, route: Route, anywhere: bool) -> Selection:
    """What each device's part is lowered to, as the types say it, or what XLA asked about when it compiled it."""
    if route.is_automatic:
        plans = recorded(key_of(avals, spec))
        if not plans:
            return Selection(over=route.over)
        *_, last = plans
        reason = last.reason and f"on a device's part, {last.factors}, {last.reason}"
        return Selection(reason, last.config, last.origin, route.over, tuple(plan.factors for plan in plans))
    parts, of_part = part_of_types(avals, spec)
    selection = select(parts[: len(of_part.batched)], of_part, anywhere=anywhere)
    return dataclasses.replace(selection, over=route.over, parts=(factors_of(parts, spec),))


def factors_of(avals: Sequence[Any], spec: GemmSpec) -> str:
    """a @ b, of these types, as matrices."""
    matrices = [jax.core.ShapedArray(x.shape, x.dtype) for x in flat_types(avals, spec)[:2]]
    transposed = (spec.transpose_a, spec.transpose_b)
    return " @ ".join(f"{x.str_short()}{'^T' if flag else ''}" for x, flag in zip(matrices, transposed, strict=True))


def _machine_reason() -> str | None:
    if named_device() is not None:
        return None
    try:
        devices = jax.devices("cuda")
    except RuntimeError:  # export and ahead-of-time compilation: the machine that runs it compiles the kernels
        return None
    other = {device.compute_capability for device in devices} - {CAPABILITY}
    if other:
        return f"the GPU has compute capability {min(other)}; the kernel needs {CAPABILITY} (Hopper)"
    return ffi.unavailable_reason()


@dataclasses.dataclass(frozen=True)
class Route:
    """How a product comes to the devices.

    Attributes:
      over: the mesh axes over which it is split; none on one device, or where all axes are manual.
      is_automatic: whether they are automatic, not explicit.
      reason: why it cannot be split.
    """

    over: tuple[str, ...] = ()
    is_automatic: bool = False
    reason: str | None = None


def route_of(avals: Sequence[Any], num_devices: int, *, for_export: bool = False) -> Route:
    """How a product of arguments of these types comes to `num_devices` devices, if they are on no mesh."""
    shardings = [aval.sharding for aval in avals]
    over, automatic = partitioned_axes(*shardings), automatic_axes(*shardings)
    on_no_mesh = all(sharding.mesh.empty for sharding in shardings)
    if not over and not (on_no_mesh and num_devices > 1):
        return Route()
    if not automatic and not on_no_mesh:
        return Route(over)
    names = f"mesh axes {', '.join(over)}" if over else f"{num_devices} devices"
    why = None
    if for_export:
        why = "an exported program cannot carry how a product is split over automatic ones"
    elif not jax.config.jax_use_shardy_partitioner:
        why = "it does so without Shardy (jax_use_shardy_partitioner), whose rules say how a product is split"
    reason = why and f"XLA partitions it over {names}, and {why}; {WAY_OUT}"
    return Route(over or (f"{num_devices} devices",), True, reason)


def tiles(
    *arguments: jax.Array,
    spec: GemmSpec,
    strict: bool,
    anywhere: bool = False,
    yields: bool = False,
    key: str | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Stores and reductions of arrays on one device: by the kernel, or by XLA with a warning; strict, an error."""
    selection = select_part(arguments, spec, anywhere=anywhere, key=key)
    if selection.config is not None:
        kernel = functools.partial(kernel_tiles, spec=spec, config=selection.config, yields=yields)
        return kernel(*arguments) if key is None else with_own_attributes(kernel)(*arguments)
    report(spec, selection.reason, strict=strict)
    return xla_tiles(*arguments, spec=spec)


def select_part(
    arguments: Sequence[Any], spec: GemmSpec, *, anywhere: bool = False, key: str | None = None
) -> Selection:
    """What a product of arrays on one device is lowered to; put on record as a part of the product of this `key`."""
    types = [jax.core.ShapedArray(x.shape, x.dtype) for x in arguments]
    selection = select(types, spec, anywhere=anywhere)
    if key is not None:
        record(key, Part(factors_of(types, spec), selection.reason, selection.config, selection.origin))
    return selection


def report(spec: GemmSpec, reason: str | None, *, strict: bool) -> None:
    """Says why a product takes its XLA form.

    Raises:
      NotImplementedError: implementation="cuda".
      FallbackError: strict, and the form was not asked for.
    """
    if spec.implementation == "cuda":
        raise NotImplementedError(f"gemm '{spec.name}': implementation='cuda' was asked for, but {reason}")
    if spec.implementation == "auto":
        message = f"takes its XLA form: {reason}"
        warn_once(f"gemm '{spec.name}' {message}", message, spec.site, strict=strict)


def devices_of(ctx: mlir.LoweringRuleContext) -> tuple[int, bool]:
    """On how many devices XLA partitions what is lowered, if its types are on no mesh; whether these are known."""
    context = ctx.module_context.axis_context
    # In a region where all axes are manual, as a shard_map is, nothing is partitioned any more; or the types say it.
    return getattr(context, "num_devices", 1), known_devices(ctx)


def _is_of_several(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program runs on several devices, so that there may be collectives beside its kernels."""
    context: Any = ctx.module_context.axis_context
    meshes = [aval.sharding.mesh for aval in ctx.avals_in]  # type: ignore[attr-defined]
    sizes = [mesh.size for mesh in (*meshes, getattr(context, "mesh", None)) if mesh is not None]
    return max(getattr(context, "num_devices", 1), *sizes) > 1


def _lower(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec, tiles: Any = tiles) -> Any:
    anywhere = ctx.module_context.lowering_parameters.for_export
    num_devices, has_devices = devices_of(ctx)
    route = route_of(ctx.avals_in, num_devices, for_export=anywhere)
    if route.is_automatic and not has_devices and route.reason is None:
        reason = f"XLA partitions it over {', '.join(route.over)}, whose devices no lowering knows; {WAY_OUT}"
        route = dataclasses.replace(route, reason=reason)
    why_not = "implementation='xla'" if spec.implementation == "xla" else _machine_reason() or route.reason
    if why_not is not None:
        report(spec, why_not, strict=is_strict())
        return lower_xla(ctx, *arguments, spec=spec)
    # Now: XLA's partitioner calls back later, and on threads of its own.
    tiles = functools.partial(tiles, strict=is_strict(), anywhere=anywhere, yields=_is_of_several(ctx))
    if route.over:
        if route.is_automatic:
            tiles = functools.partial(tiles, key=key_of(ctx.avals_in, spec))
        lower = lower_automatic if route.is_automatic else lower_explicit
        return lower(ctx, *arguments, spec=spec, tiles=tiles)

    def whole(*arguments: jax.Array) -> list[jax.Array]:
        stores, reductions = tiles(*arguments, spec=spec)
        return outputs_of([*stores, *reductions], arguments, spec)

    return mlir.lower_fun(whole, multiple_results=True)(ctx, *arguments)


for _primitive in PRIMITIVES:
    mlir.register_lowering(_primitive, _lower, platform="cuda")


def kernel_tiles(
    *arguments: jax.Array, spec: GemmSpec, config: KernelConfig, yields: bool = False
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The custom call: the program's stores and reductions; `yields` as in `kernel.lower`."""
    stores, reductions = _matrix_tiles(flat_arguments(arguments, spec), flat_spec(spec), config, yields)
    return split_results(shaped_results([*stores, *reductions], FactorAxes.of(arguments, spec), spec), spec)


def _matrix_tiles(
    arguments: Sequence[jax.Array], spec: GemmSpec, config: KernelConfig, yields: bool
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The same of matrices and vectors."""
    if not _folds(spec):
        return _launch(arguments, spec, config, yields)
    batch, rows = spec.batch(arguments), arguments[0].shape[1]
    stores, reductions = _launch(_folded(*arguments, spec=spec), spec.unbatched(), config, yields)
    stores = [x.reshape(batch, rows, x.shape[-1]) for x in stores]
    return stores, [x.reshape(batch, rows) for x in reductions]


def kernel_form(*arguments: jax.Array, spec: GemmSpec, config: KernelConfig) -> list[jax.Array]:
    """The custom call, the finish of its reductions, and the outputs in f's order."""
    stores, reductions = kernel_tiles(*arguments, spec=spec, config=config)
    return outputs_of([*stores, *reductions], arguments, spec)


def _folds(spec: GemmSpec) -> bool:
    """Whether a batch may become rows of one product: what has it is indexed by rows, and no result mixes rows."""
    a_batched, b_batched, flags = spec.split(spec.batched)
    return (
        a_batched
        and not b_batched
        and not spec.transpose_a
        and all(reduction.axis is Axis.ROW for reduction in spec.program.reductions)
        and not any(node.op == "row" for node in spec.program.nodes)
        and all(
            flag if operand.kind is Kind.TILE else _has_rows(operand) or not flag
            for operand, flag in zip(spec.program.operands, flags, strict=True)
        )
    )


def _has_rows(operand: Operand) -> bool:
    """Whether it has a row for each of the product."""
    return operand.kind in (Kind.TILE, Kind.COLUMN_VECTOR, Kind.ROPE_TABLE) and not operand.period


def _folded(*arguments: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """The arguments with a's batch as rows."""
    a, b, operands = spec.split(arguments)
    batch, rows, k = a.shape
    flat = [_fold(x, operand, batch, rows) for x, operand in zip(operands, spec.program.operands, strict=True)]
    return [a.reshape(batch * rows, k), b, *flat]


def _fold(x: jax.Array, operand: Operand, batch: Any, rows: Any) -> jax.Array:
    if not _has_rows(operand):
        return x  # a table's rows repeat in the batch as they do in one product
    columns = x.shape[-1]
    if x.ndim == 2:  # a column vector that the batch shares
        x = jnp.broadcast_to(x, (batch, rows, columns))
    return x.reshape(batch * rows, columns)


def problem_of(avals: Sequence[Any], spec: GemmSpec) -> Problem:
    """The product that the lowering launches for arguments of these types."""
    types, spec = flat_types(avals, spec), flat_spec(spec)
    if _folds(spec):
        types = jax.eval_shape(functools.partial(_folded, spec=spec), *types)
        spec = spec.unbatched()
    a, b, _ = spec.split(types)
    m, n, k = spec.sizes(a, b)
    batch = spec.batch(types)
    shape = GemmShape(m, n, k, 1 if batch is None else batch, spec.transpose_b)
    return Problem(shape, spec.program, a.dtype, spec.store_dtypes, spec.transpose_a, spec.batched)


def _launch(
    arguments: Sequence[jax.Array], spec: GemmSpec, config: KernelConfig, yields: bool
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs the kernel; returns the stores, and the reductions finished over the tiles."""
    program = spec.program
    lowered = kernel.lower([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments], spec, config, yields=yields)
    ffi.compile_async(lowered.call.source, spec.name)
    position = {store.output: i for i, store in enumerate(program.stores)}
    aliases = {2 + operand: position[output] for operand, output in spec.input_output_aliases}
    taken = 0 if len(lowered.results) == 1 else len(program.stores) + len(program.reductions)
    with _latency(arguments, spec, config, taken):
        results = ffi.gemm_call(arguments, lowered.results, lowered.call, input_output_aliases=aliases)
    # The custom call's results are typed as varying over no mesh axis.
    results = vary(varying_axes(*arguments), *results)
    stores, partials = results[: len(program.stores)], results[len(program.stores) :]
    over_tiles = zip(program.reductions, partials, strict=False)  # the kernel's own come last
    return stores, [reduction.op.reduce(partial, partial.ndim - 2) for reduction, partial in over_tiles]


def _latency(
    arguments: Sequence[jax.Array], spec: GemmSpec, config: KernelConfig, taken: int
) -> contextlib.AbstractContextManager[Any]:
    """Tells XLA's scheduler how long a call takes, which knows no custom call: what runs beside it starts in time.

    Args:
      taken: how many operations take one of several results each. XLA gives these what is said of the call, and counts
        it again: each says its share.
    """
    expected = expected_nanoseconds(problem_of(arguments, spec), config, attached_device())
    if expected is None:
        return contextlib.nullcontext()
    return set_xla_metadata(latency_metadata=expected // (1 + taken))
