"""The kernels' side of `Gradients`: the epilogue of one of dq, dk and dv, its parameters, and what it reduces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.attend.gradients import Gradients
from coda_jax.epilogue import Axis, Program
from coda_jax.epilogue import emit as emit_epilogue
from coda_jax.epilogue.dtypes import is_of_8_bits


@dataclasses.dataclass(frozen=True)
class Joined:
    """The epilogue of one gradient, as `Results` of cuda/attention_results.cuh takes it.

    Attributes:
      dtypes: of its stores.
      members: the gradients whose columns its tiles have.
    """

    program: Program
    dtypes: tuple[np.dtype, ...]
    members: tuple[int, ...]

    @classmethod
    def of(cls, gradients: Gradients, which: int) -> Joined:
        """The epilogue of dq, of dk or of dv: 0, 1 or 2."""
        tiles = gradients.tiles_of(which)
        dtypes = tuple(gradients.dtypes[tile] for tile in tiles)
        return cls(gradients.programs[which], dtypes, gradients.members[tiles[0]])

    def pointers(self, operands: Sequence[int], reductions: Sequence[int], stores: Sequence[int]) -> list[int]:
        """The buffers, from those of its operands, of its reductions and of the stores."""
        tiles = [operands[i] for i in self.program.tile_operands]
        return [*(operands[i] for i in self._others), *reductions, *tiles, *stores]

    @property
    def _others(self) -> list[int]:
        return [i for i, operand in enumerate(self.program.operands) if not operand.kind.by_tensor_map]

    @property
    def config(self) -> dict[str, Any]:
        """Members of a Config."""
        program = self.program
        first = len(self._others) + len(program.reductions)
        return {"result_pointers": first + len(program.tile_operands) + len(program.stores), "first_store": first}

    def text(self) -> str:
        """The definition of the Epilogue."""
        return emit_epilogue(self.program, self.dtypes, [False] * len(self.program.operands))

    def reduction_types(self, x: Sequence[Any], words: Any) -> list[Any]:
        """Types of what the kernel reduces of a gradient of this shape, of its heads.

        They are a number of each row, a row of each warp along columns, or a number of each warp.

        Args:
          words: how many warps store something of a head.
        """
        batch, rows, heads, width = x
        shapes = {
            Axis.ROW: (batch, rows, heads),
            Axis.COLUMN: (batch, heads, words, width),
            Axis.ALL: (batch, heads, words),
        }
        return [jax.ShapeDtypeStruct(shapes[of.axis], jnp.float32) for of in self._reductions]

    def reduced(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The reductions, (B, T), (H D,) or (), from what the kernel reduces."""
        axes = {Axis.ROW: 2, Axis.COLUMN: (0, 2), Axis.ALL: (0, 1, 2)}
        each = zip(self._reductions, arrays, strict=True)
        made = ((of.axis, of.op.reduce(x, axes[of.axis])) for of, x in each)
        return [x.reshape(-1) if axis is Axis.COLUMN else x for axis, x in made]

    @property
    def columns(self) -> dict[str, bool]:
        """Members of a Config: whose columns the tiles have."""
        return {name: i in self.members for i, name in enumerate(("has_queries", "has_keys", "has_values"))}

    @property
    def _reductions(self) -> Sequence[Any]:
        return self.program.reductions


def can_be_made(gradients: Gradients, q: Any, k: Any, v: Any, splits: Any) -> bool:
    """Whether the kernels can make these of the gradients of such arrays.

    Queries and keys are as many, and dk and dv are not summed from parts. Of 8 bits heads, and rows that are stored
    transposed, are of whole 16 bytes, which no other head or sequence shares.
    """
    rows, heads, key_heads = q.shape[1], q.shape[2], k.shape[2]
    is_joined = tuple(q.shape[:2]) == tuple(k.shape[:2]) and splits == 1
    is_static = isinstance(heads, int) and isinstance(key_heads, int)
    has_whole_heads = q.shape[3] % 16 == v.shape[3] % 16 == 0 or not any(map(is_of_8_bits, gradients.dtypes))
    has_whole_rows = not gradients.has_transposed or (isinstance(rows, int) and rows % 16 == 0)
    return is_joined and is_static and has_whole_heads and has_whole_rows
