"""The tiles of products of groups, by cuda/grouped_scheduler.cuh itself on the host: each group's rows once, whatever
the offsets are nothing outside of the arrays, and as many blocks as there is work for.
"""

import ctypes
import pathlib
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_jax.tiles.traffic import _group_table_bytes

HEADERS = pathlib.Path(__file__).resolve().parents[1] / "cuda"
# Shared memory is an array of words, and the threads that make a table are fibers which take turns in either order.
PTX = r"""
#pragma once
#include <cstdlib>
#include <vector>
namespace coda::ptx {
using uint32 = unsigned;
static std::vector<int> words;
static int& word(uint32 address) {
  if (address % 4 != 0 || address / 4 >= words.size()) std::abort();
  return words[address / 4];
}
static void store_word(uint32 address, int value) { word(address) = value; }
static int load_word(uint32 address) { return word(address); }
}  // namespace coda::ptx
"""
SOURCE = r"""
#include <ucontext.h>
#include <algorithm>
#include <array>
#define __device__
#define __host__
#define __forceinline__ inline
using std::max, std::min;
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static float __fdividef(float a, float b) { return a / b; }
static struct { int x; } blockIdx, gridDim, threadIdx;
static void (*barrier)() = [] {};
static void __syncwarp() { barrier(); }
static void __syncthreads() { barrier(); }
#include "grouped_scheduler.cuh"
using namespace coda;

struct Whole {
  static constexpr bool symmetric = false;
  static constexpr int sections = 1;
  static constexpr Section section[1] = {{0, 0, 0}};
};
struct Parts {  // of 200 and 136 columns
  static constexpr bool symmetric = false;
  static constexpr int sections = 2;
  static constexpr Section section[2] = {{0, 0, 200}, {0, 200, 336}};
};
template <int groups_, int cluster_m_, int tile_m_>
struct Config {
  static constexpr int groups = groups_, cluster_m = cluster_m_, tile_m = tile_m_, tile_k = 64;
  static constexpr DType input = DType::bf16;
};

// The first warp and one thread of the next, all at `start` of one cluster.
static ucontext_t loop, contexts[33];
static char stacks[33][1 << 14];
static bool has_ended[33];
static void (*entry)();
static void run_threads(bool backwards) {
  for (int i = 0; i < 33; ++i) {
    has_ended[i] = false;
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks[i], contexts[i].uc_stack.ss_size = sizeof stacks[i];
    contexts[i].uc_link = nullptr;
    makecontext(&contexts[i], [] {
      entry();
      has_ended[threadIdx.x] = true;
      setcontext(&loop);
    }, 0);
  }
  barrier = [] { const int self = threadIdx.x; swapcontext(&contexts[self], &loop); };
  for (int running = 33; running > 0;) {
    running = 0;
    for (int i = 0; i < 33; ++i) {
      threadIdx.x = backwards ? 32 - i : i;
      if (!has_ended[threadIdx.x]) swapcontext(&loop, &contexts[threadIdx.x]);
      running += !has_ended[threadIdx.x];
    }
  }
  barrier = [] {};
}

struct Sizes {
  int m, n, k, batch, clusters, backwards;
};
constexpr int columns_of_a_tile = 128, fields = 18;

/// What tiles of one kind of groups know alone: row_end, is_apart, first_k, k_end.
static std::array<int, 4> of_group(const RowGroupTile& tile) { return {tile.row_end, tile.is_apart, 0, 0}; }
static std::array<int, 4> of_group(const KGroupTile& tile) { return {0, 0, tile.first_k, tile.k_end}; }

/// A row a piece of work of a CTA.
template <class Scheduler, int groups, int cluster_m>
static int pieces(Sizes sizes, const int* offsets, int most, int* out) {
  constexpr int poison = 1 << 30, table_at = 64;
  static Sizes of;
  static const int* from;
  of = sizes, from = offsets;
  static const auto made = [] {
    Scheduler scheduler(of.m, of.n, of.k, (of.k + 63) / 64, of.batch);
    scheduler.read_groups(from, table_at);
    return scheduler;
  };
  ptx::words.assign(table_at / 4 + Scheduler::Table::bytes / 4, poison);
  gridDim.x = sizes.clusters * cluster_m, blockIdx.x = 0;
  entry = [] { made(); };
  run_threads(sizes.backwards);
  for (int word = 0; word < table_at / 4; ++word)
    if (ptx::words[word] != poison) return -1;  // outside of the table
  int count = 0;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    threadIdx.x = 32;
    const auto scheduler = made();
    for (int i = 0; i < scheduler.count; ++i, ++count, out += fields) {
      if (count == most) return -2;  // endless
      const int rank = blockIdx.x % cluster_m, number = i * scheduler.clusters() + scheduler.cluster();
      const auto work = scheduler.work(i, rank), claimed = scheduler.claimed(number, rank);
      const Tile &tile = work.tile, &other = claimed.tile;
      const auto group = of_group(work.tile);
      const bool agree = tile.row == other.row && tile.column == other.column && tile.batch == other.batch &&
                         tile.column_end == other.column_end && tile.section == other.section &&
                         work.blocks == claimed.blocks && group == of_group(claimed.tile);
      int of_piece = work.blocks;
      if constexpr (requires { scheduler.blocks_of(number); }) of_piece = scheduler.blocks_of(number);
      const int row[fields] = {blockIdx.x,   tile.row,       group[0],     tile.column,      tile.column_end,
                               tile.section, tile.batch,     tile.index_m, tile.index_n,     work.first_block,
                               work.blocks,  group[1],       group[2],     group[3],         agree,
                               of_piece,     scheduler.total(sizes.batch), number};
      std::copy(row, row + fields, out);
    }
  }
  return count;
}

template <int groups, int cluster_m, int tile_m, class Epilogue>
static int with(bool k_in_groups, Sizes sizes, const int* offsets, int most, int* out) {
  using C = Config<groups, cluster_m, tile_m>;
  if (k_in_groups)
    return pieces<KGroupScheduler<C, columns_of_a_tile, Epilogue>, groups, cluster_m>(sizes, offsets, most, out);
  return pieces<RowGroupScheduler<C, columns_of_a_tile, Epilogue>, groups, cluster_m>(sizes, offsets, most, out);
}
#define CASE(g)                                                                                      \
  case g:                                                                                            \
    if (parts) return cluster_m == 2 ? with<g, 2, 128, Parts>(k_in_groups, sizes, offsets, most, out)  \
                                     : with<g, 1, 128, Parts>(k_in_groups, sizes, offsets, most, out); \
    return cluster_m == 2 ? with<g, 2, 128, Whole>(k_in_groups, sizes, offsets, most, out)             \
                          : with<g, 1, 128, Whole>(k_in_groups, sizes, offsets, most, out);
extern "C" int run(int k_in_groups, int groups, int parts, int cluster_m, const Sizes* of, const int* offsets, int most,
                   int* out) {
  const Sizes sizes = *of;
  switch (groups) { CASES }
  return -3;
}
template <int most, int groups = 1>
static void all_bytes(int* out) {
  *out = GroupTable<groups, RowsOfTiles<128, 2>>::bytes;
  if constexpr (groups < most) all_bytes<most, groups + (groups < 300 ? 1 : 181)>(out + 1);
}
extern "C" void table_bytes(int* out) { all_bytes<1024>(out); }
"""
FIELDS = (
    *("cta", "row", "row_end", "column", "column_end", "section", "batch", "index_m", "index_n", "first_block"),
    *("blocks", "is_apart", "first_k", "k_end", "agree", "blocks_of", "total", "number"),
)
GROUPS = (1, 2, 3, 8, 30, 31, 62, 257, 1024)  # 30 and 62: with those of no group they fill the lanes
OF_BYTES = [*range(1, 300), *range(300, 1025, 181)]
TILE = 128


