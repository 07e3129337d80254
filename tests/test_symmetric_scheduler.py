"""The tiles of a symmetric result, by cuda/scheduler.cuh itself on the host: each of the triangle once with all its k
blocks, none above it, and straight and transposed stores together write each element once.
"""

import ctypes
import itertools
import pathlib
import subprocess

import numpy as np
import pytest

from coda_jax.tiles.config import TileShape
from coda_jax.tiles.cost_model import GemmShape, clusters_of_triangle, split_tiles

HEADERS = pathlib.Path(__file__).resolve().parents[1] / "cuda"
TILES = [(128, 128), (128, 256), (64, 256), (64, 128), (128, 192), (64, 64)]
SOURCE = r"""
#define __device__
#define __host__
#define __forceinline__ inline
#include <algorithm>
using std::max, std::min;
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static float __fdividef(float a, float b) { return a / b; }
static struct { int x; } blockIdx, gridDim;
#include "scheduler.cuh"
using namespace coda;

struct Symmetric {
  static constexpr bool symmetric = true;
  static constexpr int sections = 1;
  static constexpr Section section[1] = {{0, 0, 0}};
};
constexpr int fields = 12;

// A row a piece of work, of a product in blocks of 64 of k; each cluster's own, or those that clusters claim.
template <int tile_m, int columns, int cluster_m, bool split_k>
static int pieces(int n, int k_blocks, int batch, int clusters, bool claimed, int* out) {
  using Computed = Triangle<tile_m * cluster_m, columns>;
  int count = 0;
  gridDim.x = clusters * cluster_m;
  const auto add = [&](const auto& scheduler, const auto& work) {
    const Tile& tile = work.tile;
    Tile of_second_consumer = tile;
    of_second_consumer.row += tile_m / 2;
    const int row[fields] = {blockIdx.x, tile.row, tile.column, tile.batch, work.first_block, work.blocks,
                             tile.row == tile.index_m * tile_m && tile.column == tile.index_n * columns &&
                             tile.column_end == n, Computed::is_on_diagonal(tile),
                             Computed::is_on_diagonal(of_second_consumer),
                             scheduler.split_tiles, scheduler.parts, scheduler.total(batch)};
    std::copy(row, row + fields, out + fields * count++);
  };
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    const int rank = blockIdx.x % cluster_m;
    const Scheduler<DType::bf16, tile_m, columns, cluster_m, split_k, Symmetric> scheduler(n, n, 64 * k_blocks,
                                                                                          k_blocks, batch);
    if (!claimed)
      for (int i = 0; i < scheduler.count; ++i) add(scheduler, scheduler.work(i, rank));
    else
      for (int i = blockIdx.x / cluster_m; i < scheduler.total(batch); i += clusters)
        add(scheduler, scheduler.claimed(i, rank));
  }
  return count;
}
extern "C" int run(int tile_m, int tile_n, int cluster_m, int split_k, int n, int k_blocks, int batch, int clusters,
                   int claimed, int* out) {
  CALLS
  return -1;
}
"""
CALL = """if (tile_m == {0} && tile_n == {1} && cluster_m == {2} && split_k == {3})
    return pieces<{0}, {1}, {2}, {3}>(n, k_blocks, batch, clusters, claimed, out);"""
KERNELS = [(*tile, cluster_m, split_k) for tile, cluster_m, split_k in itertools.product(TILES, (1, 2), (False, True))]


def compiled(folder, *replacement):
    """The scheduler, with a part of its text replaced."""
    text = (HEADERS / "scheduler.cuh").read_text()
    if replacement:
        assert text.count(replacement[0]) == 1, replacement[0]
        text = text.replace(*replacement)
    (folder / "scheduler.cuh").write_text(text)
    calls = "\n  ".join(CALL.format(*map(int, of)) for of in KERNELS)
    (folder / "run.cc").write_text(SOURCE.replace("CALLS", calls))
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{HEADERS}", "-o", "run.so", "run.cc"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "run.so"))


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("symmetric"))


FIELDS = ("cta", "row", "column", "batch", "first", "blocks", "is_placed", "on_diagonal", "second_on_diagonal")


def run(library, kernel, n, k_blocks=12, *, batch=1, claimed=False):
    """Each piece of work on a chip of 132 multiprocessors as a record; and tiles that are split, parts, and all."""
    clusters = 132 // kernel[2]
    out = np.zeros((1 << 15, len(FIELDS) + 3), np.int32)
    pointer = out.ctypes.data_as(ctypes.c_void_p)
    count = library.run(*map(int, kernel), n, k_blocks, batch, clusters, claimed, pointer)
    assert 0 < count <= len(out)
    records = np.rec.fromarrays(out[:count, : len(FIELDS)].T, names=FIELDS)
    return records, *out[0, len(FIELDS) :].tolist()


def side_of(kernel):
    tile_m, tile_n, cluster_m, _ = kernel
    return int(np.lcm(tile_m * cluster_m, tile_n))


