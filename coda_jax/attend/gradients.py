"""Maps of attention's gradients that its kernels make in their place: the epilogues of dq, dk and dv.

dq (B, T, H, D), dk (B, T, K, D) and dv (B, T, K, Dv) are columns of one matrix (B T, N), N = (H + K) D + K Dv, or of
two, or are three matrices, and what is made of them are such matrices: each gradient has an epilogue
(`coda_jax.epilogue`) of its own, which sees its columns as a matrix, float32, with the values that it has as it would
be stored. Tiles are stored as (B, T, N), transposed ones as (N, B, T). Beside these there are reductions of each of
the three: along rows (B, T), along columns (H D,) or (K D,) or (K Dv,), and maxima ().
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import Axis, Program, ReductionOp, evaluate_tiles, finish
from coda_jax.epilogue.dtypes import FLOATS, TABLE, is_of_8_bits
from coda_jax.epilogue.halves import Width
from coda_jax.epilogue.program import Reduction

_MOST_ARRAYS = 16  # operands, stores and reductions of a program, which are parameters of the kernel
_OPERANDS = frozenset({"scalar", "column_vector", "rope_table", "head_vector", "tile"})


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The maps that are made of dq, dk and dv. Their operands are the last arguments of the primitive.

    Attributes:
      programs: of dq, of dk and of dv as epilogues, whose stores are columns of tiles; `unsupported` tells which may be
        ones.
      places: for each program the numbers of its operands among those of all.
      count: how many operands there are.
      members: for each tile the numbers of the gradients whose columns it has, one after the other: of dq 0, of dk 1,
        of dv 2. Two tiles have the same members, or none in common.
      dtypes: of the tiles.
    """

    programs: tuple[Program, Program, Program]
    places: tuple[tuple[int, ...], ...]
    count: int
    members: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    def shapes(self, q: Sequence[Any], v: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The shapes of the tiles, and then of the reductions, beside q and v of these shapes."""
        (batch, rows, heads, width), (key_heads, value_width) = q, v[2:]
        widths = (heads * width, key_heads * width, key_heads * value_width)
        columns = [sum(widths[i] for i in members) for members in self.members]
        tiles = [(n, batch, rows) if self.is_transposed(at) else (batch, rows, n) for at, n in enumerate(columns)]
        reductions = [
            {Axis.ALL: (), Axis.ROW: (batch, rows), Axis.COLUMN: (width,)}[reduction.axis]
            for program, width in zip(self.programs, widths, strict=True)
            for reduction in program.reductions
        ]
        return [*tiles, *reductions]

    @property
    def result_dtypes(self) -> list[np.dtype]:
        """The dtypes of the tiles, and then of the reductions."""
        return [*self.dtypes, *[np.dtype(np.float32)] * sum(len(program.reductions) for program in self.programs)]

    def tiles_of(self, which: int) -> list[int]:
        """The numbers of the tiles that one gradient has columns of, which its program's stores are, in their order."""
        return [at for at, members in enumerate(self.members) if which in members]

    def is_transposed(self, tile: int) -> bool:
        """Whether a tile is stored transposed."""
        which = self.members[tile][0]
        return self.programs[which].stores[self.tiles_of(which).index(tile)].transposed

    def join(self, columns: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """The tiles as matrices, from the columns of the three gradients: for each those of its tiles."""
        found = []
        for tile, members in enumerate(self.members):
            parts = [columns[i][self.tiles_of(i).index(tile)] for i in members]
            found.append(jnp.concatenate(parts, axis=0 if self.is_transposed(tile) else 1))
        return found

    @property
    def has_transposed(self) -> bool:
        """Whether a result is stored transposed."""
        return any(store.transposed for program in self.programs for store in program.stores)

    def operands_of(self, which: int, operands: Sequence[Any]) -> list[Any]:
        """The operands of one program, among those of all."""
        return [operands[place] for place in self.places[which]]

    def by_xla(self, gradients: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
        """The tiles and the reductions, from dq, dk and dv."""
        batch, rows = gradients[0].shape[:2]
        stores: list[list[jax.Array]] = []
        reductions: list[jax.Array] = []
        for i, (program, x) in enumerate(zip(self.programs, gradients, strict=True)):
            acc = as_matrix(x).astype(jnp.float32)
            tiles, reduced = evaluate_tiles(program, acc, *self.operands_of(i, operands))
            stores.append([x.astype(self.dtypes[tile]) for tile, x in zip(self.tiles_of(i), tiles, strict=True)])
            each = zip(reduced, program.reductions, strict=True)
            reductions += [x.reshape(batch, rows) if of.axis is Axis.ROW else x for x, of in each]
        made = [
            x.reshape(-1, batch, rows) if self.is_transposed(tile) else x.reshape(batch, rows, -1)
            for tile, x in enumerate(self.join(stores))
        ]
        return [*made, *reductions]

    def outputs(self, made: Sequence[jax.Array], operands: Sequence[jax.Array], rows: Any) -> list[jax.Array]:
        """The tiles as matrices, and then the other outputs of each program, from the tiles and the reductions.

        Args:
          rows: B T.
        """
        count = len(self.dtypes)
        found = [
            x.reshape(-1, rows) if self.is_transposed(tile) else x.reshape(rows, -1)
            for tile, x in enumerate(made[:count])
        ]
        reductions = iter(made[count:])
        for i, program in enumerate(self.programs):
            each = zip(program.reductions, reductions, strict=False)
            reduced = [x.reshape(rows) if of.axis is Axis.ROW else x for of, x in each]
            outputs = finish(program, reduced, self.operands_of(i, operands), rows)
            found += [outputs[number] for number in range(len(program.stores), program.num_outputs)]
        return found


def with_gradients(
    found: Sequence[jax.Array], operands: Sequence[jax.Array], gradients: Gradients | None
) -> list[jax.Array]:
    """dq, dk, dv and what follows them, with what is made of these in their place, by XLA."""
    return list(found) if gradients is None else [*gradients.by_xla(found[:3], operands), *found[3:]]


def as_matrix(x: jax.Array) -> jax.Array:
    """x (B, T, H, D) as (B T, H D)."""
    batch, rows, heads, width = x.shape
    return x.reshape(batch * rows, heads * width)


def unsupported(program: Program, dtypes: Sequence[np.dtype], width: Any, count: int) -> str | None:
    """Why a program, whose stores have these dtypes, is no epilogue of attention's gradients; None if it is one.

    Args:
      width: of a head of the gradient.
      count: of the outputs that are tiles, which are the first ones.
    """
    reasons = (_of_operands(program), _of_columns(program, width), _of_results(program, dtypes, count))
    return next((reason for reason in reasons if reason is not None), None)


def _of_operands(program: Program) -> str | None:
    read = [operand for i, operand in enumerate(program.operands) if program.loads(i)]
    kinds = {operand.kind.word for operand in read} - _OPERANDS
    if kinds:
        return f"it reads a {min(kinds)}"
    for i in program.tile_operands:
        operand = program.operands[i]
        if operand.width is not Width.FULL or TABLE[operand.dtype.name].bytes != 2:
            return f"it reads a tile of {operand.dtype}"
    if len(program.operands) + len(program.stores) + len(program.reductions) > _MOST_ARRAYS:
        return f"it has more than {_MOST_ARRAYS} arrays"
    return None


def _of_columns(program: Program, width: Any) -> str | None:
    halves = program.halves
    if program.columns or {"row", "column"} & {node.op for node in program.nodes}:
        return "it takes columns apart, or reads the position of an element"
    is_of_head = halves.head == width and not halves.interleaved and halves.acc_halves == halves.count
    if halves.count > 1 and not (is_of_head and width % 64 == 0):
        return "it combines or reduces columns of other heads than of 64 or 128, or adjacent ones"
    return None


def _of_results(program: Program, dtypes: Sequence[np.dtype], count: int) -> str | None:
    if not all(map(_is_made, program.reductions)):
        return "it has a reduction other than those along rows, sums along columns, and the maximum of all"
    if [store.output for store in program.stores] != list(range(count)):
        return "an output is no tile"
    for store, dtype in zip(program.stores, dtypes, strict=True):
        if store.contraction_order or store.width is not Width.FULL:
            return "it stores in another order, or half of the columns"
        if not is_of_8_bits(dtype) and (store.transposed or dtype.name not in FLOATS):
            return f"it stores {dtype}{' transposed' * store.transposed}"
    return None


def _is_made(reduction: Reduction) -> bool:
    """Whether the kernels reduce so."""
    ops = {
        Axis.ROW: (ReductionOp.SUM, ReductionOp.MAX, ReductionOp.MIN),
        Axis.COLUMN: (ReductionOp.SUM,),
        Axis.ALL: (ReductionOp.MAX,),
    }
    return reduction.width is Width.FULL and reduction.op in ops[reduction.axis]
