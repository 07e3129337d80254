"""Which tile a product should be cut into, from its sizes and what its epilogue moves.

Environment, read when a product is lowered, for export too: what is jitted already keeps its tiles.

* ``CODA_JAX_TILES_BY``: ``energy_delay`` (default), energy times time, for a chip that is at its power limit always or
  at times, where less energy is less time; or ``time``, for one that stays below it. On an H100 it makes no difference.
  All processes of a job should have the same, for all must lower the same program.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

_T = TypeVar("_T")

MULTIPROCESSORS = 132  # of an H100 or H200 with SXM
SHARED_TILES = ((128, 256),)  # (tile_m, tile_n) of which each of the two consumers has half of the rows


@dataclasses.dataclass(frozen=True)
class Product:
    """Sizes of a product, on which the best tile depends.

    Attributes:
      m: rows (an int, or a symbolic dimension, which is taken as large).
      n, k: columns, and the length of the sums.
      batch: how many such products one launch makes (an int, or symbolic, which is taken as one).
      transpose_b: whether b is stored as (N, K).
    """

    m: Any
    n: int
    k: int
    batch: Any = 1
    transpose_b: bool = False


class Cut(NamedTuple):
    """How a product is cut into tiles, all that its cost depends on; see `GemmConfig`."""

    tile_m: int
    tile_n: int
    cluster_m: int
    split_k: bool

    @property
    def tile(self) -> tuple[int, int]:
        """(tile_m, tile_n)."""
        return self.tile_m, self.tile_n

    @property
    def is_shared(self) -> bool:
        """Whether the consumers share each tile, and so nothing is multiplied during its epilogue."""
        return self.tile in SHARED_TILES


class ElementTraffic(NamedTuple):
    """What an epilogue moves.

    Attributes:
      load_bytes, store_bytes: for one element of the accumulator.
      column_reductions: along columns, for one element.
      is_long: whether it is about as long as the other warpgroup's products, which then do not hide it.
      arithmetic: instructions for each element, where nothing hides them: 0 if they take no time beside what it moves,
        infinite if they have not been timed.
      has_heads: whether it works on heads.
    """

    load_bytes: float
    store_bytes: float
    column_reductions: float
    is_long: bool
    arithmetic: float
    has_heads: bool


@dataclasses.dataclass(frozen=True)
class Constants:
    """What `make lab-tiles ARGS=--fit` sets from measured times, such that the fastest tiles come first; those
    of a tile that seldom is say no more than that. The unit is the time of 64 of k in a 128 x 128 tile in a cluster of
    two, when every multiprocessor has such a tile and the chip is at its power limit. A tile that a device's constants
    do not have has not been timed there.

    Attributes:
      of_block: tile -> time of 64 of k, for the area of a 128 x 128 tile, in clusters of one and of two, when every
        multiprocessor has such a tile: what they all read from L2 tells.
      power: tile -> power that this takes, over that of 128 x 128 tiles at the same clock (`python -m
        benchmarks.lab.tiles_energy`: its time alone over that at one clock). At the power limit energy is time: what
        products save, the clock of all else gains. No `--fit` sets this, nor `idle`.
      idle: power of a multiprocessor that has nothing to do, over that of one at work.
      alone: tile -> the least such time, when other multiprocessors have nothing to do.
      with_long_epilogue: tile -> factor for a long epilogue; a larger tile leaves it more of L2's bandwidth.
      load, store: of an epilogue, for each byte that it loads and stores for an element of a 128 x 128 tile.
      shared_load, shared_arithmetic, shared_column_reduction: of a shared tile's epilogue, which nothing hides, for
        each byte that it loads, each instruction and each reduction along columns.
      shared_heads: of one that works on heads, beside that. No `--fit` sets it, for the models' shapes have no heads.
      memory: for each MB of a and b, of products with few rows. No `--fit` sets it.
      tile: between a tile and the next.
      start: of a launch in clusters of one and of two.
      zero_flags: before a launch with split-K.
      part: sending or adding a part of a 128 x 128 tile.
      late_epilogue: of a split tile, whose loads wait for the sum, as a share of the epilogue.
    """

    of_block: Mapping[tuple[int, int], tuple[float, float]]
    power: Mapping[tuple[int, int], float]
    idle: float
    alone: Mapping[tuple[int, int], float]
    with_long_epilogue: Mapping[tuple[int, int], float]
    load: float
    shared_load: float
    shared_arithmetic: float
    shared_column_reduction: float
    shared_heads: float
    store: float
    memory: float
    tile: float
    start: tuple[float, float]
    zero_flags: float
    part: float
    late_epilogue: float


CONSTANTS = {
    "NVIDIA H200": Constants(
        of_block={
            (128, 128): (1.09, 1.0),
            (128, 192): (1.04, 0.976),
            (64, 256): (1.35, 1.02),
            (64, 128): (1.71, 1.17),
            (64, 64): (2.0, 1.2),
            (128, 256): (0.989, 0.977),
        },
        power={(128, 128): 1.0, (128, 192): 0.99, (64, 256): 1.0, (64, 128): 1.0, (64, 64): 1.0, (128, 256): 0.95},
        idle=0.55,
        alone={
            (128, 128): 0.832,
            (128, 192): 0.857,
            (64, 256): 0.904,
            (64, 128): 0.877,
            (64, 64): 1.2,
            (128, 256): 0.957,
        },
        with_long_epilogue={
            (128, 128): 1.0,
            (128, 192): 0.859,
            (64, 256): 1.02,
            (64, 128): 1.01,
            (64, 64): 1.01,
            (128, 256): 1.02,
        },
        load=4.14,
        shared_load=1.0,
        shared_arithmetic=0.2,
        shared_column_reduction=1.75,
        shared_heads=2.5,
        store=1.34,
        memory=0.5,
        tile=1.15,
        start=(25.2, 29.5),
        zero_flags=10.4,
        part=0.741,
        late_epilogue=0.226,
    ),
    "NVIDIA H100 80GB HBM3": Constants(
        of_block={
            (128, 128): (1.09, 1.0),
            (128, 192): (1.02, 0.886),
            (64, 256): (1.57, 1.08),
            (64, 128): (2.0, 1.21),
            (64, 64): (2.6, 1.4),
            (128, 256): (1.03, 0.923),
        },
        power={(128, 128): 1.0, (128, 192): 1.0, (64, 256): 1.0, (64, 128): 1.0, (64, 64): 1.0, (128, 256): 1.0},
        idle=1.0,
        alone={
            (128, 128): 0.85,
            (128, 192): 0.944,
            (64, 256): 0.874,
            (64, 128): 1.0,
            (64, 64): 0.8,
            (128, 256): 0.911,
        },
        with_long_epilogue={
            (128, 128): 1.0,
            (128, 192): 0.853,
            (64, 256): 0.981,
            (64, 128): 1.1,
            (64, 64): 1.1,
            (128, 256): 1.02,
        },
        load=4.85,
        shared_load=1.52,
        shared_arithmetic=0.1,  # `--fit` finds less, from one program alone
        shared_column_reduction=1.75,
        shared_heads=0.5,
        store=1.7,
        memory=0.7,
        tile=3.24,
        start=(22.7, 25.8),
        zero_flags=10.9,
        part=1.53,
        late_epilogue=0.236,
    ),
}


def by_time(constants: Constants) -> Constants:
    """The same for products at one clock, whatever power they take."""
    return dataclasses.replace(constants, power=dict.fromkeys(constants.power, 1.0), idle=1.0)


def constants_for(device: str | None) -> Constants:
    """Those of this kind of device; an H200's for others, and where it is not known."""
    return CONSTANTS.get(device or "", CONSTANTS["NVIDIA H200"])


