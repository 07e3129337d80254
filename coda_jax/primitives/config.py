"""How a kernel is cut: tile sizes, pipeline depths, what fits, and which products the kernel can address at all."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import Axis, Program

_LIGHT_NODES = 7  # values an element's program computes, below which registers are plenty
SHARED_BYTES_PER_BLOCK = 232_448  # what one block of an sm_90 device can have
_MAX_BUFFERS, _MAX_PARAMETER_BYTES = 64, 4096  # as in ffi/handler.cc
CONSUMERS = 2  # warpgroups that multiply and run the epilogue, in turn
THREADS = 128 * (1 + CONSUMERS)


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tile and pipeline sizes of one kernel. `None` where the library shall choose.

    Attributes:
      stages: depth of the ring of operand tiles (each 128 x 64 of a and 64 x 128 of b), 2 to 6.
      cluster_m: CTAs along m that share b's tiles through multicast, 1 or 2.
      subtile_n: columns that the epilogue works on at a time, 16, 32 or 64; a row of it is at most 128 bytes.
      load_slots: depth of the ring that prefetches the epilogue's tile operands, in subtiles of 64 rows.
      store_slots: depth of each warp's ring of results on their way to memory, in subtiles of 16 rows.
    """

    stages: int | None = None
    cluster_m: int | None = None
    subtile_n: int | None = None
    load_slots: int | None = None
    store_slots: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("stages", range(2, 7)),
            ("cluster_m", (1, 2)),
            ("subtile_n", (16, 32, 64)),
            ("load_slots", range(1, 17)),
            ("store_slots", range(1, 17)),
        ):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"GemmConfig: {name} = {value}; it must be one of {list(allowed)}")


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How one kernel is cut: a `GemmConfig` with everything chosen, and the tile that all kernels share."""

    stages: int
    cluster_m: int
    subtile_n: int
    load_slots: int
    store_slots: int

    tile_m: ClassVar[int] = 128
    tile_n: ClassVar[int] = 128
    tile_k: ClassVar[int] = 64


@dataclasses.dataclass(frozen=True)
class EpilogueTraffic:
    """Bytes of an epilogue's tiles for one element of a way: what is loaded and what is stored."""

    load_bytes: int
    store_bytes: int
    widest_bytes: int
    column_reductions: int

    @classmethod
    def of(cls, program: Program, out_dtypes: Sequence[np.dtype]) -> EpilogueTraffic:
        loads = [
            np.dtype(program.operands[i].dtype).itemsize
            for i in program.tile_operands
            for _ in program.loads(i)[: 1 if program.neighbours else None]
        ]
        stores = [np.dtype(dtype).itemsize for dtype in out_dtypes]
        of_section = [
            sum(stores[i] * program.entries(program.stores[i].width) for i in program.stores_of(section))
            for section in program.sections
        ]
        columns = sum(
            program.entries(reduction.width) for reduction in program.reductions if reduction.axis is Axis.COLUMN
        )
        return cls(sum(loads), max(of_section), max([*loads, *stores, 2]), columns)


