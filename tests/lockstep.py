"""Kernels' epilogues on the host: generated code between the kernel's own headers, without a GPU.

The threads of a consumer warpgroup are fibers. The lanes of a warp take turns: each runs to the next instruction that
all of them have. A warp runs until it has to wait for others, and which one is first can be chosen. So a warp is as far
ahead of the others as barriers let it. Shared memory is an array of bytes. The copy engine reads a box as early as it
may, when it is told to, or as late, when somebody waits for it; and it must not read what was written without a fence.
"""

import ctypes
import pathlib
import re
import shutil
import subprocess

import jax.numpy as jnp
import numpy as np

HEADERS = pathlib.Path(__file__).resolve().parents[1] / "cuda"
SHARED = pathlib.Path(__file__).with_name("emulated_sm90")  # headers of the other emulation
GUARD = 4096  # bytes before and behind an array, which stay as they are

PTX = r"""
#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <vector>
#define __device__
#define __host__
#define __shared__
#define __align__(bytes)
#define __forceinline__ inline
using std::max, std::min;
struct float4 { float x, y, z, w; };
struct int2 { int x, y; };
static bool is_misaligned, is_unfenced;
struct int4 {
  int x, y, z, w;
  int4& operator=(const int4& other) {
    is_misaligned = is_misaligned || reinterpret_cast<size_t>(this) % 16 != 0;
    std::memmove(static_cast<void*>(this), &other, 16);
    return *this;
  }
};
static struct { int x; } blockIdx, gridDim, threadIdx;
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static float __fdividef(float a, float b) { return a / b; }
static float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static void __stcg(float4*, float4) { std::abort(); }
static float4 __ldcg(const float4*) { std::abort(); }
static void __nanosleep(int) { std::abort(); }
static int atomicAdd(int*, int) { std::abort(); }
static void __syncthreads() {}
static unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return out;
}

// ---- fibers: the 128 threads of a consumer, and its prefetch thread
constexpr int fibers = 129;
static ucontext_t loop, contexts[fibers];
static bool has_ended[fibers], is_waiting[fibers], runs_fibers;
static int current;
static long progress;  // how often something has come that somebody may wait for
static void yield() { const int self = current; swapcontext(&contexts[self], &loop); }
static void __syncwarp() { yield(); }
template <class Condition> static void wait_until(const Condition& holds) {
  while (!holds()) {
    is_waiting[current] = true;
    yield();
  }
}
static unsigned words[fibers];
template <class T> static T of_lane(T value, int lane) {
  if (!runs_fibers) return value;  // that all lanes have
  std::memcpy(&words[current], &value, 4);
  yield();
  T other;
  std::memcpy(&other, &words[current / 32 * 32 + lane], 4);
  yield();
  return other;
}
template <class T> static T __shfl_sync(unsigned, T value, int lane) { return of_lane(value, lane % 32); }
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) { return of_lane(value, current % 32 ^ mask); }

namespace coda {
unsigned char shared[232448];  // as the kernel declares it
}
#include "floats_of_8_bits.h"
namespace coda::ptx {
using uint32 = unsigned;
using uint64 = unsigned long long;
static unsigned char (&memory)[sizeof shared] = shared;
static uint32 shared_address(const void*) { return 0; }
static unsigned char* at(uint32 address, int bytes) {
  if (address % bytes != 0 || address + bytes > sizeof memory) std::abort();
  return memory + address;
}
static std::string events;  // of one thread: zeros, fences, barriers

// ---- what each thread has touched since its last fence
struct Touched {
  unsigned char by[sizeof memory];  // 1 + thread
  std::vector<std::pair<uint32, int>> of[fibers];
  void add(uint32 address, int bytes) {
    std::memset(by + address, 1 + current, bytes);
    of[current].push_back({address, bytes});
  }
  void fence() {
    for (auto [address, bytes] : of[current])
      for (int i = 0; i < bytes; ++i)
        if (by[address + i] == 1 + current) by[address + i] = 0;
    of[current].clear();
  }
  void check(uint32 address, int bytes) const {
    for (int i = 0; i < bytes; ++i) is_unfenced = is_unfenced || by[address + i];
  }
};
static Touched written, read;
static void fence_async_proxy() { events += 'f', written.fence(), read.fence(); }

// ---- barriers
struct { int arrived, generation; } named[16];
static void named_barrier_sync(int number, int threads) {
  events += std::to_string(number) + "/" + std::to_string(threads);
  if (!runs_fibers) return;
  auto& barrier = named[number];
  const int generation = barrier.generation;
  if (++barrier.arrived == threads) barrier.arrived = 0, ++barrier.generation;
  ++progress, is_waiting[current] = true;
  yield();  // all lanes of the warp go on together
  wait_until([&] { return barrier.generation != generation; });
}
struct Mbarrier { int arrivals, left, bytes, phase; };
static std::map<uint32, Mbarrier> mbarriers;
static void complete(Mbarrier& barrier) {
  ++progress;
  if (barrier.left == 0 && barrier.bytes == 0) barrier.left = barrier.arrivals, barrier.phase ^= 1;
}
static void mbarrier_init(uint32 address, int arrivals) { mbarriers[address] = {arrivals, arrivals, 0, 0}; }
static void mbarrier_arrive(uint32 address) {  // for the warp, whose lanes give back what they have read
  const int warp = current / 32 * 32;
  for (int i = warp; i < min(fibers, warp + 32); ++i) is_unfenced = is_unfenced || !read.of[i].empty();
  --mbarriers[address].left, complete(mbarriers[address]);
}
static void mbarrier_arrive_expect(uint32 address, int bytes) {
  mbarriers[address].bytes += bytes;
  mbarrier_arrive(address);
}
static void mbarrier_wait(uint32 address, uint32 parity) {
  wait_until([&] { return mbarriers[address].phase != static_cast<int>(parity); });
}

// ---- the copy engine
struct TensorMap {
  unsigned char* base;
  int element_bytes, box_columns, box_rows, swizzle_bytes;
  int sizes[4];  // columns, halves, rows, batch
  long long strides[4];
};
struct Copy {
  const TensorMap* map;
  uint32 shared;
  int place[4];
  template <class Element> void each(const Element& element) const {
    for (int row = 0; row < map->box_rows; ++row)
      for (int column = 0; column < map->box_columns; ++column) {
        const int index[4] = {place[0] + column, place[1], place[2] + row, place[3]};
        long long offset = 0;
        bool inside = true;
        for (int i = 0; i < 4; ++i) {
          inside = inside && 0 <= index[i] && index[i] < map->sizes[i];
          offset += index[i] * map->strides[i];
        }
        uint32 of_box = shared + row * map->swizzle_bytes + column * map->element_bytes;
        of_box ^= (of_box >> 7 & (map->swizzle_bytes / 16 - 1)) << 4;
        element(at(of_box, map->element_bytes), inside ? map->base + offset : nullptr);
      }
  }
  void store() const {  // what lies within the array
    each([&](unsigned char* of_box, unsigned char* of_array) {
      if (of_array) std::memcpy(of_array, of_box, map->element_bytes);
    });
  }
  void load() const {  // zeros for the rest
    each([&](unsigned char* of_box, unsigned char* of_array) {
      if (of_array) std::memcpy(of_box, of_array, map->element_bytes);
      else std::memset(of_box, 0, map->element_bytes);
    });
  }
  int bytes() const { return map->box_rows * map->swizzle_bytes; }
};
static bool stores_early;
static std::vector<Copy> given[fibers];
static std::deque<std::vector<Copy>> pending[fibers];  // groups that have not read shared memory
static void tma_store(const TensorMap& map, uint32 source, int column, int half, int row, int batch) {
  const Copy copy{&map, source, {column, half, row, batch}};
  written.check(source, copy.bytes());
  if (stores_early) copy.store();
  given[current].push_back(copy);
}
static void tma_store_commit() {
  pending[current].push_back(given[current]);
  given[current].clear();
}
template <int count> void tma_store_wait_read() {
  for (auto& groups = pending[current]; groups.size() > count; groups.pop_front())
    for (const Copy& copy : groups.front())
      if (!stores_early) copy.store();
}
static void tma_load(uint32 target, const TensorMap& map, uint32 barrier, int column, int half, int row, int batch) {
  const Copy copy{&map, target, {column, half, row, batch}};
  read.check(target, copy.bytes());
  copy.load();
  mbarriers[barrier].bytes -= copy.bytes();
  complete(mbarriers[barrier]);
}

// ---- shared memory
static uint32 addresses[fibers], words_of[fibers][4];
template <bool transposed, int count> static void store_all(uint32 address, const uint32 (&words)[count]) {
  addresses[current] = address;
  std::copy(words, words + count, words_of[current]);
  yield();
  const int warp = current / 32 * 32, lane = current % 32;
  for (int i = 0; i < count; ++i)
    for (int half = 0; half < 2; ++half) {
      const int row = transposed ? lane % 4 * 2 + half : lane / 4, column = transposed ? lane / 4 : lane % 4 * 2 + half;
      const uint32 to = addresses[warp + 8 * i + row];
      std::memcpy(at(to, 16) + 2 * column, reinterpret_cast<char*>(&words_of[current][i]) + 2 * half, 2);
      written.add(to + 2 * column, 2);
    }
  yield();
}
template <int count> static void store_matrices(uint32 address, const uint32 (&words)[count]) {
  store_all<false>(address, words);
}
template <int count> static void store_matrices_transposed(uint32 address, const uint32 (&words)[count]) {
  store_all<true>(address, words);
}
static void load_matrices(uint32 address, uint32 (&words)[4]) {
  addresses[current] = address;
  yield();
  for (int i = 0; i < 4; ++i) {
    const uint32 from = addresses[current / 32 * 32 + 8 * i + current % 32 / 4];
    std::memcpy(&words[i], at(from, 16) + 4 * (current % 4), 4);
    read.add(from + 4 * (current % 4), 4);
  }
  yield();
}
static void store_pair(uint32 address, float first, float second) {
  const float pair[2] = {first, second};
  std::memcpy(at(address, 8), pair, 8);
  written.add(address, 8);
}
static void load_pair(uint32 address, float& first, float& second) {
  float pair[2];
  std::memcpy(pair, at(address, 8), 8);
  first = pair[0], second = pair[1];
  read.add(address, 8);
}
static void store_2_bytes(uint32 address, uint16 bits) {
  std::memcpy(at(address, 2), &bits, 2);
  written.add(address, 2);
}
static uint16 load_2_bytes(uint32 address) {
  uint16 bits;
  std::memcpy(&bits, at(address, 2), 2);
  read.add(address, 2);
  return bits;
}
static int4 load_16_bytes(uint32 address) {
  int4 words;
  std::memcpy(static_cast<void*>(&words), at(address, 16), 16);
  return words;
}
static void store_word(uint32 address, int word) { std::memcpy(at(address, 4), &word, 4); }
static int load_word(uint32 address) {
  int word;
  std::memcpy(&word, at(address, 4), 4);
  return word;
}
static void store_zeros(uint32 address) {
  std::memset(at(address, 16), 0, 16);
  if (events.empty() || events.back() != 'z') events += 'z';
}

// ---- conversions
static uint32 bits(float value) { uint32 of; std::memcpy(&of, &value, 4); return of; }
static uint32 pack_bf16(float low, float high) {
  const auto rounded = [](float x) { return x != x ? 0x7FFF : (bits(x) + 0x7FFF + (bits(x) >> 16 & 1)) >> 16; };
  return rounded(low) | rounded(high) << 16;
}
static uint32 pack_f16(float low, float high) {
  const _Float16 pair[2] = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  uint32 of;
  std::memcpy(&of, pair, 4);
  return of;
}
static float f16_to_float(uint16 of) { _Float16 value; std::memcpy(&value, &of, 2); return value; }
static uint32 e5m2_to_f16(uint16 bytes) { return (bytes & 0xFF) << 8 | (bytes & 0xFF00) << 16; }
static uint32 e4m3_to_f16(uint16 bytes) {
  const auto value = [](int byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float magnitude = (byte & 0x7F) == 0x7F ? NAN
                            : exponent            ? std::ldexp(8.f + mantissa, exponent - 10)
                                                  : std::ldexp(static_cast<float>(mantissa), -9);
    return byte & 0x80 ? -magnitude : magnitude;
  };
  return pack_f16(value(bytes & 0xFF), value(bytes >> 8));
}
static uint32 joined(uint16 low, uint16 high) { return low | static_cast<uint32>(high) << 16; }
OTHERS
}  // namespace coda::ptx
"""
# Those that nothing here runs.
NOT_RUN = (
    *("store_release", "load_acquire", "tma_prefetch_map", "tma_load_multicast"),
    *("mbarrier_init_fence", "mbarrier_arrive_remote", "store_async", "named_barrier_arrive"),
    *("cluster_rank", "cluster_arrive", "cluster_wait", "launch_dependents", "wait_for_earlier_kernels"),
)
OTHERS = (
    "".join(f"template <class... T> int {name}(T&&...) {{ std::abort(); }}\n" for name in NOT_RUN)
    + """
template <int count> void registers_decrease() { std::abort(); }
template <int count> void registers_increase() { std::abort(); }
"""
)

