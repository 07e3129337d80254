"""The CUDA lowering: the kernel's custom call and the finish of its reductions, or the XLA form and why."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from coda_jax import ffi
from coda_jax.epilogue import Axis, Kind, Operand, finish
from coda_jax.primitives import kernel
from coda_jax.primitives.addressing import unsupported_reason
from coda_jax.primitives.gemm_primitive import coda_gemm_p, lower_xla
from coda_jax.primitives.mesh_types import partitioned_axes, vary, varying_axes
from coda_jax.primitives.notes import warn_once
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.config import KernelConfig
from coda_jax.tiles.cost_model import GemmShape
from coda_jax.tiles.table import Problem, attached_device, config_for

CAPABILITY = "9.0"


@dataclasses.dataclass(frozen=True)
class Selection:
    """What a product is lowered to on a GPU.

    Attributes:
      reason: why it takes the XLA form; None where it is the kernel.
      config: of the kernel.
      origin: who says so, as `config_for`.
    """

    reason: str | None = None
    config: KernelConfig | None = None
    origin: str = ""


def select(avals: Sequence[Any], spec: GemmSpec, num_devices: int, *, anywhere: bool = False) -> Selection:
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
    reason = _machine_reason() or unsupported_reason(avals, spec) or _partition_reason(avals, spec, num_devices)
    if reason is not None:
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


def _machine_reason() -> str | None:
    try:
        devices = jax.devices("cuda")
    except RuntimeError:  # export and ahead-of-time compilation: the machine that runs it compiles the kernels
        return None
    other = {device.compute_capability for device in devices} - {CAPABILITY}
    if other:
        return f"the GPU has compute capability {min(other)}; the kernel needs {CAPABILITY} (Hopper)"
    return ffi.unavailable_reason()


def _partition_reason(avals: Sequence[Any], spec: GemmSpec, num_devices: int) -> str | None:
    """Which parts of a program each device has only XLA knows; it would gather a kernel's arguments on all of them."""
    shardings = [aval.sharding for aval in avals]
    axes = partitioned_axes(*shardings, *filter(None, [spec.out_sharding]))
    if axes:
        over = f"mesh axes {', '.join(axes)}"
    elif num_devices > 1 and all(sharding.mesh.empty for sharding in shardings):
        over = f"{num_devices} devices"
    else:
        return None
    return f"XLA partitions it over {over}; inside a jax.shard_map each device runs the kernel on its own part"


def _lower(ctx: mlir.LoweringRuleContext, *arguments: Any, spec: GemmSpec) -> Any:
    num_devices = getattr(ctx.module_context.axis_context, "num_devices", 1)  # of a shard_map the types say it
    choice = select(ctx.avals_in, spec, num_devices, anywhere=ctx.module_context.lowering_parameters.for_export)
    if choice.config is not None:
        form = functools.partial(kernel_form, spec=spec, config=choice.config)
        return mlir.lower_fun(form, multiple_results=True)(ctx, *arguments)
    if spec.implementation == "cuda":
        raise NotImplementedError(f"gemm '{spec.name}': implementation='cuda' was asked for, but {choice.reason}")
    if spec.implementation == "auto":
        message = f"takes its XLA form: {choice.reason}"
        warn_once(f"gemm '{spec.name}' {message}", message, spec.site)
    return lower_xla(ctx, *arguments, spec=spec)


mlir.register_lowering(coda_gemm_p, _lower, platform="cuda")


def kernel_form(*arguments: jax.Array, spec: GemmSpec, config: KernelConfig) -> list[jax.Array]:
    """The custom call, the finish of its reductions, and the outputs in f's order."""
    program, batch = spec.program, spec.batch(arguments)
    if _folds(spec):
        rows = arguments[0].shape[1]
        stores, reductions = _launch(_folded(*arguments, spec=spec), spec.unbatched(), config)
        stores = [x.reshape(batch, rows, x.shape[-1]) for x in stores]
        reductions = [x.reshape(batch, rows) for x in reductions]
    else:
        stores, reductions = _launch(arguments, spec, config)

    finished: dict[int, jax.Array] = {}
    if program.finishing.outputs:
        _, _, operands = spec.split(arguments)
        _, _, flags = spec.split(spec.batched)
        one = functools.partial(finish, program)
        axes = [0 if flag else None for flag in flags]
        each = jax.vmap(one, in_axes=(0, axes), axis_size=batch) if any(spec.batched) else one
        finished = each(reductions, operands)
    outputs = finished | {store.output: x for store, x in zip(program.stores, stores, strict=True)}
    return [outputs[i].astype(dtype) for i, dtype in enumerate(spec.out_dtypes)]


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
    return operand.kind in (Kind.TILE, Kind.COLUMN_VECTOR, Kind.HEAD_TABLE) and not operand.period


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
    types: Sequence[Any] = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    if _folds(spec):
        types = jax.eval_shape(functools.partial(_folded, spec=spec), *types)
        spec = spec.unbatched()
    a, b, _ = spec.split(types)
    m, n, k = spec.sizes(a, b)
    batch = spec.batch(types)
    shape = GemmShape(m, n, k, 1 if batch is None else batch, spec.transpose_b)
    return Problem(shape, spec.program, a.dtype, spec.store_dtypes, spec.transpose_a, spec.batched)


def _launch(
    arguments: Sequence[jax.Array], spec: GemmSpec, config: KernelConfig
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs the kernel; returns the stores, and the reductions finished over the tiles."""
    program = spec.program
    lowered = kernel.lower([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments], spec, config)
    ffi.compile_async(lowered.call.source, spec.name)
    position = {store.output: i for i, store in enumerate(program.stores)}
    aliases = {2 + operand: position[output] for operand, output in spec.input_output_aliases}
    results = ffi.gemm_call(arguments, lowered.results, lowered.call, input_output_aliases=aliases)
    # The custom call's results are typed as varying over no mesh axis.
    results = vary(varying_axes(*arguments), *results)
    stores, partials = results[: len(program.stores)], results[len(program.stores) :]
    over_tiles = zip(program.reductions, partials, strict=False)  # split-K's come last
    return stores, [reduction.op.reduce(partial, partial.ndim - 2) for reduction, partial in over_tiles]
