"""The tiles that a kernel can have: sizes, pipeline depths, and the configuration of one kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from coda_jax.tiles.arch import current

MAX_STAGES = 12


def tile_k(dtype: np.dtype) -> int:
    """Elements of a k block, for factors of this dtype."""
    return current().row_bytes // np.dtype(dtype).itemsize


class TileShape(NamedTuple):
    """The fields of a `GemmConfig` on which a product's cost depends.

    Attributes:
      cooperative: whether the consumers share each tile, so that no products hide its epilogue.
    """

    tile_m: int
    tile_n: int
    cluster_m: int
    split_k: bool
    cooperative: bool

    @property
    def size(self) -> tuple[int, int]:
        """(tile_m, tile_n)."""
        return self.tile_m, self.tile_n

    @property
    def kind(self) -> tuple[int, ...]:
        """The key of the cost model's constants: the size, and the consumers if it is cooperative by choice alone."""
        by_choice = self.cooperative and self.size in current().either_way_tiles
        return (*self.size, current().consumers) if by_choice else self.size

    @property
    def consumer_m(self) -> int:
        """Rows of a tile that one consumer has."""
        return self.tile_m // (current().consumers if self.cooperative else 1)


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile and pipeline sizes of one kernel. The library chooses the fields that are None.

    Attributes:
      tile_m, tile_n: rows and columns of the output that a warpgroup, or two together, computes at a time: one of
        `Arch.tiles`.
      stages: depth of the ring of operand tiles, each a k block of 128 bytes: 64 of k of 16-bit factors. 2 to 12.
      cluster_m: CTAs along m that share b's tiles through multicast, 1 or 2.
      box_n: columns of the boxes in which the epilogue's tiles are copied, 16, 32 or 64; a row of a box is at most 128
        bytes.
      subtile_n: columns of a box that the epilogue has in registers at a time, 16, 32 or 64.
      load_slots: depth of the ring that prefetches the epilogue's tile operands, in boxes of 64 rows.
      store_slots: depth of each warp's ring of results on their way to memory, in boxes of 16 rows.
      split_k: whether the tiles of the last, partial wave, if they fill at most half of the chip, are split along k
        among all SMs. A launch then has a workspace of a float32 tile for each. Cooperative tiles cannot be split.
      column_passes: the number of groups of a tile's columns on which the same code of the epilogue works one after the
        other: more than 1 where code for all columns would exceed the instruction cache. All groups have the same
        number of whole boxes, and whole heads.
      cooperative: whether two warpgroups have half of the rows of each tile, or each has every second tile. Tiles of
        128 x 256 are always cooperative, of 128 x 192 by choice, others never.
      promote: for factors of 8 bits, after how many elements of k the accumulator is added to a float32 total and
        begins at zero again, a multiple of 128; False for never. The tensor cores align addends to the largest one and
        truncate them 13 bits below it: harmless for data of mean zero, but a sum of 16384 positive addends loses a
        quarter, and 0.6 % with 512. By default never up to k = 4096, and every 512 beyond. It needs cooperative tiles
        of 128 x 192, which cost up to 5 % of a product.
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
    column_passes: int | None = None
    cooperative: bool | None = None
    promote: int | None = None

    def __post_init__(self) -> None:
        arch = current()
        for name, allowed in (
            ("tile_m", sorted({m for m, _ in arch.tiles})),
            ("tile_n", sorted({n for _, n in arch.tiles})),
            ("stages", range(2, MAX_STAGES + 1)),
            ("cluster_m", (1, 2)),
            ("box_n", (16, 32, 64)),
            ("subtile_n", (16, 32, 64)),
            ("load_slots", range(1, 17)),
            ("store_slots", range(1, 17)),
            ("split_k", (False, True)),
            ("column_passes", range(1, 17)),
            ("cooperative", (False, True)),
        ):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"GemmConfig: {name} = {value}; it must be one of {list(allowed)}")
        size: Any = (self.tile_m, self.tile_n)
        if self.split_k and (size in arch.cooperative_tiles or self.cooperative):
            raise ValueError(
                f"GemmConfig: split_k = True with {'cooperative ' * bool(self.cooperative)}tiles of "
                f"{self.tile_m}x{self.tile_n}; it must be one of {listed(arch.split_k_tiles)}, not cooperative"
            )
        if self.cooperative is not None and self.cooperative not in arch.tiles.get(size, (False, True)):
            raise ValueError(
                f"GemmConfig: cooperative = {self.cooperative} with tiles of {self.tile_m}x{self.tile_n}; tiles of "
                f"{listed(arch.cooperative_tiles)} are always cooperative, of {listed(arch.either_way_tiles)} by "
                "choice, others never"
            )
        unit, promote = arch.row_bytes, self.promote
        if promote is not None and (not isinstance(promote, int) or promote is True or promote < 0 or promote % unit):
            raise ValueError(
                f"GemmConfig: promote = {promote}; it must be False or a multiple of {unit}, elements of k"
            )


def listed(sizes: Iterable[tuple[int, int]]) -> str:
    """Sizes of tiles, for messages: "128x128, 128x192"."""
    return ", ".join(f"{m}x{n}" for m, n in sizes)


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """The sizes of one kernel: a `GemmConfig` with all fields chosen; `promote` is 0 for never."""

    tile_m: int
    tile_n: int
    stages: int
    cluster_m: int
    box_n: int
    subtile_n: int
    load_slots: int
    store_slots: int
    split_k: bool
    column_passes: int
    cooperative: bool
    promote: int

    @property
    def tile(self) -> TileShape:
        """The shape of its tile, on which its cost depends."""
        return TileShape(self.tile_m, self.tile_n, self.cluster_m, self.split_k, self.cooperative)

    @property
    def consumer_m(self) -> int:
        """Rows of a tile that one consumer has."""
        return self.tile.consumer_m

    @property
    def name(self) -> str:
        """The tile for a reader: "128 x 192", "128 x 192, split-K", "128 x 192 cooperative, promoted every 512"."""
        size = f"{self.tile_m} x {self.tile_n}{' cooperative' * (len(self.tile.kind) > 2)}"
        return f"{size}{', split-K' * self.split_k}{f', promoted every {self.promote}' if self.promote else ''}"
