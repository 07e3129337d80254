"""The configuration that a kernel gets: the tiles that a product can have, best first, and the pipeline of each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from coda_jax.epilogue import Axis, Program, instructions
from coda_jax.tiles.config import (
    MAX_STAGES,
    PROMOTE,
    PROMOTED_TILE,
    ROW_BYTES,
    TILES,
    UNPROMOTED_K,
    GemmConfig,
    KernelConfig,
    TileShape,
    ways_of,
)
from coda_jax.tiles.constants import Constants, by_time, constants_in_use
from coda_jax.tiles.cost_model import GemmShape, best_first, cost, may_split
from coda_jax.tiles.traffic import (
    LEAST_BOX_BYTES,
    SHARED_BYTES_PER_BLOCK,
    EpilogueTraffic,
    element_traffic,
    has_few_nodes,
    has_logsumexp,
    has_long_epilogue,
    shared_bytes,
)

_LONG_K_BYTES = 6144  # of k, from which a long epilogue hides under the products
_HIDES_NARROW_ROWS_BYTES = 16384  # of k, from which narrow rows of the epilogue's tiles do
_CACHED_INSTRUCTIONS = 7000  # of the 8192 that the instruction cache holds: estimates may be a seventh too low
_LEAST_SUBTILE = 16  # columns
_OTHER_INSTRUCTIONS = 900  # of a kernel, beside what its epilogue does for each element
_FEW_ROWS = 256  # up to which products have tiles of 64 x 64, for what they read from memory
_FEW_TILES = 8  # along m, up to which clusters of one are worth a try

_Pipeline = tuple[int, tuple[int, int, int, int]]  # stages, (box_n, subtile_n, load_slots, store_slots)


def choose_config(
    shape: GemmShape,
    program: Program,
    out_dtypes: Sequence[np.dtype],
    given: GemmConfig | None = None,
    device: str | None = None,
) -> KernelConfig:
    """Completes `given`: the best tile with the deepest pipeline that fits beside what the epilogue needs.

    Args:
      shape: the product's sizes.
      program: its epilogue.
      out_dtypes: dtypes of the program's stores.
      given: fields that are not None are kept.
      device: kind of the device it runs on, if that is known.

    Raises:
      ValueError: nothing that keeps `given` fits into shared memory, no tile takes the program's heads or halves, or a
        subtile's row is wider than 128 bytes.
    """
    given = given or GemmConfig()
    traffic = EpilogueTraffic.of(program, out_dtypes)
    _check_boxes(given, program, traffic)
    given = _with_promotion(given, shape)
    tiles = tiles_for(shape, program, traffic, given, constants_in_use(device))
    for tile in tiles:
        fitting = []  # but their code outgrows the cache
        for config in _configs(tile, program, traffic, given, shape.k_bytes):
            if shared_bytes(config, program, traffic, shape.groups) <= SHARED_BYTES_PER_BLOCK:
                if given.column_passes or not _uncached_instructions(program, tile, config.column_passes):
                    return config
                fitting.append(config)
        if fitting:
            return max(fitting, key=lambda config: config.column_passes)
    raise ValueError(_misfit(tiles, program, traffic, given, shape))


def candidates(
    shape: GemmShape, program: Program, out_dtypes: Sequence[np.dtype], device: str | None = None
) -> list[KernelConfig]:
    """The configurations that are worth measuring, the cost model's choice first: every tile that fits, with the
    pipeline that `choose_config` gives it.
    """
    found, given = [], _with_promotion(GemmConfig(), shape)
    for tile in tiles_for(shape, program, EpilogueTraffic.of(program, out_dtypes), given, constants_in_use(device)):
        with contextlib.suppress(ValueError):  # too large for shared memory
            found.append(choose_config(shape, program, out_dtypes, GemmConfig(**tile._asdict())))
    return found


def tiles_for(
    shape: GemmShape,
    program: Program,
    traffic: EpilogueTraffic,
    given: GemmConfig | None,
    constants: Constants,
) -> list[TileShape]:
    """The configurations that complete `given`, in the order of `best_first`.

    A tile of 128 x 192 is the last resort of an epilogue to which it leaves too little. After all others come those
    whose cost is not known: of a tile that has not been timed on a device, of a cooperative tile with an epilogue whose
    like has not been timed, and of 128 x 192 with heads that spill there; and at the very end those whose code the
    instruction cache holds in no number of column passes, least first.
    """
    given = given or GemmConfig()
    found = _possible_tiles(shape, program, traffic, given)
    of_element, at_one_clock = element_traffic(program, traffic), by_time(constants)

    def energy_and_time(tile: TileShape) -> tuple[float, float]:
        if tile.kind not in constants.of_block or (tile.kind == (128, 192) and _spills_with_wide_heads(program)):
            return math.inf, math.inf
        return cost(shape, tile, of_element, constants), cost(shape, tile, of_element, at_one_clock)

    costs = {tile: energy_and_time(tile) for tile in found}

    def resort(tile: TileShape) -> tuple[float, bool, bool]:
        most_passes = max(_possible_passes(program, tile, given.box_n or _least_box(traffic)), default=1)
        uncached = _uncached_instructions(program, tile, most_passes)
        return uncached, math.isinf(costs[tile][0]), _leaves_too_little(tile, shape, program, traffic)

    of_resorts = itertools.groupby(sorted(found, key=resort), resort)
    return [tile for _, tiles in of_resorts for tile in best_first({tile: costs[tile] for tile in tiles})]


def _possible_tiles(shape: GemmShape, program: Program, traffic: EpilogueTraffic, given: GemmConfig) -> list[TileShape]:
    """In clusters of two but for few rows; with split-K where that changes anything."""
    found = []
    for tile_m, tile_n in TILES:
        cooperative = ways_of(tile_m, tile_n)[0] if given.cooperative is None else given.cooperative
        if not _takes((tile_m, tile_n), shape, program, traffic, given) or cooperative not in ways_of(tile_m, tile_n):
            continue
        for cluster_m in [given.cluster_m] if given.cluster_m else _clusters_for(shape, tile_m):
            for split_k in (False, True) if given.split_k is None else (given.split_k,):
                tile = TileShape(tile_m, tile_n, cluster_m, split_k, cooperative)
                if split_k and (tile.cooperative or shape.groups):
                    continue
                if given.split_k is not None or not split_k or may_split(shape, tile):
                    found.append(tile)
    return found


def _with_promotion(given: GemmConfig, shape: GemmShape) -> GemmConfig:
    """`given` with what is promoted, and with the tiles that this takes.

    Raises:
      ValueError: other tiles are given, or factors have more than 8 bits.
    """
    if shape.element_bytes > 1:
        if given.promote:
            raise ValueError(
                f"GemmConfig: promote = {given.promote} with factors of {8 * shape.element_bytes} bits; it must be "
                "False or None, for their products are summed in float32"
            )
        return dataclasses.replace(given, promote=0)
    promote = (PROMOTE if shape.k > UNPROMOTED_K else 0) if given.promote is None else int(given.promote)
    if not promote:
        return dataclasses.replace(given, promote=0)
    tile_m, tile_n = PROMOTED_TILE
    wanted = dataclasses.replace(given, tile_m=tile_m, tile_n=tile_n, cooperative=True, split_k=False, promote=promote)
    for name in ("tile_m", "tile_n", "cooperative", "split_k"):
        if (asked := getattr(given, name)) not in (None, getattr(wanted, name)):
            raise ValueError(
                f"GemmConfig: {name} = {asked}, but factors of 8 bits and k = {shape.k} are promoted every {promote} "
                f"of k{' by default' if given.promote is None else ''}, which cooperative tiles of {tile_m}x{tile_n} "
                "can; promote=False sums all of k in the tensor cores"
            )
    return wanted


def _takes(
    size: tuple[int, int], shape: GemmShape, program: Program, traffic: EpilogueTraffic, given: GemmConfig
) -> bool:
    """Whether tiles of this size are those given, have whole heads and, of each half of a b stored by columns, whole
    chunks of 64 columns. Unless they are asked for, 64 x 64 are for few rows alone, 64 x 192 for heads of 192 columns.
    """
    tile_m, tile_n = size
    if (given.tile_m or tile_m, given.tile_n or tile_n) != size:
        return False
    if program.halves.head and not _has_heads(tile_n, program.halves.head):
        return False
    if size == (64, 64) and not given.tile_n and not _is_for_few_rows(shape, program, traffic):
        return False
    if size == (64, 192) and not (given.tile_m and given.tile_n) and program.halves.head != 192:
        return False
    return shape.transpose_b or tile_n // program.halves.n_halves * shape.element_bytes % ROW_BYTES == 0


def takes_heads(columns: int) -> bool:
    """Whether some tile has whole heads of so many columns, and half a head whole boxes."""
    return any(_has_heads(tile_n, columns) for _, tile_n in TILES)


def _has_heads(tile_n: int, columns: int) -> bool:
    return columns % 32 == 0 and tile_n % columns == 0


def _is_for_few_rows(shape: GemmShape, program: Program, traffic: EpilogueTraffic) -> bool:
    """Whether tiles of 64 x 64 have been timed with the like of it."""
    return isinstance(shape.m, int) and shape.m <= _FEW_ROWS and not has_long_epilogue(program, traffic)


def _clusters_for(shape: GemmShape, tile_m: int) -> tuple[int, ...]:
    """Numbers of CTAs that may share b's tiles; of two one would be idle where there is one tile of rows."""
    if not isinstance(shape.m, int) or shape.m > _FEW_TILES * tile_m:
        return (2,)
    return (2, 1) if shape.m > tile_m else (1,)