SOURCE = r"""
#include "ptx_sm90.cuh"
#define private public
#include "mainloop_sm90.cuh"
#undef private
using namespace coda;

struct Piece {  // of work of a block's consumer
  int block, consumer, row, row_end, column, column_end, section, batch, index_m, index_n, has_product;
};
struct Launch {
  int m, n, batch, pieces, blocks, lane_first, warp_first, stores_early;
  const Piece* piece;
  const float* acc;  // (batch, m, n), rows in groups (m, n); what is outside of it or of the piece's rows is `foreign`
  const ptx::TensorMap* map;
  void** pointer;
};
constexpr float foreign = 12345;
static const Launch* launched;
static int consumer;

/// Calls `use` with the tile of each piece of this block's consumer.
template <class Use>
static void each_piece(const Use& use) {
  for (int i = 0; i < launched->pieces; ++i) {
    const Piece& piece = launched->piece[i];
    if (piece.block != blockIdx.x || piece.consumer != consumer) continue;
    use(piece, RowGroupTile{{piece.row, piece.column, piece.batch, piece.index_m, piece.index_n, piece.section,
                             piece.column_end}, piece.row_end});
  }
}

template <class C, class E, class P>
static void thread_of_consumer() {
  using Visitor = EpilogueVisitor<C, CompleteEpilogue<E>, P>;
  using Layout = typename Visitor::Layout;
  static P params;
  const Launch& launch = *launched;
  std::copy(launch.map, launch.map + sizeof params.map / sizeof *params.map, params.map);
  std::copy(launch.pointer, launch.pointer + sizeof params.pointer / sizeof *params.pointer, params.pointer);
  params.m = launch.m, params.n = launch.n, params.k = 64, params.batch = launch.batch;
  const ptx::uint32 base = consumer * Layout::bytes;
  const Ring<Layout::load_slots> ring{0};
  if (current == fibers - 1) {  // the prefetch thread
    RingPosition<Layout::load_slots> at;
    if constexpr (CompleteEpilogue<E>::tile_loads > 0)
      each_piece([&](const Piece& piece, const RowGroupTile& tile) {
        if (piece.has_product) prefetch_operands<C, CompleteEpilogue<E>>(params, tile, base, ring, at);
      });
    return;
  }
  const int warp = current / 32, lane = current % 32;
  Visitor epilogue(params, base, ring, consumer, warp, lane);
  each_piece([&](const Piece& piece, const RowGroupTile& tile) {
    if (!piece.has_product) {
      epilogue.store_zeros(tile);
      return;
    }
    epilogue.begin(tile);
    ptx::named_barrier_sync(1, 128);
    typename Visitor::TileAccumulator accumulator;
    constexpr int of_half = C::tile_n / Layout::n_halves;
    const float* acc = launch.acc + (C::ragged == Ragged::m ? 0 : 1ll * piece.batch * launch.m * launch.n);
    for (int block = 0; block < Layout::blocks; ++block)
      for (int j = 0; j < C::tile_n / 8; ++j)
        for (int r = 0; r < 2; ++r)
          for (int c = 0; c < 2; ++c) {
            const int row = tile.row + 64 * block + 16 * warp + lane / 4 + 8 * r, at = 8 * j + 2 * (lane % 4) + c;
            const int n = launch.n / Layout::n_halves, column = tile.column + at % of_half;
            const bool inside = row < min(tile.row_end, launch.m) && column < n;
            accumulator.registers[block][4 * j + 2 * r + c] =
                inside ? acc[static_cast<long long>(row) * launch.n + at / of_half * n + column] : foreign;
          }
    epilogue.read_ahead();
    epilogue.visit(tile, accumulator);
  });
  epilogue.finish();
}

/// Consumers run one after the other, for they share nothing. Returns 0 or the sum of what is wrong, see _FAULTS.
template <class C, class E, class P>
static int run(const Launch* launch) {
  static char stacks[fibers][1 << 17];
  static void (*entry)() = thread_of_consumer<C, E, P>;
  launched = launch, is_misaligned = is_unfenced = false, runs_fibers = true;
  ptx::stores_early = launch->stores_early;
  std::fill(std::begin(ptx::memory), std::end(ptx::memory), 0xFF);
  gridDim.x = launch->blocks;
  for (blockIdx.x = 0; blockIdx.x < launch->blocks; ++blockIdx.x)
    for (consumer = 0; consumer < consumers; ++consumer) {
      ptx::written = {}, ptx::read = {};
      for (auto& barrier : ptx::named) barrier = {};
      Ring<EpilogueLayout<C, CompleteEpilogue<E>>::load_slots>{0}.init(1, consumer_warps);
      for (int i = 0; i < fibers; ++i) {
        has_ended[i] = false;
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks[i], contexts[i].uc_stack.ss_size = sizeof stacks[i];
        contexts[i].uc_link = nullptr;
        makecontext(&contexts[i], [] {
          entry();
          has_ended[current] = true, ++progress;
          setcontext(&loop);
        }, 0);
      }
      for (int running = fibers; running > 0;) {
        running = 0;
        const long before = progress;
        for (int w = 0; w < 5; ++w) {
          const int warp = (launch->warp_first + w) % 5, lanes = warp == 4 ? 1 : 32;
          for (int live = 1, waiting = 0; live > waiting;) {  // until all of its lanes wait
            live = waiting = 0;
            for (int i = 0; i < lanes; ++i) {
              current = 32 * warp + (launch->lane_first + i) % lanes;
              if (has_ended[current]) continue;
              is_waiting[current] = false;
              swapcontext(&loop, &contexts[current]);
              live += !has_ended[current], waiting += !has_ended[current] && is_waiting[current];
            }
            if (live == waiting) running += live;
          }
        }
        if (running > 0 && progress == before) return 4;
      }
      for (int i = 0; i < fibers; ++i)
        if (!ptx::given[i].empty() || !ptx::pending[i].empty()) return 8;
    }
  return is_misaligned + 2 * is_unfenced;
}

template <class C, class E, class P>
static int zero(int of_consumer, int slot, int first, unsigned char* stages, int bytes, char* said) {
  using Kernel = Gemm<C, CompleteEpilogue<E>, P>;
  static P params;
  if (bytes != Kernel::Layout::epilogue_offset) return 0;
  runs_fibers = false;
  std::copy(stages, stages + bytes, ptx::memory);
  for (int thread = 0; thread < 128; ++thread) {
    gridDim.x = 1, blockIdx.x = 0, threadIdx.x = 128 * (1 + of_consumer) + thread;
    params.m = params.n = params.k = 64, params.batch = C::groups;
    ptx::events.clear();
    Kernel(params, 0).zero_behind(of_consumer, slot, first);
    if (thread == 0) std::strcpy(said, ptx::events.c_str());
  }
  std::copy(ptx::memory, ptx::memory + bytes, stages);
  return Kernel::Layout::stage_bytes;
}
PROGRAMS
"""