class Pieces:
    """A named column for each field."""

    def __init__(self, table):
        self.table = table
        for name, column in zip(FIELDS, table.T, strict=True):
            setattr(self, name, column)


class Library:
    """grouped_scheduler.cuh, with parts of its text replaced."""

    def __init__(self, folder, groups=GROUPS, replacements=()):
        text = (HEADERS / "grouped_scheduler.cuh").read_text()
        for there, instead in replacements:
            assert text.count(there) == 1, there
            text = text.replace(there, instead)
        folder.mkdir(exist_ok=True)
        (folder / "grouped_scheduler.cuh").write_text(text)
        (folder / "ptx_sm90.cuh").write_text(PTX)
        (folder / "run.cc").write_text(SOURCE.replace("CASES", " ".join(f"CASE({count})" for count in groups)))
        command = [
            "g++",
            "-std=c++20",
            "-O0",
            "-shared",
            "-fPIC",
            "-fno-gnu-unique",
            f"-I{HEADERS}",
            "-o",
            "run.so",
            "run.cc",
        ]
        subprocess.run(command, cwd=folder, check=True)
        self._library = ctypes.CDLL(str(folder / "run.so"))
        self._out = np.zeros((1 << 16, len(FIELDS)), np.int32)

    def run(self, offsets, m, n, k, *, ragged="m", cluster_m=2, parts=False, clusters=66, backwards=False):
        groups = len(offsets) - 1
        sizes = (ctypes.c_int32 * 6)(m, n, k, groups, clusters, backwards)
        offsets = np.ascontiguousarray(offsets, np.int32)
        pointers = [offsets.ctypes.data_as(ctypes.c_void_p), len(self._out), self._out.ctypes.data_as(ctypes.c_void_p)]
        count = self._library.run(ragged == "k", groups, parts, cluster_m, ctypes.byref(sizes), *pointers)
        assert count >= 0, {-1: "outside of the table", -2: "no end", -3: "not compiled"}[count]
        return Pieces(self._out[:count].copy())

    def table_bytes(self):
        out = (ctypes.c_int * len(OF_BYTES))()
        self._library.table_bytes(out)
        return list(out)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("grouped"))