def _spills_with_wide_heads(program: Program) -> bool:
    """Whether 64 x 192 is the tile of heads of 192 columns, which only tiles of as many have.

    There none spill. In 128 x 192 a rotary embedding spills 32 bytes and takes 3 % less; norms and other reductions,
    even and odd columns spill 1 to 4 kB and take 1 to 27 % more, a norm of queries and keys 3 % more with 4096 rows and
    4 to 8 % less with 16384 (an H200).
    """
    reduces = program.head_levels or any(one.axis is Axis.COLUMN for one in program.reductions)
    return program.halves.head == 192 and bool(program.halves.interleaved or reduces)


def _leaves_too_little(tile: TileShape, shape: GemmShape, program: Program, traffic: EpilogueTraffic) -> bool:
    if tile.kind != (128, 192):
        return False
    # Heads mostly spill 0.5 to 4 KB here, log-sum-exps with split-K 200 bytes. Shared memory has room for boxes of half
    # a cache line only: adding to a float32 array in place then costs a third of a product with k = 2048, and 1 to 3 %
    # with k = 16384.
    adds_float32 = traffic.load_bytes > 0 and traffic.widest_bytes == 4 and shape.k_bytes < _HIDES_NARROW_ROWS_BYTES
    spills = program.halves.head > 0 or (tile.split_k and has_logsumexp(program)) or _sums_halves_both_ways(program)
    return spills or adds_float32 or len(program.sections) > 1 or _turns_halves(program, traffic)


