"""Promotion of 8-bit products' accumulators, by the consumers' loop of cuda/mainloop_sm90.cuh on the host: what each
interval of k adds, in float32, bit for bit; with products that read a stage, and write registers, as late as they may.
"""

import ctypes
import pathlib
import subprocess

import numpy as np
import pytest

HEADERS = pathlib.Path(__file__).resolve().parents[1] / "cuda"
REAL = (
    *("scheduler", "grouped_scheduler", "static_for", "epilogue_abi", "dtypes", "elementwise", "pipeline", "claims"),
    *("shared_layout_sm90", "promotion_sm90", "mainloop_sm90"),
)
STEPS, REGISTERS = 4, 32  # k steps of a block; of a thread, for 64 columns

# One thread of a consumer, and a producer that fills a stage when it is waited for. What is given back is lost at once.
PTX = r"""
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <vector>
using std::max, std::min;
#define __device__
#define __host__
#define __forceinline__ inline
static struct { int x; } blockIdx, gridDim, threadIdx;
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static float __fdividef(float a, float b) { return a / b; }
static int __shfl_sync(unsigned, int value, int) { return value; }
static int atomicAdd(int*, int) { std::abort(); }
static void __syncthreads() { std::abort(); }
static void __syncwarp() { std::abort(); }

constexpr int stages = 3, stage_bytes = (128 + 64) * 128, a_bytes = 128 * 128, first_barrier = stages * stage_bytes;
enum Fault { none, filled_twice, given_back_twice, wrong_factor, never_given_back };
static Fault fault;
static int filled, held[stages];  // k blocks that have been loaded; that of each stage, or -1

namespace coda::ptx {
using uint16 = unsigned short;
using uint32 = unsigned;
using uint64 = unsigned long long;
struct TensorMap {};
static void mbarrier_wait(uint32 barrier, int) {
  int& of_stage = held[(barrier - first_barrier) / 8];
  if (of_stage >= 0) fault = filled_twice;
  of_stage = filled++;
}
static void mbarrier_arrive(uint32 barrier) {
  int& of_stage = held[(barrier - first_barrier) / 8 - stages];
  if (of_stage < 0) fault = given_back_twice;
  of_stage = -1;
}
static void named_barrier_sync(int, int) {}
OTHERS
}  // namespace coda::ptx
"""
NOT_RUN = (
    *("cluster_arrive", "cluster_rank", "cluster_wait", "fence_async_proxy", "launch_dependents", "load_word"),
    *("mbarrier_arrive_expect", "mbarrier_arrive_remote", "mbarrier_init", "mbarrier_init_fence"),
    *("named_barrier_arrive", "shared_address", "store_async", "store_word", "store_zeros", "tma_load"),
    *("tma_load_multicast", "tma_prefetch_map", "wait_for_earlier_kernels"),
)
OTHERS = "".join(f"template <class... T> int {name}(T&&...) {{ std::abort(); }}\n" for name in NOT_RUN) + "".join(
    f"template <int count> void registers_{way}() {{ std::abort(); }}\n" for way in ("increase", "decrease")
)

# Behind the declaration of Accumulator. A product is done when it is waited for; and the compiler may use a register's
# new value only behind that: until then it is NaN.
WGMMA = r"""
namespace wgmma {
constexpr int k_step_bytes = 32;
static const float* addends;  // [k block][step][register]
static int share;             // where this consumer's rows begin in a stage
static float sums[32];
static bool are_in_registers;
struct Product {
  int stage, step;
  bool accumulate;
};
static std::vector<Product> issued;
static std::deque<std::vector<Product>> groups;

static ptx::uint64 descriptor(ptx::uint32 address) { return address / 16; }
static void fence() {}
static void commit() {
  groups.push_back(issued);
  issued.clear();
}
/// The sum of two numbers that are truncated 13 bits below the larger one.
static float aligned_sum(float x, float y) {
  const float unit = std::ldexp(1.f, std::ilogb(max(std::abs(x), std::abs(y))) - 13);
  return unit * (std::trunc(x / unit) + std::trunc(y / unit));
}
template <int pending> void wait() {
  for (; groups.size() > pending; groups.pop_front())
    for (const Product& product : groups.front())
      for (int i = 0; i < 32; ++i) {
        const int k_block = held[product.stage];
        const float addend = k_block < 0 ? NAN : addends[(4 * k_block + product.step) * 32 + i];
        sums[i] = product.accumulate ? aligned_sum(sums[i], addend) : addend;
      }
}
template <int count> void keep_behind_wait(float (&registers)[count]) {
  if (!groups.empty() || are_in_registers) return;
  std::copy(sums, sums + count, registers);
  are_in_registers = true;
}
template <DType, DType, bool a_is_mn_major, bool b_is_mn_major, int count>
void multiply(float (&registers)[count], ptx::uint64 a, ptx::uint64 b, bool accumulate) {
  static_assert(count == 32 && !a_is_mn_major && !b_is_mn_major);
  const int stage = 16 * a / stage_bytes, step = (16 * a % stage_bytes - share) / k_step_bytes;
  if (16 * a != stage * stage_bytes + share + step * k_step_bytes || step >= 4 ||
      16 * b != stage * stage_bytes + a_bytes + step * k_step_bytes)
    fault = wrong_factor;
  if (are_in_registers) std::copy(registers, registers + count, sums);
  are_in_registers = false;
  std::fill(registers, registers + count, NAN);
  issued.push_back({stage, step, accumulate});
}
}  // namespace wgmma
}  // namespace coda
"""

