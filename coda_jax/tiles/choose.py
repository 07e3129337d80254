"""The choice of a kernel's configuration: the tiles that a product can have, best first, and the pipeline of each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from coda_jax.epilogue import Axis, Program, instructions
from coda_jax.tiles.arch import current
from coda_jax.tiles.config import MAX_STAGES, GemmConfig, KernelConfig, TileShape, listed
from coda_jax.tiles.constants import Constants, by_time, constants_in_use
from coda_jax.tiles.cost_model import GemmShape, best_first, cost, may_split
from coda_jax.tiles.traffic import (
    EpilogueTraffic,
    element_traffic,
    has_few_nodes,
    has_logsumexp,
    has_long_epilogue,
    shared_bytes,
)

_LONG_K_BYTES = 6144  # bytes along k from which the products hide a long epilogue
_HIDES_NARROW_ROWS_BYTES = 16384  # bytes along k from which they hide narrow rows of the epilogue's tiles
_LEAST_SUBTILE = 16  # columns
_OTHER_INSTRUCTIONS = 900  # of a kernel, beside its epilogue's work on each element
_FEW_ROWS = 256  # up to so many rows, products may have tiles of 64 x 64, as reading from memory limits them
_FEW_TILES = 8  # up to so many tiles along m, clusters of one are worth a try

_Pipeline = tuple[int, tuple[int, int, int, int]]  # stages, (box_n, subtile_n, load_slots, store_slots)


def choose_config(
    shape: GemmShape,
    program: Program,
    out_dtypes: Sequence[np.dtype],
    fixed: GemmConfig | None = None,
    device: str | None = None,
) -> KernelConfig:
    """Completes `fixed`: the best tile with the deepest pipeline that fits into shared memory beside the epilogue.

    Args:
      shape: the product's sizes.
      program: its epilogue.
      out_dtypes: dtypes of the program's stores.
      fixed: fields that are not None are kept.
      device: kind of the device it runs on, if that is known.

    Raises:
      ValueError: no configuration with the fields of `fixed` fits into shared memory, no tile fits the program's heads
        or halves, or a subtile's row is wider than 128 bytes.
    """
    fixed = fixed or GemmConfig()
    traffic = EpilogueTraffic.of(program, out_dtypes)
    _check_boxes(fixed, program, traffic)
    fixed = _with_promotion(fixed, shape)
    tiles, most_bytes = tiles_for(shape, program, traffic, fixed, constants_in_use(device)), current().shared_bytes
    for tile in tiles:
        fitting = []  # into shared memory, while their code outgrows the instruction cache
        for config in _configs(tile, program, traffic, fixed, shape.k_bytes):
            if shared_bytes(config, program, traffic, shape.groups) <= most_bytes:
                if fixed.column_passes or not _uncached_instructions(program, tile, config.column_passes):
                    return config
                fitting.append(config)
        if fitting:
            return max(fitting, key=lambda config: config.column_passes)
    raise ValueError(_misfit(tiles, program, traffic, fixed, shape))


def candidates(
    shape: GemmShape, program: Program, out_dtypes: Sequence[np.dtype], device: str | None = None
) -> list[KernelConfig]:
    """The configurations that are worth measuring, the cost model's choice first: every tile that fits, with the
    pipeline that `choose_config` gives it.
    """
    configs, fixed = [], _with_promotion(GemmConfig(), shape)
    for tile in tiles_for(shape, program, EpilogueTraffic.of(program, out_dtypes), fixed, constants_in_use(device)):
        with contextlib.suppress(ValueError):  # too large for shared memory
            configs.append(choose_config(shape, program, out_dtypes, GemmConfig(**tile._asdict())))
    return configs


def tiles_for(
    shape: GemmShape,
    program: Program,
    traffic: EpilogueTraffic,
    fixed: GemmConfig | None,
    constants: Constants,
) -> list[TileShape]:
    """The tiles that complete `fixed`, in the order of `best_first`.

    Tiles of 128 x 192 come later if they leave the epilogue too few registers or too little shared memory. Then come
    tiles whose cost is not known: those that have not been timed on the device, cooperative tiles with an epilogue like
    none that has been timed, and 128 x 192 with heads that spill there. At the end come tiles whose code exceeds the
    instruction cache with any number of column passes, the smallest first.
    """
    fixed = fixed or GemmConfig()
    possible = _possible_tiles(shape, program, traffic, fixed)
    work, at_one_clock = element_traffic(program, traffic), by_time(constants)

    def energy_and_time(tile: TileShape) -> tuple[float, float]:
        if tile.kind not in constants.of_block or (tile.kind == (128, 192) and _spills_with_wide_heads(program)):
            return math.inf, math.inf
        return cost(shape, tile, work, constants), cost(shape, tile, work, at_one_clock)

    costs = {tile: energy_and_time(tile) for tile in possible}

    def resort(tile: TileShape) -> tuple[float, bool, bool]:
        most_passes = max(_possible_passes(program, tile, fixed.box_n or _least_box(traffic)), default=1)
        uncached = _uncached_instructions(program, tile, most_passes)
        return uncached, math.isinf(costs[tile][0]), _leaves_too_little(tile, shape, program, traffic)

    by_resort = itertools.groupby(sorted(possible, key=resort), resort)
    return [tile for _, tiles in by_resort for tile in best_first({tile: costs[tile] for tile in tiles})]


def _possible_tiles(shape: GemmShape, program: Program, traffic: EpilogueTraffic, fixed: GemmConfig) -> list[TileShape]:
    """The tiles that complete `fixed`: in clusters of two but for few rows, and with split-K where it has an effect."""
    tiles = []
    for (tile_m, tile_n), ways in current().tiles.items():
        cooperative = ways[0] if fixed.cooperative is None else fixed.cooperative
        if not _is_possible((tile_m, tile_n), shape, program, traffic, fixed) or cooperative not in ways:
            continue
        for cluster_m in [fixed.cluster_m] if fixed.cluster_m else _clusters_for(shape, tile_m):
            for split_k in (False, True) if fixed.split_k is None else (fixed.split_k,):
                tile = TileShape(tile_m, tile_n, cluster_m, split_k, cooperative)
                if split_k and (tile.cooperative or shape.groups):
                    continue
                if fixed.split_k is not None or not split_k or may_split(shape, tile):
                    tiles.append(tile)
    return tiles


def _with_promotion(fixed: GemmConfig, shape: GemmShape) -> GemmConfig:
    """`fixed` with `promote` chosen, and with the tiles that promotion needs.

    Raises:
      ValueError: `fixed` has other tiles, or factors have more than 8 bits.
    """
    if shape.element_bytes > 1:
        if fixed.promote:
            raise ValueError(
                f"GemmConfig: promote = {fixed.promote} with factors of {8 * shape.element_bytes} bits; it must be "
                "False or None, for their products are summed in float32"
            )
        return dataclasses.replace(fixed, promote=0)
    arch = current()
    promote = (arch.promoted_k if shape.k > arch.unpromoted_k else 0) if fixed.promote is None else int(fixed.promote)
    if not promote:
        return dataclasses.replace(fixed, promote=0)
    tile_m, tile_n = arch.promoted_tile
    promoted = dataclasses.replace(
        fixed, tile_m=tile_m, tile_n=tile_n, cooperative=True, split_k=False, promote=promote
    )
    for name in ("tile_m", "tile_n", "cooperative", "split_k"):
        if (asked := getattr(fixed, name)) not in (None, getattr(promoted, name)):
            raise ValueError(
                f"GemmConfig: {name} = {asked}, but factors of 8 bits and k = {shape.k} are promoted every {promote} "
                f"of k{' by default' if fixed.promote is None else ''}, which cooperative tiles of {tile_m}x{tile_n} "
                "can; promote=False sums all of k in the tensor cores"
            )
    return promoted


def _is_possible(
    size: tuple[int, int], shape: GemmShape, program: Program, traffic: EpilogueTraffic, fixed: GemmConfig
) -> bool:
    """Whether tiles of this size agree with `fixed`, have whole heads, and have whole chunks of 64 columns of each half
    of a b that is not transposed. Unless `fixed` has them, 64 x 64 are for few rows alone, and 64 x 192 for heads of
    192 columns.
    """
    tile_m, tile_n = size
    if (fixed.tile_m or tile_m, fixed.tile_n or tile_n) != size:
        return False
    if program.halves.head and not _has_heads(tile_n, program.halves.head):
        return False
    if size == (64, 64) and not fixed.tile_n and not _is_for_few_rows(shape, program, traffic):
        return False
    if size == (64, 192) and not (fixed.tile_m and fixed.tile_n) and program.halves.head != 192:
        return False
    return shape.transpose_b or tile_n // program.halves.n_halves * shape.element_bytes % current().row_bytes == 0


def takes_heads(columns: int) -> bool:
    """Whether some tile has whole heads of so many columns, and half a head is whole boxes."""
    return any(_has_heads(tile_n, columns) for _, tile_n in current().tiles)


def _has_heads(tile_n: int, columns: int) -> bool:
    return columns % 32 == 0 and tile_n % columns == 0


def _is_for_few_rows(shape: GemmShape, program: Program, traffic: EpilogueTraffic) -> bool:
    """Whether the product is one of those with which tiles of 64 x 64 have been timed."""
    return isinstance(shape.m, int) and shape.m <= _FEW_ROWS and not has_long_epilogue(program, traffic)


def _clusters_for(shape: GemmShape, tile_m: int) -> tuple[int, ...]:
    """The possible `cluster_m`. In a cluster of two, one CTA would be idle if there is one tile along m."""
    if not isinstance(shape.m, int) or shape.m > _FEW_TILES * tile_m:
        return (2,)
    return (2, 1) if shape.m > tile_m else (1,)


def _spills_with_wide_heads(program: Program) -> bool:
    """Whether an epilogue with heads of 192 columns spills in 128 x 192, so that 64 x 192 is its tile.

    In 64 x 192 nothing spills. In 128 x 192 a rotary embedding spills 32 bytes, and is 3 % faster. Norms and other
    reductions, and even and odd columns, spill 1 to 4 kB and are 1 to 27 % slower; a norm of queries and keys is 3 %
    slower with 4096 rows, and 4 to 8 % faster with 16384 (an H200).
    """
    reduces = program.head_levels or any(one.axis is Axis.COLUMN for one in program.reductions)
    return program.halves.head == 192 and bool(program.halves.interleaved or reduces)


def _leaves_too_little(tile: TileShape, shape: GemmShape, program: Program, traffic: EpilogueTraffic) -> bool:
    if tile.kind != (128, 192):
        return False
    # Heads mostly spill 0.5 to 4 KB here, log-sum-exps with split-K 200 bytes. Shared memory only has room for boxes of
    # half a cache line: adding to a float32 array in place then costs a third of a product with k = 2048, and 1 to 3 %
    # with k = 16384.
    adds_float32 = traffic.load_bytes > 0 and traffic.widest_bytes == 4 and shape.k_bytes < _HIDES_NARROW_ROWS_BYTES
    spills = program.halves.head > 0 or (tile.split_k and has_logsumexp(program)) or _sums_halves_both_ways(program)
    return spills or adds_float32 or len(program.sections) > 1 or _turns_halves(program, traffic)


def _turns_halves(program: Program, traffic: EpilogueTraffic) -> bool:
    """Whether it reads two halves from memory and stores transposed copies, as the backward pass of a gate in fp8 does.

    128 x 192, 128 x 128 and 64 x 128 take 1313, 998 and 979 us with (16384, 8192, 2048), and 2918, 2208 and 2630 with
    k = 4096 and n = 14336 (an H100).
    """
    return has_long_epilogue(program, traffic) and any(store.transposed for store in program.stores)


def _sums_halves_both_ways(program: Program) -> bool:
    """Whether the columns of both halves are summed, and rows too, as for a gate with a bias: that spills 2.7 to 5 KB.

    The backward pass of a GeGLU with a bias (16384, 8192, 2048) then takes 1630 us, twice the time without the sums (an
    H200).
    """
    axes = {one.axis for one in program.reductions}
    return Axis.ROW in axes and any(one.axis is Axis.COLUMN and len(one.values) > 1 for one in program.reductions)


def _configs(
    tile: TileShape, program: Program, traffic: EpilogueTraffic, fixed: GemmConfig, k_bytes: int
) -> Iterator[KernelConfig]:
    """The configurations of this tile that complete `fixed`, best first, whether they fit into shared memory or not.

    Each has the fewest column passes whose code fits into the instruction cache, or the most if none does.
    """
    least_box, row_bytes = _least_box(traffic), current().row_bytes
    for stages, (box_n, subtile_n, load_slots, store_slots) in _preferred(program, traffic, tile, k_bytes):
        box_n = fixed.box_n or max(box_n, fixed.subtile_n or _LEAST_SUBTILE, least_box)
        possible = _possible_passes(program, tile, box_n)
        is_too_wide = box_n * traffic.widest_bytes > row_bytes
        if is_too_wide or not possible or (fixed.column_passes and fixed.column_passes not in possible):
            continue
        cached = (passes for passes in possible if not _uncached_instructions(program, tile, passes))
        yield KernelConfig(
            **tile._asdict(),
            stages=fixed.stages or stages,
            box_n=box_n,
            subtile_n=fixed.subtile_n or min(subtile_n, fixed.box_n or subtile_n),
            load_slots=fixed.load_slots or load_slots,
            store_slots=fixed.store_slots or store_slots,
            column_passes=fixed.column_passes or next(cached, possible[-1]),
            promote=fixed.promote or 0,
        )


def _possible_passes(program: Program, tile: TileShape, box_n: int) -> list[int]:
    """Possible `column_passes`, ascending; empty if a tile's columns, or half a head, are not whole boxes."""
    boxes, rest = divmod(tile.tile_n // program.halves.runs(program.halves.acc), box_n)
    if rest or program.halves.head // 2 % box_n:
        return []
    together = program.halves.head // program.halves.runs(program.halves.acc) // box_n or 1  # boxes of one head
    return [passes for passes in range(1, boxes + 1) if boxes % passes == 0 and boxes // passes % together == 0]


def _uncached_instructions(program: Program, tile: TileShape, passes: int) -> float:
    """The estimated number of instructions by which a kernel exceeds the instruction cache.

    A kernel that does so is 1.5 to 4 times slower. Column passes cost up to 3 % of a product with k = 2048 in
    128 x 192, and 5 % in 128 x 128.
    """
    places = tile.consumer_m * tile.tile_n // 128 // program.halves.acc_halves  # elements of a thread
    return max(0.0, _OTHER_INSTRUCTIONS + places * instructions(program) / passes - current().cached_instructions)


def _preferred(program: Program, traffic: EpilogueTraffic, tile: TileShape, k_bytes: int) -> Iterator[_Pipeline]:
    """Stages, and (box_n, subtile_n, load_slots, store_slots), the best first.

    Wider boxes need fewer copies, and rows of an entire cache line are best. Programs that need many registers have
    narrower subtiles. Stages come before the depth of the epilogue's rings: 5 instead of 6 cost 1 to 2 %. A long
    epilogue comes before stages: the backward pass of a gate is 26 % over the bare product with wide boxes and 5 stages
    of 128 x 128, and 40 % with narrow boxes and 6; with 4 stages of 128 x 192 and two slots it is 14 %. So do loads
    that nothing hides: in cooperative tiles, whose 3 stages are as good as 4, they should be complete when the products
    end (the backward pass of a norm, k = 16384: 1 to 2 % instead of 3.5 with one slot of 32 columns). Only tiles that
    are so small that 8 stages hold too little of b in flight from memory have more than 8.
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
    return current().least_row_bytes // traffic.narrowest_bytes


def _check_boxes(fixed: GemmConfig, program: Program, traffic: EpilogueTraffic) -> None:
    """Raises ValueError for boxes that no tile can have."""
    arch = current()
    box_n = fixed.box_n or max(fixed.subtile_n or _LEAST_SUBTILE, _least_box(traffic))
    if box_n * traffic.widest_bytes > arch.row_bytes:
        raise ValueError(
            f"GemmConfig: box_n = {box_n} makes rows of {box_n * traffic.widest_bytes} bytes "
            f"of the {traffic.widest_bytes}-byte tiles; TMA's swizzle takes at most {arch.row_bytes}"
        )
    if box_n < _least_box(traffic):
        raise ValueError(
            f"GemmConfig: box_n = {box_n} makes rows of {box_n * traffic.narrowest_bytes} bytes "
            f"of the {traffic.narrowest_bytes}-byte tiles; TMA's swizzle takes at least {arch.least_row_bytes}"
        )
    if program.halves.head and program.halves.head // 2 % box_n:
        raise ValueError(f"GemmConfig: box_n = {box_n} does not divide half a head of {program.halves.head} columns")
    if box_n % (fixed.subtile_n or _LEAST_SUBTILE):
        raise ValueError(f"GemmConfig: subtile_n = {fixed.subtile_n} does not divide box_n = {box_n}")


def _misfit(
    tiles: Sequence[TileShape], program: Program, traffic: EpilogueTraffic, fixed: GemmConfig, shape: GemmShape
) -> str:
    """Why none of the tiles has a configuration."""
    if fixed.split_k and shape.groups:
        return "GemmConfig: split_k = True with a product of groups; their tiles are never split, and it must be False"
    if not tiles:
        return (
            f"of the tiles {listed(current().tiles)} none has"
            + (f" tile_m = {fixed.tile_m}" if fixed.tile_m else "")
            + (f" tile_n = {fixed.tile_n}" if fixed.tile_n else "")
            + (f" whole heads of {program.halves.head} columns" if program.halves.head else "")
            + (" 64 columns of each half of a b that is not transposed" if program.halves.n_halves == 2 else "")
        )
    possible = set[int]()
    for tile in tiles:
        for _, (box_n, *_) in _preferred(program, traffic, tile, shape.k_bytes):
            box_n = fixed.box_n or max(box_n, fixed.subtile_n or _LEAST_SUBTILE, _least_box(traffic))
            possible.update(_possible_passes(program, tile, box_n))
    if not possible:
        return f"GemmConfig: box_n = {fixed.box_n} does not divide the columns of a tile's half: {fixed}"
    if fixed.column_passes and fixed.column_passes not in possible:
        return (
            f"GemmConfig: column_passes = {fixed.column_passes}; it must be one of {sorted(possible)}, "
            f"groups of whole boxes{' and whole heads' if program.halves.head else ''}, with {fixed}"
        )
    return (
        f"the epilogue's tiles ({traffic.load_bytes} bytes loaded and {traffic.store_bytes} stored for each element), "
        f"{traffic.column_reductions} column reductions and {traffic.vectors_over_columns} vectors over columns "
        f"do not fit into {current().shared_bytes} bytes of shared memory with {fixed}"
    )