def _turns_halves(program: Program, traffic: EpilogueTraffic) -> bool:
    """Whether it is made of two halves in memory and stores transposed copies, as the backward pass of a gate in fp8.

    With (16384, 8192, 2048) 128 x 192 takes 1313 us, 128 x 128 998 and 64 x 128 979; with k = 4096 and n = 14336 2918,
    2208 and 2630 (an H100).
    """
    return has_long_epilogue(program, traffic) and any(store.transposed for store in program.stores)


def _sums_halves_both_ways(program: Program) -> bool:
    """Whether both halves' columns are summed beside rows, as a gate with a bias is: 2.7 to 5 KB are spilled there.

    Back through a GeGLU with a bias (16384, 8192, 2048) takes 1630 us so, twice the time without the sums (an H200).
    """
    axes = {one.axis for one in program.reductions}
    return Axis.ROW in axes and any(one.axis is Axis.COLUMN and len(one.values) > 1 for one in program.reductions)


def _configs(
    tile: TileShape, program: Program, traffic: EpilogueTraffic, given: GemmConfig, k_bytes: int
) -> Iterator[KernelConfig]:
    """The configurations of this tile that keep what is given, best first, whether they fit into shared memory or not.

    Each has as few column passes as the instruction cache allows, or the most if it holds none.
    """
    for stages, (box_n, subtile_n, load_slots, store_slots) in _preferred(program, traffic, tile, k_bytes):
        box_n = given.box_n or max(box_n, given.subtile_n or _LEAST_SUBTILE, _least_box(traffic))
        possible = _possible_passes(program, tile, box_n)
        if not possible or (given.column_passes and given.column_passes not in possible):
            continue
        cached = (passes for passes in possible if not _uncached_instructions(program, tile, passes))
        yield KernelConfig(
            **tile._asdict(),
            stages=given.stages or stages,
            box_n=box_n,
            subtile_n=given.subtile_n or min(subtile_n, given.box_n or subtile_n),
            load_slots=given.load_slots or load_slots,
            store_slots=given.store_slots or store_slots,
            column_passes=given.column_passes or next(cached, possible[-1]),
            promote=given.promote or 0,
        )


