"""From a product's types to one kernel: its source, its results, and what the launch has to know."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coda_jax import ffi
from coda_jax.epilogue import Axis, Program, Reduction, Width, emit
from coda_jax.epilogue.dtypes import TABLE, is_of_8_bits
from coda_jax.primitives.axes import Dimension
from coda_jax.primitives.spec import GemmSpec
from coda_jax.tiles.arch import current
from coda_jax.tiles.config import KernelConfig, tile_k
from coda_jax.tiles.cost_model import clusters_of_triangle
from coda_jax.tiles.table import Problem
from coda_jax.tiles.traffic import CLAIMS_BYTES, EpilogueTraffic, keeps_tables, shared_bytes


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled form of a product with its epilogue.

    Attributes:
      results: what the custom call returns: the program's stores in order, then one array of partials per reduction:
        ([batch,] tiles along n, M) for a row reduction, ([batch,] consumers' tiles along m, N) for a column reduction,
        (consumer warps of a launch,) for one of all rows and columns, or what a row reduction has (`_by_rows`),
        float32; then scratch of the kernel's own: with split-K two arrays, with claimed tiles one.
      call: the custom call's attributes, the source for NVRTC among them.
    """

    results: list[jax.ShapeDtypeStruct]
    call: ffi.GemmCall


@dataclasses.dataclass(frozen=True)
class _Map:
    """A tensor map: which buffer, its column (or row) sections, the box, the swizzle in bytes."""

    buffer: int
    halves: int
    split_rows: bool
    box_columns: int
    box_rows: int
    swizzle_bytes: int


def lower(types: Sequence[Any], spec: GemmSpec, config: KernelConfig, *, yields: bool = False) -> Kernel:
    """Builds the kernel of a product.

    Args:
      types: of a, b and the operands.
      yields: whether its blocks claim their tiles and end early, as a program of several devices needs it.
    """
    arch = current()
    a, b, operands = spec.split(types)
    size, (m, n, _) = spec.batch(types), spec.sizes(a, b)
    if size is not None or spec.ragged or (yields and not config.split_k) or not _has_whole_groups(spec.program, n):
        spec = spec.replace(program=_by_rows(spec.program))
    program, out_dtypes = spec.program, spec.store_dtypes
    groups = spec.num_groups(types)
    if spec.ragged is Dimension.K:
        size = groups
    smem_bytes = shared_bytes(config, program, EpilogueTraffic.of(program, out_dtypes), groups)
    claims = (
        yields
        and not config.split_k
        and smem_bytes + CLAIMS_BYTES <= arch.shared_bytes
        and _clusters(program, size, m, n, config) > arch.sms // config.cluster_m  # else each has a tile, in any order
    )
    scratch = _scratch(config, claims)
    stored, rows = spec.ragged is Dimension.M, _rows(m, config)
    pointers = _pointers(program, len(operands), len(scratch), stored=stored)
    source = _source(
        program,
        (a.dtype, b.dtype),
        out_dtypes,
        spec.transpose_a,
        spec.transpose_b,
        spec.batched,
        config,
        rows,
        ragged=spec.ragged.value if spec.ragged else "none",
        groups=groups,
        claims=claims,
    )
    return Kernel(
        results=[*_results(spec, () if size is None else (size,), m, n, config), *scratch],
        call=ffi.GemmCall(
            name=spec.name,
            source=source,
            arch=arch.target,
            maps=[
                number
                for map_ in _maps(spec, a.dtype, len(operands), config, rows)
                for number in dataclasses.astuple(map_)
            ],
            pointers=pointers,
            flags=pointers[-1] if scratch else -1,
            yield_k_blocks=yield_k_blocks(config) if yields and not config.split_k else 0,
            transpose_a=spec.transpose_a,
            transpose_b=spec.transpose_b,
            tile_m=config.tile_m,
            tile_n=config.tile_n,
            halves=program.halves.n_halves,
            cluster_m=config.cluster_m,
            threads=arch.threads(),
            smem_bytes=smem_bytes + CLAIMS_BYTES * claims,
        ),
    )


def yield_k_blocks(config: KernelConfig) -> int:
    """The k blocks of a tile that an SM multiplies in `Arch.yield_nanoseconds`; 0 if that is 0."""
    block_nanoseconds = current().unit_nanoseconds * config.tile_m * config.tile_n / (128 * 128)
    return math.ceil(current().yield_nanoseconds / block_nanoseconds)


