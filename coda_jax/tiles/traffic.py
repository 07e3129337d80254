"""The traffic and arithmetic of an epilogue for each element, and the shared memory and registers that it needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coda_jax.epilogue import Axis, Program, ReductionOp
from coda_jax.tiles.arch import current
from coda_jax.tiles.config import KernelConfig

CLAIMS_BYTES = 16 * 12  # of a kernel that claims its tiles (cuda/claims.cuh)
_LIGHT_NODES = 7  # up to so many nodes for an element, registers are plenty and time is short
# The relative time of each operation that has been measured in a cooperative tile; a logistic has two slow
# instructions. `Operation.instructions` has the number of instructions instead.
_TIMED = dict.fromkeys(("acc", "operand", "literal", "row", "column"), 0) | dict.fromkeys((
    "add", "add_any", "sub", "mul", "square", "integer_pow", "neg", "abs", "max", "min", "clamp", "eq", "ne", "lt",
    "le", "gt", "ge", "and", "or", "xor", "not", "select_n", "convert_element_type",
), 1) | {"logistic": 6}  # fmt: skip
_TIMED_WITH_HEADS = _TIMED | {"head_sum": 1, "div": 4, "rsqrt": 4}


@dataclasses.dataclass(frozen=True)
class EpilogueTraffic:
    """The traffic of an epilogue.

    Attributes:
      load_bytes, store_bytes: of its tiles, for one column of each run of columns; see `Halves.runs`.
      transposed_bytes: of transposed results, for one such column.
      widest_bytes, narrowest_bytes: of an element of a tile that is not transposed, at least and at most two.
      column_reductions, vectors_over_columns: counts; two halves count twice, but even and odd columns once.
    """

    load_bytes: int
    store_bytes: int
    transposed_bytes: int
    widest_bytes: int
    narrowest_bytes: int
    column_reductions: int
    vectors_over_columns: int

    @classmethod
    def of(cls, program: Program, out_dtypes: Sequence[np.dtype]) -> EpilogueTraffic:
        loads = [
            np.dtype(program.operands[i].dtype).itemsize for i in program.tile_operands for _ in program.loaded_runs(i)
        ]
        straight = {
            i: np.dtype(dtype).itemsize
            for i, (dtype, store) in enumerate(zip(out_dtypes, program.stores, strict=True))
            if not store.transposed
        }
        # Boxes of 4-byte elements begin at multiples of 1024 bytes: beside them, 1-byte elements have the room of 2.
        least = 2 if 4 in straight.values() else 1
        section_bytes = [
            sum(
                max(least, straight[i]) * program.halves.runs(program.stores[i].width)
                for i in program.stores_of(section)
                if i in straight
            )
            for section in program.sections
        ]
        transposed = sum(
            np.dtype(dtype).itemsize * program.halves.runs(store.width)
            for dtype, store in zip(out_dtypes, program.stores, strict=True)
            if store.transposed or program.symmetric
        )
        tiles = [*loads, *straight.values(), 2]
        columns = sum(
            program.halves.runs(reduction.width) for reduction in program.reductions if reduction.axis is Axis.COLUMN
        )
        vectors = sum(len(program.loaded_runs(i)) for i, x in enumerate(program.operands) if x.kind.in_shared_memory)
        return cls(sum(loads), max(section_bytes), transposed, max(tiles), min(tiles), columns, vectors)


class ElementTraffic(NamedTuple):
    """The work of an epilogue for one element of the accumulator, as the cost model counts it.

    Attributes:
      load_bytes, store_bytes: of tiles.
      column_reductions: reductions along columns.
      is_long: whether it is about as long as the other warpgroup's products, which then do not hide it.
      arithmetic: instructions, for tiles in which nothing hides them: 0 if its loads and stores hide them, infinite if
        they have not been timed.
      has_heads: whether it works on heads.
    """

    load_bytes: float
    store_bytes: float
    column_reductions: float
    is_long: bool
    arithmetic: float
    has_heads: bool


def element_traffic(program: Program, traffic: EpilogueTraffic) -> ElementTraffic:
    """The cost model's numbers for an epilogue."""
    runs = program.halves.runs(program.halves.acc)
    return ElementTraffic(
        load_bytes=traffic.load_bytes / runs,
        store_bytes=(traffic.store_bytes + traffic.transposed_bytes) / runs,
        column_reductions=traffic.column_reductions / runs,
        is_long=has_long_epilogue(program, traffic),
        arithmetic=_arithmetic(program),
        has_heads=program.halves.head > 0,
    )


