"""vmap of the primitive: one leading batch axis, with a flag for each argument that has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from coda_jax.primitives.gemm_primitive import PRIMITIVES, bind
from coda_jax.primitives.spec import GemmSpec


def _batch(
    arguments: Sequence[jax.Array], dims: Sequence[int | None], *, spec: GemmSpec
) -> tuple[list[jax.Array], list[int]]:
    """Adds a batch axis, or merges it with the one already there, repeating what lacks one of the two."""
    mapped = [dim is not None for dim in dims]
    new = next(x.shape[dim] for x, dim in zip(arguments, dims, strict=True) if dim is not None)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arguments, dims, strict=True)]
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


def _merge(x: jax.Array, new: Any, old: Any, is_mapped: bool, has_old: bool) -> jax.Array:
    matrix = x.shape[is_mapped + has_old :]
    x = x.reshape(new if is_mapped else 1, old if has_old else 1, *matrix)
    return jnp.broadcast_to(x, (new, old, *matrix)).reshape(new * old, *matrix)


def _batched(spec: GemmSpec, batched: Sequence[bool]) -> GemmSpec:
    # An operand that all products of the batch share cannot take the place of a result of each.
    _, _, flags = spec.split(batched)
    aliases = tuple((operand, output) for operand, output in spec.input_output_aliases if flags[operand])
    return spec.replace(batched=tuple(batched), input_output_aliases=aliases)


for _primitive in PRIMITIVES:
    batching.primitive_batchers[_primitive] = _batch
