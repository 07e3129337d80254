"""The CUDA lowering: the kernel's custom call and the finish of its reductions, or the XLA form and why."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from coda_jax import ffi
from coda_jax.epilogue import Axis, Kind, Operand, Program
from coda_jax.primitives import kernel
from coda_jax.primitives.addressing import unsupported_reason
from coda_jax.primitives.gemm_primitive import coda_gemm_p, lower_xla
from coda_jax.primitives.mesh_types import partitioned_axes, vary, varying_axes
from coda_jax.primitives.notes import warn_once
from coda_jax.tiles.cost_model import Product
from coda_jax.tiles.table import Problem, attached_device, tiling_for

CAPABILITY = "9.0"


def fallback_reason(avals: Sequence[Any], params: dict[str, Any], num_devices: int) -> str | None:
    """Why this product takes the XLA form on the attached GPUs (on a Hopper GPU if there are none), or None.

    Args:
      avals, params: of the product's equation.
      num_devices: how many XLA partitions the program over, if its types are on no mesh.
    """
    if params["implementation"] == "xla":
        return "implementation='xla'"
    return _machine_reason() or _product_reason(avals, params) or _partition_reason(avals, params, num_devices)


def _machine_reason() -> str | None:
    try:
        devices = jax.devices("cuda")
    except RuntimeError:  # export and ahead-of-time compilation: the machine that runs it compiles the kernels
        return None
    other = {device.compute_capability for device in devices} - {CAPABILITY}
    if other:
        return f"the GPU has compute capability {min(other)}; the kernel needs {CAPABILITY} (Hopper)"
    return ffi.unavailable_reason()


def _product_reason(avals: Sequence[Any], params: dict[str, Any]) -> str | None:
    a, b = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals[:2])
    program = params["program"]
    dtypes = store_dtypes(program, params["out_dtypes"])
    return unsupported_reason(a, b, program, dtypes, params["transpose_a"], params["transpose_b"])


def _partition_reason(avals: Sequence[Any], params: dict[str, Any], num_devices: int) -> str | None:
    """Which parts of a program each device has only XLA knows; it would gather a kernel's arguments on all of them."""
    shardings = [aval.sharding for aval in avals]
    axes = partitioned_axes(*shardings, *filter(None, [params["out_sharding"]]))
    if axes:
        over = f"mesh axes {', '.join(axes)}"
    elif num_devices > 1 and all(sharding.mesh.empty for sharding in shardings):
        over = f"{num_devices} devices"
    else:
        return None
    return f"XLA partitions it over {over}; inside a jax.shard_map each device runs the kernel on its own part"


def store_dtypes(program: Program, out_dtypes: Sequence[np.dtype]) -> tuple[np.dtype, ...]:
    """Dtypes of the program's stores, from those of all flat outputs."""
    return tuple(out_dtypes[store.output] for store in program.stores)


def _lower(ctx: mlir.LoweringRuleContext, *arguments: Any, **params: Any) -> Any:
    num_devices = getattr(ctx.module_context.axis_context, "num_devices", 1)  # of a shard_map the types say it
    reason = fallback_reason(ctx.avals_in, params, num_devices)
    if reason is None:
        # What is exported runs anywhere: no table of this machine has a say in it.
        device = None if ctx.module_context.lowering_parameters.for_export else attached_device()
        form = functools.partial(kernel_form, device=device, **params)
        return mlir.lower_fun(form, multiple_results=True)(ctx, *arguments)
    if params["implementation"] == "cuda":
        raise NotImplementedError(f"gemm '{params['name']}': implementation='cuda' was asked for, but {reason}")
    if params["implementation"] == "auto":
        warn_once(f"gemm '{params['name']}' takes its XLA form: {reason}", reason, params["site"])
    return lower_xla(ctx, *arguments, **params)


mlir.register_lowering(coda_gemm_p, _lower, platform="cuda")


def kernel_form(
    a: jax.Array, b: jax.Array, *operands: jax.Array, batched: Sequence[bool], device: str | None, **params: Any
) -> list[jax.Array]:
    """The custom call, the finish of its reductions, and the outputs in f's order."""
    program, out_dtypes = params["program"], params["out_dtypes"]
    batch: Any = next((x.shape[0] for x, flag in zip((a, b, *operands), batched, strict=True) if flag), None)
    if _folds(program, batched, params["transpose_a"]):
        rows = a.shape[1]
        folded = _folded(a, b, *operands, program=program)
        stores, reductions = _launch(*folded, batched=(False,) * len(batched), device=device, **params)
        stores = [x.reshape(batch, rows, x.shape[-1]) for x in stores]
        reductions = [x.reshape(batch, rows) for x in reductions]
    else:
        stores, reductions = _launch(a, b, *operands, batched=batched, device=device, **params)

    finished: dict[int, jax.Array] = {}
    if program.finishing.outputs:
        axes = [0 if flag else None for flag in batched[2:]]
        finish = jax.vmap(program.finish, in_axes=(0, axes), axis_size=batch) if any(batched) else program.finish
        finished = finish(reductions, list(operands))
    outputs = finished | {store.output: x for store, x in zip(program.stores, stores, strict=True)}
    return [outputs[i].astype(dtype) for i, dtype in enumerate(out_dtypes)]