def _possible_passes(program: Program, tile: TileShape, box_n: int) -> list[int]:
    """Possible `column_passes`, ascending; none where a tile's columns, or half a head, are no whole boxes."""
    boxes, rest = divmod(tile.tile_n // program.halves.runs(program.halves.acc), box_n)
    if rest or program.halves.head // 2 % box_n:
        return []
    together = program.halves.head // program.halves.runs(program.halves.acc) // box_n or 1  # boxes of one head
    return [passes for passes in range(1, boxes + 1) if boxes % passes == 0 and boxes // passes % together == 0]


def _uncached_instructions(program: Program, tile: TileShape, passes: int) -> float:
    """By how many instructions a kernel is estimated to outgrow the instruction cache.

    A kernel that does takes 1.5 to 4 times as long. Column passes cost up to 3 % of a product with k = 2048 in
    128 x 192, and 5 % in 128 x 128.
    """
    places = tile.consumer_m * tile.tile_n // 128 // program.halves.acc_halves  # of a thread
    return max(0.0, _OTHER_INSTRUCTIONS + places * instructions(program) / passes - _CACHED_INSTRUCTIONS)


def _preferred(program: Program, traffic: EpilogueTraffic, tile: TileShape, k_bytes: int) -> Iterator[_Pipeline]:
    """Stages, and (box_n, subtile_n, load_slots, store_slots), the best first.

    Wider boxes ask less of the copy engine, most of all when a row is a whole cache line; programs that need many
    registers have narrower subtiles. Stages come before the depth of the epilogue's rings: 5 instead of 6 cost 1 to
    2 %. A long epilogue comes before them: back through a gate it is 26 % over the bare product with wide boxes and 5
    stages of 128 x 128, and 40 % with narrow ones and 6; with 4 stages of 128 x 192 and two slots it is 14 %. So do
    loads that nothing hides: in cooperative tiles, whose 3 stages are as good as 4, they should be there when the
    products end (back through a norm, k = 16384: 1 to 2 % instead of 3.5 with one slot of 32 columns). More than 8
    stages only where the tiles are so small that 8 have not enough of b on its way from memory.
    """
    is_wide = program.halves.count == 1 and has_few_nodes(program)
    if tile.cooperative and is_wide and traffic.load_bytes:
        whole_lines = [(64, 64, 3, 2)] if traffic.widest_bytes == 2 else []
        yield from itertools.product((3,), [*whole_lines, *((32, 32, slots, 2) for slots in (4, 3, 2))])
    elif tile.cooperative and is_wide and traffic.widest_bytes == 2:
        yield from itertools.product((4, 3), [(64, 64, 1, 2)])
    narrow = [(16, 16, 2, 2), (16, 16, 2, 1)]
    if not program.halves.head:
        narrow = [(32, 16, 2, 1), *narrow]
    wide = [(32, 32, 2, 2), (32, 32, 2, 1), (32, 32, 1, 1)]
    if has_long_epilogue(program, traffic):
        if tile.tile_n > 128:  # two slots where the epilogue is longer than the other warpgroup's products
            two, one = (32, 16, 2, 1), (32, 16, 1, 1)
            yield from itertools.product((4,), [two, one] if k_bytes < _LONG_K_BYTES else [one, two])
        yield from itertools.product((8, 7, 6, 5), [(32, 32, 1, 1)])
        wide = []
    elif is_wide:
        if traffic.load_bytes and traffic.widest_bytes == 2:
            wide = [(64, 64, 1, 1), *wide]
    elif not (program.halves.head and program.halves.head % 64 == 0 and not program.reductions):
        wide = []
    most = MAX_STAGES if tile.size == (64, 64) else 8
    yield from itertools.product(range(most, 1, -1), [*wide, *narrow])


def _least_box(traffic: EpilogueTraffic) -> int:
    """The columns of the narrowest box."""
    return LEAST_BOX_BYTES // traffic.narrowest_bytes


def _check_boxes(given: GemmConfig, program: Program, traffic: EpilogueTraffic) -> None:
    """Raises ValueError for boxes that no tile can have."""
    box_n = given.box_n or max(given.subtile_n or _LEAST_SUBTILE, _least_box(traffic))
    if box_n * traffic.widest_bytes > 128:
        raise ValueError(
            f"GemmConfig: box_n = {box_n} makes rows of {box_n * traffic.widest_bytes} bytes "
            f"of the {traffic.widest_bytes}-byte tiles; TMA's swizzle takes at most 128"
        )
    if box_n < _least_box(traffic):
        raise ValueError(
            f"GemmConfig: box_n = {box_n} makes rows of {box_n * traffic.narrowest_bytes} bytes "
            f"of the {traffic.narrowest_bytes}-byte tiles; TMA's swizzle takes at least {LEAST_BOX_BYTES}"
        )
    if program.halves.head and program.halves.head // 2 % box_n:
        raise ValueError(f"GemmConfig: box_n = {box_n} does not divide half a head of {program.halves.head} columns")
    if box_n % (given.subtile_n or _LEAST_SUBTILE):
        raise ValueError(f"GemmConfig: subtile_n = {given.subtile_n} does not divide box_n = {box_n}")


def _misfit(
    tiles: Sequence[TileShape], program: Program, traffic: EpilogueTraffic, given: GemmConfig, shape: GemmShape
) -> str:
    """Why none of the tiles has a configuration."""
    if given.split_k and shape.groups:
        return "GemmConfig: split_k = True with a product of groups; their tiles are never split, and it must be False"
    if not tiles:
        return (
            f"of the tiles {', '.join(f'{m}x{n}' for m, n in TILES)} none has"
            + (f" tile_m = {given.tile_m}" if given.tile_m else "")
            + (f" tile_n = {given.tile_n}" if given.tile_n else "")
            + (f" whole heads of {program.halves.head} columns" if program.halves.head else "")
            + (" 64 columns of each half of a b that is not transposed" if program.halves.n_halves == 2 else "")
        )
    possible = set[int]()
    for tile in tiles:
        for _, (box_n, *_) in _preferred(program, traffic, tile, shape.k_bytes):
            box_n = given.box_n or max(box_n, given.subtile_n or _LEAST_SUBTILE, _least_box(traffic))
            possible.update(_possible_passes(program, tile, box_n))
    if not possible:
        return f"GemmConfig: box_n = {given.box_n} does not divide the columns of a tile's half: {given}"
    if given.column_passes and given.column_passes not in possible:
        return (
            f"GemmConfig: column_passes = {given.column_passes}; it must be one of {sorted(possible)}, "
            f"groups of whole boxes{' and whole heads' if program.halves.head else ''}, with {given}"
        )
    return (
        f"the epilogue's tiles ({traffic.load_bytes} bytes loaded and {traffic.store_bytes} stored for each element), "
        f"{traffic.column_reductions} column reductions and {traffic.vectors_over_columns} vectors over columns "
        f"do not fit into {SHARED_BYTES_PER_BLOCK} bytes of shared memory with {given}"
    )