def shared_bytes(tiling: Tiling, program: Program, traffic: EpilogueTraffic) -> int:
    """Shared memory of a kernel in bytes; the kernel asserts that it counts the same (SharedLayout)."""
    operands = tiling.stages * (tiling.tile_m + tiling.tile_n) * tiling.tile_k * 2
    load_ring = tiling.load_slots * 64 * tiling.subtile_n * traffic.load_bytes
    store_rings = 4 * tiling.store_slots * 16 * tiling.subtile_n * traffic.store_bytes
    columns = traffic.column_reductions * 4 * (tiling.tile_n // program.entries(program.acc_width)) * 4
    epilogue = _round_up(load_ring + store_rings + columns, 1024)
    barriers = 16 * tiling.stages + CONSUMERS * 16 * (tiling.load_slots if traffic.load_bytes else 1)
    return operands + CONSUMERS * epilogue + barriers


def choose_tiling(m: Any, program: Program, out_dtypes: Sequence[np.dtype], given: GemmConfig | None = None) -> Tiling:
    """Completes `given`: the deepest pipeline that fits beside what the epilogue needs.

    Args:
      m: rows of the product (an int, or a symbolic dimension, which is taken as large).
      program: the epilogue's program.
      out_dtypes: dtypes of the program's stores.
      given: fields that are not None are kept.

    Raises:
      ValueError: nothing that keeps `given` fits into shared memory, or a subtile's row is wider than 128 bytes.
    """
    given = given or GemmConfig()
    traffic = EpilogueTraffic.of(program, out_dtypes)
    if given.subtile_n is not None and given.subtile_n * traffic.widest_bytes > 128:
        raise ValueError(
            f"GemmConfig: subtile_n = {given.subtile_n} makes rows of {given.subtile_n * traffic.widest_bytes} bytes "
            f"of the {traffic.widest_bytes}-byte tiles; TMA's swizzle takes at most 128"
        )
    if given.subtile_n is not None and program.head and program.head // 2 % given.subtile_n:
        raise ValueError(
            f"GemmConfig: subtile_n = {given.subtile_n} does not divide half a head of {program.head} columns"
        )
    cluster_m = given.cluster_m or (1 if isinstance(m, int) and m <= Tiling.tile_m else 2)
    for stages, (subtile_n, load_slots, store_slots) in _preferred(program, traffic):
        tiling = Tiling(
            stages=given.stages or stages,
            cluster_m=cluster_m,
            subtile_n=given.subtile_n or subtile_n,
            load_slots=given.load_slots or load_slots,
            store_slots=given.store_slots or store_slots,
        )
        if shared_bytes(tiling, program, traffic) <= SHARED_BYTES_PER_BLOCK:
            return tiling
    raise ValueError(
        f"the epilogue's tiles ({traffic.load_bytes} bytes loaded and {traffic.store_bytes} stored for each element) "
        f"do not fit into {SHARED_BYTES_PER_BLOCK} bytes of shared memory with {given}"
    )


def _preferred(program: Program, traffic: EpilogueTraffic) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Stages, and (subtile_n, load_slots, store_slots), the best first.

    Wider subtiles ask less of the copy engine, most of all when a row is a whole cache line, but programs that need
    many registers then spill. Stages come before the depth of the epilogue's rings: 5 instead of 6 cost 1 to 2 %. The
    backward pass of a gate moves so much that there the wider subtile comes first (26 % over the bare product with 5
    stages and 32 columns, 40 % with 6 and 16).
    """
    narrow, wide = [(16, 2, 2), (16, 2, 1)], [(32, 2, 2), (32, 2, 1), (32, 1, 1)]
    if program.ways == 1 and len(program.nodes) <= _LIGHT_NODES:
        if traffic.load_bytes and traffic.widest_bytes == 2:
            wide = [(64, 1, 1), *wide]
    elif program.ways == 2 and traffic.load_bytes and not program.head:
        yield from itertools.product((6, 5), [(32, 1, 1)])
        wide = []
    elif not (program.head and program.head % 64 == 0 and not program.reductions):
        wide = []
    yield from itertools.product(range(6, 1, -1), [*wide, *narrow])


def takes_heads(columns: int) -> bool:
    """Whether a tile has whole heads of so many columns, and half a head whole subtiles."""
    return columns % 32 == 0 and Tiling.tile_n % columns == 0


def unsupported_reason(
    a: jax.ShapeDtypeStruct,
    b: jax.ShapeDtypeStruct,
    program: Program,
    out_dtypes: Sequence[np.dtype],
    transpose_a: bool,
    transpose_b: bool,
) -> str | None:
    """The rule that keeps the kernel from computing this product, with the value that breaks it; None if none does.

    Shapes are those of the product itself: (M, K) or (K, M), (K, N) or (N, K), with or without a leading batch axis.
    """
    for name, array in (("a", a), ("b", b)):
        if array.dtype not in (jnp.bfloat16, jnp.float16):
            return f"{name} is {np.dtype(array.dtype).name}; the kernel multiplies bfloat16 and float16"
    if a.dtype != b.dtype:
        return f"a is {np.dtype(a.dtype).name} and b is {np.dtype(b.dtype).name}; the kernel wants one dtype"
    k, m = a.shape[-2:] if transpose_a else a.shape[::-1][:2]
    n = b.shape[-2] if transpose_b else b.shape[-1]
    for name, size in (("n", n), ("k", k)):
        if not isinstance(size, int):
            return f"{name} = {size} is symbolic; only m may be"
    if 0 in (m, n, k) or 0 in a.shape or 0 in b.shape:
        return f"m, n, k = {m}, {n}, {k}; an empty product needs no kernel"

    if program.head and not takes_heads(program.head):
        return f"heads of {program.head} columns; the kernel's tile of {Tiling.tile_n} takes heads of 32, 64 and 128"
    if program.tiles_of_heads:
        return (
            f"operand {program.tiles_of_heads[0]}: a reduction of each head depends on this tile, which the kernel "
            "reads once; it reduces heads of what follows from acc and vectors"
        )
    split = program.splits
    rows = [("a", a.shape[-1], a.dtype), ("b", b.shape[-1] if transpose_b else n // split, b.dtype)]
    rows += [(f"operand {i}", n // split, program.operands[i].dtype) for i in program.tile_operands]
    rows += [
        (f"output {store.output}", store.part[1] - store.part[0] if store.part else n // split, dtype)
        for store, dtype in zip(program.stores, out_dtypes, strict=True)
    ]
    for name, size, dtype in rows:
        if not isinstance(size, int):
            return f"{name}: its rows have the symbolic length {size}"
        row_bytes = size * np.dtype(dtype).itemsize
        if row_bytes % 16:
            return (
                f"{name}: a row{' of a half' if split > 1 and name != 'a' else ''} of {size} {np.dtype(dtype).name} is "
                f"{row_bytes} bytes; TMA addresses multiples of 16"
            )
    for name, array in (("a", a), ("b", b)):
        known = [size for size in array.shape if isinstance(size, int)]
        if math.prod(known) >= 2**40 or math.prod(known[:-1]) >= 2**31 or known[-1] >= 2**31:
            return f"{name}: shape {array.shape} is beyond the kernel's 32-bit coordinates"
    buffers = 2 + len(program.operands) + len(program.stores) + len(program.reductions)
    maps = 2 + len(program.tile_operands) + len(program.stores)
    if buffers > _MAX_BUFFERS or 128 * maps + 8 * buffers + 16 > _MAX_PARAMETER_BYTES:
        return (
            f"product and epilogue have {buffers} arrays, {maps} of them matrices; a launch takes {_MAX_BUFFERS}, and "
            f"{_MAX_PARAMETER_BYTES - 16} bytes at 128 a matrix and 8 an array"
        )
    try:
        choose_tiling(m, program, out_dtypes)
    except ValueError as error:
        return str(error)
    return None


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