def _arithmetic(program: Program) -> float:
    """`ElementTraffic.arithmetic`, of the section of columns that has most.

    The operations of `_TIMED` have been timed, in programs that store tiles; with heads, only programs whose tables
    cooperative tiles keep.
    """
    operation_times = _TIMED_WITH_HEADS if program.halves.head else _TIMED
    if not program.stores or has_logsumexp(program):
        return math.inf
    if program.halves.head and not all(keeps_tables(program, size) for size in current().cooperative_tiles):
        return math.inf
    reduced = [value for reduction in program.reductions for value in reduction.values]
    section_times = []
    for section in program.sections:
        stored = [value for i in program.stores_of(section) for value in program.stores[i].values]
        section_times.append(
            [operation_times.get(program.nodes[i].op, math.inf) for i in program.needed([*reduced, *stored])]
        )
    is_light = (
        not program.halves.head and has_few_nodes(program) and all(x <= 1 for times in section_times for x in times)
    )
    return 0.0 if is_light else max(map(sum, section_times)) / program.halves.acc_halves


def has_few_nodes(program: Program) -> bool:
    return len(program.nodes) <= _LIGHT_NODES * program.halves.runs(program.halves.acc)


def has_long_epilogue(program: Program, traffic: EpilogueTraffic) -> bool:
    return program.halves.count == 2 and traffic.load_bytes > 0 and not program.halves.head


def has_logsumexp(program: Program) -> bool:
    return any(reduction.op is ReductionOp.LOGSUMEXP for reduction in program.reductions)


def shared_bytes(config: KernelConfig, program: Program, traffic: EpilogueTraffic, groups: int = 0) -> int:
    """Shared memory of a kernel in bytes; the kernel asserts that its own count is the same (SharedLayout).

    Args:
      groups: of a grouped product; 0 for any other.
    """
    arch = current()
    operands = config.stages * (config.tile_m + config.tile_n) * arch.row_bytes
    load_ring = config.load_slots * 64 * config.box_n * traffic.load_bytes
    store_rings = 4 * config.store_slots * 16 * config.box_n * traffic.store_bytes
    transposed = config.store_slots * config.consumer_m * config.box_n * traffic.transposed_bytes
    # Column reductions of four warps; vectors of a tile and of the next.
    columns = config.tile_n // program.halves.runs(program.halves.acc)
    over_columns = (traffic.column_reductions * 4 + traffic.vectors_over_columns * 2) * columns * 4
    epilogue = _round_up(transposed + load_ring + store_rings + over_columns, 1024)
    barriers = 16 * config.stages + arch.consumers * 16 * (config.load_slots if traffic.load_bytes else 1)
    return operands + arch.consumers * epilogue + barriers + (_group_table_bytes(groups) if groups else 0)


def _group_table_bytes(groups: int) -> int:
    """The bytes of `GroupTable` in cuda/grouped_scheduler.cuh."""
    segments = groups + 2
    return _round_up(4 * (groups + 1 + segments + 1 + 32), 16)


def keeps_tables(program: Program, size: tuple[int, int]) -> bool:
    """Whether a tile's words of rope tables are loaded before its products and kept in registers.

    Cooperative tiles do so if registers have room beside the accumulator: nothing hides the loads of each head there, 2
    to 7 % of a product. In other tiles the other consumer's products hide them, and loading ahead costs 1 to 3 %.
    """
    arch = current()
    if size not in arch.cooperative_tiles:
        return False
    blocks, tile_n = size[0] // arch.consumers // 64, size[1]
    # A table of 16 bits counts twice, as the assembler keeps its words both packed and widened.
    tables = sum(
        len(program.loads(i)) * (4 // np.dtype(one.dtype).itemsize)
        for i, one in enumerate(program.operands)
        if one.kind.is_kept
    )
    # A thread has two of a block's 64 rows, and two of every eight columns of each half of a head.
    return tables > 0 and blocks * (tile_n // 2 + tables * program.halves.head // 4) <= arch.kept_registers


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
