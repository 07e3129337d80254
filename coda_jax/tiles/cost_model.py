"""The energy and time of a product with each tile, from its sizes and its epilogue's traffic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from coda_jax.tiles.arch import current
from coda_jax.tiles.config import TileShape
from coda_jax.tiles.constants import Constants
from coda_jax.tiles.traffic import ElementTraffic

_NOT_HIDDEN = 0.1  # share of the shorter of computing and reading from memory that the longer does not hide
_MAX_K_PARTS, _MIN_BLOCKS = 8, 4  # k slices of a split tile, and k blocks of a slice
_MANY_WAVES = 12
_TIMED_K_BYTES = 2048  # bytes along k from which epilogues that compute have been timed in cooperative tiles
_FEW_WAVES = 4  # of 128 x 128 tiles: a shorter product's last wave counts in full; for a longer one mean power counts
_AS_GOOD = 0.0075
_SYMBOLIC_M = 1 << 14

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class GemmShape:
    """Sizes of a product, on which the best tile depends.

    Attributes:
      m: rows (an int, or a symbolic dimension, which counts as large).
      n, k: columns, and the length of the sums.
      batch: how many such products one launch computes (an int, or symbolic, which counts as one).
      transpose_b: whether b is stored as (N, K).
      element_bytes: of an element of a or b.
      ragged: "m" or "k", the dimension that the groups of a grouped product divide; else "". Groups along k are a
        batch, and k is the mean of theirs.
      groups: the number of groups.
      symmetric: whether only the tiles on and below the diagonal are computed.
    """

    m: Any
    n: int
    k: int
    batch: Any = 1
    transpose_b: bool = False
    element_bytes: int = 2
    ragged: str = ""
    groups: int = 0
    symmetric: bool = False

    @property
    def k_bytes(self) -> int:
        """Bytes along k, to which the time of products is proportional: half the bits are multiplied twice as fast."""
        return self.k * self.element_bytes

    @property
    def k_blocks(self) -> int:
        return -(-self.k_bytes // current().row_bytes)


def best_first(costs: Mapping[_T, tuple[float, float]]) -> list[_T]:
    """The keys of `costs` by energy times time, the least first.

    A chip at its power limit is faster the less energy a product needs; below the limit only time counts. Of the keys
    whose geometric mean of energy and time is within 0.75 % of the least, the fastest comes first.

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
    one clock. Infinite for tiles and epilogues that have not been measured, and for cooperative tiles of a symmetric
    result, where nothing hides that each tile is stored twice: 128 x 256 takes 1.03 to 1.11 of 128 x 128's time (16
    products of n = 2048, k = 2048 to 8192, an H200).

    The time is that of the busiest SM; idle SMs in the last wave of a long product count by their power. Two warpgroups
    alternate, so that one's epilogue runs while the other multiplies: a tile takes as long as its products, or half as
    long as products and epilogue, whichever is longer. The last epilogue is not hidden, nor is one of a cooperative
    tile. Split-K adds the time of a k slice of a split tile, and of adding the other slices. For few rows, reading a
    and b from memory takes longer than all this.
    """
    if tile.cooperative and (math.isinf(traffic.arithmetic) or (traffic.arithmetic and shape.k_bytes < _TIMED_K_BYTES)):
        return math.inf
    if tile.cooperative and shape.symmetric:
        return math.inf
    c = constants
    at_once, clusters = current().sms // tile.cluster_m, _clusters(shape, tile)
    split, k_parts = split_tiles(shape, tile)
    waves, left_over = divmod(clusters - split, at_once)
    k_blocks, kind, area = shape.k_blocks, tile.kind, tile.tile_m * tile.tile_n / (128 * 128)
    epilogue = _epilogue(tile, traffic, c) * area
    all_at_work = c.of_block[kind][tile.cluster_m - 1] * (c.with_long_epilogue[kind] if traffic.is_long else 1)

    def block(clusters_at_work: int) -> float:
        share = clusters_at_work / at_once
        return area * _power(tile, share, c) * max(c.alone[kind], all_at_work * share)

    def whole_tile(clusters_at_work: int) -> float:
        products = k_blocks * block(clusters_at_work) + c.tile
        return products + epilogue if tile.cooperative else max(products, (products + epilogue) / 2)

    time = 0.0
    if clusters > split:
        time += waves * whole_tile(at_once)
        if left_over:
            last = _last_wave(shape, left_over / at_once, c) * whole_tile(at_once) if waves else whole_tile(left_over)
            time += last
    if split:
        time += -(-k_blocks // k_parts) * block(split * k_parts)
    reading = c.memory * _megabytes(shape)
    time = max(time, reading) + _NOT_HIDDEN * min(time, reading) + c.start[tile.cluster_m - 1]
    if split:
        time += c.tile + k_parts * c.k_part * area + c.late_epilogue * epilogue
    if not tile.cooperative:
        time += epilogue
    return time + (c.zero_flags if tile.split_k else 0)


def _epilogue(tile: TileShape, traffic: ElementTraffic, constants: Constants) -> float:
    """Time of the epilogue for an area of 128 x 128."""
    if not tile.cooperative:
        return constants.load * traffic.load_bytes + constants.store * traffic.store_bytes
    epilogue = constants.cooperative_load * traffic.load_bytes + constants.cooperative_arithmetic * traffic.arithmetic
    epilogue += (
        constants.cooperative_column_reduction * traffic.column_reductions
        + constants.cooperative_heads * traffic.has_heads
    )
    return epilogue + constants.store * traffic.store_bytes


def _megabytes(shape: GemmShape) -> float:
    """Megabytes of a and b, each read from memory once."""
    m, batch = _rows_and_batch(shape)
    b_count = shape.groups if shape.ragged == "m" else batch
    return 1e-6 * (batch * m + b_count * shape.n) * shape.k_bytes


def relative_power(shape: GemmShape, tile: TileShape, constants: Constants) -> float:
    """The mean power of a product over its duration, relative to 128 x 128 tiles that fill the chip at the same clock.

    `cost` multiplies a time by it to get the energy.
    """
    at_once, (split, k_parts) = current().sms // tile.cluster_m, split_tiles(shape, tile)
    waves, left_over = divmod(_clusters(shape, tile), at_once)
    if not waves:
        return _power(tile, (split * k_parts or left_over) / at_once, constants)
    last = _last_wave(shape, left_over / at_once, constants) if left_over and not split else 1.0
    return _power(tile, 1.0, constants) * (waves + last) / (waves + 1)


def _power(tile: TileShape, share: float, constants: Constants) -> float:
    """The chip's relative power while this share of its SMs works on such tiles."""
    return 1 + (constants.power.get(tile.kind, 1.0) - 1) * share


