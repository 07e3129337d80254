"""The work of the kernel's clusters, by cuda/scheduler.cuh itself on the host: every k block of every tile once.

Also split-K's sums, by cuda/partial_tiles_sm90.cuh, block after block.
"""

import ctypes
import functools
import itertools
import pathlib
import subprocess

import numpy as np
import pytest

from coda_jax.tiles.config import TileShape
from coda_jax.tiles.cost_model import GemmShape, split_tiles

HEADERS = pathlib.Path(__file__).resolve().parents[1] / "cuda"
SOURCE = r"""
#define __device__
#define __host__
#define __forceinline__ inline
#include <algorithm>
#include <string>
using std::max, std::min;
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static float of_quotient = 1;  // what the device's approximate division gives of the exact one
static float __fdividef(float a, float b) { return a / b * of_quotient; }
static struct { int x; } blockIdx, gridDim;
#include "scheduler.cuh"

struct float4 {
  float x, y, z, w;
};
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static std::string steps;  // of a thread, each kind once in a row
static void step(char kind) {
  if (steps.empty() || steps.back() != kind) steps += kind;
}
static void __stcg(float4* to, float4 value) { step('s'), *to = value; }
static float4 __ldcg(const float4* from) { return step('l'), *from; }
static void __syncwarp() { step('w'); }
static void __nanosleep(int) { throw 1; }  // it waits for a block that has not run
namespace coda::ptx {
static void store_release(int* flag, int value) { step('r'), *flag = value; }
static int load_acquire(const int* flag) { return step('a'), *flag; }
}  // namespace coda::ptx
PARTIAL_TILES
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

// A row a piece of work: CTA, row, column, batch, first k block, k blocks; split_tiles, parts, others().
template <int cluster_m, bool split_k, class Epilogue>
static int pieces(int m, int n, int k, int batch, int clusters, int* out) {
  int count = 0;
  gridDim.x = clusters * cluster_m;
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    const Scheduler<DType::bf16, 128, 128, cluster_m, split_k, Epilogue> scheduler(m, n, k, (k + 63) / 64, batch);
    const Others others = scheduler.others();
    for (int i = 0; i < scheduler.count; ++i, ++count, out += 11) {
      const auto work = scheduler.work(i, blockIdx.x % cluster_m);
      const Tile& tile = work.tile;
      const int row[11] = {blockIdx.x,          tile.row,         tile.column,     tile.batch,
                           work.first_block,    work.blocks,      scheduler.split_tiles, scheduler.parts,
                           others.first,        others.stride,    others.count};
      std::copy(row, row + 11, out);
    }
  }
  return count;
}
struct Registers {
  static constexpr int blocks = 2, columns = 128;
  float registers[blocks][columns / 2];
};

// All blocks, one after the other: what a thread's registers hold at the end of each tile, out[tile][thread][register].
// At first those of a part hold value(first k block) in all threads, and their number and the thread's added.
template <int cluster_m>
static int sums(int m, int n, int k, int clusters, const float* value, float* out) {
  gridDim.x = clusters * cluster_m;
  float4* slots = new float4[gridDim.x * 128 * 32];
  int* flags = new int[gridDim.x * 4]();
  const int tiles_n = (n + 127) / 128;
  try {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      const Scheduler<DType::bf16, 128, 128, cluster_m, true, Whole> scheduler(m, n, k, (k + 63) / 64, 1);
      for (int i = 0; i < scheduler.count; ++i) {
        const auto work = scheduler.work(i, blockIdx.x % cluster_m);
        for (int thread = 0; thread < 128; ++thread) {
          Registers sum;
          for (int at = 0; at < 128; ++at) sum.registers[at / 64][at % 64] = value[work.first_block] + at + thread;
          const PartialTiles<Registers> partial_tiles{slots, flags, thread / 32, thread % 32};
          if (work.first_block > 0) {
            partial_tiles.send(sum);
            continue;
          }
          if (work.blocks < scheduler.k_blocks) partial_tiles.add(scheduler.others(), sum);
          const int tile = work.tile.row / 128 * tiles_n + work.tile.column / 128;
          for (int at = 0; at < 128; ++at) out[(tile * 128 + thread) * 128 + at] = sum.registers[at / 64][at % 64];
        }
      }
    }
  } catch (int) {
    return 1;
  }
  return 0;
}
extern "C" int run_sums(int cluster_m, int m, int n, int k, int clusters, const float* value, float* out) {
  return cluster_m == 2 ? sums<2>(m, n, k, clusters, value, out) : sums<1>(m, n, k, clusters, value, out);
}

/// What a thread of block 2 does when it sends, and when it adds the sums of blocks 1 and 3; '!' if it waits.
extern "C" const char* handover(int warp, int lane, int* flags) {
  static float4 slots[4 * 128 * 32];
  const PartialTiles<Registers> partial_tiles{slots, flags, warp, lane};
  Registers sum = {};
  blockIdx.x = 2, steps.clear();
  partial_tiles.send(sum);
  steps += ' ';
  try {
    partial_tiles.add({1, 2, 2}, sum);
  } catch (int) {
    steps += '!';
  }
  return steps.c_str();
}

extern "C" void quotients(float of_exact, int count, const int* dividends, const int* divisors, int* out) {
  of_quotient = of_exact;
  for (int i = 0; i < count; ++i) out[i] = Divisor(divisors[i]).quotient(dividends[i]);
  of_quotient = 1;
}
extern "C" int band(int k) {
  gridDim.x = 2;
  return Scheduler<DType::bf16, 128, 128, 2, false, Whole>(1 << 20, 128, k, 1, 1).band.value;
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
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scheduler")
    partial_tiles = (HEADERS / "partial_tiles_sm90.cuh").read_text().splitlines()
    text = "\n".join(line for line in partial_tiles if not line.startswith("#include") and "#pragma" not in line)
    (folder / "run.cc").write_text(SOURCE.replace("PARTIAL_TILES", text))
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{HEADERS}", "-o", "run.so", "run.cc"]
    subprocess.run(command, cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "run.so"))


@pytest.fixture
def run(library):
    def run(m, n, k, *, batch=1, clusters=66, cluster_m=2, parts=False, split_k=True):
        out = np.zeros((1 << 16, 11), np.int32)
        count = library.run(parts, split_k, cluster_m, m, n, k, batch, clusters, out.ctypes.data_as(ctypes.c_void_p))
        return out[:count]

    return run


@pytest.mark.parametrize("of_exact", [1 - 2**-22, 1, 1 + 2**-22])  # two units in the last place
def test_quotients_are_exact(library, of_exact):
    rng = np.random.default_rng(0)
    largest = 2**31 - 1
    divisors = np.concatenate([np.arange(1, 2000), 2 ** np.arange(31), largest - np.arange(50)])
    divisors = np.concatenate([divisors, 2.0 ** rng.uniform(0, 31, 20000)]).astype(np.int32)
    dividends = (2.0 ** rng.uniform(0, 31, divisors.size)).astype(np.int32)
    multiples = largest // divisors * divisors
    for of in (dividends, np.zeros_like(divisors), multiples, multiples - 1, np.full_like(divisors, largest)):
        out = np.zeros_like(of)
        pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (of, divisors, out))
        library.quotients(ctypes.c_float(of_exact), of.size, *pointers)
        wrong = np.flatnonzero(out != of // divisors)
        assert not wrong.size, f"{of[wrong[0]]} / {divisors[wrong[0]]} = {out[wrong[0]]}"


def test_bands_rows_of_a_fit_into_l2(library):
    fits = (24 << 20) // (2 * 128 * 2)  # k of two tiles' rows, 2 bytes each
    ks = [64, *(fits // band + more for band in range(1, 12) for more in (0, 1)), 2**31 - 1]
    assert [library.band(k) for k in ks] == [max(2, min(8, fits // k)) for k in ks]


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
    for _, row, column, batch, first, blocks, *_ in run(*sizes, **options).tolist():
        assert blocks > 0
        done.setdefault((row, column, batch), []).append((first, first + blocks))
    columns = [*range(0, 200, 128), *range(200, 336, 128)] if options.get("parts") else range(0, n, 128)
    rows = range(0, -(-m // (128 * cluster_m)) * 128 * cluster_m, 128)
    batches = range(options.get("batch", 1))
    assert done.keys() == {(row, column, batch) for row in rows for column in columns for batch in batches}
    for parts in done.values():
        ends = [0, *(end for _, end in sorted(parts))]
        assert [first for first, _ in sorted(parts)] == ends[:-1] and ends[-1] == k_blocks


@pytest.mark.parametrize(("sizes", "options"), SHAPES, ids=str)
def test_no_cluster_has_much_more_than_another(run, sizes, options):
    """One tile, or the part of one, at most."""
    pieces = run(*sizes, **options)
    ctas = options.get("clusters", 66) * options.get("cluster_m", 2)
    work = np.bincount(pieces[:, 0], pieces[:, 5], minlength=ctas)
    split, parts = pieces[0, 6:8]
    k_blocks = -(-sizes[2] // 64)
    assert work.max() - work.min() <= (-(-k_blocks // parts) if split else k_blocks)


@pytest.mark.parametrize(("sizes", "options"), SHAPES, ids=str)
def test_parts(run, sizes, options):
    """Parts come before anything else. A tile's first part has a higher block than the others, which it adds in the
    order of k.
    """
    pieces = run(*sizes, **options).tolist()
    k_blocks, split, parts = -(-sizes[2] // 64), *pieces[0][6:8]
    of_cta = {}
    for cta, *tile, first, blocks, _, _, start, stride, count in pieces:
        of_cta.setdefault(cta, []).append((tile, first, blocks, [start + stride * i for i in range(count)]))
    found = 0
    for cta, ((tile, first, blocks, others), *more) in of_cta.items():
        assert all((of[1], of[2]) == (0, k_blocks) for of in more)
        if first == 0 and blocks < k_blocks:
            found += 1
            assert len(others) == parts - 1 and max(others) < cta
            rest = [of_cta[other][0] for other in others]
            assert all(of[0] == tile for of in rest)
            assert [of[1] for of in rest] == [j * k_blocks // parts for j in range(1, parts)]
            assert min(blocks, *(of[2] for of in rest)) >= 4
    assert found == split * options.get("cluster_m", 2)


@pytest.mark.parametrize(
    ("sizes", "options"), [case for case in SHAPES if not {"parts", "split_k"} & case[1].keys()], ids=str
)
def test_the_cost_model_knows(run, sizes, options):
    m, n, k = sizes
    shape = GemmShape(m, n, k, options.get("batch", 1))
    expected = split_tiles(shape, TileShape(128, 128, options.get("cluster_m", 2), True, False))
    split, parts = run(*sizes, **options)[0, 6:8]
    assert (split, parts if split else 1) == expected


def test_some_products_that_are_split(run):
    """All of the above, of one tile in as many parts as there may be, and of a short last band."""
    tests = (test_every_k_block_of_every_tile_once, test_no_cluster_has_much_more_than_another, test_parts)
    for case, test in itertools.product((SHAPES[1], SHAPES[6]), (*tests, test_the_cost_model_knows)):
        test(run, *case)


@pytest.mark.parametrize(
    ("m", "n", "k", "cluster_m", "clusters"),
    [
        (768, 768, 16384, 2, 66),  # 18 tiles in 3 parts
        (768, 3072, 16384, 2, 66),  # a whole tile each, then 6 in 8 parts
        (4096, 1280, 520, 2, 66),
        (264, 400, 4104, 1, 132),
        (200, 136, 1000, 2, 4),
    ],
)
def test_sums(library, run, m, n, k, cluster_m, clusters):
    """With blocks that run one after the other nobody waits, and parts are added in the order of k."""
    k_blocks, pointer = -(-k // 64), ctypes.c_void_p
    value = 1e3 * np.random.default_rng(0).normal(size=k_blocks).astype(np.float32)
    tiles = -(-m // (128 * cluster_m)) * cluster_m * -(-n // 128)
    out = np.full((tiles, 128, 128), np.nan, np.float32)
    arrays = (x.ctypes.data_as(pointer) for x in (value, out))
    assert library.run_sums(cluster_m, m, n, k, clusters, *arrays) == 0
    split, parts = run(m, n, k, cluster_m=cluster_m, clusters=clusters)[0, 6:8]
    counts = np.arange(128, dtype=np.float32)
    of_parts = [value[part * k_blocks // parts] + counts + counts[:, None] for part in range(parts)]
    is_split = [np.array_equal(tile, functools.reduce(np.add, of_parts)) for tile in out]
    is_whole = [np.array_equal(tile, of_parts[0]) for tile in out]
    assert parts > 1 and sum(is_split) == split * cluster_m and sum(is_whole) == tiles - sum(is_split)


def test_sums_are_handed_over_in_order(library):
    """A flag is set when all lanes have stored, and what others have stored is read when the lanes have seen their
    flags: each lane that of a block, of its own warp.
    """
    library.handover.restype = ctypes.c_char_p
    for lane, ready in itertools.product(range(3), ((1, 3), (1,), (3,), ())):
        flags = np.zeros((4, 4), np.int32)
        flags[list(ready), 2] = 1
        said = library.handover(2, lane, flags.ctypes.data_as(ctypes.c_void_p)).decode()
        sent, seen = "swr" if lane == 0 else "sw", "a" if lane < 2 else ""
        waits = lane < 2 and (1, 3)[lane] not in ready
        assert said == f"{sent} {seen}{'!' if waits else 'wl'}"
        assert flags[2, 2] == (lane == 0) and flags.sum() == len(ready) + (lane == 0)
