"""Which tile a product should be cut into, from its sizes and what its epilogue moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

MULTIPROCESSORS = 132  # of an H100 or H200 with SXM


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


@dataclasses.dataclass(frozen=True)
class Constants:
    """What `python -m benchmarks.tiles --fit` sets from measured times. Times are those of 64 of k in a 128 x 128 tile
    in a cluster of two, when every multiprocessor has such a tile and the chip is at its power limit.

    Attributes:
      relative_time: tile -> time of its products relative to that of a 128 x 128 tile, area for area: with an epilogue
        that hides under the other warpgroup's products, and with one that is as long as they are, for which the larger
        tile leaves more of L2's bandwidth.
      alone: the same when the other multiprocessors have nothing to do.
      without_multicast: the same in clusters of one.
      start: of a launch in clusters of one and of two.
      end: of the last 128 x 128 tile's epilogue.
    """

    relative_time: Mapping[tuple[int, int], tuple[float, float]]
    alone: float
    without_multicast: float
    start: tuple[float, float]
    end: float


CONSTANTS = Constants(
    relative_time={
        (128, 128): (1.0, 1.0),
        (128, 192): (0.975, 0.931),
        (64, 256): (1.009, 1.04),
        (64, 128): (1.19, 1.125),
    },
    alone=0.737,
    without_multicast=1.055,
    start=(12.0, 13.8),
    end=2.1,
)
# In the same unit.
_ZERO_FLAGS = 7.8  # before a launch with split-K
_PART = 1.5  # sending or adding a part of a 128 x 128 tile
_MAX_PARTS, _MIN_BLOCKS = 8, 4  # of a split tile, and of a part
_MANY_WAVES = 12


def cost(product: Product, cut: Cut, *, has_long_epilogue: bool, constants: Constants = CONSTANTS) -> float:
    """Time of a product, in the unit of `Constants`.

    That of the busiest multiprocessor's tiles, each as long as its area and the constants say, and the start and end of
    the launch; with split-K, of what its part of a split tile takes and of adding the others'.

    Args:
      product: sizes.
      cut: tiles and clusters.
      has_long_epilogue: whether a tile's epilogue is about as long as its products.
    """
    at_once, clusters = MULTIPROCESSORS // cut.cluster_m, _clusters(product, cut)
    k_blocks = -(-product.k // 64)
    split, parts = split_tiles(product, cut)
    busy = min(1.0, max(clusters, split * parts) / at_once)
    area = cut.tile_m * cut.tile_n / (128 * 128)
    full = 1.0 if cut.cluster_m > 1 else constants.without_multicast
    of_block = area * constants.relative_time[cut.tile_m, cut.tile_n][has_long_epilogue]
    of_block *= constants.alone + (full - constants.alone) * busy
    time = -(-(clusters - split) // at_once) * k_blocks * of_block
    if split:
        time += -(-k_blocks // parts) * of_block + parts * _PART * area
    if cut.split_k:
        time += _ZERO_FLAGS
    return time + constants.start[cut.cluster_m - 1] + constants.end * area


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
    m = product.m if isinstance(product.m, int) else 1 << 14
    batch = product.batch if isinstance(product.batch, int) else 1
    return -(-m // (cut.tile_m * cut.cluster_m)) * -(-product.n // cut.tile_n) * batch
