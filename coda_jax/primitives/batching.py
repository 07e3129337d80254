"""vmap of the primitive: a batch of rows becomes more rows; else a leading batch axis, and a flag for each argument."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching
from jax.sharding import NamedSharding

from coda_jax.epilogue import Axis
from coda_jax.epilogue.values import same_size
from coda_jax.primitives.gemm_primitive import PRIMITIVES, bind
from coda_jax.primitives.mesh_types import axes_of_dimension, explicit_cuts, partition_spec, with_sharding, without_axes
from coda_jax.primitives.spec import GemmSpec


def _batch(
    arguments: Sequence[jax.Array], dims: Sequence[int | None], *, spec: GemmSpec
) -> tuple[list[jax.Array], list[int]]:
    """Adds a batch axis, or merges it with the one already there, repeating arguments that lack one of the two."""
    mapped = [dim is not None for dim in dims]
    if spec.ragged is not None:
        return _one_by_one(arguments, dims, spec), [0] * len(spec.out_dtypes)
    new = next(x.shape[dim] for x, dim in zip(arguments, dims, strict=True) if dim is not None)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arguments, dims, strict=True)]
    more_rows = _as_rows(moved, mapped, spec)
    if more_rows is not None:
        row_arguments, row_spec = more_rows
        return bind(*row_arguments, spec=row_spec), [0] * len(spec.out_dtypes)
    if not any(spec.batched):
        return bind(*moved, spec=_batched(spec, mapped)), [0] * len(spec.out_dtypes)

    old = next(x.shape[is_mapped] for x, flag, is_mapped in zip(moved, spec.batched, mapped, strict=True) if flag)
    merged = [
        _merge(x, new, old, is_mapped, flag) if is_mapped or flag else x
        for x, is_mapped, flag in zip(moved, mapped, spec.batched, strict=True)
    ]
    flags = [is_mapped or flag for is_mapped, flag in zip(mapped, spec.batched, strict=True)]
    outputs = bind(*merged, spec=_batched(spec, flags))
    return [x.reshape(new, old, *x.shape[1:]) for x in outputs], [0] * len(outputs)


def _one_by_one(arguments: Sequence[jax.Array], dims: Sequence[int | None], spec: GemmSpec) -> list[jax.Array]:
    """A batch of products of groups, one after the other: each has its own groups, and so its own kernel.

    Over explicit mesh axes that shard the batch it is gathered, and the results are sharded by them again.
    """
    batch = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arguments, dims, strict=True) if dim is not None]
    cuts = next((cuts[0] for x in batch if (cuts := explicit_cuts(x))[0]), ())

    def one(batch: Sequence[jax.Array]) -> list[jax.Array]:
        rest = iter(batch)
        return bind(*(x if dim is None else next(rest) for x, dim in zip(arguments, dims, strict=True)), spec=spec)

    results: list[jax.Array] = jax.lax.map(one, [without_axes(x, 0, axes_of_dimension(x, 0)) for x in batch])
    return [_with_sharded_batch(x, cuts) for x in results] if cuts else results


def _with_sharded_batch(x: jax.Array, cuts: tuple[str, ...]) -> jax.Array:
    """x, whose first axis is sharded by these explicit mesh axes, and no other is."""
    others = [tuple(name for name in names if name not in cuts) for names in explicit_cuts(x)[1:]]
    return with_sharding(x, NamedSharding(jax.typeof(x).sharding.mesh, partition_spec([cuts, *others])))


def _as_rows(
    arguments: Sequence[jax.Array], mapped: Sequence[bool], spec: GemmSpec
) -> tuple[list[jax.Array], GemmSpec] | None:
    """The arguments and the spec of one product that computes a batch of a with one b; None where none does."""
    program, matrices = spec.program, spec.matrices
    flags = iter(mapped)
    a_flags, b_flags, *operand_flags = (
        [next(flags) for _ in pieces] for pieces in (matrices.a, matrices.b, *matrices.operands)
    )
    if not all(a_flags) or any(b_flags) or not _has_rows_alone(spec) or explicit_cuts(arguments[0])[0]:
        return None
    size, *rows = arguments[0].shape[: 1 + spec.axes.m]
    is_row = same_size(math.prod(rows), 1)
    operands, row_arguments, rest = [], list(arguments[: 1 + len(b_flags)]), iter(arguments[1 + len(b_flags) :])
    for operand, has_batch, pieces in zip(program.operands, operand_flags, matrices.operands, strict=True):
        row_operand = operand.kind.more_rows(operand, has_batch=all(has_batch), is_row=is_row)
        arrays = [next(rest) for _ in pieces]
        if row_operand is None or any(has_batch) != all(has_batch):
            return None
        if row_operand.kind is not operand.kind:  # an operand beside one row has no axis of rows
            axes = sum(axis.rank for axis in pieces[0])
            arrays = [x.reshape(size, *rows, *(x.shape[x.ndim - axes :] if axes else (1,))) for x in arrays]
        operands.append(row_operand)
        row_arguments += arrays
    row_axes = spec.axes._replace(m=spec.axes.m + 1)
    return row_arguments, spec.replace(program=dataclasses.replace(program, operands=tuple(operands)), axes=row_axes)


def _has_rows_alone(spec: GemmSpec) -> bool:
    """True if the results of a row of a depend neither on its number nor on other rows."""
    program, finishing = spec.program, spec.program.finishing
    if (
        any(spec.batched)
        or spec.symmetric
        or spec.transpose_a
        or spec.out_sharding is not None
        or len(spec.matrices.a) > 1
    ):
        return False
    if any(store.transposed for store in program.stores):
        return False
    if any(reduction.axis is not Axis.ROW for reduction in program.reductions) or finishing.equations:
        return False
    if any(source == "operand" for _, source, _ in finishing.inputs):
        return False
    is_finished = all(isinstance(atom, int) for _, atom in finishing.outputs)
    return is_finished and all(node.op != "row" for node in program.nodes)


def _merge(x: jax.Array, new: Any, old: Any, is_mapped: bool, has_old: bool) -> jax.Array:
    matrix = x.shape[is_mapped + has_old :]
    x = x.reshape(new if is_mapped else 1, old if has_old else 1, *matrix)
    return jnp.broadcast_to(x, (new, old, *matrix)).reshape(new * old, *matrix)


def _batched(spec: GemmSpec, batched: Sequence[bool]) -> GemmSpec:
    # An operand that all products of the batch share cannot be overwritten by a result of each.
    _, _, flags = spec.split(batched)
    aliases = tuple((operand, output) for operand, output in spec.input_output_aliases if flags[operand])
    return spec.replace(batched=tuple(batched), input_output_aliases=aliases)


for _primitive in PRIMITIVES:
    batching.primitive_batchers[_primitive] = _batch
