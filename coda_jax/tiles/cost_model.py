"""The tile that a product should have, from its sizes and what its epilogue moves: energy and time of each tile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from coda_jax.tiles.config import ROW_BYTES, TileShape
from coda_jax.tiles.constants import NUM_SMS, Constants
from coda_jax.tiles.traffic import ElementTraffic

_NOT_HIDDEN = 0.1  # of products beside reading from memory, or the other way round
_MAX_K_PARTS, _MIN_BLOCKS = 8, 4  # of a split tile, and of a part
_MANY_WAVES = 12
_TIMED_K_BYTES = 2048  # of k, from which epilogues that compute have been timed in cooperative tiles
_FEW_WAVES = 4  # of 128 x 128 tiles: so short a product is waited for; of a longer one the mean power counts
_AS_GOOD = 0.0075
_SYMBOLIC_M = 1 << 14

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """Sizes of a product, on which the best tile depends.

    Attributes:
      m: rows (an int, or a symbolic dimension, which is taken as large).
      n, k: columns, and the length of the sums.
      batch: how many such products one launch makes (an int, or symbolic, which is taken as one).
      transpose_b: whether b is stored as (N, K).
      element_bytes: of an element of a or b.
      ragged: "m" or "k", the dimension that the groups of a grouped product divide; else "". Groups along k are a
        batch, and k is what one has of it on average.
      groups: how many.
    """

    m: Any
    n: int
    k: int
    batch: Any = 1
    transpose_b: bool = False
    element_bytes: int = 2
    ragged: str = ""
    groups: int = 0

    @property
    def k_bytes(self) -> int:
        """Bytes along k, in which the time of products is counted: half the bits are multiplied twice as fast."""
        return self.k * self.element_bytes

    @property
    def k_blocks(self) -> int:
        return -(-self.k_bytes // ROW_BYTES)


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


def cost(shape: GemmShape, tile: TileShape, traffic: ElementTraffic, constants: Constants) -> float:
    """Energy of a product, which is its time at the power limit, in the unit of `Constants`; with `by_time` its time at
    one clock. Infinite where nobody has measured.

    The time is that of the busiest multiprocessor; those that have nothing to do in the last wave of a long product
    count for what they take. Two warpgroups take turns at its tiles, so that one's epilogue runs while the other
    multiplies: a tile takes as long as its products, or half as long as products and epilogue, whichever is longer. The
    last epilogue is alone; that of a cooperative tile always is. With split-K comes what its part of a split tile
    takes, and adding the others'. Where there are few rows, reading a and b from memory takes longer than all that.
    """
    if tile.cooperative and (math.isinf(traffic.arithmetic) or (traffic.arithmetic and shape.k_bytes < _TIMED_K_BYTES)):
        return math.inf
    of = constants
    at_once, clusters = NUM_SMS // tile.cluster_m, _clusters(shape, tile)
    split, k_parts = split_tiles(shape, tile)
    waves, left_over = divmod(clusters - split, at_once)
    k_blocks, kind, area = shape.k_blocks, tile.kind, tile.tile_m * tile.tile_n / (128 * 128)
    epilogue = _epilogue(tile, traffic, of) * area
    all_at_work = of.of_block[kind][tile.cluster_m - 1] * (of.with_long_epilogue[kind] if traffic.is_long else 1)

    def block(clusters_at_work: int) -> float:
        share = clusters_at_work / at_once
        return area * _power(tile, share, of) * max(of.alone[kind], all_at_work * share)

    def whole_tile(clusters_at_work: int) -> float:
        products = k_blocks * block(clusters_at_work) + of.tile
        return products + epilogue if tile.cooperative else max(products, (products + epilogue) / 2)

    time = 0.0
    if clusters > split:
        time += waves * whole_tile(at_once)
        if left_over:
            last = _last_wave(shape, left_over / at_once, of) * whole_tile(at_once) if waves else whole_tile(left_over)
            time += last
    if split:
        time += -(-k_blocks // k_parts) * block(split * k_parts)
    reading = of.memory * _megabytes(shape)
    time = max(time, reading) + _NOT_HIDDEN * min(time, reading) + of.start[tile.cluster_m - 1]
    if split:
        time += of.tile + k_parts * of.k_part * area + of.late_epilogue * epilogue
    if not tile.cooperative:
        time += epilogue
    return time + (of.zero_flags if tile.split_k else 0)


def _epilogue(tile: TileShape, traffic: ElementTraffic, of: Constants) -> float:
    """Time that the epilogue adds to an area of 128 x 128."""
    if not tile.cooperative:
        return of.load * traffic.load_bytes + of.store * traffic.store_bytes
    epilogue = of.cooperative_load * traffic.load_bytes + of.cooperative_arithmetic * traffic.arithmetic
    epilogue += of.cooperative_column_reduction * traffic.column_reductions + of.cooperative_heads * traffic.has_heads
    return epilogue + of.store * traffic.store_bytes


def _megabytes(shape: GemmShape) -> float:
    """Megabytes of a and b, which are read from memory at least once."""
    m, batch = _rows_and_batch(shape)
    of_b = shape.groups if shape.ragged == "m" else batch
    return 1e-6 * (batch * m + of_b * shape.n) * shape.k_bytes


def relative_power(shape: GemmShape, tile: TileShape, constants: Constants) -> float:
    """The mean power of a product over its duration, relative to 128 x 128 tiles that fill the chip at the same clock.

    It is the factor that `cost` applies to a time to make an energy of it.
    """
    at_once, (split, k_parts) = NUM_SMS // tile.cluster_m, split_tiles(shape, tile)
    waves, left_over = divmod(_clusters(shape, tile), at_once)
    if not waves:
        return _power(tile, (split * k_parts or left_over) / at_once, constants)
    last = _last_wave(shape, left_over / at_once, constants) if left_over and not split else 1.0
    return _power(tile, 1.0, constants) * (waves + last) / (waves + 1)


def _power(tile: TileShape, share: float, constants: Constants) -> float:
    """The chip's relative power while this share of its multiprocessors works on such tiles."""
    return 1 + (constants.power.get(tile.kind, 1.0) - 1) * share


