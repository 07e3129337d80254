"""From a program and the arrays' types to one kernel: its source, its results, and what the launch has to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax.epilogue import Axis, Kind, Program, Width, emit
from coda_jax.tiles.config import THREADS, EpilogueTraffic, Tiling, keeps_tables, shared_bytes
from coda_jax.tiles.cost_model import MULTIPROCESSORS
from coda_jax.tiles.table import Problem


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled form of a product with its epilogue.

    Attributes:
      source: the translation unit for NVRTC.
      results: what the custom call returns: the program's stores in order, then one array of partials per reduction:
        ([batch,] tiles along n, M) for a row reduction, ([batch,] consumers' tiles along m, N) for a column reduction,
        float32; with split-K two more, of no use to anyone else.
      attributes: keyword arguments of `coda_jax.ffi.gemm_call`.
    """

    source: str
    results: tuple[jax.ShapeDtypeStruct, ...]
    attributes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Map:
    """A tensor map: which buffer, its column (or row) sections, the box, the swizzle in bytes."""

    buffer: int
    ways: int
    split_rows: bool
    box_columns: int
    box_rows: int
    swizzle_bytes: int

    def encoded(self) -> list[int]:
        return [self.buffer, self.ways, int(self.split_rows), self.box_columns, self.box_rows, self.swizzle_bytes]


def lower(
    program: Program,
    a: jax.ShapeDtypeStruct,
    b: jax.ShapeDtypeStruct,
    operands: Sequence[jax.ShapeDtypeStruct],
    *,
    out_dtypes: Sequence[np.dtype],
    transpose_a: bool,
    transpose_b: bool,
    batched: Sequence[bool],
    tiling: Tiling,
    name: str,
) -> Kernel:
    """Builds the kernel of `program` on a (M, K) b (K, N), or their transposes.

    Args:
      a, b, operands: types of the arguments; each has a leading batch axis where `batched` says so.
      out_dtypes: one for each of the program's stores.
      batched: flags for a, b and the operands.
      tiling: from `choose_tiling`.
      name: for messages.
    """
    batch_sizes = [array.shape[0] for array, is_batched in zip((a, b, *operands), batched, strict=True) if is_batched]
    batch = tuple(batch_sizes[:1])
    m = a.shape[-1] if transpose_a else a.shape[-2]
    n = b.shape[-2] if transpose_b else b.shape[-1]
    pointers = _pointers(program, len(operands), tiling)
    rows = _rows(m, tiling)
    return Kernel(
        source=_source(program, a.dtype, out_dtypes, transpose_a, transpose_b, batched, tiling, rows),
        results=_results(program, batch, m, n, out_dtypes, tiling),
        attributes={
            "name": name,
            "maps": [
                map_.encoded()
                for map_ in _maps(program, len(operands), out_dtypes, transpose_a, transpose_b, tiling, rows)
            ],
            "pointers": pointers,
            "flags": pointers[-1] if tiling.split_k else -1,
            "transpose_a": transpose_a,
            "transpose_b": transpose_b,
            "tile_m": tiling.tile_m,
            "tile_n": tiling.tile_n,
            "ways": program.splits,
            "cluster_m": tiling.cluster_m,
            "threads": THREADS,
            "smem_bytes": shared_bytes(tiling, program, EpilogueTraffic.of(program, out_dtypes)),
        },
    )