def tile_columns(n, parts):
    """First column of each tile, and its section's end."""
    sections = [(0, 200), (200, 336)] if parts else [(0, n)]
    return [(first, end) for begin, end in sections for first in range(begin, end, TILE)]


def check_rows(library, offsets, m, n, k, *, parts=False, cluster_m=2, clusters=66, **options):
    """Each element of the result in one tile of its group, or, if its row is in none, of one without products."""
    found = library.run(offsets, m, n, k, parts=parts, cluster_m=cluster_m, clusters=clusters, **options)
    groups, columns = len(offsets) - 1, tile_columns(n, parts)
    _check_always(found, m, n, k, cluster_m, clusters, columns)

    group_of = np.full(m, -1)
    for group in range(groups):
        group_of[offsets[group] : offsets[group + 1]] = group
    times = np.zeros((m, len(columns)), int)
    for row, row_end, batch, index_n, blocks in zip(
        found.row, found.row_end, found.batch, found.index_n, found.blocks, strict=True
    ):
        rows = slice(row, min(row + TILE, row_end))
        if rows.start < rows.stop:
            times[rows, index_n] += 1
            assert np.all(group_of[rows] == (batch if batch < groups else -1))
            assert blocks == (-(-k // 64) if batch < groups else 0)
            assert index_n < len(columns)
    assert np.all(times == 1), f"rows {np.flatnonzero((times != 1).any(1))[:10]}"

    _check_clusters(found, offsets, cluster_m, columns)
    return found


def _check_always(found, m, n, k, cluster_m, clusters, columns):
    """Checks what holds for any offsets."""
    assert np.all(found.agree), "`work` and `claimed` differ"
    assert np.all(found.first_block == 0)
    assert np.all(found.blocks == found.blocks_of)
    assert np.all((found.blocks == -(-k // 64)) | (found.blocks == 0))
    stores = found.row < found.row_end
    assert np.all(found.row >= 0) and np.all(found.row[stores] < m) and np.all(found.row_end <= m)
    assert np.all((found.column >= 0) & (found.index_n < len(columns) + cluster_m - 1))
    assert np.all(~stores | (found.index_n < len(columns))), "columns beyond the last tile are stored"
    for at, (first, end) in enumerate(columns):
        mine = found.index_n == at
        assert np.all(found.column[mine] == first) and np.all(found.column_end[mine] == end)
    numbers = found.number[found.cta % cluster_m == 0]
    total = found.total[0] if len(numbers) else 0
    assert sorted(numbers.tolist()) == list(range(total))
    of_cluster = np.bincount(found.cta // cluster_m, minlength=clusters) // cluster_m
    assert of_cluster.max() - of_cluster.min() <= 1


def _check_clusters(found, offsets, cluster_m, columns):
    """Who shares b's tiles, and that no cluster has more rows of tiles of a group than there are."""
    tiles = {}
    for piece in zip(found.number, found.cta % cluster_m, range(len(found.cta)), strict=True):
        tiles.setdefault(int(piece[0]), {})[int(piece[1])] = piece[2]
    for ranks in tiles.values():
        assert len(ranks) == cluster_m
        if cluster_m == 1:
            continue
        first, second = ranks[0], ranks[1]
        assert found.batch[first] == found.batch[second] and found.blocks[first] == found.blocks[second]
        assert found.is_apart[first] == found.is_apart[second]
        if found.is_apart[first]:
            assert found.row[first] == found.row[second]
            assert found.index_n[second] == found.index_n[first] + 1 and found.index_n[first] % 2 == 0
        else:
            assert found.index_n[first] == found.index_n[second]
            assert found.row[second] == found.row[first] + TILE < found.row_end[second]
    for group, size in enumerate(np.diff(offsets)):
        mine = (found.batch == group) & (found.row < found.row_end)
        assert mine.sum() == -(-size // TILE) * len(columns)


SIZES = {
    "equal": [128, 128, 128],
    "one": [777],
    "pairs and odd ones": [256, 384, 130, 128, 0, 1, 513, 1024],
    "empty": [0] * 30,
    "small": [(7 * i) % 23 for i in range(62)],
    "all lanes": [(37 * i) % 211 for i in range(30)],
    "one more": [(37 * i) % 211 for i in range(31)],
    "tail": [0, 0, 300],
    "experts": [(61 * i) % 97 for i in range(257)],
    "many": [(i % 5 == 0) * (i % 300) for i in range(1024)],
}


@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_groups_rows_once(library, sizes, cluster_m):
    for first, more in ((0, 0), (0, 45), (130, 0), (300, 257)):
        offsets = np.cumsum([first, *sizes])
        for n, parts in ((640, False), (136, False), (336, True)):
            options = {"cluster_m": cluster_m, "parts": parts, "clusters": 132 // cluster_m, "backwards": first > 0}
            if offsets[-1] + more > 0 and (len(sizes) < 100 or n == 136):
                check_rows(library, offsets, offsets[-1] + more, n, 200, **options)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_sizes(library, data):
    groups = data.draw(st.sampled_from(GROUPS[:7]))
    sizes = data.draw(st.lists(st.one_of(st.just(0), st.integers(0, 700)), min_size=groups, max_size=groups))
    first, more = data.draw(st.integers(0, 400)), data.draw(st.integers(0, 400))
    offsets = np.cumsum([first, *sizes])
    cluster_m, parts = data.draw(st.sampled_from([1, 2])), data.draw(st.booleans())
    n = 336 if parts else data.draw(st.integers(1, 600))
    clusters = data.draw(st.sampled_from([1, 7, 66]))
    if offsets[-1] + more > 0:
        check_rows(library, offsets, offsets[-1] + more, n, 100, cluster_m=cluster_m, parts=parts, clusters=clusters)


UNDEFINED = {
    "decreasing": [500, 300, 200, 0],
    "negative": [-(2**31), -5, 200, 300],
    "beyond": [0, 200, 9999, 2**31 - 1],
    "to and fro": [0, 700, 3, 700, 0, -3, 300, 1 << 30, 5],
    "all before": [-3, -2, -1, 0],
    "all beyond": [700, 701, 900, 800],
}


@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.parametrize("offsets", UNDEFINED.values(), ids=UNDEFINED)
def test_undefined_offsets_stay_within_the_arrays(library, offsets, cluster_m):
    for parts, n in ((False, 640), (True, 336)):
        found = library.run(offsets, 700, n, 200, cluster_m=cluster_m, parts=parts, clusters=9)
        _check_always(found, 700, n, 200, cluster_m, 9, tile_columns(n, parts))
        assert len(found.cta)
        assert np.all(found.batch <= len(offsets))
    check_k(library, offsets, 300, 200, 700, cluster_m=cluster_m)


@settings(max_examples=30, deadline=None)
@given(offsets=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 1000), min_size=4, max_size=4))
def test_any_offsets_stay_within_the_arrays(library, offsets):
    found = library.run(offsets, 700, 256, 200, clusters=5)
    _check_always(found, 700, 256, 200, 2, 5, tile_columns(256, False))
    check_k(library, offsets, 300, 200, 700)


def check_k(library, offsets, m, n, k, *, cluster_m=2, clusters=13, **options):
    """Every tile of every group once, over its rows of k; a group without rows has one k block behind its end."""
    found = library.run(offsets, m, n, k, ragged="k", cluster_m=cluster_m, clusters=clusters, **options)
    groups, within = len(offsets) - 1, np.clip(offsets, 0, k)
    rows = range(0, -(-m // (TILE * cluster_m)) * TILE * cluster_m, TILE)
    expected = {(row, column, group) for row in rows for column in range(0, n, TILE) for group in range(groups)}
    tiles = list(zip(found.row.tolist(), found.column.tolist(), found.batch.tolist(), strict=True))
    assert len(tiles) == len(expected) and set(tiles) == expected
    assert np.all(found.agree)
    first, end = within[found.batch], np.maximum(within[found.batch], within[found.batch + 1])
    assert np.array_equal(found.first_k, first) and np.array_equal(found.k_end, end)
    assert np.all(found.first_block == 0)
    assert np.array_equal(found.blocks, np.maximum(1, -(-(end - first) // 64)))
    assert np.all((found.first_k >= 0) & (found.k_end <= k))
    return found


@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_k_of_each_group(library, sizes, cluster_m):
    for first, more in ((0, 0), (130, 45)):
        offsets = np.cumsum([first, *sizes])
        check_k(library, offsets, 264, 336, offsets[-1] + more + 1, cluster_m=cluster_m, backwards=first > 0)


def test_the_host_counts_the_tables_bytes(library):
    assert library.table_bytes() == [_group_table_bytes(groups) for groups in OF_BYTES]


@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_how_many_clusters_of_tiles_there_are_at_most(library, sizes, cluster_m):
    """The host launches as many blocks as that is work for (`test_clusters_of_groups` in test_ffi_call.py)."""
    for first, more in ((0, 0), (130, 45), (1, 1), (0, 1000)):
        offsets, n = np.cumsum([first, *sizes]), 328
        if (m := offsets[-1] + more) > 0:
            found = library.run(offsets, m, n, 200, cluster_m=cluster_m)
            assert found.total[0] <= (-(-m // (TILE * cluster_m)) + len(sizes) + 1) * -(-n // TILE)


FAULTS = {
    "an offset by one": ("min(max(offsets[group], 0), rows)", "min(max(offsets[group] + 1, 0), rows)"),
    "offsets are not clamped below": ("min(max(offsets[group], 0), rows)", "min(offsets[group], rows)"),
    "offsets are not clamped above": ("min(max(offsets[group], 0), rows)", "max(offsets[group], 0)"),
    "sizes below zero": (
        "return max(end(segment, rows) - begin(segment), 0);",
        "return end(segment, rows) - begin(segment);",
    ),
    "the last group is missing": ("for (int group = lane; group <= groups;", "for (int group = lane; group < groups;"),
    "rows before the first are missing": (
        "segment < groups ? row(segment + 1) : segment == groups ? rows : row(0)",
        "segment < groups ? row(segment + 1) : segment == groups ? rows : 0",
    ),
    "rows behind the last are missing": (
        "segment < groups ? row(segment + 1) : segment == groups ? rows : row(0)",
        "segment < groups ? row(segment + 1) : segment == groups ? row(groups) : row(0)",
    ),
    "a full run of lanes has no total": ("if (lane == lanes - 1 && lanes * per_lane == segments)", "if (false)"),
    "few groups are searched": ("int step = 1 << 10;", "int step = 1 << 3;"),
    "an odd row of tiles is missing": (
        "return pairs * tiles_n + (is_odd ? (tiles_n + cluster_m - 1) / cluster_m : 0);",
        "return pairs * tiles_n;",
    ),
    "an odd column of an odd row is missing": ("(tiles_n + cluster_m - 1) / cluster_m : 0", "tiles_n / cluster_m : 0"),
    "columns beyond the last are stored": (
        "index_n < tiles_n ? table.end(segment, m) : row;",
        "table.end(segment, m);",
    ),
    "rows of a neighbour": ("index_n < tiles_n ? table.end(segment, m) : row;", "index_n < tiles_n ? m : row;"),
    "tiles apart share b": ("row_end, in_odd_row >= 0};", "row_end, false};"),
    "products of no group": ("segment < Config::groups ? k_blocks : 0};", "k_blocks};"),
    "other k blocks": ("index < table.first_cluster(Config::groups) ? k_blocks : 0", "k_blocks"),
    "no barrier": (
        "      table.count_clusters(m, tiles_n, lane);\n      __syncwarp();",
        "      table.count_clusters(m, tiles_n, lane);",
    ),
    "a cluster too few": ("(total(0) - Bands::cluster() + Bands::clusters() - 1)", "(total(0) - Bands::cluster())"),
    "no section": ("    Bands::place_in_section(tile, index_n);\n", ""),
    "a short last band": ("rows = min(band, pairs - first_row);", "rows = band;"),
    "k: the end of the next group": ("table.row(tile.batch + 1)", "table.row(tile.batch + 2)"),
    "k: a block too few": ("k_end - first_k + Config::tile_k - 1", "k_end - first_k"),
    "k: no block": ("0, max(1, (", "0, max(0, ("),
    "k: an end before the first": (
        "max(first_k, table.row(tile.batch + 1))",
        "table.row(tile.batch + 1)",
    ),
}


def _check_all(library):
    """Small forms of the tests above, on 3 and 30 groups."""
    for cluster_m in (1, 2):
        for sizes in ([100, 0, 600], [(37 * i) % 211 for i in range(30)], [2600, 3, 5]):
            offsets = np.cumsum([130, *sizes])
            for n, parts in ((640, False), (336, True)):
                for backwards in (False, True):
                    options = {"cluster_m": cluster_m, "parts": parts, "backwards": backwards}
                    check_rows(library, offsets, offsets[-1] + 45, n, 200, **options)
            check_k(library, offsets, 264, 336, offsets[-1] + 45, cluster_m=cluster_m)
        for offsets in ([500, 300, 200, 0], [-5, 200, 300, 999], [690, 0, 690, 20]):
            found = library.run(offsets, 700, 640, 200, cluster_m=cluster_m)
            _check_always(found, 700, 640, 200, cluster_m, 66, tile_columns(640, False))
            check_k(library, offsets, 264, 336, 700, cluster_m=cluster_m)


SOME = {"rows of a neighbour", "tiles apart share b", "sizes below zero", "k: a block too few"}  # the others are slow


@pytest.mark.parametrize(
    "fault",
    [
        None,
        *(pytest.param(fault, marks=[pytest.mark.slow] * (name not in SOME)) for name, fault in FAULTS.items()),
    ],
    ids=["none", *FAULTS],
)
def test_a_fault_shows(tmp_path, fault):
    library = Library(tmp_path / "fault", (3, 30), [fault] if fault else ())
    if fault is None:
        return _check_all(library)
    with pytest.raises((AssertionError, IndexError)):
        _check_all(library)
