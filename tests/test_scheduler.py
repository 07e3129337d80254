"""What the kernel's clusters work on, by cuda/scheduler.cuh itself on the host: every k block of every tile once."""

import ctypes
import pathlib
import subprocess

import numpy as np
import pytest

from coda_jax.primitives.cost_model import Cut, Product, split_tiles

HEADERS = pathlib.Path(__file__).resolve().parents[1] / "cuda"
SOURCE = r"""
#define __device__
#define __host__
#define __forceinline__ inline
#include <algorithm>
using std::max, std::min;
static struct { int x; } blockIdx, gridDim;
#include "scheduler.cuh"
using namespace coda;

struct Whole {
  static constexpr int sections = 1;
  static constexpr Section section[1] = {{0, 0, 0}};
};
struct Parts {  // of 200 and 136 columns
  static constexpr int sections = 2;
  static constexpr Section section[2] = {{0, 0, 200}, {0, 200, 336}};
};

// A row a piece of work: cluster, row, column, batch, first k block, k blocks; the scheduler's split_tiles and parts.
template <int cluster_m, bool split_k, class Epilogue>
static int pieces(int m, int n, int k, int batch, int clusters, int* out) {
  int count = 0;
  gridDim.x = clusters * cluster_m;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x += cluster_m) {
    const Scheduler<128, 128, cluster_m, split_k, Epilogue> scheduler(m, n, k, (k + 63) / 64, batch);
    for (int i = 0; i < scheduler.count; ++i, ++count, out += 8) {
      const Work work = scheduler.work(i, 0);
      const int row[8] = {blockIdx.x / cluster_m, work.tile.row,          work.tile.column, work.tile.batch,
                          work.first_block,       work.blocks,            scheduler.split_tiles, scheduler.parts};
      std::copy(row, row + 8, out);
    }
  }
  return count;
}
extern "C" int run(int parts, int split_k, int cluster_m, int m, int n, int k, int batch, int clusters, int* out) {
  const auto with = [&]<class Epilogue>(Epilogue) {
    if (split_k)
      return cluster_m == 2 ? pieces<2, true, Epilogue>(m, n, k, batch, clusters, out)
                            : pieces<1, true, Epilogue>(m, n, k, batch, clusters, out);
    return cluster_m == 2 ? pieces<2, false, Epilogue>(m, n, k, batch, clusters, out)
                          : pieces<1, false, Epilogue>(m, n, k, batch, clusters, out);
  };
  return parts ? with(Parts()) : with(Whole());
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scheduler")
    (folder / "run.cc").write_text(SOURCE)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{HEADERS}", "-o", "run.so", "run.cc"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "run.so"))

    def run(m, n, k, *, batch=1, clusters=66, cluster_m=2, parts=False, split_k=True):
        out = np.zeros((1 << 16, 8), np.int32)
        count = library.run(parts, split_k, cluster_m, m, n, k, batch, clusters, out.ctypes.data_as(ctypes.c_void_p))
        return out[:count]

    return run


SHAPES = [
    ((256, 128, 64 * 5), {}),  # one tile, too few k blocks to split
    ((256, 128, 64 * 1000), {}),
    ((768, 768, 16384), {}),  # 18 tiles in 3 parts
    ((768, 3072, 16384), {}),  # 72: 6 more than clusters, in as many parts as there may be
    ((4096, 1280, 520), {}),  # 160: 28 left over, in two parts
    ((16384, 2048, 2048), {}),  # 1024
    ((2112, 1024, 1000), {}),  # 72, k no multiple of 64
    ((2112 * 4, 1024, 640), {"batch": 3}),
    ((33, 1544, 520), {"cluster_m": 1, "clusters": 132}),
    ((264, 336, 4096), {"parts": True}),
    ((256 * 33, 256, 192), {}),  # whole waves
    ((256 * 33, 256, 192), {"split_k": False}),
    ((4000, 1000, 192), {"split_k": False, "batch": 2}),
]


@pytest.mark.parametrize(("sizes", "options"), SHAPES, ids=str)
def test_every_k_block_of_every_tile_once(run, sizes, options):
    m, n, k = sizes
    cluster_m, k_blocks = options.get("cluster_m", 2), -(-k // 64)
    done = {}
    for _, row, column, batch, first, blocks, _, _ in run(*sizes, **options):
        assert blocks > 0
        done.setdefault((row, column, batch), []).append((first, first + blocks))
    columns = [*range(0, 200, 128), *range(200, 336, 128)] if options.get("parts") else range(0, n, 128)
    rows, batches = range(0, m, 128 * cluster_m), range(options.get("batch", 1))
    assert done.keys() == {(row, column, batch) for row in rows for column in columns for batch in batches}
    for parts in done.values():
        ends = [0, *(end for _, end in sorted(parts))]
        assert [first for first, _ in sorted(parts)] == ends[:-1] and ends[-1] == k_blocks


@pytest.mark.parametrize(("sizes", "options"), SHAPES, ids=str)
def test_no_cluster_has_much_more_than_another(run, sizes, options):
    """One tile, or the part of one, at most."""
    pieces = run(*sizes, **options)
    work = np.bincount(pieces[:, 0], pieces[:, 5], minlength=options.get("clusters", 66))
    split, parts = pieces[0, 6:]
    k_blocks = -(-sizes[2] // 64)
    assert work.max() - work.min() <= (-(-k_blocks // parts) if split else k_blocks)


@pytest.mark.parametrize(("sizes", "options"), SHAPES, ids=str)
def test_parts(run, sizes, options):
    """The j-th part of the t-th split tile is what cluster t + j * split_tiles does before anything else."""
    pieces = run(*sizes, **options).tolist()
    k_blocks, split, parts = -(-sizes[2] // 64), *pieces[0][6:]
    of_cluster = {}
    for cluster, *tile, first, blocks, _, _ in pieces:
        of_cluster.setdefault(cluster, []).append((tile, first, blocks))
    for of in of_cluster.values():
        assert all((first, blocks) == (0, k_blocks) for _, first, blocks in of[1:])
    for t in range(split):
        starts = [of_cluster[t + j * split][0] for j in range(parts)]
        assert [tile for tile, _, _ in starts] == [starts[0][0]] * parts
        assert [first for _, first, _ in starts] == [j * k_blocks // parts for j in range(parts)]
        assert min(blocks for _, _, blocks in starts) >= 4


@pytest.mark.parametrize(("sizes", "options"), SHAPES, ids=str)
def test_the_cost_model_knows(run, sizes, options):
    m, n, k = sizes
    if options.get("parts") or not options.get("split_k", True):
        pytest.skip("sections and whole tiles")
    product = Product(m, n, k, options.get("batch", 1))
    expected = split_tiles(product, Cut(128, 128, options.get("cluster_m", 2), True))
    split, parts = run(*sizes, **options)[0, 6:]
    assert (split, parts if split else 1) == expected
