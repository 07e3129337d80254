"""The facts of an architecture for which the library has kernels, and of its chips: an `Arch`, of which `SM90` is one.

All others ask `current()`. Measured times of kernels are in constants.py, tables of tiles in tuned/; what a kernel is
written in for it stands in the headers that the object names.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Chip(NamedTuple):
    """The figures of the data sheet: TFLOP/s of dense bfloat16, TB/s of memory, and its size, a number taken as GiB."""

    tflops: float
    tbytes: float
    gib: int

    def tflops_of(self, element_bytes: int) -> float:
        """The TFLOP/s for factors of so many bytes an element: twice as many for 1 byte, 1978.8 on an H100 or H200."""
        return 2 * self.tflops if element_bytes == 1 else self.tflops


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arch:
    """An architecture, and the form that the kernels have on it.

    Attributes:
      name: for messages.
      capability: the compute capability of its devices, as JAX has it.
      target: what NVRTC compiles for.
      product_header: of cuda/, which defines a product's kernel.
      attention_headers: by the function of ``coda::attention`` that they define.
      chips: by the beginning of JAX's device kind.
      default_device: the kind whose figures stand for kinds that are not known, and for None.
      sms: of its largest chip.
      shared_bytes: the shared memory that one block can have.
      cached_instructions: what the instruction cache holds, by estimates.
      kept_registers: of a consumer's thread, for the accumulator and tables of an epilogue.
      row_bytes, least_row_bytes: of the widest and the narrowest swizzle. A row of a factor's tile in shared memory,
        and so a k block, has the widest; a row of a box of the epilogue at least the narrowest.
      warpgroup: threads of a warpgroup.
      consumers: warpgroups that multiply and run the epilogue, in turn or together.
      tiles: (tile_m, tile_n) that a product's kernel can have -> the possible values of `GemmConfig.cooperative`, the
        default first.
      promoted_tile: the cooperative tile whose registers have room for two accumulators.
      unpromoted_k, promoted_k: 8-bit factors with a longer k than the first are promoted every so many elements of k.
      power_limit_tflops: what all SMs together reach with 16-bit factors at the power limit.
      yield_nanoseconds: In a program of several devices, NCCL occupies some SMs for a while. If all blocks of a product
        had fixed shares of its tiles, the blocks of those SMs would begin when the others end. So blocks claim their
        tiles (cuda/claims.cuh). A block also ends after this time, or up to twice this time, so that a collective need
        not wait for the end of a long product.
      copy_share: the share of the data sheet's TB/s that XLA's elementwise passes over large arrays reach.
      attention_tflops: TFLOP/s of needed pairs that the attention kernels reach, forward and backward.
    """

    name: str
    capability: str
    target: str
    product_header: str
    attention_headers: Mapping[str, str]
    chips: Mapping[str, Chip]
    default_device: str
    sms: int
    shared_bytes: int
    cached_instructions: int
    kept_registers: int
    row_bytes: int
    least_row_bytes: int
    warpgroup: int
    consumers: int
    tiles: Mapping[tuple[int, int], tuple[bool, ...]]
    promoted_tile: tuple[int, int]
    unpromoted_k: int
    promoted_k: int
    power_limit_tflops: float
    yield_nanoseconds: int
    copy_share: float
    attention_tflops: tuple[float, float]

    def threads(self, consumers: int | None = None) -> int:
        """The threads of a block with so many consumers, by default its own number: the producer is one more."""
        return self.warpgroup * (1 + (self.consumers if consumers is None else consumers))

    @functools.cached_property
    def cooperative_tiles(self) -> tuple[tuple[int, int], ...]:
        """The tiles of which the consumers always have a share of the rows each."""
        return tuple(size for size, ways in self.tiles.items() if ways == (True,))

    @functools.cached_property
    def either_way_tiles(self) -> tuple[tuple[int, int], ...]:
        """The tiles that are cooperative by choice."""
        return tuple(size for size, ways in self.tiles.items() if len(ways) > 1)

    @functools.cached_property
    def split_k_tiles(self) -> tuple[tuple[int, int], ...]:
        """The tiles that the kernel can split along k."""
        return tuple(size for size in self.tiles if size not in self.cooperative_tiles)

    @property
    def unit_nanoseconds(self) -> float:
        """The unit of `Constants`: a k block of 16-bit factors, in a 128 x 128 tile on each SM, at the power limit."""
        return self.sms * 2 * 128 * 128 * (self.row_bytes // 2) / (1e3 * self.power_limit_tflops)


SM90 = Arch(
    name="Hopper",
    capability="9.0",
    target="sm_90a",
    product_header="mainloop_sm90.cuh",
    attention_headers={"forward": "attention_forward_sm90.cuh", "backward": "attention_backward_sm90.cuh"},
    chips={
        "NVIDIA H200": Chip(989.4, 4.8, 141),
        "NVIDIA H100 80GB HBM3": Chip(989.4, 3.35, 80),
        "NVIDIA H100 PCIe": Chip(756.0, 2.0, 80),
    },
    default_device="NVIDIA H200",
    sms=132,  # with SXM
    shared_bytes=232_448,
    cached_instructions=7000,  # of 8192: estimates may be a seventh too low
    kept_registers=192,  # of 240
    row_bytes=128,
    least_row_bytes=32,
    warpgroup=128,
    consumers=2,
    tiles={
        (128, 128): (False,),
        (128, 192): (False, True),
        (64, 256): (False,),
        (64, 128): (False,),
        (64, 64): (False,),
        (128, 256): (True,),
        (64, 192): (False,),
    },
    promoted_tile=(128, 192),
    unpromoted_k=4096,
    promoted_k=512,
    power_limit_tflops=700,
    yield_nanoseconds=1_000_000,
    copy_share=0.69,  # 3.3 of 4.8 on an H200
    # FlashAttention-3, whose structure the kernels have, reaches 460 to 650 and 435 to 560 on an H100, with heads of 64
    # and 128 (arXiv 2407.08608, figures 5 and 6).
    attention_tflops=(500, 430),
)
ARCHITECTURES = (SM90,)

_named: contextvars.ContextVar[tuple[str | None, Arch | None]] = contextvars.ContextVar("named", default=(None, None))


@contextlib.contextmanager
def as_if_attached(device: str | None) -> Iterator[None]:
    """A context in which kernels are made as if a GPU of this kind were attached; None changes nothing."""
    token = _named.set(_named.get() if device is None else (device, of(device)))
    try:
        yield
    finally:
        _named.reset(token)


def named_device() -> str | None:
    """The kind of device of `as_if_attached`."""
    return _named.get()[0]


def of(device: str | None) -> Arch:
    """The architecture of a kind of device; the first one for kinds that are not known, and for None."""
    if device is not None:
        for arch in ARCHITECTURES:
            if device.startswith(tuple(arch.chips)):
                return arch
    return ARCHITECTURES[0]


def current() -> Arch:
    """The architecture that kernels are made for: of the device that `as_if_attached` names, else the first one.

    Attached GPUs of another one take XLA's form (`machine_reason` in lowering/select.py).
    """
    return _named.get()[1] or ARCHITECTURES[0]


def chip_of(device: str) -> Chip | None:
    """The chip of a device of this kind; None if it is not known."""
    return next((chip for name, chip in of(device).chips.items() if device.startswith(name)), None)
