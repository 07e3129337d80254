"""Measured constants of the cost model, for each kind of device, and the measure by which tiles are chosen.

Environment, read when a product is lowered, for export too: a function that is jitted already keeps its tiles.

* ``CODA_JAX_TILES_BY``: ``energy_delay`` (default), energy times time, for a chip that is at its power limit at least
  at times, where less energy is less time; or ``time``, for one that stays below it. On an H100 it makes no difference.
  All processes of a job should have the same setting, as all must lower the same program.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from coda_jax.tiles import arch


@dataclasses.dataclass(frozen=True)
class Constants:
    """Constants of the cost model on one kind of device, which `make lab-tiles ARGS=--fit` fits to measured times.

    The fit ranks the fastest tile of each shape first. It says little about a tile that is seldom the fastest. The unit
    of time is that of a k block in a 128 x 128 tile in a cluster of two, when every SM has such a tile and the chip is
    at its power limit. A tile that was never timed on the device has no constants. Tiles are identified by
    `TileShape.kind`. With factors of 8 bits a k block has twice as many elements of k in the same time, which leaves an
    epilogue half the time for the same k. Cooperative tiles of 128 x 192 were timed with these factors alone, on an
    H100, promoted every 512 of k: 1.06 of the time of 128 x 256.

    Attributes:
      of_block: tile -> time of a k block, for the area of a 128 x 128 tile, in clusters of one and of two, when every
        SM has such a tile: their common bandwidth of L2 counts.
      power: tile -> power that such tiles need, relative to 128 x 128 tiles at the same clock (`python -m
        benchmarks.lab.tiles_energy`: its time alone over that at one clock). At the power limit energy is time: the
        energy that products save raises the clock of all other kernels. No `--fit` sets this, nor `idle`.
      idle: power of an idle SM, relative to one at work.
      alone: tile -> the least time of a k block, when the other SMs are idle.
      with_long_epilogue: tile -> factor for a long epilogue; a larger tile leaves it more of L2's bandwidth.
      load, store: time of an epilogue for each byte that it loads and stores for an element of a 128 x 128 tile.
      cooperative_load, cooperative_arithmetic, cooperative_column_reduction: time of a cooperative tile's epilogue,
        which nothing hides, for each byte that it loads, each instruction and each reduction along columns.
      cooperative_heads: additional time of one that works on heads. No `--fit` sets it: the models' shapes have none.
      memory: time for each MB of a and b, for products with few rows. No `--fit` sets it.
      tile: time between two tiles.
      start: time of a launch in clusters of one and of two.
      zero_flags: time before a launch with split-K.
      k_part: time to send or add one k slice of a 128 x 128 tile.
      late_epilogue: additional time of a split tile's epilogue, whose loads wait for the sum, as a share of it.
    """

    of_block: Mapping[tuple[int, ...], tuple[float, float]]
    power: Mapping[tuple[int, ...], float]
    idle: float
    alone: Mapping[tuple[int, ...], float]
    with_long_epilogue: Mapping[tuple[int, ...], float]
    load: float
    cooperative_load: float
    cooperative_arithmetic: float
    cooperative_column_reduction: float
    cooperative_heads: float
    store: float
    memory: float
    tile: float
    start: tuple[float, float]
    zero_flags: float
    k_part: float
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
            (128, 192, 2): (1.05, 1.04),
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
            (128, 192, 2): 1.01,
        },
        with_long_epilogue={
            (128, 128): 1.0,
            (128, 192): 0.859,
            (64, 256): 1.02,
            (64, 128): 1.01,
            (64, 64): 1.01,
            (128, 256): 1.02,
            (128, 192, 2): 1.02,
        },
        load=4.14,
        cooperative_load=1.0,
        cooperative_arithmetic=0.2,
        cooperative_column_reduction=1.75,
        cooperative_heads=2.5,
        store=1.34,
        memory=0.5,
        tile=1.15,
        start=(25.2, 29.5),
        zero_flags=10.4,
        k_part=0.741,
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
            (128, 192, 2): (1.09, 0.98),
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
            (128, 192, 2): 0.965,
        },
        with_long_epilogue={
            (128, 128): 1.0,
            (128, 192): 0.853,
            (64, 256): 0.981,
            (64, 128): 1.1,
            (64, 64): 1.1,
            (128, 256): 1.02,
            (128, 192, 2): 1.02,
        },
        load=4.85,
        cooperative_load=1.52,
        cooperative_arithmetic=0.1,  # `--fit` gives less, from one program alone
        cooperative_column_reduction=1.75,
        cooperative_heads=0.5,
        store=1.7,
        memory=0.7,
        tile=3.24,
        start=(22.7, 25.8),
        zero_flags=10.9,
        k_part=1.53,
        late_epilogue=0.236,
    ),
}


def by_time(constants: Constants) -> Constants:
    """The same constants for products at one clock, whatever power they need."""
    return dataclasses.replace(constants, power=dict.fromkeys(constants.power, 1.0), idle=1.0)


def constants_for(device: str | None) -> Constants:
    """The constants of this kind of device; for other kinds, and for None, those of `Arch.default_device`."""
    return CONSTANTS.get(device or "", CONSTANTS[arch.of(device).default_device])


def tiles_by() -> str:
    """The measure by which tiles are chosen, "energy_delay" or "time".

    Raises:
      RuntimeError: ``CODA_JAX_TILES_BY`` is something else.
    """
    setting = os.environ.get("CODA_JAX_TILES_BY") or "energy_delay"
    if setting not in ("energy_delay", "time"):
        raise RuntimeError(f"CODA_JAX_TILES_BY = {setting!r}; it must be 'energy_delay' or 'time'")
    return setting


def constants_in_use(device: str | None) -> Constants:
    """`constants_for` the device; `by_time` if tiles are chosen by time."""
    constants = constants_for(device)
    return by_time(constants) if tiles_by() == "time" else constants
