"""Which tile a product should be cut into, from its sizes and what its epilogue moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Constants:
    """What `python -m benchmarks.tiles --fit` sets from measured times.

    Attributes:
      relative_time: tile -> time of its products relative to that of a 128 x 128 tile, area for area, at the power
        limit: with an epilogue that hides under the other warpgroup's products, and with one that is as long as they
        are, for which the larger tile leaves more of L2's bandwidth.
      without_multicast: the same of a cluster of one.
    """

    relative_time: Mapping[tuple[int, int], tuple[float, float]]
    without_multicast: float


CONSTANTS = Constants(
    relative_time={
        (128, 128): (1.0, 1.0),
        (128, 192): (0.985, 0.91),
        (64, 256): (1.015, 1.1),
        (64, 128): (1.19, 1.2),
    },
    without_multicast=1.3,
)
_START_AND_END = 13  # of a launch: filling the pipeline and the last tile's epilogue, in k blocks of a 128 x 128 tile


def cost(
    product: Product,
    tile: tuple[int, int],
    cluster_m: int,
    *,
    has_long_epilogue: bool,
    constants: Constants = CONSTANTS,
) -> float:
    """Time of a product, in units of what a 128 x 128 tile takes for 64 of k.

    That of the busiest multiprocessor's tiles, each as long as its area and the figures above say, and the start and
    end of the launch.

    Args:
      product: sizes.
      tile: (tile_m, tile_n).
      cluster_m: CTAs that share b's tiles.
      has_long_epilogue: whether a tile's epilogue is about as long as its products.
    """
    tile_m, tile_n = tile
    m = product.m if isinstance(product.m, int) else 1 << 14
    batch = product.batch if isinstance(product.batch, int) else 1
    clusters = -(-m // (tile_m * cluster_m)) * -(-product.n // tile_n) * batch
    waves = -(-clusters // (MULTIPROCESSORS // cluster_m))
    of_tile = tile_m * tile_n / (128 * 128) * constants.relative_time[tile][has_long_epilogue]
    multicast = 1.0 if cluster_m > 1 else constants.without_multicast
    return waves * -(-product.k // 64) * of_tile * multicast + _START_AND_END