def _last_wave(shape: GemmShape, share: float, constants: Constants) -> float:
    """The weight of a last wave that occupies this share of the chip; a full wave has weight 1.

    In a long product idle SMs save power. The last wave of a short product counts in full.
    """
    if _clusters(shape, TileShape(128, 128, 1, False, False)) < _FEW_WAVES * current().sms:
        return 1.0
    return constants.idle + (1 - constants.idle) * share


def split_tiles(shape: GemmShape, tile: TileShape) -> tuple[int, int]:
    """How many clusters' tiles are split along k, and into how many k slices each.

    It agrees with cuda/scheduler.cuh for that many SMs and an output whose columns are one section.
    """
    if not tile.split_k or not isinstance(shape.m, int) or not isinstance(shape.batch, int):
        return 0, 1
    at_once = current().sms // tile.cluster_m
    left_over = _clusters(shape, tile) % at_once
    k_parts = min(at_once // left_over, _MAX_K_PARTS, shape.k_blocks // _MIN_BLOCKS) if left_over else 1
    return (left_over, k_parts) if k_parts > 1 else (0, 1)


def may_split(shape: GemmShape, tile: TileShape) -> bool:
    """Whether split-K splits any tile, in a product with few enough waves for that to matter."""
    waves = _clusters(shape, tile) * tile.cluster_m / current().sms
    return split_tiles(shape, tile)[0] > 0 and waves < _MANY_WAVES


def _clusters(shape: GemmShape, tile: TileShape) -> int:
    """The number of clusters' tiles of a product."""
    m, batch = _rows_and_batch(shape)
    tiles_n = -(-shape.n // tile.tile_n)
    if shape.ragged == "m":  # a group ends within a tile, on average in its middle; with few rows some are empty
        tiles_m = max(m / tile.tile_m + shape.groups / 2, min(m, shape.groups))
        return math.ceil(tiles_m * tiles_n / tile.cluster_m)
    if shape.symmetric:
        return clusters_of_triangle(shape.n, tile.tile_m * tile.cluster_m, tile.tile_n) * batch
    return -(-m // (tile.tile_m * tile.cluster_m)) * tiles_n * batch


def clusters_of_triangle(n: int, rows: int, columns: int) -> int:
    """The clusters' tiles of a symmetric (n, n) result that are computed, as cuda/scheduler.cuh has them in `Triangle`.

    Args:
      rows, columns: of a cluster's tiles.
    """
    side = math.lcm(rows, columns)
    squares = -(-n // side)
    return squares * (squares + 1) // 2 * (side // rows) * (side // columns)


def _rows_and_batch(shape: GemmShape) -> tuple[int, int]:
    """m and batch, with the numbers by which symbolic ones count."""
    m = shape.m if isinstance(shape.m, int) else _SYMBOLIC_M
    return m, shape.batch if isinstance(shape.batch, int) else 1