def _rows(m: Any, config: KernelConfig) -> int:
    """The rows of a tile that are loaded: where the product has fewer than a tile those, rounded up to a multiple of 8.

    The copy engine fills rows with zeros more slowly than it loads them (k = 14336, n = 4096: 16 rows took 52 us where
    64 take 34), and results of such rows are not stored.
    """
    return min(config.tile_m, -(-m // 8) * 8) if isinstance(m, int) else config.tile_m


def _results(
    spec: GemmSpec, batch: tuple[int, ...], m: Any, n: int, config: KernelConfig
) -> list[jax.ShapeDtypeStruct]:
    program = spec.program
    tiles_m, tiles_n = -(-m // config.consumer_m), _tiles_along_n(program, n, config)
    width = {width: program.halves.columns(width, n) for width in Width}
    columns = [store.slice[1] - store.slice[0] if store.slice else width[store.width] for store in program.stores]
    stores = [
        jax.ShapeDtypeStruct((*batch, *((size, m) if store.transposed else (m, size))), dtype)
        for store, size, dtype in zip(program.stores, columns, spec.store_dtypes, strict=True)
    ]

    def partials(reduction: Reduction) -> tuple[Any, ...]:
        match reduction.axis:
            case Axis.ROW:
                return (*batch, tiles_n, m)
            case Axis.COLUMN:
                return (*batch, tiles_m, width[reduction.width])
        return (current().sms * current().consumers * 4,)  # a word for each warp that adds to it

    return [*stores, *(jax.ShapeDtypeStruct(partials(one), jnp.float32) for one in program.reductions)]


def _has_whole_groups(program: Program, n: int) -> bool:
    """True if each group of 8 columns of a tile is entirely inside or entirely outside of the array."""
    half_columns = n // program.halves.n_halves
    return all(first % 8 == 0 and (end or half_columns) % 8 == 0 for first, end in program.sections)


def _by_rows(program: Program) -> Program:
    """The program with row reductions instead of those of all rows and columns.

    For the latter each warp keeps one value for the entire launch. That takes a launch of one product with no more
    blocks than SMs, and groups of columns that are entirely inside or outside of the array.
    """
    reductions = [
        dataclasses.replace(one, axis=Axis.ROW) if one.axis is Axis.ALL else one for one in program.reductions
    ]
    return dataclasses.replace(program, reductions=tuple(reductions))


def finished(reduction: Reduction, partials: jax.Array) -> jax.Array:
    """The reduction of a program from the kernel's result for it; see `Kernel`."""
    if reduction.axis is not Axis.ALL:
        return reduction.op.reduce(partials, partials.ndim - 2)
    return reduction.op.reduce(partials, 0 if partials.ndim == 1 else (partials.ndim - 2, partials.ndim - 1))


def _tiles_along_n(program: Program, n: int, config: KernelConfig) -> int:
    columns, half_columns = config.tile_n // program.halves.n_halves, n // program.halves.n_halves
    return sum(-(-((end or half_columns) - first) // columns) for first, end in program.sections)


def _clusters(program: Program, batch: Any, m: Any, n: int, config: KernelConfig) -> float:
    """The number of clusters of tiles; infinite where a size is not known."""
    if not isinstance(m, int) or not isinstance(batch, int | None):
        return math.inf
    rows = config.tile_m * config.cluster_m
    if program.symmetric:
        return (batch or 1) * clusters_of_triangle(n, rows, config.tile_n)
    return (batch or 1) * -(-m // rows) * _tiles_along_n(program, n, config)  # at least


def _scratch(config: KernelConfig, claims: bool) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The buffers that only the kernel uses; the last is zeroed before it starts.

    * Split-K: the sums that one block hands to another, a tile each; and a flag for each of its four warps.
    * Claimed tiles: one counter, the first of as many words.
    """
    shape = (current().sms, config.tile_m, config.tile_n)
    sums, flags = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct((shape[0], 4), jnp.int32)
    return (sums, flags) if config.split_k else (flags,) if claims else ()


def _maps(spec: GemmSpec, dtype: np.dtype, operand_count: int, config: KernelConfig, rows: int) -> list[_Map]:
    """Tensor maps in the kernel's order: a, b, tile operands, stores, and of symmetric results the same transposed.

    Rows of a's and b's boxes are `Arch.row_bytes`.
    """
    widest = current().row_bytes
    program, columns = spec.program, tile_k(dtype)  # a chunk along m or n has as many as one along k
    rows_of_a = columns if spec.transpose_a else rows
    if spec.transpose_b:
        rows_of_b = config.tile_n // max(config.cluster_m, program.halves.n_halves)
    else:  # a chunk of columns, or a CTA's share of its rows
        rows_of_b = columns if config.tile_n // columns % config.cluster_m == 0 else columns // config.cluster_m
    maps = [
        _Map(0, 1, False, columns, rows_of_a, widest),
        _Map(1, program.halves.n_halves, spec.transpose_b, columns, rows_of_b, widest),
    ]

    for i in program.tile_operands:
        operand = program.operands[i]
        row_bytes = config.box_n * np.dtype(operand.dtype).itemsize
        maps.append(
            _Map(2 + i, program.halves.tensor_map_halves(operand.width), False, config.box_n, min(64, rows), row_bytes)
        )
    for i, (store, dtype) in enumerate(zip(program.stores, spec.store_dtypes, strict=True)):
        buffer, halves = 2 + operand_count + i, program.halves.tensor_map_halves(store.width)
        if store.transposed:
            maps.append(_transposed_map(buffer, halves, dtype, config))
        else:
            row_bytes = config.box_n * np.dtype(dtype).itemsize
            maps.append(_Map(buffer, halves, False, config.box_n, 16, row_bytes))
    if program.symmetric:
        maps += [_transposed_map(2 + operand_count + i, 1, x, config) for i, x in enumerate(spec.store_dtypes)]
    return maps


def _transposed_map(buffer: int, halves: int, dtype: np.dtype, config: KernelConfig) -> _Map:
    columns = min(config.consumer_m, current().row_bytes // np.dtype(dtype).itemsize)
    return _Map(buffer, halves, True, columns, config.box_n, columns * np.dtype(dtype).itemsize)


def _pointers(program: Program, operand_count: int, scratch: int, *, stored: bool) -> list[int]:
    """Buffers in the order of the kernel's pointers: vectors and scalars, the stores, the partials, the scratch ones.

    Args:
      stored: whether stores have pointers beside their tensor maps, as rows in groups need them.
    """
    vectors = [2 + i for i, operand in enumerate(program.operands) if not operand.kind.by_tensor_map]
    first_store, partials = 2 + operand_count, len(program.reductions) + scratch
    first = first_store + (0 if stored else len(program.stores))
    return vectors + list(range(first, first_store + len(program.stores) + partials))


def readable_source(problem: Problem, config: KernelConfig) -> str:
    """The kernel's source with the names and the line of the user's epilogue, which the compiled source leaves out."""
    program, shape = problem.program, problem.shape
    if any(problem.batched) or shape.ragged or not _has_whole_groups(program, shape.n):
        program = _by_rows(program)
    return _source(
        program,
        (problem.dtype, problem.dtype_of_b),
        problem.out_dtypes,
        problem.transpose_a,
        problem.shape.transpose_b,
        problem.batched,
        config,
        _rows(problem.shape.m, config),
        ragged=problem.shape.ragged or "none",
        groups=problem.shape.groups,
        for_reader=True,
    )


def _source(
    program: Program,
    dtypes: tuple[np.dtype, np.dtype],
    out_dtypes: Sequence[np.dtype],
    transpose_a: bool,
    transpose_b: bool,
    batched: Sequence[bool],
    config: KernelConfig,
    rows: int,
    *,
    ragged: str,
    groups: int,
    claims: bool = False,
    for_reader: bool = False,
) -> str:
    traffic, stored = EpilogueTraffic.of(program, out_dtypes), ragged == "m"
    maps = 2 + len(program.tile_operands) + len(program.stores) * (1 + program.symmetric)
    pointers = len(_pointers(program, len(program.operands), len(_scratch(config, claims)), stored=stored))
    # The groups' offsets are the last operand.
    offsets = sum(not operand.kind.by_tensor_map for operand in program.operands) - 1 if groups else -1
    emitted = emit(
        program,
        out_dtypes,
        tuple(batched[2 : 2 + len(program.operands)]),
        rows_in_groups=stored,
        for_reader=for_reader,
    )
    arch, flags = current(), {True: "true", False: "false"}
    dtype, cuda = dtypes[0], [TABLE[np.dtype(dtype).name].cuda for dtype in dtypes]
    members_of_8_bits = (
        f"""
  static constexpr coda::DType input_b = coda::DType::{cuda[1]};
  static constexpr int promote_blocks = {config.promote // tile_k(dtype)};"""
        if is_of_8_bits(dtype)
        else ""
    )
    return f"""#include "{arch.product_header}"

{emitted}
struct Config {{
  static constexpr coda::DType input = coda::DType::{cuda[0]};{members_of_8_bits}
  static constexpr int tile_m = {config.tile_m}, tile_n = {config.tile_n}, tile_k = {tile_k(dtype)};
  static constexpr int consumer_m = {config.consumer_m}, loaded_rows = {rows};
  static constexpr int stages = {config.stages}, cluster_m = {config.cluster_m};
  static constexpr int box_n = {config.box_n}, subtile_n = {config.subtile_n};
  static constexpr int column_passes = {config.column_passes};
  static constexpr int load_slots = {config.load_slots}, store_slots = {config.store_slots};
  static constexpr bool split_k = {flags[config.split_k]};
  static constexpr bool claims = {flags[claims]};
  static constexpr bool keeps_tables = {flags[keeps_tables(program, config.tile.size)]};
  static constexpr bool transpose_a = {flags[transpose_a]}, transpose_b = {flags[transpose_b]};
  static constexpr bool a_batched = {flags[batched[0]]}, b_batched = {flags[batched[1] or stored]};
  static constexpr coda::Ragged ragged = coda::Ragged::{ragged};
  static constexpr int groups = {groups}, offsets = {offsets};
  static constexpr int multiprocessors = {arch.sms};
  static constexpr int shared_bytes = {shared_bytes(config, program, traffic, groups) + CLAIMS_BYTES * claims};
}};

extern "C" __global__ void __launch_bounds__({arch.threads()}, 1)
    coda_gemm(const __grid_constant__ coda::Params<{maps}, {pointers}> params) {{
  coda::gemm<Config, Epilogue>(params);
}}
"""