def tiles_by() -> str:
    """What tiles are chosen by, "energy_delay" or "time".

    Raises:
      RuntimeError: ``CODA_JAX_TILES_BY`` is something else.
    """
    setting = os.environ.get("CODA_JAX_TILES_BY") or "energy_delay"
    if setting not in ("energy_delay", "time"):
        raise RuntimeError(f"CODA_JAX_TILES_BY = {setting!r}; it must be 'energy_delay' or 'time'")
    return setting


def constants_in_use(device: str | None) -> Constants:
    """`constants_for`; `by_time` where that is what tiles are chosen by."""
    constants = constants_for(device)
    return by_time(constants) if tiles_by() == "time" else constants


_NOT_HIDDEN = 0.1  # of products beside reading from memory, or the other way round
_MAX_PARTS, _MIN_BLOCKS = 8, 4  # of a split tile, and of a part
_MANY_WAVES = 12
_TIMED_K = 1024  # from which epilogues that compute have been timed in shared tiles
_FEW_WAVES = 4  # of 128 x 128 tiles: so short a product is waited for; of a longer one the mean power counts
_AS_GOOD = 0.0075


def best_first(costs: Mapping[_T, tuple[float, float]]) -> list[_T]:
    """Least energy times time first: at its power limit a chip is the faster, the less energy a product takes, below it
    the less time. Of those whose geometric mean of both is within 0.75 % of the least, the fastest first.

    Args:
      costs: energy of each, and its time at one clock.
    """
    means = {one: math.sqrt(energy * time) for one, (energy, time) in costs.items()}
    enough = (1 + _AS_GOOD) * min(means.values(), default=math.inf)

    def order(one: _T) -> tuple[bool, float]:
        return (False, costs[one][1]) if means[one] <= enough else (True, means[one])

    return sorted(costs, key=order)