def _folds(program: Program, batched: Sequence[bool], transpose_a: bool) -> bool:
    """Whether a batch may become rows of one product: what has it is indexed by rows, and no result mixes rows."""
    a_batched, b_batched, *flags = batched
    return (
        a_batched
        and not b_batched
        and not transpose_a
        and all(reduction.axis is Axis.ROW for reduction in program.reductions)
        and not any(node.op == "row" for node in program.nodes)
        and all(
            flag if operand.kind is Kind.TILE else _has_rows(operand) or not flag
            for operand, flag in zip(program.operands, flags, strict=True)
        )
    )


def _has_rows(operand: Operand) -> bool:
    """Whether it has a row for each of the product."""
    return operand.kind in (Kind.TILE, Kind.COLUMN_VECTOR, Kind.HEAD_TABLE) and not operand.period


def _folded(a: jax.Array, b: jax.Array, *operands: jax.Array, program: Program) -> list[jax.Array]:
    """The arguments with a's batch as rows."""
    batch, rows, k = a.shape
    flat = [_fold(x, operand, batch, rows) for x, operand in zip(operands, program.operands, strict=True)]
    return [a.reshape(batch * rows, k), b, *flat]


def _fold(x: jax.Array, operand: Operand, batch: Any, rows: Any) -> jax.Array:
    if not _has_rows(operand):
        return x  # a table's rows repeat in the batch as they do in one product
    columns = x.shape[-1]
    if x.ndim == 2:  # a column vector that the batch shares
        x = jnp.broadcast_to(x, (batch, rows, columns))
    return x.reshape(batch * rows, columns)


def problem_of(avals: Sequence[Any], params: dict[str, Any]) -> Problem:
    """The product that the lowering launches for arguments of these types."""
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    batched, program = params["batched"], params["program"]
    if _folds(program, batched, params["transpose_a"]):
        types = jax.eval_shape(functools.partial(_folded, program=program), *types)
        batched = (False,) * len(batched)
    return _problem(types, batched, params)


def _problem(arguments: Sequence[Any], batched: Sequence[bool], params: dict[str, Any]) -> Problem:
    a, b, *_ = arguments
    transpose_a, transpose_b, program = params["transpose_a"], params["transpose_b"], params["program"]
    k, m = a.shape[-2:] if transpose_a else a.shape[:-3:-1]
    batch = next((x.shape[0] for x, flag in zip(arguments, batched, strict=True) if flag), 1)
    product = Product(m, b.shape[-2] if transpose_b else b.shape[-1], k, batch, transpose_b)
    dtypes = store_dtypes(program, params["out_dtypes"])
    return Problem(product, program, a.dtype, dtypes, transpose_a, tuple(batched))


def _launch(
    a: jax.Array,
    b: jax.Array,
    *operands: jax.Array,
    batched: Sequence[bool],
    config: Any,
    name: str,
    device: str | None,
    input_output_aliases: Sequence[tuple[int, int]],
    **params: Any,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Runs the kernel; returns the stores, and the reductions finished over the tiles."""
    problem = _problem((a, b, *operands), batched, params)
    program, dtypes = problem.program, problem.out_dtypes
    a_type, b_type, *operand_types = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (a, b, *operands))
    lowered = kernel.lower(
        program,
        a_type,
        b_type,
        operand_types,
        out_dtypes=dtypes,
        transpose_a=problem.transpose_a,
        transpose_b=problem.product.transpose_b,
        batched=batched,
        tiling=tiling_for(problem, config, device)[0],
        name=name,
    )
    ffi.compile_async(lowered.source, name)
    position = {store.output: i for i, store in enumerate(program.stores)}
    results = ffi.gemm_call(
        (a, b, *operands),
        lowered.results,
        source=lowered.source,
        input_output_aliases={2 + operand: position[output] for operand, output in input_output_aliases},
        **lowered.attributes,
    )
    # The custom call's results are typed as varying over no mesh axis.
    results = vary(varying_axes(a, b, *operands), *results)
    stores, partials = results[: len(dtypes)], results[len(dtypes) :]
    over_tiles = zip(program.reductions, partials, strict=False)  # split-K's come last
    return stores, [reduction.op.reduce(partial, partial.ndim - 2) for reduction, partial in over_tiles]
