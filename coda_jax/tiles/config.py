"""How a kernel is cut: tile sizes, pipeline depths, and what fits into shared memory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from coda_jax.epilogue import Axis, Kind, Program, ReductionOp, instructions
from coda_jax.tiles.cost_model import (
    SHARED_TILES,
    Constants,
    Cut,
    ElementTraffic,
    Product,
    best_first,
    by_time,
    constants_in_use,
    cost,
    may_split,
)

_LIGHT_NODES = 7  # values that are computed for an element, up to which registers are plenty and time is short
# What an operation takes of a shared tile's time, of those that were timed there; a logistic has two slow instructions.
# How many instructions each is: `Operation.instructions`.
_TIMED = dict.fromkeys(("acc", "operand", "literal", "row", "column"), 0) | dict.fromkeys((
    "add", "add_any", "sub", "mul", "square", "integer_pow", "neg", "abs", "max", "min", "clamp", "eq", "ne", "lt",
    "le", "gt", "ge", "and", "or", "xor", "not", "select_n", "convert_element_type",
), 1) | {"logistic": 6}  # fmt: skip
_TIMED_WITH_HEADS = _TIMED | {"head_sum": 1, "div": 4, "rsqrt": 4}
_LONG_K = 3072  # from which a long epilogue hides under the products
_HIDES_NARROW_ROWS = 8192  # k from which narrow rows of the epilogue's tiles do
_KEPT_REGISTERS = 192  # of a thread's 240, for the accumulator and tables
_CACHED_INSTRUCTIONS = 7000  # of the 8192 that the instruction cache holds: estimates may be a seventh too low
_LEAST_BOX = 16  # columns
_OTHER_INSTRUCTIONS = 900  # of a kernel, beside what its epilogue does for each element
SHARED_BYTES_PER_BLOCK = 232_448  # what one block of an sm_90 device can have
# (tile_m, tile_n) that the kernel can have, and those of which it can make parts along k.
TILES = ((128, 128), (128, 192), (64, 256), (64, 128), (64, 64), (128, 256), (64, 192))
SPLIT_K_TILES = tuple(tile for tile in TILES if tile not in SHARED_TILES)
_MAX_STAGES = 12
_FEW_ROWS = 256  # up to which products have tiles of 64 x 64, for what they read from memory
_FEW_TILES = 8  # along m, up to which clusters of one are worth a try
CONSUMERS = 2  # warpgroups that multiply and run the epilogue, in turn or together
THREADS = 128 * (1 + CONSUMERS)


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile and pipeline sizes of one kernel. `None` where the library shall choose.

    Attributes:
      tile_m, tile_n: rows and columns of the output that a warpgroup makes at a time, or two together: one of `TILES`.
      stages: depth of the ring of operand tiles (each tile_m x 64 of a and 64 x tile_n of b), 2 to 12.
      cluster_m: CTAs along m that share b's tiles through multicast, 1 or 2.
      box_n: columns of the boxes in which the epilogue's tiles move, 16, 32 or 64; a row of one is at most 128 bytes.
      subtile_n: columns of a box that the epilogue has in registers at a time, 16, 32 or 64.
      load_slots: depth of the ring that prefetches the epilogue's tile operands, in boxes of 64 rows.
      store_slots: depth of each warp's ring of results on their way to memory, in boxes of 16 rows.
      split_k: whether tiles that whole waves leave over, if they fill at most half of the chip, are split along k among
        all multiprocessors. A launch then has a workspace of 132 float32 tiles. Not of tiles that two warpgroups make.
      turns: parts of a tile's columns that an epilogue works on one after the other, by the same code: more than 1
        where code for all columns would outgrow the instruction cache. Whole boxes, as many in each, and whole heads.
    """

    tile_m: int | None = None
    tile_n: int | None = None
    stages: int | None = None
    cluster_m: int | None = None
    box_n: int | None = None
    subtile_n: int | None = None
    load_slots: int | None = None
    store_slots: int | None = None
    split_k: bool | None = None
    turns: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tile_m", sorted({m for m, _ in TILES})),
            ("tile_n", sorted({n for _, n in TILES})),
            ("stages", range(2, _MAX_STAGES + 1)),
            ("cluster_m", (1, 2)),
            ("box_n", (16, 32, 64)),
            ("subtile_n", (16, 32, 64)),
            ("load_slots", range(1, 17)),
            ("store_slots", range(1, 17)),
            ("split_k", (False, True)),
            ("turns", range(1, 17)),
        ):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"GemmConfig: {name} = {value}; it must be one of {list(allowed)}")
        if self.split_k and (self.tile_m, self.tile_n) in SHARED_TILES:
            raise ValueError(
                f"GemmConfig: split_k = True with tiles of {self.tile_m}x{self.tile_n}; "
                f"it must be one of {', '.join(f'{m}x{n}' for m, n in SPLIT_K_TILES)}"
            )


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one kernel is cut: a `GemmConfig` with everything chosen."""

    tile_m: int
    tile_n: int
    stages: int
    cluster_m: int
    box_n: int
    subtile_n: int
    load_slots: int
    store_slots: int
    split_k: bool
    turns: int

    tile_k: ClassVar[int] = 64

    @property
    def consumer_m(self) -> int:
        """Rows of a tile that one consumer has."""
        return _consumer_m(self.cut)

    @property
    def cut(self) -> Cut:
        """What its cost depends on."""
        return Cut(self.tile_m, self.tile_n, self.cluster_m, self.split_k)

    @property
    def name(self) -> str:
        """For a reader: "128 x 192", or "128 x 192, split-K"."""
        return f"{self.tile_m} x {self.tile_n}{', split-K' if self.split_k else ''}"


def _consumer_m(cut: Cut) -> int:
    return cut.tile_m // (CONSUMERS if cut.is_shared else 1)


@dataclasses.dataclass(frozen=True)
class EpilogueTraffic:
    """Bytes of an epilogue's tiles for one element of a way, loaded and stored; entries of what lies over columns."""

    load_bytes: int
    store_bytes: int
    widest_bytes: int
    column_reductions: int
    vectors_over_columns: int

    @classmethod
    def of(cls, program: Program, out_dtypes: Sequence[np.dtype]) -> EpilogueTraffic:
        loads = [
            np.dtype(program.operands[i].dtype).itemsize for i in program.tile_operands for _ in program.entry_ways(i)
        ]
        stores = [np.dtype(dtype).itemsize for dtype in out_dtypes]
        of_section = [
            sum(stores[i] * program.entries(program.stores[i].width) for i in program.stores_of(section))
            for section in program.sections
        ]
        columns = sum(
            program.entries(reduction.width) for reduction in program.reductions if reduction.axis is Axis.COLUMN
        )
        over_columns = (Kind.ROW_VECTOR, Kind.HEAD_VECTOR)
        vectors = sum(len(program.entry_ways(i)) for i, one in enumerate(program.operands) if one.kind in over_columns)
        return cls(sum(loads), max(of_section), max([*loads, *stores, 2]), columns, vectors)