def _rows(m: Any, tiling: Tiling) -> int:
    """How many rows of a tile are loaded: of a product with fewer rows than a tile only those, and what makes them a
    multiple of 8. To fill rows with zeros takes the copy engine longer than to load them (k = 14336, n = 4096: 16 rows
    took 52 us where 64 take 34), and what becomes of them is stored nowhere.
    """
    return min(tiling.tile_m, -(-m // 8) * 8) if isinstance(m, int) else tiling.tile_m


def _results(
    program: Program, batch: tuple[int, ...], m: Any, n: int, out_dtypes: Sequence[np.dtype], tiling: Tiling
) -> tuple[jax.ShapeDtypeStruct, ...]:
    tiles_m, tile_columns = -(-m // tiling.consumer_m), tiling.tile_n // program.splits
    tiles_n = sum(-(-((end or n // program.splits) - first) // tile_columns) for first, end in program.sections)
    width = {width: program.width(width, n) for width in Width}
    columns = [store.part[1] - store.part[0] if store.part else width[store.width] for store in program.stores]
    stores = [jax.ShapeDtypeStruct((*batch, m, size), dtype) for size, dtype in zip(columns, out_dtypes, strict=True)]
    partials = [
        jax.ShapeDtypeStruct(
            (*batch, tiles_n, m) if reduction.axis is Axis.ROW else (*batch, tiles_m, width[reduction.width]),
            jnp.float32,
        )
        for reduction in program.reductions
    ]
    return (*stores, *partials, *_partial_tiles(tiling))


def _partial_tiles(tiling: Tiling) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Split-K's sums on their way from one block to another, a tile each, and a flag for each of its four warps."""
    if not tiling.split_k:
        return ()
    shape = (MULTIPROCESSORS, tiling.tile_m, tiling.tile_n)
    return jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((shape[0], 4), jnp.int32)


def _maps(
    program: Program,
    operand_count: int,
    out_dtypes: Sequence[np.dtype],
    transpose_a: bool,
    transpose_b: bool,
    tiling: Tiling,
    rows: int,
) -> list[_Map]:
    """Tensor maps in the kernel's order: a, b, tile operands, stores. Boxes of a and b have rows of 64 elements."""
    rows_of_a = 64 if transpose_a else rows
    if transpose_b:
        rows_of_b = tiling.tile_n // max(tiling.cluster_m, program.splits)
    else:  # a chunk of 64 columns, or a CTA's share of its rows
        rows_of_b = 64 if tiling.tile_n // 64 % tiling.cluster_m == 0 else 64 // tiling.cluster_m
    maps = [_Map(0, 1, False, 64, rows_of_a, 128), _Map(1, program.splits, transpose_b, 64, rows_of_b, 128)]

    def splits(width: Width) -> int:
        return 1 if program.head else program.ways_of(width)

    for i in program.tile_operands:
        operand = program.operands[i]
        row_bytes = tiling.box_n * np.dtype(operand.dtype).itemsize
        maps.append(_Map(2 + i, splits(operand.width), False, tiling.box_n, min(64, rows), row_bytes))
    for i, (store, dtype) in enumerate(zip(program.stores, out_dtypes, strict=True)):
        row_bytes = tiling.box_n * np.dtype(dtype).itemsize
        maps.append(_Map(2 + operand_count + i, splits(store.width), False, tiling.box_n, 16, row_bytes))
    return maps


def _pointers(program: Program, operand_count: int, tiling: Tiling) -> list[int]:
    """Buffers in the order of the kernel's pointers: vectors and scalars, the partials, split-K's."""
    vectors = [2 + i for i, operand in enumerate(program.operands) if operand.kind is not Kind.TILE]
    partials = len(program.reductions) + len(_partial_tiles(tiling))
    first_partial = 2 + operand_count + len(program.stores)
    return vectors + [first_partial + i for i in range(partials)]


def readable_source(problem: Problem, tiling: Tiling) -> str:
    """The kernel's source with the names and the line of the user's epilogue, which what is compiled has not."""
    return _source(
        problem.program,
        problem.dtype,
        problem.out_dtypes,
        problem.transpose_a,
        problem.product.transpose_b,
        problem.batched,
        tiling,
        _rows(problem.product.m, tiling),
        for_reader=True,
    )


def _source(
    program: Program,
    dtype: np.dtype,
    out_dtypes: Sequence[np.dtype],
    transpose_a: bool,
    transpose_b: bool,
    batched: Sequence[bool],
    tiling: Tiling,
    rows: int,
    *,
    for_reader: bool = False,
) -> str:
    traffic = EpilogueTraffic.of(program, out_dtypes)
    maps = 2 + len(program.tile_operands) + len(program.stores)
    pointers = len(_pointers(program, len(program.operands), tiling))
    flags = {True: "true", False: "false"}
    return f"""#include "mainloop_sm90.cuh"

{emit(program, out_dtypes, tuple(batched[2 : 2 + len(program.operands)]), for_reader=for_reader)}
struct Config {{
  static constexpr coda::DType input = coda::DType::{"bf16" if dtype == jnp.bfloat16 else "f16"};
  static constexpr int tile_m = {tiling.tile_m}, tile_n = {tiling.tile_n}, tile_k = {tiling.tile_k};
  static constexpr int consumer_m = {tiling.consumer_m}, rows = {rows};
  static constexpr int stages = {tiling.stages}, cluster_m = {tiling.cluster_m};
  static constexpr int box_n = {tiling.box_n}, subtile_n = {tiling.subtile_n}, column_passes = {tiling.turns};
  static constexpr int load_slots = {tiling.load_slots}, store_slots = {tiling.store_slots};
  static constexpr bool split_k = {flags[tiling.split_k]};
  static constexpr bool keeps_tables = {flags[keeps_tables(program, tiling.cut.tile)]};
  static constexpr bool transpose_a = {flags[transpose_a]}, transpose_b = {flags[transpose_b]};
  static constexpr bool a_batched = {flags[batched[0]]}, b_batched = {flags[batched[1]]};
  static constexpr int shared_bytes = {shared_bytes(tiling, program, traffic)};
}};

extern "C" __global__ void __launch_bounds__({THREADS}, 1)
    coda_gemm(const __grid_constant__ coda::Params<{maps}, {pointers}> params) {{
  coda::gemm<Config, Epilogue>(params);
}}
"""
