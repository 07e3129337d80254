"""The stores of a tile of a product of groups, by the kernel's own epilogue on the host: rows of other groups stay.

Also the rows that a k block loses which has rows of two groups.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.epilogues import EpilogueCase
from benchmarks.programs import lowered, spec_of
from coda_jax.epilogue import trace
from coda_jax.primitives.axes import Dimension
from coda_jax.tiles.config import GemmConfig
from tests.lockstep import Library, Piece, bits

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@dataclasses.dataclass(frozen=True)
class Case:
    """An epilogue that is exact in float32, its results' dtypes, N, and the tile."""

    epilogue: object
    out_dtypes: tuple
    n: int = 328
    tile: tuple = (128, 128)
    ragged: Dimension = Dimension.M
    options: dict = dataclasses.field(default_factory=dict)

    def kernel(self, m):
        k = 64
        acc = jax.ShapeDtypeStruct((m, self.n), F32)
        offsets = jax.ShapeDtypeStruct((4,), jnp.int32)
        traced, (*captured, kept) = trace(self.epilogue, acc, (), offsets)
        assert not captured
        by_k = self.ragged is Dimension.K
        spec = spec_of(EpilogueCase(self.epilogue, None, self.out_dtypes), traced, ragged=self.ragged, transpose_a=by_k)
        types = (
            jax.ShapeDtypeStruct((k, m) if by_k else (m, k), BF16),
            jax.ShapeDtypeStruct((k, self.n) if by_k else (3, k, self.n), BF16),
        )
        config = GemmConfig(tile_m=self.tile[0], tile_n=self.tile[1], **self.options)
        return spec, lowered((*types, kept), spec, config)


def gate(acc):
    of_gate, up = jnp.split(acc, 2, axis=1)
    return jnp.maximum(of_gate, 0) * up


def halves_of_heads(acc):
    first, second = jnp.split(acc.reshape(acc.shape[0], -1, 64), 2, axis=-1)
    return jnp.concatenate([second - first, first], axis=-1).reshape(acc.shape)


def neighbours(acc):
    x = acc.reshape(acc.shape[0], -1, 64)
    return jnp.stack([x[..., 1::2], -x[..., 0::2]], axis=-1).reshape(acc.shape)


CASES = {
    "bfloat16": Case(lambda acc: acc, (BF16,)),
    "float16": Case(lambda acc: acc * 2, (F16,), tile=(128, 192)),
    "float32": Case(lambda acc: acc, (F32,)),
    "shared tile": Case(lambda acc: (acc, -acc), (BF16, F32), n=520, tile=(128, 256)),
    "kept gate": Case(lambda acc: (acc, gate(acc)), (BF16, BF16), n=2 * 200),
    "wide gate": Case(lambda acc: (gate(acc), acc), (F32, BF16), n=2 * 136, tile=(64, 256)),
    "slices": Case(lambda acc: (acc[:, :104], acc[:, 104:]), (BF16, F32)),
    "slices and all": Case(lambda acc: (acc[:, :104], acc), (F32, BF16)),
    "slices at any column": Case(lambda acc: (acc[:, :100], acc[:, 100:], acc), (F32, F32, BF16)),
    "heads": Case(halves_of_heads, (BF16,), n=320),
    "neighbours": Case(neighbours, (BF16,), n=320),
    "row sums": Case(lambda acc: (acc, jnp.sum(acc, axis=1)), (BF16,)),
    "columns in passes": Case(lambda acc: (acc, -acc), (F32, BF16), options={"column_passes": 2}),
    "k": Case(lambda acc: acc, (BF16,), ragged=Dimension.K),
    "k of a shared tile": Case(lambda acc: acc, (BF16,), tile=(128, 256), ragged=Dimension.K),
}
M = 333  # no multiple of 16


class Kernels(Library):
    """The kernels of some cases, with parts of the headers' text replaced."""

    def __init__(self, folder, names, replacements=()):
        self.kernels = {name: CASES[name].kernel(M) for name in names}
        super().__init__(folder, {name: kernel for name, (_, kernel) in self.kernels.items()}, replacements)