_PIECE = (
    *("block", "consumer", "row", "row_end", "column", "column_end", "section", "batch", "index_m", "index_n"),
    "has_product",
)


class Piece(ctypes.Structure):
    """A tile of a consumer, or its rows of one."""

    _fields_ = tuple((name, ctypes.c_int) for name in _PIECE)


class TensorMap(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("element_bytes", "box_columns", "box_rows", "swizzle_bytes")),
        ("sizes", ctypes.c_int * 4),
        ("strides", ctypes.c_longlong * 4),
    )


_NUMBERS = ("m", "n", "batch", "pieces", "blocks", "lane_first", "warp_first", "stores_early")


class Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in _NUMBERS),
        *((name, ctypes.c_void_p) for name in ("piece", "acc", "map", "pointer")),
    )


_FAULTS = {
    1: "a misaligned store of 16 bytes",
    2: "the copy engine and threads use the same bytes without a fence",
    4: "all wait",
    8: "the kernel ends before its stores have been read",
}


class Library:
    """Compiled kernels by their names, with parts of the headers' text replaced."""

    def __init__(self, folder, kernels, replacements=()):
        folder.mkdir(exist_ok=True)
        left = list(replacements)
        for path in HEADERS.glob("*.cuh"):
            text = path.read_text()
            for there, instead in [of for of in left if of[0] in text]:
                assert text.count(there) == 1, there
                text = text.replace(there, instead)
                left.remove((there, instead))
            (folder / path.name).write_text(text)
        assert not left
        (folder / "ptx_sm90.cuh").write_text(PTX.replace("OTHERS", OTHERS))
        shutil.copy(SHARED / "floats_of_8_bits.h", folder)
        self._numbers, self._sources, programs = {}, {}, []
        for i, (name, kernel) in enumerate(kernels.items()):
            self._numbers[name], self._sources[name] = i, kernel.call.source
            text = kernel.call.source.split("\n", 1)[1].split('extern "C"')[0]
            types = re.search(r"coda::Params<\d+, \d+>", kernel.call.source)[0]
            of = f"p{i}::Config, p{i}::Epilogue, {types}"
            programs.append(f"namespace p{i} {{\n{text}\n}}\n")
            if "Ragged::k;" in kernel.call.source:
                arguments = "int consumer, int slot, int first, unsigned char* stages, int bytes, char* said"
                call = f"zero<{of}>(consumer, slot, first, stages, bytes, said)"
            else:
                arguments, call = "const Launch* launch", f"run<{of}>(launch)"
            programs.append(f'extern "C" int run_{i}({arguments}) {{ return {call}; }}\n')
        (folder / "run.cc").write_text(SOURCE.replace("PROGRAMS", "".join(programs)))
        command = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", "-fno-gnu-unique", "-o", "run.so", "run.cc"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        self._library = ctypes.CDLL(str(folder / "run.so"))

    def store(self, name, kernel, pieces, acc, operands, *, lane_first=0, warp_first=0, stores_early=False):
        """All results of a launch, in arrays of bytes that were full of ones, as unsigned integers.

        Args:
          kernel: what is compiled, for the sizes of this launch.
          pieces: of its work.
          acc: ([batch,] M, N) float32.
          operands: arrays, from the kernel's third buffer on.
          lane_first, warp_first: the order in which lanes and warps take turns.
          stores_early: whether the copy engine reads boxes at once, instead of when it is waited for.
        """
        assert _without_rows(kernel.call.source) == _without_rows(self._sources[name])
        out = [_poisoned(result) for result in kernel.results]
        buffers = [None, None, *map(np.ascontiguousarray, operands), *(inside for _, inside in out)]
        types = [None, None, *operands, *kernel.results]
        call = kernel.call
        maps = (TensorMap * (len(call.maps) // 6))()
        for at in range(2, len(maps)):
            buffer, *described = call.maps[6 * at : 6 * at + 6]
            _describe(maps[at], buffers[buffer], types[buffer], *described)
        pointers = (ctypes.c_void_p * len(call.pointers))(*(buffers[buffer].ctypes.data for buffer in call.pointers))
        of_pieces, acc = (Piece * len(pieces))(*pieces), np.ascontiguousarray(acc, np.float32)
        launch = Launch(*acc.shape[-2:], acc.shape[0] if acc.ndim == 3 else 1, len(pieces))
        launch.blocks = 1 + max((piece.block for piece in pieces), default=0)
        launch.lane_first, launch.warp_first, launch.stores_early = lane_first, warp_first, stores_early
        launch.piece, launch.acc = ctypes.addressof(of_pieces), acc.ctypes.data
        launch.map, launch.pointer = ctypes.addressof(maps), ctypes.addressof(pointers)
        fault = self._library[f"run_{self._numbers[name]}"](ctypes.byref(launch))
        assert not fault, _FAULTS.get(fault, fault)
        for whole, inside in out:
            assert np.all(whole[:GUARD] == 0xFF) and np.all(whole[GUARD + inside.size :] == 0xFF), "outside of an array"
        return [
            inside.view(bits(result)).reshape(result.shape)
            for (_, inside), result in zip(out, kernel.results, strict=True)
        ]

    def zero(self, name, consumer, slot, first, stages):
        """The stages with that of `slot` zeroed; the bytes of one; what a thread did."""
        stages, said = stages.copy(), ctypes.create_string_buffer(64)
        bytes_ = self._library[f"run_{self._numbers[name]}"](
            consumer, slot, first, stages.ctypes.data_as(ctypes.c_void_p), stages.size, said
        )
        return stages, bytes_, said.value.decode()


def _without_rows(source):
    """A kernel's text without how many rows of a tile are loaded, which stores do not depend on."""
    return re.sub(r"loaded_rows = \d+", "", source)


def _describe(map_, buffer, type_, halves, split_rows, box_columns, box_rows, swizzle_bytes):
    """As DescribeMap in coda_jax/ffi/tensor_map.cc."""
    bytes_, (*batch, rows, columns) = np.dtype(type_.dtype).itemsize, type_.shape
    pitch = columns * bytes_
    map_.base, map_.element_bytes = buffer.ctypes.data, bytes_
    map_.box_columns, map_.box_rows, map_.swizzle_bytes = box_columns, box_rows, swizzle_bytes
    of_half = rows // halves * pitch if split_rows else pitch // halves
    sizes = (columns, halves, rows // halves) if split_rows else (columns // halves, halves, rows)
    map_.sizes[:] = (*sizes, *(batch or [1]))
    map_.strides[:] = (bytes_, of_half, pitch, pitch * rows)
    assert all(stride % 16 == 0 or size == 1 for stride, size in zip(map_.strides[1:], map_.sizes[1:], strict=True))
    assert box_columns * bytes_ == swizzle_bytes


def _poisoned(result):
    """An array of bytes that are all ones, with more of them around it."""
    size = int(np.prod(result.shape)) * np.dtype(result.dtype).itemsize
    whole = np.full(size + 2 * GUARD + 64, 0xFF, np.uint8)
    start = -whole.ctypes.data % 64
    whole = whole[start : start + size + 2 * GUARD]
    return whole, whole[GUARD : GUARD + size]


def bits(result):
    """The unsigned integers as large as a result's elements."""
    return {1: np.uint8, 2: np.uint16, 4: np.uint32}[jnp.dtype(result.dtype).itemsize]