EPILOGUE = r"""
#pragma once
#include "accumulator_sm90.cuh"
#include "pipeline.cuh"
#include "scheduler.cuh"
namespace coda {
template <class Config, class Epilogue>
struct EpilogueLayout {
  static constexpr int n_halves = 1, bytes = 0, load_slots = 1;
  static constexpr bool cooperative = true;
};
template <class Config, class Epilogue, class Params, class Ring>
void prefetch_operands(const Params&, const Tile&, ptx::uint32, Ring, RingPosition<Ring::slots>&) {}
template <int slots> void skip_operands(Ring<slots>, RingPosition<slots>&) {}
static float* results;
template <class Config, class Epilogue, class Params>
struct EpilogueVisitor {
  EpilogueVisitor(const Params&, ptx::uint32, Ring<1>, int, int, int) {}
  void begin(const Tile&) {}
  void read_ahead() {}
  void finish() {}
  void store_zeros(const Tile&) {}
  void visit(const Tile&, const Accumulator<1, 64>& accumulator) {
    results = std::copy(accumulator.registers[0], accumulator.registers[0] + 32, results);
  }
};
}  // namespace coda
"""

PARTIAL_TILES = """
#pragma once
struct float4;
namespace coda { template <class> struct PartialTiles {}; }
"""

SOURCE = r"""
#include "ptx_sm90.cuh"
#define private public
#include "mainloop_sm90.cuh"
using namespace coda;

struct Whole {
  static constexpr bool symmetric = false;
  static constexpr int sections = 1, tile_loads = 0;
  static constexpr Section section[1] = {{0, 0, 0}};
};
struct Never {
  static constexpr int tile_m = 128, tile_n = 64, tile_k = 128, stages = ::stages, cluster_m = 1, consumer_m = 64;
  static constexpr int loaded_rows = tile_m, groups = 0, offsets = 0;
  static constexpr Ragged ragged = Ragged::none;
  static constexpr bool transpose_a = false, transpose_b = true, a_batched = false, b_batched = false;
  static constexpr bool claims = false, split_k = false;
  static constexpr DType input = DType::e4m3;
};
template <int blocks>
struct Every : Never {
  static constexpr int promote_blocks = blocks;
};
template <class Of>
struct Sized : Of {
  static constexpr int shared_bytes = SharedLayout<Of, Whole>::bytes;
};
struct Params {
  ptx::TensorMap map[2];
  void* pointer[1];
  int m, n, k, batch;
};

template <class Config>
static void consume(int consumer, int tiles, int blocks) {
  const Params params{{}, {}, 128 * tiles, 64, 128 * blocks, 1};
  threadIdx.x = 128 * (1 + consumer);
  Gemm<Config, Whole, Params>(params, 0).consume(consumer);
}

/// Writes (tiles, 32), all that a thread's registers have when the epilogue gets them.
extern "C" int run(int every, int consumer, int tiles, int blocks, const float* addends, float* out) {
  fault = none, filled = 0, gridDim.x = 1, results = out;
  std::fill(held, held + stages, -1);
  wgmma::addends = addends, wgmma::share = consumer * 64 * 128, wgmma::are_in_registers = true;
  if (every == 0) consume<Sized<Never>>(consumer, tiles, blocks);
  if (every == 1) consume<Sized<Every<1>>>(consumer, tiles, blocks);
  if (every == 4) consume<Sized<Every<4>>>(consumer, tiles, blocks);
  if (std::any_of(held, held + stages, [](int block) { return block >= 0; })) fault = never_given_back;
  return filled == tiles * blocks ? fault : never_given_back;
}
"""
STATES = (
    "",
    "a stage is filled before it is given back",
    "a stage is given back twice",
    "factors of another step",
    "a stage is not given back, or not used",
)