def shared_bytes(tiling: Tiling, program: Program, traffic: EpilogueTraffic) -> int:
    """Shared memory of a kernel in bytes; the kernel asserts that it counts the same (SharedLayout)."""
    operands = tiling.stages * (tiling.tile_m + tiling.tile_n) * tiling.tile_k * 2
    load_ring = tiling.load_slots * 64 * tiling.box_n * traffic.load_bytes
    store_rings = 4 * tiling.store_slots * 16 * tiling.box_n * traffic.store_bytes
    # Column reductions of four warps; vectors of a tile and of the next.
    columns = tiling.tile_n // program.entries(program.acc_width)
    over_columns = (traffic.column_reductions * 4 + traffic.vectors_over_columns * 2) * columns * 4
    epilogue = _round_up(load_ring + store_rings + over_columns, 1024)
    barriers = 16 * tiling.stages + CONSUMERS * 16 * (tiling.load_slots if traffic.load_bytes else 1)
    return operands + CONSUMERS * epilogue + barriers


def keeps_tables(program: Program, tile: tuple[int, int]) -> bool:
    """Whether registers keep a tile's words of head tables from before its products on, beside the accumulator.

    In shared tiles, if there is room: there nothing hides the loads of each head, 2 to 7 % of a product. In others,
    where the other consumer's products do, loading ahead costs 1 to 3 %.
    """
    if tile not in SHARED_TILES:
        return False
    blocks, tile_n = tile[0] // CONSUMERS // 64, tile[1]
    # A table counts twice if it has 16 bits, which the assembler keeps as they are and widened.
    tables = sum(
        len(program.loads(i)) * (4 // np.dtype(one.dtype).itemsize)
        for i, one in enumerate(program.operands)
        if one.kind is Kind.HEAD_TABLE
    )
    # Of a block's 64 rows a thread has two, of eight columns of each half of a head two.
    return tables > 0 and blocks * (tile_n // 2 + tables * program.head // 4) <= _KEPT_REGISTERS


def takes_heads(columns: int) -> bool:
    """Whether some tile has whole heads of so many columns, and half a head whole boxes."""
    return any(_has_heads(tile_n, columns) for _, tile_n in TILES)


def _has_heads(tile_n: int, columns: int) -> bool:
    return columns % 32 == 0 and tile_n % columns == 0


def _spills_with_wide_heads(program: Program) -> bool:
    """Whether 64 x 192 is the tile of heads of 192 columns, which only tiles of as many have.

    There none spill. In 128 x 192 a rotary embedding spills 32 bytes and takes 3 % less; norms and other reductions,
    even and odd columns spill 1 to 4 kB and take 1 to 27 % more, a norm of queries and keys 3 % more with 4096 rows and
    4 to 8 % less with 16384 (an H200).
    """
    reduces = program.head_levels or any(one.axis is Axis.COLUMN for one in program.reductions)
    return program.head == 192 and bool(program.neighbours or reduces)


def cuts_for(
    product: Product,
    program: Program,
    traffic: EpilogueTraffic,
    given: GemmConfig | None,
    constants: Constants,
) -> list[Cut]:
    """What may be chosen where `given` leaves it open, as `best_first` orders it.

    Of `TILES` those that have whole heads, and whole chunks of 64 columns of each half of a b stored by columns; 64 x
    64 for few rows alone, 64 x 192 for heads of 192 columns; in clusters of two but for few rows; with split-K where
    that changes anything. A tile of 128 x 192 is the last resort of an epilogue to which it leaves too little. After
    all others come those whose cost is not known: of a tile that has not been timed on a device, of one that the
    consumers share with an epilogue whose like has not been timed, and of 128 x 192 with heads that spill there; and at
    the very end those whose code the instruction cache holds in no turns, least first.
    """
    given = given or GemmConfig()
    found = []
    for tile_m, tile_n in TILES:
        if (given.tile_m or tile_m, given.tile_n or tile_n) != (tile_m, tile_n):
            continue
        if program.head and not _has_heads(tile_n, program.head):
            continue
        if (tile_m, tile_n) == (64, 64) and not given.tile_n and not _is_for_few_rows(product, program, traffic):
            continue
        if (tile_m, tile_n) == (64, 192) and not (given.tile_m and given.tile_n) and program.head != 192:
            continue
        if not product.transpose_b and tile_n // program.splits % 64:
            continue
        for cluster_m in [given.cluster_m] if given.cluster_m else _clusters_for(product, tile_m):
            for split_k in (False, True) if given.split_k is None else (given.split_k,):
                cut = Cut(tile_m, tile_n, cluster_m, split_k)
                if split_k and cut.is_shared:
                    continue
                if given.split_k is not None or not split_k or may_split(product, cut):
                    found.append(cut)
    of_element, at_one_clock = element_traffic(program, traffic), by_time(constants)

    def energy_and_time(cut: Cut) -> tuple[float, float]:
        if cut.tile not in constants.of_block or (cut.tile == (128, 192) and _spills_with_wide_heads(program)):
            return math.inf, math.inf
        return cost(product, cut, of_element, constants), cost(product, cut, of_element, at_one_clock)

    costs = {cut: energy_and_time(cut) for cut in found}

    def resort(cut: Cut) -> tuple[float, bool, bool]:
        most_turns = max(_possible_turns(program, cut, given.box_n or _LEAST_BOX), default=1)
        uncached = _uncached_instructions(program, cut, most_turns)
        return uncached, math.isinf(costs[cut][0]), _leaves_too_little(cut, product, program, traffic)

    of_resorts = itertools.groupby(sorted(found, key=resort), resort)
    return [cut for _, cuts in of_resorts for cut in best_first({cut: costs[cut] for cut in cuts})]


def _is_for_few_rows(product: Product, program: Program, traffic: EpilogueTraffic) -> bool:
    """Whether tiles of 64 x 64 have been timed with the like of it."""
    return isinstance(product.m, int) and product.m <= _FEW_ROWS and not _has_long_epilogue(program, traffic)


def _clusters_for(product: Product, tile_m: int) -> tuple[int, ...]:
    """Numbers of CTAs that may share b's tiles; of two one would be idle where there is one tile of rows."""
    if not isinstance(product.m, int) or product.m > _FEW_TILES * tile_m:
        return (2,)
    return (2, 1) if product.m > tile_m else (1,)


def _leaves_too_little(cut: Cut, product: Product, program: Program, traffic: EpilogueTraffic) -> bool:
    if cut.tile != (128, 192):
        return False
    # Most heads spill half a kilobyte to four, log-sum-exps beside parts of tiles 200 bytes. There is shared memory for
    # rows of half a cache line only, which cost a float32 array that is added to in place a third of a product with
    # k = 2048, and 1 to 3 % with 16384.
    adds_float32 = traffic.load_bytes > 0 and traffic.widest_bytes == 4 and product.k < _HIDES_NARROW_ROWS
    spills = program.head > 0 or (cut.split_k and _has_logsumexp(program))
    return spills or adds_float32 or len(program.sections) > 1


def _has_logsumexp(program: Program) -> bool:
    return any(reduction.op is ReductionOp.LOGSUMEXP for reduction in program.reductions)


def _has_few_nodes(program: Program) -> bool:
    return len(program.nodes) <= _LIGHT_NODES * program.entries(program.acc_width)


def _arithmetic(program: Program) -> float:
    """As `ElementTraffic` has it, of the columns with most. Timed have been these operations, in programs that store
    tiles; of those with heads, such whose tables shared tiles keep.
    """
    takes = _TIMED_WITH_HEADS if program.head else _TIMED
    if not program.stores or _has_logsumexp(program):
        return math.inf
    if program.head and not all(keeps_tables(program, tile) for tile in SHARED_TILES):
        return math.inf
    reduced = [value for reduction in program.reductions for value in reduction.values]
    of_sections = []
    for section in program.sections:
        stored = [value for i in program.stores_of(section) for value in program.stores[i].values]
        of_sections.append([takes.get(program.nodes[i].op, math.inf) for i in program.needed([*reduced, *stored])])
    is_light = not program.head and _has_few_nodes(program) and all(one <= 1 for of in of_sections for one in of)
    return 0.0 if is_light else max(map(sum, of_sections)) / program.acc_ways


def element_traffic(program: Program, traffic: EpilogueTraffic) -> ElementTraffic:
    """What the cost model wants to know of an epilogue."""
    entries = program.entries(program.acc_width)
    return ElementTraffic(
        load_bytes=traffic.load_bytes / entries,
        store_bytes=traffic.store_bytes / entries,
        column_reductions=traffic.column_reductions / entries,
        is_long=_has_long_epilogue(program, traffic),
        arithmetic=_arithmetic(program),
        has_heads=program.head > 0,
    )


def _has_long_epilogue(program: Program, traffic: EpilogueTraffic) -> bool:
    return program.ways == 2 and traffic.load_bytes > 0 and not program.head


def choose_tiling(
    product: Product,
    program: Program,
    out_dtypes: Sequence[np.dtype],
    given: GemmConfig | None = None,
    device: str | None = None,
) -> Tiling:
    """Completes `given`: the deepest pipeline that fits beside what the epilogue needs.

    Args:
      product: its sizes.
      program: the epilogue's program.
      out_dtypes: dtypes of the program's stores.
      given: fields that are not None are kept.
      device: kind of the device it runs on, if that is known.

    Raises:
      ValueError: nothing that keeps `given` fits into shared memory, no tile takes the program's heads or halves, or a
        subtile's row is wider than 128 bytes.
    """
    given = given or GemmConfig()
    traffic = EpilogueTraffic.of(program, out_dtypes)
    box_n = given.box_n or given.subtile_n or _LEAST_BOX
    if box_n * traffic.widest_bytes > 128:
        raise ValueError(
            f"GemmConfig: box_n = {box_n} makes rows of {box_n * traffic.widest_bytes} bytes "
            f"of the {traffic.widest_bytes}-byte tiles; TMA's swizzle takes at most 128"
        )
    if program.head and program.head // 2 % box_n:
        raise ValueError(f"GemmConfig: box_n = {box_n} does not divide half a head of {program.head} columns")
    if box_n % (given.subtile_n or _LEAST_BOX):
        raise ValueError(f"GemmConfig: subtile_n = {given.subtile_n} does not divide box_n = {box_n}")
    cuts = cuts_for(product, program, traffic, given, constants_in_use(device))
    if not cuts:
        raise ValueError(
            f"of the tiles {', '.join(f'{m}x{n}' for m, n in TILES)} none has"
            + (f" tile_m = {given.tile_m}" if given.tile_m else "")
            + (f" tile_n = {given.tile_n}" if given.tile_n else "")
            + (f" whole heads of {program.head} columns" if program.head else "")
            + (" 64 columns of each half of a b that is not transposed" if program.splits == 2 else "")
        )
    some_is_whole, possible_turns = False, set[int]()
    for cut in cuts:
        fitting = []  # but their code outgrows the cache
        for stages, (box_n, subtile_n, load_slots, store_slots) in _preferred(program, traffic, cut, product.k):
            box_n = given.box_n or max(box_n, given.subtile_n or _LEAST_BOX)
            possible = _possible_turns(program, cut, box_n)
            some_is_whole = some_is_whole or bool(possible)
            possible_turns.update(possible)
            if not possible or (given.turns and given.turns not in possible):
                continue
            cached = [turns for turns in possible if not _uncached_instructions(program, cut, turns)]
            tiling = Tiling(
                **cut._asdict(),
                stages=given.stages or stages,
                box_n=box_n,
                subtile_n=given.subtile_n or min(subtile_n, given.box_n or subtile_n),
                load_slots=given.load_slots or load_slots,
                store_slots=given.store_slots or store_slots,
                turns=given.turns or min(cached, default=possible[-1]),
            )
            if shared_bytes(tiling, program, traffic) <= SHARED_BYTES_PER_BLOCK:
                if given.turns or cached:
                    return tiling
                fitting.append(tiling)
        if fitting:
            return max(fitting, key=lambda tiling: tiling.turns)
    if not some_is_whole:
        raise ValueError(f"GemmConfig: box_n = {given.box_n} does not divide the columns of a tile's half: {given}")
    if given.turns and given.turns not in possible_turns:
        raise ValueError(
            f"GemmConfig: turns = {given.turns}; it must be one of {sorted(possible_turns)}, "
            f"parts of whole boxes{' and whole heads' if program.head else ''}, with {given}"
        )
    raise ValueError(
        f"the epilogue's tiles ({traffic.load_bytes} bytes loaded and {traffic.store_bytes} stored for each element), "
        f"{traffic.column_reductions} column reductions and {traffic.vectors_over_columns} vectors over columns "
        f"do not fit into {SHARED_BYTES_PER_BLOCK} bytes of shared memory with {given}"
    )


def _possible_turns(program: Program, cut: Cut, box_n: int) -> list[int]:
    """Of `GemmConfig.turns`; none where a tile's columns, or half a head, are no whole boxes."""
    boxes, rest = divmod(cut.tile_n // program.entries(program.acc_width), box_n)
    if rest or program.head // 2 % box_n:
        return []
    together = program.head // program.entries(program.acc_width) // box_n or 1  # boxes of one head
    return [turns for turns in range(1, boxes + 1) if boxes % turns == 0 and boxes // turns % together == 0]


def _uncached_instructions(program: Program, cut: Cut, turns: int) -> float:
    """Of a kernel, as estimated, those that the instruction cache has no room for. With any it takes 1.5 to 4 times as
    long; turns cost up to 3 % of a product at k = 2048 in 128 x 192, 5 % in 128 x 128.
    """
    places = _consumer_m(cut) * cut.tile_n // 128 // program.acc_ways  # of a thread
    return max(0.0, _OTHER_INSTRUCTIONS + places * instructions(program) / turns - _CACHED_INSTRUCTIONS)


def candidates(
    product: Product, program: Program, out_dtypes: Sequence[np.dtype], device: str | None = None
) -> list[Tiling]:
    """The tilings that are worth measuring, the cost model's choice first: every cut that fits, with the pipeline that
    `choose_tiling` gives it.
    """
    found = []
    for cut in cuts_for(product, program, EpilogueTraffic.of(program, out_dtypes), None, constants_in_use(device)):
        with contextlib.suppress(ValueError):  # too large for shared memory
            found.append(choose_tiling(product, program, out_dtypes, GemmConfig(**cut._asdict())))
    return found


def _preferred(
    program: Program, traffic: EpilogueTraffic, cut: Cut, k: int
) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
    """Stages, and (box_n, subtile_n, load_slots, store_slots), the best first.

    Wider boxes ask less of the copy engine, most of all when a row is a whole cache line; programs that need many
    registers have narrower subtiles. Stages come before the depth of the epilogue's rings: 5 instead of 6 cost 1 to
    2 %. A long epilogue comes before them: back through a gate it is 26 % over the bare product with wide boxes and 5
    stages of 128 x 128, and 40 % with narrow ones and 6; with 4 stages of 128 x 192 and two slots it is 14 %. So do
    loads that nothing hides: in shared tiles, whose 3 stages are as good as 4, they should be there when the products
    end (back through a norm, k = 16384: 1 to 2 % instead of 3.5 with one slot of 32 columns). More than 8 stages only
    where the tiles are so small that 8 have not enough of b on its way from memory.
    """
    is_wide = program.ways == 1 and _has_few_nodes(program)
    if cut.is_shared and is_wide and traffic.load_bytes:
        whole_lines = [(64, 64, 3, 2)] if traffic.widest_bytes == 2 else []
        yield from itertools.product((3,), [*whole_lines, *((32, 32, slots, 2) for slots in (4, 3, 2))])
    elif cut.is_shared and is_wide and traffic.widest_bytes == 2:
        yield from itertools.product((4, 3), [(64, 64, 1, 2)])
    narrow = [(16, 16, 2, 2), (16, 16, 2, 1)]
    if not program.head:
        narrow = [(32, 16, 2, 1), *narrow]
    wide = [(32, 32, 2, 2), (32, 32, 2, 1), (32, 32, 1, 1)]
    if _has_long_epilogue(program, traffic):
        if cut.tile_n > 128:  # two slots where the epilogue is longer than the other warpgroup's products
            two, one = (32, 16, 2, 1), (32, 16, 1, 1)
            yield from itertools.product((4,), [two, one] if k < _LONG_K else [one, two])
        yield from itertools.product((8, 7, 6, 5), [(32, 32, 1, 1)])
        wide = []
    elif is_wide:
        if traffic.load_bytes and traffic.widest_bytes == 2:
            wide = [(64, 64, 1, 1), *wide]
    elif not (program.head and program.head % 64 == 0 and not program.reductions):
        wide = []
    most = _MAX_STAGES if cut.tile == (64, 64) else 8
    yield from itertools.product(range(most, 1, -1), [*wide, *narrow])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