def sizes_of(kernel):
    """N that is less than a square, one square, one and a little, and of 2 to 7 squares, whole and not."""
    side = side_of(kernel)
    return [8, side - 40, side, side + 8, 2 * side, 3 * side - 16, 4 * side, 5 * side - side // 2, 6 * side + 8]


def check_triangle(library, kernel, n, **options):
    """Each tile on and below the diagonal of squares once with all its k blocks, and no other."""
    tile_m, tile_n, cluster_m, _ = kernel
    side, k_blocks, batch = side_of(kernel), options.get("k_blocks", 12), options.get("batch", 1)
    found, *_, total = run(library, kernel, n, **options)
    assert found.is_placed.all()
    squares = -(-n // side)
    expected = {
        (row, column, of)
        for row in range(0, squares * side, tile_m)
        for column in range(0, squares * side, tile_n)
        for of in range(batch)
        if column // side <= row // side
    }
    done = {}
    for piece in found:
        assert piece.blocks > 0
        done.setdefault((piece.row, piece.column, piece.batch), []).append((piece.first, piece.first + piece.blocks))
    assert done.keys() == expected
    for parts in done.values():
        ends = [0, *(end for _, end in sorted(parts))]
        assert [first for first, _ in sorted(parts)] == ends[:-1] and ends[-1] == k_blocks
    assert total * cluster_m == len(expected)


def check_stores(library, kernel, n):
    """Each element is written by one straight store or by one transposed store, of a tile that is not on the diagonal.

    Elements of tiles that consumers share are those of the tile.
    """
    tile_m, tile_n, *_ = kernel
    found, *_ = run(library, kernel, n)
    np.testing.assert_array_equal(found.on_diagonal, found.second_on_diagonal)
    written = np.zeros((n, n), int)
    for piece in found[found["first"] == 0]:
        rows, columns = slice(piece.row, piece.row + tile_m), slice(piece.column, piece.column + tile_n)
        written[rows, columns] += 1
        if not piece.on_diagonal:
            written[columns, rows] += 1
    assert (written == 1).all()


def check_balance(library, kernel, n, **options):
    """The cost model's numbers are the kernel's; a cluster has at most a tile, or part of one, more than another."""
    tile_m, tile_n, cluster_m, split_k = kernel
    k_blocks, batch = options.get("k_blocks", 12), options.get("batch", 1)
    found, split, parts, total = run(library, kernel, n, **options)
    assert total == batch * clusters_of_triangle(n, tile_m * cluster_m, tile_n)
    shape = GemmShape(n, n, 64 * k_blocks, batch, symmetric=True)
    expected = split_tiles(shape, TileShape(tile_m, tile_n, cluster_m, split_k, False))
    assert (split, parts if split else 1) == expected
    work = np.bincount(found.cta, found.blocks, minlength=132)
    assert work.max() - work.min() <= (-(-k_blocks // parts) if split else k_blocks)


def check_all(library, kernel):
    """Sizes beside squares; many k blocks, which make bands of fewer rows; a batch; tiles that are claimed."""
    for n in sizes_of(kernel):
        check_triangle(library, kernel, n)
        check_stores(library, kernel, n)
        check_balance(library, kernel, n)
    side = side_of(kernel)
    for n, options in (
        (5 * side, {"k_blocks": 600}),
        (3 * side + 8, {"batch": 3}),
        (4 * side, {"batch": 2, "k_blocks": 17}),
    ):
        check_triangle(library, kernel, n, **options)
        check_balance(library, kernel, n, **options)
    if not kernel[3]:
        check_triangle(library, kernel, 4 * side - 8, batch=2, claimed=True)


@pytest.mark.smoke
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_tiles_of_the_triangle(library, kernel):
    check_all(library, kernel)


def test_some_products_are_split_and_some_have_short_bands(library):
    """Else the test above shows nothing of parts, and of rectangles whose last band is shorter."""
    splits = [run(library, kernel, n)[1] > 0 for kernel in KERNELS if kernel[3] for n in sizes_of(kernel)]
    assert 0.2 < np.mean(splits) < 1
    rows = {(-(-n // side_of(of)) + 1) // 2 * side_of(of) // (of[0] * of[2]) for of in KERNELS for n in sizes_of(of)}
    assert {row % 8 for row in rows if row > 8} - {0}


FAULTS = {
    "the other parity": ("row - squares(n) % 2) - row", "row - (squares(n) + 1) % 2) - row"),
    "no parity": ("row - squares(n) % 2) - row", "row) - row"),
    "even columns": ("(squares(n) | 1) * tiles_n", "squares(n) * tiles_n"),
    "a row less": ("(squares(n) + 1) / 2 * clusters_m", "squares(n) / 2 * clusters_m"),
    "a column less": ("column < length;", "column < length - 1;"),
    "no second row": ("tile_n -= (is_longer ? 0 : length) * tiles_n", "tile_n -= 0"),
    "squares of tiles": ("side = least_common_multiple(rows, columns);", "side = max(rows, columns);"),
    "a diagonal of tiles": ("tile.row / side == tile.column / side", "tile.row / rows == tile.column / columns"),
    "a diagonal of elements": ("tile.row / side == tile.column / side", "tile.row == tile.column"),
    "whole squares": ("return (n + side - 1) / side;", "return n / side;"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_shows(tmp_path, fault):
    library = compiled(tmp_path, *fault)
    with pytest.raises(AssertionError):
        for kernel in KERNELS:
            check_all(library, kernel)
