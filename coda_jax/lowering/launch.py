"""The kernel's custom call: a batch that is more rows, the call's latency for XLA, and the finish over its tiles."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from coda_jax import ffi
from coda_jax.epilogue import Axis, Operand
from coda_jax.lowering import kernel
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.mesh_types import vary, varying_axes
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.config import KernelConfig
from coda_jax.tiles.cost_model import GemmShape
from coda_jax.tiles.table import Problem, attached_device, expected_nanoseconds


def kernel_tiles(
    *arguments: jax.Array, spec: GemmSpec, config: KernelConfig, yields: bool = False
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The kernel's custom call: the program's stores, and its reductions finished over the tiles.

    Args:
      yields: as in `kernel.lower`.
    """
    matrices, flat = spec.matrices, spec.matrices.flatten(arguments)
    spec = matrices.spec_of_matrices
    is_folded, batch, rows = folds(spec), spec.batch(flat), flat[0].shape[1]
    if is_folded:
        flat, spec = _folded(*flat, spec=spec), spec.unbatched()
    program = spec.program
    lowered = kernel.lower([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat], spec, config, yields=yields)
    ffi.compile_async(lowered.call.source, spec.name, lowered.call.arch)
    position = {store.output: i for i, store in enumerate(program.stores)}
    aliases = {2 + operand: position[output] for operand, output in spec.input_output_aliases}
    taken = 0 if len(lowered.results) == 1 else len(program.stores) + len(program.reductions)
    with _latency(flat, spec, config, taken):
        results = ffi.gemm_call(flat, lowered.results, lowered.call, input_output_aliases=aliases)
    # The custom call's results are typed as varying over no mesh axis.
    results = vary(varying_axes(*flat), *results)
    stores, partials = results[: len(program.stores)], results[len(program.stores) :]
    over_tiles = zip(program.reductions, partials, strict=False)  # the kernel's own come last
    reductions = [kernel.finished(reduction, partial) for reduction, partial in over_tiles]
    if is_folded:
        stores = [x.reshape(batch, rows, x.shape[-1]) for x in stores]
        reductions = [x.reshape(batch, rows) for x in reductions]
    return matrices.split_results(matrices.unflatten_results([*stores, *reductions], matrices.factor_sizes(arguments)))


def problem_of(avals: Sequence[Any], spec: GemmSpec) -> Problem:
    """The product that the lowering launches for arguments of these types."""
    types, spec = spec.matrices.flat_types(avals), spec.matrices.spec_of_matrices
    if folds(spec):
        types = jax.eval_shape(functools.partial(_folded, spec=spec), *types)
        spec = spec.unbatched()
    a, b, _ = spec.split(types)
    m, n, k = spec.sizes(a, b)
    batch = spec.batch(types)
    groups = spec.num_groups(types)
    if spec.ragged is Dimension.K:
        batch, k = groups, -(-k // groups)
    shape = GemmShape(
        m,
        n,
        k,
        1 if batch is None else batch,
        spec.transpose_b,
        a.dtype.itemsize,
        spec.ragged.value if spec.ragged else "",
        groups,
        spec.symmetric,
    )
    return Problem(
        shape,
        spec.program,
        a.dtype,
        spec.store_dtypes,
        spec.transpose_a,
        spec.batched,
        None if b.dtype == a.dtype else b.dtype,
    )


def folds(spec: GemmSpec) -> bool:
    """True if a batch may become rows of one product: what has it is indexed by rows, and no result mixes rows."""
    a_batched, b_batched, flags = spec.split(spec.batched)
    return (
        a_batched
        and not b_batched
        and not spec.transpose_a
        and not spec.symmetric
        and all(reduction.axis is Axis.ROW for reduction in spec.program.reductions)
        and not any(store.transposed for store in spec.program.stores)
        and not any(node.op == "row" for node in spec.program.nodes)
        and all(
            operand.kind.folds(operand, has_batch=flag)
            for operand, flag in zip(spec.program.operands, flags, strict=True)
        )
    )


def _folded(*arguments: jax.Array, spec: GemmSpec) -> list[jax.Array]:
    """The arguments with a's batch as rows."""
    a, b, operands = spec.split(arguments)
    batch, rows, k = a.shape
    flat = [_fold(x, operand, batch, rows) for x, operand in zip(operands, spec.program.operands, strict=True)]
    return [a.reshape(batch * rows, k), b, *flat]


def _fold(x: jax.Array, operand: Operand, batch: Any, rows: Any) -> jax.Array:
    if not operand.has_rows:
        return x  # a table's rows repeat in the batch as they do in one product
    columns = x.shape[-1]
    if x.ndim == 2:  # a column vector that the batch shares
        x = jnp.broadcast_to(x, (batch, rows, columns))
    return x.reshape(batch * rows, columns)


def _latency(
    arguments: Sequence[jax.Array], spec: GemmSpec, config: KernelConfig, taken: int
) -> contextlib.AbstractContextManager[Any]:
    """Gives XLA's scheduler the cost of a custom call, which has none: whatever runs beside it starts in time.

    Args:
      taken: how many operations take one of several results each. XLA gives these what is said of the call, and counts
        it again: each says its share.
    """
    expected = expected_nanoseconds(problem_of(arguments, spec), config, attached_device())
    if expected is None:
        return contextlib.nullcontext()
    return set_xla_metadata(latency_metadata=expected // (1 + taken))