def tiles(library, name, row, row_end, *, has_product=True, order=0):
    """The pieces of all columns for a tile's rows."""
    spec, kernel = library.kernels[name]
    n, columns = CASES[name].n // spec.program.halves.n_halves, CASES[name].tile[1] // spec.program.halves.n_halves
    found, index_n = [], 0
    for section, (begin, end) in enumerate(spec.program.sections):
        for column in range(begin, end or n, columns):
            place = column, end or n, section, 1, 0, index_n, has_product
            index_n += 1
            if CASES[name].tile[0] == 128 and "consumer_m = 64" in kernel.call.source:  # they share a tile
                found += [Piece(0, consumer, row + 64 * consumer, row_end, *place) for consumer in range(2)]
            else:
                found.append(Piece(0, (index_n + order) % 2, row, row_end, *place))
    return found


def rows_of_piece(name):
    return 64 if CASES[name].tile in ((128, 256), (64, 256)) else 128


def check(library, name, pieces, acc, **options):
    """Checks that the pieces' own elements are as they should be, and all others as they were."""
    spec, kernel = library.kernels[name]
    found = library.store(name, kernel, pieces, acc, [np.zeros(4, np.int32)], **options)
    stores = spec.program.stores
    values = jax.tree.leaves(CASES[name].epilogue(jnp.asarray(acc)))
    columns = CASES[name].tile[1] // spec.program.halves.n_halves
    for number, (out, result) in enumerate(zip(found, kernel.results, strict=True)):
        expected = np.full(result.shape, -1, bits(result).__name__.replace("u", "")).view(bits(result))
        may_be = np.zeros(result.shape, bool)  # of a whole row where a slice ends: values of the next one
        if number >= len(stores):
            value = np.asarray(acc, np.float32)
        else:
            value = np.asarray(values[stores[number].output]).astype(result.dtype).view(bits(result))
        for piece in pieces:
            rows = slice(piece.row, min(piece.row_end, piece.row + rows_of_piece(name), M))
            if rows.stop <= rows.start:
                continue
            if number >= len(stores):
                if piece.has_product:
                    of_tile = value[rows, piece.column : piece.column + columns].sum(1, dtype=np.float32)
                    expected[piece.index_n, rows] = of_tile.view(np.uint32)
                continue
            first, end = stores[number].slice or (0, result.shape[1])
            if not (first <= piece.column < end):
                continue
            halves = spec.program.halves.tensor_map_halves(stores[number].width)
            for half in range(halves):
                of_half = half * result.shape[1] // halves - first
                mine = slice(of_half + piece.column, of_half + min(piece.column + columns, piece.column_end))
                expected[rows, mine] = value[rows, mine] if piece.has_product else 0
                more = slice(mine.stop, min(of_half + piece.column + columns, (half + 1) * result.shape[1] // halves))
                may_be[rows, more] = True
        wrong = (out != expected) & ~(may_be & (out == (value if number < len(stores) else out)))
        places = np.argwhere(wrong)[:4].tolist()
        assert not wrong.any(), f"result {number}: {wrong.sum()} elements, at {places}: {out[wrong][:4]}"


GROUPED = [name for name in CASES if CASES[name].ragged is Dimension.M]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Kernels(tmp_path_factory.mktemp("stores"), list(CASES))


def accumulator(name, seed=0):
    """Small integers, whose sums are exact in any order."""
    return np.random.default_rng(seed).integers(-9, 10, (M, CASES[name].n)).astype(np.float32)


@pytest.mark.parametrize("name", GROUPED)
def test_a_tile_stores_its_own_rows_alone(library, name):
    for size in (*range(1, 17), 31, 33, 48, 63, 64, 65, 100, 127, 128):
        for row in (0, 101) if size in (7, 128) else (101,):
            pieces = tiles(library, name, row, row + size)
            check(library, name, pieces, accumulator(name), lane_first=size % 32)


@pytest.mark.parametrize("name", GROUPED)
def test_the_last_rows_of_the_array(library, name):
    for row in (M - 1, M - 16, M - 45, M - 128):
        check(library, name, tiles(library, name, row, M), accumulator(name))


@pytest.mark.parametrize("name", GROUPED)
def test_zeros_for_rows_of_no_group(library, name):
    for size in (1, 15, 16, 50, 128):
        check(library, name, tiles(library, name, 101, 101 + size, has_product=False), accumulator(name))


@pytest.mark.parametrize("name", GROUPED)
def test_tiles_without_rows_store_nothing(library, name):
    """As the second of a cluster has them in an odd row of tiles."""
    check(library, name, tiles(library, name, 101, 101), accumulator(name))


@pytest.mark.parametrize("name", GROUPED)
def test_a_consumer_goes_from_tile_to_tile(library, name):
    """Whole boxes, which the copy engine may still have to read, and others take turns in the same slots."""
    rows, pieces = CASES[name].tile[0], []
    for i, (first, end) in enumerate([(0, 5), (5, 150), (150, 150), (150, 179), (179, 310), (310, M)]):
        for row in range(first, end, rows):
            pieces += tiles(library, name, row, end, has_product=i not in (0, 5), order=row // rows)
    for order in range(2):
        if order:
            np.random.default_rng(0).shuffle(pieces)
        check(library, name, pieces, accumulator(name), lane_first=7 * order)


@functools.cache
def _finite(rows):
    return np.random.default_rng(0).normal(size=(rows, 64)).astype(BF16)


def _stages(bytes_, valid):
    """Stages of bfloat16, whose rows of k from `valid` on are NaN and infinite."""
    rows = _finite(bytes_ // 128).copy()
    rows.reshape(-1, 64, 64)[:, valid:] = np.where(np.arange(64) % 3 == 0, np.nan, np.inf)
    return rows.view(np.uint8).reshape(-1)


def _matrix(chunks):
    """(k, columns) of chunks of 64 rows of k that are swizzled."""
    rows = chunks.view(BF16).reshape(-1, 64, 8, 8)
    k = np.arange(64)
    plain = rows[:, k[:, None], np.arange(8) ^ (k[:, None] & 7)]
    return plain.reshape(-1, 64, 64).transpose(1, 0, 2).reshape(64, -1).astype(np.float32)


def check_zeroed(library, name, first):
    """Both consumers, if they share the tile, one after the other; else each on its own."""
    (tile_m, tile_n), shares = CASES[name].tile, CASES[name].tile == (128, 256)
    a_rows, b_rows = tile_m, tile_n  # of 128 bytes in a stage: 64 of k for each 64 columns
    stage = (a_rows + b_rows) * 128
    count = int(re.search(r"stages = (\d+)", library.kernels[name][1].call.source)[1])
    before, slot = _stages(stage * count, first), 1
    after = before
    for consumer in range(2):
        given = after if shares else before
        after, bytes_, said = library.zero(name, consumer, slot, first, given)
        assert bytes_ == stage
        assert said == f"zf{3 + consumer}/128", "zeros, a fence, the consumer's barrier"
        mine = np.zeros(stage * count // 128, bool)  # rows that may change
        share = slice(consumer * 64, consumer * 64 + 64) if shares else slice(0, a_rows)
        of_stage = mine[slot * stage // 128 : (slot + 1) * stage // 128]
        of_stage[share] = of_stage[a_rows:] = True
        mine &= np.arange(len(mine)) % 64 >= first
        rows, rows_before = after.reshape(-1, 128), given.reshape(-1, 128)
        assert np.all(rows[mine] == 0)
        assert np.array_equal(rows[~mine], rows_before[~mine])
        if first % 9 == 5 and (consumer == 1 or not shares):
            one = after[slot * stage : (slot + 1) * stage]
            whole = before[slot * stage : (slot + 1) * stage]
            a, b = _matrix(one[: a_rows * 128]), _matrix(one[a_rows * 128 :])
            of_a, of_b = _matrix(whole[: a_rows * 128])[:first], _matrix(whole[a_rows * 128 :])[:first]
            assert not a[first:].any() and not b[first:].any()
            np.testing.assert_allclose(a.T @ b, of_a.T @ of_b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["k", "k of a shared tile"])
def test_rows_of_k_behind_the_end_are_zeroed_in_both_factors(library, name):
    for first in range(64):
        check_zeroed(library, name, first)


FAULTS = {
    "a neighbour's rows": ("kept gate", "if (rows < 16) {", "if (rows < 0) {"),
    "an empty group is missing": ("bfloat16", "    });\n    if (lane == 0) ptx::tma_store_commit();", "    });"),
    "a row too far": ("float32", "16 * warp + row) * width", "16 * warp + row + 1) * width"),
    "no swizzle": ("float32", "Result::offset(row, byte / 16) + byte % 16", "row * row_bytes + byte"),
    "no half": ("kept gate", "(Layout::head > 0 ? 0 : access.half * n) + at - access.first", "at - access.first"),
    "whole chunks": ("slices at any column", "rows_are_aligned<variant, index>() ? 16", "true ? 16"),
    "the wrong of two": ("slices at any column", "8 * (value & 2)", "0"),
    "no slice": ("slices", "access.half * n) + at - access.first", "access.half * n) + at"),
    "columns beyond the end": ("bfloat16", "if (at >= tile.column_end) continue;", ""),
    "rows of another width": ("slices", "access.columns > 0 ? access.columns : ", ""),
    "a sum of a neighbour's rows": ("row sums", "at < row_end(tile)", "at < params.m"),
    "a batch": ("bfloat16", "return rows_in_groups ? 0 : tile.batch;", "return tile.batch;"),
    "zeros in one box": (
        "bfloat16",
        "for (int box = 0; box < Layout::boxes; ++box)\n#pragma",
        "for (int box = 0; box < 1; ++box)\n#pragma",
    ),
    "rows of another block": (
        "bfloat16",
        "row_end(tile) - (tile.row + 64 * block + 16 * warp)",
        "row_end(tile) - (tile.row + 16 * warp)",
    ),
    "k: one factor": ("k", "chunk < chunks_of_a + chunks_of_b;", "chunk < chunks_of_a;"),
    "k: the other factor": (
        "k",
        "for (int chunk = 0; chunk < chunks_of_a",
        "for (int chunk = chunks_of_a; chunk < chunks_of_a",
    ),
    "k: a row too few": ("k", "int at = first * factor_row_bytes", "int at = (first + 1) * factor_row_bytes"),
    "k: a row too many": ("k", "int at = first * factor_row_bytes", "int at = (first - 1) * factor_row_bytes"),
    "k: another share": (
        "k of a shared tile",
        "(cooperative ? consumer * chunks_of_a",
        "(cooperative ? 0 * chunks_of_a",
    ),
    "k: no fence": ("k", "    ptx::fence_async_proxy();\n    ptx::named_barrier_sync", "    ptx::named_barrier_sync"),
}
SOME = {"a neighbour's rows", "an empty group is missing", "k: one factor"}  # the others are slow


@pytest.mark.parametrize(
    "fault", [pytest.param(FAULTS[name], marks=[pytest.mark.slow] * (name not in SOME)) for name in FAULTS], ids=FAULTS
)
def test_a_fault_shows(tmp_path, fault):
    name, *replacement = fault
    library = Kernels(tmp_path / "fault", [name], [tuple(replacement)])
    with pytest.raises(AssertionError):
        if CASES[name].ragged is Dimension.K:
            for first in (1, 5, 63):
                check_zeroed(library, name, first)
        else:
            test_a_tile_stores_its_own_rows_alone(library, name)
            test_zeros_for_rows_of_no_group(library, name)
            test_a_consumer_goes_from_tile_to_tile(library, name)