def cost(product: Product, cut: Cut, traffic: ElementTraffic, constants: Constants) -> float:
    """Energy of a product, which is its time at the power limit, in the unit of `Constants`; with `by_time` its time at
    one clock. Infinite where nobody has measured.

    The time is that of the busiest multiprocessor; those that have nothing to do in the last wave of a long product
    count for what they take. Two warpgroups take turns at its tiles, so that one's epilogue runs while the other
    multiplies: a tile takes as long as its products, or half as long as products and epilogue, whichever is longer. The
    last epilogue is alone; that of a tile that they share always is. With split-K comes what its part of a split tile
    takes, and adding the others'. Where there are few rows, reading a and b from memory takes longer than all that.
    """
    if cut.is_shared and (math.isinf(traffic.arithmetic) or (traffic.arithmetic and product.k < _TIMED_K)):
        return math.inf
    of = constants
    at_once, clusters = MULTIPROCESSORS // cut.cluster_m, _clusters(product, cut)
    split, parts = split_tiles(product, cut)
    waves, left_over = divmod(clusters - split, at_once)
    k_blocks, name, area = -(-product.k // 64), cut.tile, cut.tile_m * cut.tile_n / (128 * 128)
    if cut.is_shared:
        epilogue = of.shared_load * traffic.load_bytes + of.shared_arithmetic * traffic.arithmetic
        epilogue += of.shared_column_reduction * traffic.column_reductions + of.shared_heads * traffic.has_heads
    else:
        epilogue = of.load * traffic.load_bytes
    epilogue = (epilogue + of.store * traffic.store_bytes) * area
    all_at_work = of.of_block[name][cut.cluster_m - 1] * (of.with_long_epilogue[name] if traffic.is_long else 1)

    def block(clusters_at_work: int) -> float:
        share = clusters_at_work / at_once
        return area * _power(cut, share, of) * max(of.alone[name], all_at_work * share)

    def tile(clusters_at_work: int) -> float:
        products = k_blocks * block(clusters_at_work) + of.tile
        return products + epilogue if cut.is_shared else max(products, (products + epilogue) / 2)

    time = 0.0
    if clusters > split:
        time += waves * tile(at_once)
        if left_over:
            time += (_last_wave(product, left_over / at_once, of) * tile(at_once)) if waves else tile(left_over)
    if split:
        time += -(-k_blocks // parts) * block(split * parts)
    reading = of.memory * _megabytes(product)
    time = max(time, reading) + _NOT_HIDDEN * min(time, reading) + of.start[cut.cluster_m - 1]
    if split:
        time += of.tile + parts * of.part * area + of.late_epilogue * epilogue
    if not cut.is_shared:
        time += epilogue
    return time + (of.zero_flags if cut.split_k else 0)


def _megabytes(product: Product) -> float:
    """Of a and b, which are read from memory once at least."""
    m, batch = _rows_and_batch(product)
    return 2e-6 * batch * (m + product.n) * product.k


def relative_power(product: Product, cut: Cut, constants: Constants) -> float:
    """Of a product, over that of 128 x 128 tiles that fill the chip, at the same clock: what `cost` makes of a time."""
    at_once, (split, parts) = MULTIPROCESSORS // cut.cluster_m, split_tiles(product, cut)
    waves, left_over = divmod(_clusters(product, cut), at_once)
    if not waves:
        return _power(cut, (split * parts or left_over) / at_once, constants)
    last = _last_wave(product, left_over / at_once, constants) if left_over and not split else 1.0
    return _power(cut, 1.0, constants) * (waves + last) / (waves + 1)


def _power(cut: Cut, share: float, constants: Constants) -> float:
    """With this share of the chip at work."""
    return 1 + (constants.power.get(cut.tile, 1.0) - 1) * share


def _last_wave(product: Product, share: float, constants: Constants) -> float:
    """What a wave after whole ones counts that has work for this share of the chip, over a whole one."""
    if _clusters(product, Cut(128, 128, 1, False)) < _FEW_WAVES * MULTIPROCESSORS:
        return 1.0
    return constants.idle + (1 - constants.idle) * share


def split_tiles(product: Product, cut: Cut) -> tuple[int, int]:
    """How many clusters' tiles are split along k, and each into how many parts: as cuda/scheduler.cuh has it, on 132
    multiprocessors and for an output that is not in parts.
    """
    if not cut.split_k or not isinstance(product.m, int) or not isinstance(product.batch, int):
        return 0, 1
    at_once = MULTIPROCESSORS // cut.cluster_m
    left_over = _clusters(product, cut) % at_once
    parts = min(at_once // left_over, _MAX_PARTS, -(-product.k // 64) // _MIN_BLOCKS) if left_over else 1
    return (left_over, parts) if parts > 1 else (0, 1)


def may_split(product: Product, cut: Cut) -> bool:
    """Whether split-K changes anything, and whole waves are few enough for that to show."""
    waves = _clusters(product, cut) * cut.cluster_m / MULTIPROCESSORS
    return split_tiles(product, cut)[0] > 0 and waves < _MANY_WAVES


def _clusters(product: Product, cut: Cut) -> int:
    """Clusters' tiles of a product."""
    m, batch = _rows_and_batch(product)
    return -(-m // (cut.tile_m * cut.cluster_m)) * -(-product.n // cut.tile_n) * batch


def _rows_and_batch(product: Product) -> tuple[int, int]:
    """With what `Product` says is taken for symbolic sizes."""
    m = product.m if isinstance(product.m, int) else 1 << 14
    return m, product.batch if isinstance(product.batch, int) else 1