class Library:
    """The consumers' loop, with a part of a header's text replaced."""

    def __init__(self, folder, there=None, instead=None):
        texts = {f"{name}.cuh": (HEADERS / f"{name}.cuh").read_text() for name in REAL}
        texts["mainloop_sm90.cuh"] = texts["mainloop_sm90.cuh"].split("/// The kernel's body")[0] + "}\n"
        accumulator = (HEADERS / "accumulator_sm90.cuh").read_text().split("namespace wgmma {")[0]
        if there is not None:
            assert sum(text.count(there) for text in texts.values()) == 1, there
            texts = {name: text.replace(there, instead) for name, text in texts.items()}
        texts["accumulator_sm90.cuh"] = accumulator + WGMMA
        texts |= {"ptx_sm90.cuh": PTX.replace("OTHERS", OTHERS), "epilogue_sm90.cuh": EPILOGUE, "run.cc": SOURCE}
        texts |= {f"{name}.cuh": "#pragma once\n" for name in ("contracts", "epilogue_layout_sm90")}
        texts["partial_tiles_sm90.cuh"] = PARTIAL_TILES
        for name, text in texts.items():
            (folder / name).write_text(text)
        command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-o", "run.so", "run.cc"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        self._library = ctypes.CDLL(str(folder / "run.so"))

    def sums(self, addends, every, consumer):
        """(tiles, registers) from addends (tiles, k blocks, steps, registers)."""
        tiles, blocks, *_ = addends.shape
        out = np.full((tiles, REGISTERS), np.nan, np.float32)
        pointers = (x.ctypes.data_as(ctypes.c_void_p) for x in (addends, out))
        fault = self._library.run(every, consumer, tiles, blocks, *pointers)
        assert fault == 0, STATES[fault]
        return out


def aligned_sum(x, y):
    """The sum of float32 arrays that are truncated 13 bits below the larger addend, as tensor cores do it."""
    unit = np.ldexp(1.0, np.frexp(np.maximum(abs(x), abs(y)))[1] - 14)
    return (unit * (np.trunc(x / unit) + np.trunc(y / unit))).astype(np.float32)


def promoted(addends, every):
    """Sums of a tile's (k blocks, steps, registers): in tensor cores over `every` blocks, then in float32."""
    total = None
    for begin in range(0, len(addends), every or len(addends)):
        first, *others = addends[begin : begin + (every or len(addends))].reshape(-1, REGISTERS)
        for addend in others:
            first = aligned_sum(first, addend)
        total = first if total is None else total + first
    return total


def addends_of(tiles, blocks):
    """Positive numbers, whose sum grows: without promotion the later ones lose their last bits."""
    return np.random.default_rng(blocks).uniform(0.5, 1, (tiles, blocks, STEPS, REGISTERS)).astype(np.float32)


def check(library):
    """Whole intervals of 4 blocks, parts of one, and fewer; three tiles, each of which begins at zero."""
    for every in (4, 1, 0):
        for blocks in (1, 3, 4, 5, 8, 11):
            addends = addends_of(3, blocks)
            want = np.stack([promoted(tile, every) for tile in addends])
            for consumer in (0, 1):
                np.testing.assert_array_equal(library.sums(addends, every, consumer), want)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("promotion"))


def test_sums_are_promoted_every_interval(library):
    check(library)


def test_promotion_keeps_the_last_bits(library):
    """Without it a sum over 64 blocks has more than ten times the error."""
    addends = addends_of(1, 64)
    exact = addends.astype(np.float64).sum(axis=(1, 2))
    never, every_four = (np.abs(library.sums(addends, every, 0) / exact - 1).max() for every in (0, 4))
    assert every_four < never / 10


FAULTS = {
    "never": ("if (begins && k_block > 0) {", "if (false) {"),
    "not begun again": (
        "multiply(consumer, at.slot, !begins, accumulator);",
        "multiply(consumer, at.slot, true, accumulator);",
    ),
    "added twice": (
        "        add(total, accumulator);\n",
        "        add(total, accumulator), add(total, accumulator);\n",
    ),
    "not added": ("        add(total, accumulator);\n", ""),
    "every second interval": ("% at_least_one(promote_after)", "% at_least_one(2 * promote_after)"),
    "a block late": (
        "k_block % at_least_one(promote_after)",
        "(k_block + promote_after - 1) % at_least_one(promote_after)",
    ),
    "the last interval is lost": ("add(accumulator, total);", "accumulator = total;"),
    "the total is lost": ("if constexpr (promote_after > 0) add(accumulator, total);", ""),
    "the total is added twice": ("add(accumulator, total);", "add(accumulator, total), add(accumulator, total);"),
    "the total is not cleared": ("    clear(total);\n", ""),
    "half of the registers": ("i < columns / 2; ++i) sums", "i < columns / 4; ++i) sums"),
    "added before the wait": ("        wgmma::wait<0>();\n        wgmma::keep", "        wgmma::keep"),
    "one product is not waited for": (
        "        wgmma::wait<0>();\n        wgmma::keep",
        "        wgmma::wait<1>();\n        wgmma::keep",
    ),
    "moved before the wait": ("        wgmma::keep_behind_wait(accumulator.registers[0]);\n", ""),
    "a stage is given back early": (
        "if (!begins) {\n        wgmma::wait<1>();\n        release(previous.slot);",
        "if (!begins) {\n        release(previous.slot);\n        wgmma::wait<1>();",
    ),
    "a stage is not given back": ("release(previous.slot);\n        add(total", "add(total"),
    "a stage is given back twice": (
        "      if (!begins) {\n        wgmma::wait<1>();",
        "      if (k_block > 0) {\n        wgmma::wait<1>();",
    ),
    "a Config's interval is not read": ("return Config::promote_blocks;", "return 0;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_shows(tmp_path, fault):
    library = Library(tmp_path, *fault)
    with pytest.raises(AssertionError):
        check(library)