def _last_wave(shape: GemmShape, share: float, constants: Constants) -> float:
    """The weight of a last wave that occupies this share of the chip; a full wave has weight 1.

    In a long product idle multiprocessors save power. A short product is waited for, so that its last wave counts in
    full.
    """
    if _clusters(shape, TileShape(128, 128, 1, False, False)) < _FEW_WAVES * NUM_SMS:
        return 1.0
    return constants.idle + (1 - constants.idle) * share


def split_tiles(shape: GemmShape, tile: TileShape) -> tuple[int, int]:
    """How many clusters' tiles are split along k, and into how many parts each.

    As cuda/scheduler.cuh has it, on 132 multiprocessors and for an output whose columns are one section.
    """
    if not tile.split_k or not isinstance(shape.m, int) or not isinstance(shape.batch, int):
        return 0, 1
    at_once = NUM_SMS // tile.cluster_m
    left_over = _clusters(shape, tile) % at_once
    k_parts = min(at_once // left_over, _MAX_K_PARTS, shape.k_blocks // _MIN_BLOCKS) if left_over else 1
    return (left_over, k_parts) if k_parts > 1 else (0, 1)


def may_split(shape: GemmShape, tile: TileShape) -> bool:
    """Whether split-K changes anything, and whole waves are few enough for that to show."""
    waves = _clusters(shape, tile) * tile.cluster_m / NUM_SMS
    return split_tiles(shape, tile)[0] > 0 and waves < _MANY_WAVES


def _clusters(shape: GemmShape, tile: TileShape) -> int:
    """Clusters' tiles of a product."""
    m, batch = _rows_and_batch(shape)
    tiles_n = -(-shape.n // tile.tile_n)
    if shape.ragged == "m":  # a group ends anywhere within a tile; of few rows not each has some
        tiles_m = max(m / tile.tile_m + shape.groups / 2, min(m, shape.groups))
        return math.ceil(tiles_m * tiles_n / tile.cluster_m)
    return -(-m // (tile.tile_m * tile.cluster_m)) * tiles_n * batch


def _rows_and_batch(shape: GemmShape) -> tuple[int, int]:
    """m and batch, with what `GemmShape` says is taken for symbolic ones."""
    m = shape.m if isinstance(shape.m, int) else _SYMBOLIC_M
    return m, shape.batch if isinstance(shape.batch, int) else 1
