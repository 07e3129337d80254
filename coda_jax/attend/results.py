"""Maps of attention's result that its kernel makes beside it: the epilogue of y.

An epilogue (`coda_jax.epilogue`) sees y (B, T, H, Dv) as a matrix (B T, H Dv), float32, with the values that y has as
it is stored. Its tiles are stored as (B, T, H, Dv), transposed ones as (H, Dv, B, T), so that a mesh may shard each
axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import Axis, Program, ReductionOp, evaluate_tiles, finish
from coda_jax.epilogue.dtypes import FLOATS, is_of_8_bits

_MOST_ARRAYS = 16  # scalars, stores and reductions, which are parameters of the kernel


@dataclasses.dataclass(frozen=True)
class Results:
    """The maps that are made of y beside it. Their operands are the last arguments of the primitive.

    Attributes:
      program: of the maps as an epilogue; `unsupported` tells which may be one.
      dtypes: of the program's stores.
      keeps_y: whether y itself is a result.
    """

    program: Program
    dtypes: tuple[np.dtype, ...]
    keeps_y: bool = True

    @property
    def count(self) -> int:
        """The number of operands."""
        return len(self.program.operands)

    def shapes(self, y: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The shapes of the stores, and then of the reductions, beside y of this shape."""
        batch, rows, heads, width = y
        tiles = [(heads, width, batch, rows) if x.transposed else tuple(y) for x in self.program.stores]
        return [*tiles, *[()] * len(self.program.reductions)]

    @property
    def result_dtypes(self) -> list[np.dtype]:
        """The dtypes of the stores, and then of the reductions."""
        return [*self.dtypes, *[np.dtype(np.float32)] * len(self.program.reductions)]

    def by_xla(self, y: jax.Array, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The stores and the reductions, from y."""
        batch, rows, heads, width = y.shape
        acc = y.astype(jnp.float32).reshape(batch * rows, heads * width)
        stores, reductions = evaluate_tiles(self.program, acc, *operands)
        shapes = self.shapes(y.shape)
        each = zip(stores, shapes, self.dtypes, strict=False)
        return [*(x.reshape(shape).astype(dtype) for x, shape, dtype in each), *reductions]

    def beside(self, y: jax.Array, lse: jax.Array, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """All results of the forward primitive, from y and lse, by XLA."""
        return [*([y] if self.keeps_y else []), lse, *self.by_xla(y, operands)]

    def outputs(self, made: Sequence[jax.Array], operands: Sequence[jax.Array], y: Sequence[Any]) -> list[jax.Array]:
        """The program's flat outputs, matrices and vectors, from the stores and reductions beside y of this shape."""
        batch, rows, heads, width = y
        program, count = self.program, len(self.program.stores)
        found = finish(program, made[count:], operands, batch * rows)
        for store, x in zip(program.stores, made, strict=False):
            shape = (heads * width, batch * rows) if store.transposed else (batch * rows, heads * width)
            found[store.output] = x.reshape(shape)
        return [found[i] for i in range(program.num_outputs)]

    @property
    def has_transposed(self) -> bool:
        """Whether a result is stored transposed."""
        return any(store.transposed for store in self.program.stores)


def unsupported(program: Program, dtypes: Sequence[np.dtype]) -> str | None:
    """Why a program, whose stores have these dtypes, is no epilogue of attention's kernels; None if it is one."""
    kinds = {operand.kind.word for operand in program.operands} - {"scalar"}
    if kinds:
        return f"it reads a {min(kinds)} beside scalars"
    if program.halves.count > 1 or program.columns or program.head_levels:
        return "it takes columns apart, or reduces heads"
    if {"row", "column"} & {node.op for node in program.nodes}:
        return "it reads the position of an element"
    if any(x.axis is not Axis.ALL or x.op is not ReductionOp.MAX for x in program.reductions):
        return "it has a reduction other than the maximum of all elements"
    if any(store.contraction_order for store in program.stores):
        return "it stores in contraction order"
    for store, dtype in zip(program.stores, dtypes, strict=True):
        if store.transposed and not is_of_8_bits(dtype):
            return f"it stores {dtype} transposed"
        if not is_of_8_bits(dtype) and dtype.name not in FLOATS:
            return f"it stores {dtype}"
    if len(program.operands) + len(program.stores) + len(program.reductions) > _MOST_ARRAYS:
        return f"it has more than {_MOST_ARRAYS} arrays"
    return None
