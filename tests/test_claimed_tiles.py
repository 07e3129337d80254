"""Tiles that clusters claim, those split along k, and those of products of groups, by cuda/mainloop_sm90.cuh,
cuda/claims.cuh and cuda/grouped_scheduler.cuh themselves on the host: the threads of all clusters take turns in a
random order, copies arrive late, and a tile's products tell which tile was loaded.
"""

import collections
import ctypes
import itertools
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

HEADERS = pathlib.Path(__file__).resolve().parents[1] / "cuda"
MULTIPROCESSORS = 4  # of this device
STAGES = 12  # the most

# Barriers as the hardware has them, copies of the engine as events, and the threads that do something as fibers: of
# each CTA the producer, the two that prefetch, and for each warp of the consumers its first one, which acts for all;
# of products of groups the producer's whole warp, which reads the groups.
PTX = r"""
#pragma once
#include <ucontext.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>
using std::max, std::min;
#define __device__
#define __host__
#define __forceinline__ inline
static struct { int x; } blockIdx, gridDim, threadIdx;
static unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static float __fdividef(float a, float b) { return a / b; }
static int __shfl_sync(unsigned, int value, int) { return value; }
static void __syncwarp();

enum Fault { none, deadlock, sent_to_an_ended_block, bad_barrier, bad_word, wrong_stage, wrong_operand, endless };
static Fault fault;
static unsigned shared_bytes;
static std::mt19937 random_numbers;

struct Barrier {
  int count = 0, pending = 0, bytes = 0, phase = 0;
  void complete() {
    if (pending < 0 || count == 0) fault = bad_barrier;
    if (pending > 0 || bytes != 0) return;
    phase++, pending = count;
  }
};
struct Named {
  int arrived = 0, phase = 0;
};
struct Tag {
  int row, column, k, batch, half = 0;
};
struct Block {  // of threads, and its shared memory
  int index, running = 0, fibers = 0, of_first_warp = 0;
  Named all, first_warp;
  std::map<unsigned, Barrier> barriers;
  std::map<unsigned, int> words;
  std::map<unsigned, Tag> tags;
  std::map<int, Named> named;
};
struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  int fibers = 0, arrived = 0;
};
struct Fiber {
  Cluster* cluster;
  Block* block;
  int thread, priority, fences = 0;
  unsigned stage, zeroed = ~0u;  // where a's rows of the last stage are; the first bytes zeroed for a tile
  std::function<bool()> ready;  // none: it can go on
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
};
struct Event {  // what arrives in a block's shared memory
  Cluster* cluster;
  Block* block;
  std::function<void()> arrive;
};
static ucontext_t loop;
static Fiber* current;
static std::vector<Event> events;

static void let_others() { swapcontext(&current->context, &loop); }
static void wait_until(std::function<bool()> ready) {
  current->ready = std::move(ready);
  let_others();
}
static void step() {
  if (random_numbers() % 4 == 0) let_others();
}
static void sync_cluster() {
  Cluster* cluster = current->cluster;
  wait_until([=] { return cluster->arrived >= cluster->fibers; });
}
static void sync(Named& at, int threads) {
  const int phase = at.phase;
  if (++at.arrived == threads) at.arrived = 0, at.phase++;
  else wait_until([=, &at] { return at.phase != phase; });
}
static void __syncthreads() { sync(current->block->all, current->block->fibers); }
static void __syncwarp() {
  if (threadIdx.x < 32) sync(current->block->first_warp, current->block->of_first_warp);
}
static int atomicAdd(int* counter, int more) {
  step();
  const int before = *counter;
  *counter += more;
  return before;
}

namespace coda::ptx {
using uint16 = unsigned short;
using uint32 = unsigned;
using uint64 = unsigned long long;
struct TensorMap {
  bool is_b, is_transposed;  // a stored as (k, m), b as (n, k)
  int bytes;                 // of a copy
};
static void tma_prefetch_map(const TensorMap&) {}
static void mbarrier_init_fence() {}
static void launch_dependents() {}
static void wait_for_earlier_kernels() {}
template <int count> void registers_decrease() {}
template <int count> void registers_increase() {}
static int cluster_rank() { return blockIdx.x % current->cluster->blocks.size(); }
static void cluster_arrive() { current->cluster->arrived++; }
static void cluster_wait() { sync_cluster(); }

static void send(Block* block, std::function<void()> arrive) { events.push_back({current->cluster, block, arrive}); }
static Block* block_of(int rank) { return current->cluster->blocks[rank].get(); }

static void mbarrier_init(uint32 barrier, int count) { current->block->barriers[barrier] = {count, count, 0, 0}; }
static void arrive(Block* block, uint32 barrier, int bytes) {
  Barrier& at = block->barriers[barrier];
  at.bytes += bytes, at.pending--;
  at.complete();
}
static void mbarrier_arrive_expect(uint32 barrier, int bytes) { step(), arrive(current->block, barrier, bytes); }
static void mbarrier_arrive(uint32 barrier) { step(), arrive(current->block, barrier, 0); }
static void mbarrier_arrive_remote(uint32 barrier, int) {  // each lane at that of the block of its number
  step();
  for (auto& block : current->cluster->blocks) send(block.get(), [=, to = block.get()] { arrive(to, barrier, 0); });
}
static void mbarrier_wait(uint32 barrier, int parity) {
  step();
  Block* block = current->block;
  if (block->barriers[barrier].phase % 2 != parity) return;
  wait_until([=] { return block->barriers[barrier].phase % 2 != parity; });
}
static void arrive_bytes(Block* block, uint32 barrier, int bytes) {
  Barrier& at = block->barriers[barrier];
  at.bytes -= bytes;
  at.complete();
}
static void put(Block* block, uint32 to, int value) {
  block->words[to] = value;
  if (to % 4 != 0 || to + 4 > shared_bytes || block->barriers.count(to & ~7u)) fault = bad_word;
}
static void store_async(uint32 to, int value, uint32 barrier, int rank) {
  step();
  send(block_of(rank), [=, block = block_of(rank)] { put(block, to, value), arrive_bytes(block, barrier, 4); });
}
static void store_word(uint32 to, int value) { put(current->block, to, value); }
static int load_word(uint32 from) {
  step();
  const auto found = current->block->words.find(from);
  if (found == current->block->words.end()) fault = bad_word;
  return found == current->block->words.end() ? 0 : found->second;
}
static void store_zeros(uint32 at) { current->zeroed = min(current->zeroed, at); }
static void fence_async_proxy() { current->fences++; }
static void copy(Block* block, uint32 target, const TensorMap& map, uint32 barrier, int inner, int half, int outer,
                 int batch) {
  send(block, [=] {
    if (map.is_b && map.is_transposed) block->tags[target] = {0, outer, inner, batch, half};
    if (map.is_b && !map.is_transposed) block->tags[target] = {0, inner, outer, batch, half};
    if (!map.is_b && map.is_transposed) block->tags[target] = {inner, 0, outer, batch};
    for (int row = 0; !map.is_b && !map.is_transposed && row < 128; row += 64)
      block->tags[target + row * 128] = {outer + row, 0, inner, batch};
    arrive_bytes(block, barrier, map.bytes);
  });
}
static void tma_load(uint32 target, const TensorMap& map, uint32 barrier, int inner, int half, int outer, int batch) {
  copy(current->block, target, map, barrier, inner, half, outer, batch);
}
static void tma_load_multicast(uint32 target, const TensorMap& map, uint32 barrier, int inner, int half, int outer,
                               int batch, uint16 everyone) {
  for (size_t rank = 0; rank < current->cluster->blocks.size(); ++rank)
    if (everyone >> rank & 1) copy(block_of(rank), target, map, barrier, inner, half, outer, batch);
}
static bool arrive_at_named(int number, int threads) {
  Named& at = current->block->named[number];
  at.arrived += 32;
  if (at.arrived > threads) fault = bad_barrier;
  if (at.arrived < threads) return false;
  at.arrived = 0, at.phase++;
  return true;
}
static void named_barrier_arrive(int number, int threads) { step(), arrive_at_named(number, threads); }
static void named_barrier_sync(int number, int threads) {
  step();
  Block* block = current->block;
  const int phase = block->named[number].phase;
  if (!arrive_at_named(number, threads)) wait_until([=] { return block->named[number].phase != phase; });
}
}  // namespace coda::ptx
"""

# Products whose first register is a tile's row, then its column and a's batch, how many k blocks, the sum of where they
# begin, b's batch, and where the last one begins.
# An epilogue with one operand, which has to be that of its tile.
EPILOGUE = r"""
#pragma once
#include "pipeline.cuh"
#include "scheduler.cuh"
namespace coda {
template <int blocks_, int columns_>
struct Accumulator {
  float registers[blocks_][columns_ / 2];
};
namespace wgmma {
constexpr int k_step_bytes = 32;
static ptx::uint64 descriptor(ptx::uint32 address) { return address / 16; }
static void fence() { current->stage = ~0u; }
static void commit() {}
template <int count> void wait() { step(); }
template <class Registers> void keep_behind_wait(Registers&) {}
static int halves;  // of b's tile of 64 columns
/// Whether all boxes of a stage's b are where they belong, by the first one.
static bool is_whole(ptx::uint32 b, const Tag& first, bool is_transposed) {
  int boxes = 0;
  const auto& tags = current->block->tags;
  for (auto it = tags.lower_bound(b); it != tags.end() && it->first < b + 64 * 128; ++it, ++boxes) {
    const int row = (it->first - b) / 128;
    const int column = first.column + (is_transposed ? row % (64 / halves) : 0);
    const int k = first.k + (is_transposed ? 0 : row);
    const Tag& box = it->second;
    if (box.column != column || box.k != k || box.half != row / (64 / halves) || box.batch != first.batch) return false;
  }
  return boxes == max(halves, static_cast<int>(current->cluster->blocks.size()));
}
template <DType, DType, bool, bool b_is_mn_major, class Registers>
void multiply(Registers& registers, ptx::uint64 a, ptx::uint64 b, bool accumulate) {
  if (!accumulate) std::fill(std::begin(registers), std::end(registers), 0.f);
  const auto& tags = current->block->tags;
  if (!accumulate || tags.count(a * 16)) {
    if (!tags.count(a * 16)) return static_cast<void>(fault = wrong_stage);
    const Tag of_a = tags.at(a * 16);
    const float found[3] = {float(of_a.row), 0, float(of_a.batch)};
    if (registers[3] > 0 && (registers[0] != found[0] || registers[2] != found[2])) fault = wrong_stage;
    registers[0] = found[0], registers[2] = found[2];
    registers[3] += 1, registers[4] += of_a.k, registers[6] = of_a.k;
    current->stage = min(current->stage, static_cast<unsigned>(a * 16));
  }
  if (tags.count(b * 16)) {
    const Tag of_b = tags.at(b * 16);
    const bool is_first = !accumulate;
    if (!is_first && (registers[1] != of_b.column || registers[5] != of_b.batch)) fault = wrong_stage;
    registers[1] = of_b.column, registers[5] = of_b.batch;
    if (of_b.k < registers[6] || of_b.k >= registers[6] + 64) fault = wrong_stage;
    if (tags.count(a * 16) && !is_whole(b * 16, of_b, !b_is_mn_major)) fault = wrong_stage;
  } else if (!accumulate) {
    fault = wrong_stage;
  }
}
}  // namespace wgmma
template <class Config, class Epilogue>
struct EpilogueLayout {
  static constexpr int n_halves = Config::halves, bytes = 1024, load_slots = 1;
  static constexpr bool cooperative = 2 * Config::consumer_m == Config::tile_m;
};
static std::vector<int> pieces;
template <class Config, class Epilogue, class Params, class Ring>
void prefetch_operands(const Params&, const Tile& tile, ptx::uint32 base, Ring ring, RingPosition<Ring::slots>& at) {
  ring.wait_empty(at);
  current->block->tags[base] = {tile.row, tile.column, 0, tile.batch};
  ptx::mbarrier_arrive(ring.full(at.slot));
  at.advance();
}
template <int slots>
void skip_operands(Ring<slots> ring, RingPosition<slots>& at) {
  ring.wait_empty(at);
  ptx::mbarrier_arrive(ring.full(at.slot));
  at.advance();
}
template <class Config, class Epilogue, class Params>
struct EpilogueVisitor {
  using LoadRing = Ring<1>;
  const Params& params;
  ptx::uint32 base;
  LoadRing ring;
  int consumer, warp;
  RingPosition<1> at = {};
  EpilogueVisitor(const Params& params, ptx::uint32 base, LoadRing ring, int consumer, int warp, int)
      : params(params), base(base), ring(ring), consumer(consumer), warp(warp) {}
  void begin(const Tile&) {}
  void read_ahead() {}
  void finish() {}
  template <class Accumulator>
  void visit(const Tile& tile, const Accumulator& accumulator) {
    const float* found = accumulator.registers[0];
    int first = 0, k = params.k;
    if (Config::ragged == Ragged::k) {
      const int* offsets = static_cast<const int*>(params.pointer[Config::offsets]) + tile.batch;
      first = offsets[0], k = offsets[1] - offsets[0];
    }
    const int blocks = Config::ragged == Ragged::k ? max(1, (k + 63) / 64) : (k + 63) / 64;
    if (found[0] != tile.row || found[1] != tile.column || found[2] != (Config::a_batched ? tile.batch : 0) ||
        found[3] != blocks || found[4] != blocks * first + 32 * blocks * (blocks - 1) ||
        found[5] != (Config::b_batched ? tile.batch : 0))
      fault = wrong_stage;
    // Rows of k behind the end of a group are zeroed, each warp's part of them, and no others.
    const bool has_rest = Config::ragged == Ragged::k && (k == 0 || k % 64 > 0);
    const int zeroed = 128 * (k % 64) + 512 * warp;
    if (current->fences != has_rest ||
        current->zeroed != (has_rest && zeroed < 64 * 128 ? current->stage + zeroed : ~0u))
      fault = wrong_stage;
    current->fences = 0, current->zeroed = ~0u;
    ring.wait_full(at);
    const Tag operand = current->block->tags[base];
    if (operand.row != tile.row || operand.column != tile.column || operand.batch != tile.batch) fault = wrong_operand;
    ptx::mbarrier_arrive(ring.empty(at.slot));
    at.advance();
    record(tile);
  }
  void store_zeros(const Tile& tile) {
    if (Config::claims) {
      ring.wait_full(at);
      ptx::mbarrier_arrive(ring.empty(at.slot));
      at.advance();
    }
    record(tile);
  }
  void record(const Tile& tile) {
    if (warp == 0) pieces.insert(pieces.end(), {int(blockIdx.x), consumer, tile.row, tile.column, tile.batch});
  }
};
}  // namespace coda
"""

SOURCE = r"""
#include "ptx_sm90.cuh"
#include "mainloop_sm90.cuh"
using namespace coda;

struct Whole {
  static constexpr bool symmetric = false;
  static constexpr int sections = 1, tile_loads = 1;
  static constexpr Section section[1] = {{0, 0, 0}};
};
template <int stages_, int cluster_m_, bool cooperative, Ragged ragged_ = Ragged::none, bool claims_ = true,
          bool split_k_ = false, int halves_ = 1>
struct Unsized {
  static constexpr int tile_m = 128, tile_n = 64, tile_k = 64, stages = stages_, cluster_m = cluster_m_;
  static constexpr int consumer_m = cooperative ? 64 : 128, loaded_rows = tile_m;
  static constexpr Ragged ragged = ragged_;
  static constexpr int groups = 3, offsets = 0, multiprocessors = MULTIPROCESSORS;
  static constexpr bool transpose_a = ragged == Ragged::k, transpose_b = split_k_ || halves_ > 1;
  static constexpr bool a_batched = ragged == Ragged::none, b_batched = ragged != Ragged::k;
  static constexpr bool claims = claims_, split_k = split_k_;
  static constexpr int halves = halves_;
  static constexpr DType input = DType::bf16;
};
template <class Of>
struct Sized : Of {
  static constexpr int shared_bytes = SharedLayout<Of, Whole>::bytes;
};
struct Params {
  ptx::TensorMap map[2];
  void* pointer[2];
  int m, n, k, batch;
};
static Params params;
template <class Config>
static void thread() {
  using Kernel = Gemm<Config, Whole, Params>;
  Kernel::initialize(params, 0);
  Kernel(params, 0).run();
}

/// All clusters, so many at a time, the next one where one has ended. Each role has a priority, by which threads take
/// turns; if not `strict` any other one sometimes. The cluster `fast` goes on whenever it can.
template <class Config>
static void launch(int clusters, int resident, int fast, bool strict) {
  std::vector<std::unique_ptr<Cluster>> kept;
  std::vector<std::unique_ptr<Fiber>> fibers;
  static void (*entry)() = thread<Config>;
  gridDim.x = clusters * Config::cluster_m, shared_bytes = Config::shared_bytes;
  const auto start = [&](int index) {
    kept.push_back(std::make_unique<Cluster>());
    Cluster* cluster = kept.back().get();
    for (int rank = 0; rank < Config::cluster_m; ++rank) {
      cluster->blocks.push_back(std::make_unique<Block>());
      cluster->blocks[rank]->index = index * Config::cluster_m + rank;
    }
    std::vector<int> threads{0, 32, 64};
    if (Config::ragged != Ragged::none)
      for (int lane = 1; lane < 32; ++lane) threads.push_back(lane);
    for (int warp = 4; warp < 12; ++warp) threads.push_back(32 * warp);
    int of_role[5];
    for (int& priority : of_role) priority = random_numbers() % 100;
    for (auto& block : cluster->blocks) {
      for (const int number : threads) {
        fibers.push_back(std::make_unique<Fiber>());
        Fiber& fiber = *fibers.back();
        const int role = number < 128 ? number / 32 : 2 + number / 128;
        fiber.cluster = cluster, fiber.block = block.get(), fiber.thread = number;
        fiber.priority = of_role[role] + (index == fast ? 1000 : 0);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, [] {
          entry();
          current->block->running--;
          current->thread = -1;
          setcontext(&loop);
        }, 0);
        block->running++, block->fibers++, block->of_first_warp += number < 32, cluster->fibers++;
      }
    }
  };
  int started = 0;
  for (int turn = 0; fault == none; ++turn) {
    if (turn > 1 << 22 || pieces.size() > 5 << 12) fault = endless;
    int running = 0;
    for (const auto& cluster : kept)
      running += std::any_of(cluster->blocks.begin(), cluster->blocks.end(), [](auto& x) { return x->running > 0; });
    for (; running < resident && started < clusters; ++running) start(started++);
    if (running == 0) break;
    std::vector<Fiber*> able;
    for (const auto& fiber : fibers)
      if (!fiber->ready || fiber->ready()) able.push_back(fiber.get());
    const bool takes_event = !events.empty() && (able.empty() || random_numbers() % 3 == 0);
    if (takes_event) {
      const size_t at = random_numbers() % events.size();
      const Event event = events[at];
      events.erase(events.begin() + at);
      if (event.block->running == 0) fault = sent_to_an_ended_block;
      event.arrive();
      continue;
    }
    if (able.empty()) {
      fault = deadlock;
      break;
    }
    const auto less = [](Fiber* a, Fiber* b) { return a->priority < b->priority; };
    current = strict || random_numbers() % 8 ? *std::max_element(able.begin(), able.end(), less)
                                             : able[random_numbers() % able.size()];
    current->ready = nullptr;
    threadIdx.x = current->thread, blockIdx.x = current->block->index;
    swapcontext(&loop, &current->context);
    if (current->thread < 0)
      fibers.erase(std::find_if(fibers.begin(), fibers.end(), [](auto& fiber) { return fiber.get() == current; }));
  }
  if (fault == none && !events.empty()) fault = sent_to_an_ended_block;
}

extern "C" int run(int form, int m, int n, int k, int batch, int clusters, int fast, int seed, int counter,
                   int* offsets, int* out, int* count) {
  const bool cooperative = form == 2, k_in_groups = form == 7 || form == 8;
  const int cluster_m = form == 1 || form == 4 || form == 10 ? 1 : 2;
  wgmma::halves = form >= 10 ? 2 : 1;
  fault = none, events.clear(), pieces.clear(), sent.clear(), random_numbers.seed(seed);
  params = {{{false, k_in_groups, (k_in_groups ? 64 : 128) * 64 * 2},
             {true, form >= 9, 64 * 64 * 2 / max(cluster_m, wgmma::halves)}},
            {offsets, &counter}, m, n, k, batch};
  const int resident = MULTIPROCESSORS / cluster_m;
  const bool strict = fast >= 0 || seed % 2;
  constexpr Ragged none_ = Ragged::none, by_m = Ragged::m, by_k = Ragged::k;
#ifndef PAIRS
  if (form == 3) launch<Sized<Unsized<3, 2, false, by_m>>>(clusters, resident, fast, strict);
  else if (form == 4) launch<Sized<Unsized<4, 1, false, by_m, false>>>(clusters, resident, fast, strict);
  else if (form == 5) launch<Sized<Unsized<2, 2, true, by_m>>>(clusters, resident, fast, strict);
  else if (form == 6) launch<Sized<Unsized<5, 2, false, by_m, false>>>(clusters, resident, fast, strict);
  else if (form == 7) launch<Sized<Unsized<3, 2, false, by_k, false>>>(clusters, resident, fast, strict);
  else if (form == 8) launch<Sized<Unsized<4, 2, true, by_k>>>(clusters, resident, fast, strict);
  else if (form == 9) launch<Sized<Unsized<3, 2, false, none_, false, true>>>(clusters, resident, fast, strict);
  else if (form == 10) launch<Sized<Unsized<4, 1, false, none_, false, true, 2>>>(clusters, resident, fast, strict);
  else if (form == 11) launch<Sized<Unsized<3, 2, false, none_, false, false, 2>>>(clusters, resident, fast, strict);
  else if (cooperative) launch<Sized<Unsized<4, 2, true>>>(clusters, resident, fast, strict);
  else if (cluster_m == 1) launch<Sized<Unsized<3, 1, false>>>(clusters, resident, fast, strict);
  else
#endif
  launch<Sized<Unsized<STAGES, 2, false>>>(clusters, resident, fast, strict);
  if (fault == none) std::copy(pieces.begin(), pieces.end(), out);
  *count = pieces.size() / 5;
  return fault;
}
extern "C" int most_stages() {
  int stages = 1;
  while (Claims<2>::slots_suffice(stages + 1)) ++stages;
  return stages;
}
"""
# Sums of k slices: what the warps of blocks have sent. Those of one tile are added.
PARTIAL_TILES = r"""
#pragma once
#include "scheduler.cuh"
struct float4;
static std::map<std::pair<int, int>, std::vector<float>> sent;  // by block and warp
namespace coda {
template <class Accumulator>
struct PartialTiles {
  float4* slots;
  int* flags;
  int warp, lane;
  void send(const Accumulator& accumulator) const {
    step();
    auto& sums = sent[{blockIdx.x, warp}];
    if (!sums.empty()) fault = wrong_stage;
    sums.assign(accumulator.registers[0], accumulator.registers[0] + 6);
  }
  void add(const Others& others, Accumulator& accumulator) const {
    float* sums = accumulator.registers[0];
    for (int i = 0; i < others.count; ++i) {
      const std::pair<int, int> of{others.first + i * others.stride, warp};
      wait_until([=] { return sent.count(of); });
      const auto& more = sent.at(of);
      for (int same : {0, 1, 2, 5})
        if (sums[same] != more[same]) fault = wrong_stage;
      sums[3] += more[3], sums[4] += more[4];
    }
  }
};
}  // namespace coda
"""
FORMS = {"pairs": 0, "alone": 1, "cooperative": 2}
CLUSTER_M = {"pairs": 2, "alone": 1, "cooperative": 2, "split, pairs": 2, "split halves, alone": 1, "halves, pairs": 2}
# In turn, with b stored as (N, K): tiles split along k, and of two halves of N, of which a tile has 32 columns each.
IN_TURN = {"split, pairs": 9, "split halves, alone": 10, "halves, pairs": 11}
# Of products of groups: rows or k in groups, and whether tiles are claimed.
GROUPED = {
    "m, pairs, claimed": 3,
    "m, alone": 4,
    "m, cooperative, claimed": 5,
    "m, pairs": 6,
    "k, pairs": 7,
    "k, cooperative, claimed": 8,
}


def compiled(folder, *flags):
    """Compiles run.cc and returns what g++ says."""
    flags = (f"-DMULTIPROCESSORS={MULTIPROCESSORS}", *flags)
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-fno-gnu-unique", *flags, "-o", "run.so", "run.cc"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the sources."""
    folder = tmp_path_factory.mktemp("claims")
    for name in (
        "scheduler",
        "static_for",
        "epilogue_abi",
        "dtypes",
        "elementwise",
        "pipeline",
        "claims",
        "grouped_scheduler",
        "shared_layout_sm90",
        "promotion_sm90",
        "mainloop_sm90",
    ):
        text = (HEADERS / f"{name}.cuh").read_text()
        text = text.split("/// The kernel's body")[0] + "}" * (name == "mainloop_sm90")
        (folder / f"{name}.cuh").write_text(text)
    for name, text in {"ptx_sm90.cuh": PTX, "epilogue_sm90.cuh": EPILOGUE, "run.cc": SOURCE}.items():
        (folder / name).write_text(text)
    for name in ("contracts", "accumulator_sm90", "epilogue_layout_sm90"):
        (folder / f"{name}.cuh").write_text("#pragma once\n")
    (folder / "partial_tiles_sm90.cuh").write_text(PARTIAL_TILES)
    return folder


@pytest.fixture(scope="module")
def library(folder):
    assert not (said := compiled(folder, f"-DSTAGES={STAGES}")), said
    return ctypes.CDLL(str(folder / "run.so"))


def runner(library):
    """Pieces of work in the order of their ends: block, consumer, row, column, batch; without a fault."""

    def run(form, m, n, k, *, batch=1, clusters=8, fast=-1, seed=0, counter=0, offsets=()):
        out, count = np.zeros((1 << 12, 5), np.int32), ctypes.c_int()
        sizes = m, n, k, batch, clusters, fast, seed, counter
        arrays = [array.ctypes.data_as(ctypes.c_void_p) for array in (np.asarray(offsets, np.int32), out)]
        fault = library.run({**FORMS, **GROUPED, **IN_TURN}[form], *sizes, *arrays, ctypes.byref(count))
        assert fault == 0, ["", *FAULTS][fault]
        return out[: count.value]

    return run


@pytest.fixture
def run(library):
    return runner(library)


FAULTS = (
    "no thread can go on",
    "something was sent to a block that has ended",
    "more arrivals than a barrier expects",
    "a number is read before it is there, or has no place of its own",
    "the products are not those of the tile",
    "the epilogue's operand is not that of the tile",
    "it does not end",
)


def tiles(form, m, n, batch=1):
    """(row, column, batch) of all tiles, those of clusters that reach beyond M too."""
    rows_of_cluster, halves = 128 * CLUSTER_M[form], 1 + ("halves" in form)
    rows = range(0, -(-m // rows_of_cluster) * rows_of_cluster, 64 if form == "cooperative" else 128)
    columns = range(0, n // halves, 64 // halves)
    return collections.Counter((row, column, of) for row in rows for column in columns for of in range(batch))


def shares(pieces, form, clusters):
    """How many tiles of a cluster's size each had, and the share after which one ends."""
    of_cluster = pieces[:, 0] // CLUSTER_M[form]
    parts = CLUSTER_M[form] * (2 if form == "cooperative" else 1)
    return np.bincount(of_cluster, minlength=clusters) / parts, -(-len(pieces) // parts // clusters)


# One k block a tile: the producer is as many tiles ahead as there are stages.
@pytest.mark.parametrize("sizes", [(1024, 600, 64), (384, 512, 200)], ids=str)
@pytest.mark.parametrize("clusters", [1, 8, None], ids=["one", "some", "a tile each"])
@pytest.mark.parametrize("form", FORMS)
def test_every_tile_once(run, form, clusters, sizes):
    m, n, k = sizes
    clusters = clusters or 2 * -(-m // (128 * CLUSTER_M[form])) * -(-n // 64)
    for seed in range(8):
        pieces = run(form, m, n, k, batch=2, clusters=clusters, seed=seed)
        assert collections.Counter(tuple(piece[2:]) for piece in pieces.tolist()) == tiles(form, m, n, 2)
        done, share = shares(pieces, form, clusters)
        assert max(done[: -MULTIPROCESSORS // CLUSTER_M[form]], default=0) <= share


@pytest.mark.parametrize("form", FORMS)
def test_a_cluster_ends_after_its_share(run, form):
    """One that goes on whenever it can has no more than that; but the last ones, as many as run at a time, go on."""
    last, tiles_of_clusters = MULTIPROCESSORS // CLUSTER_M[form], 8 // CLUSTER_M[form] * 10
    for clusters, of_them in ((8, range(8 - last + 1)), (tiles_of_clusters, [0])):
        for fast in of_them:
            done, share = shares(run(form, 1024, 600, 64, clusters=clusters, fast=fast), form, clusters)
            assert done[fast] > share if fast == clusters - last else done[fast] == share


def test_the_counter_has_to_be_zero_when_the_kernel_starts(run):
    """Tiles below what it holds are not done."""
    assert len(run("alone", 512, 64, 64, counter=3)) == 1


def test_a_number_is_read_before_it_is_overwritten(library, folder):
    """With as many stages as are allowed, which pairs have here; the kernel refuses more when it compiles."""
    assert library.most_stages() == STAGES
    assert "no claim is overwritten before it is read" in compiled(
        folder, f"-DSTAGES={STAGES + 1}", "-DPAIRS", "-fsyntax-only"
    )


def test_every_tile_once_in_turn(run):
    """A tile's sums are those of all of k, also where some blocks have slices of it."""
    for form, (clusters, k), seed in itertools.product(IN_TURN, ((9, 64 * 13), (19, 64 * 13), (14, 64)), range(2)):
        pieces = run(form, 512, 320, k, batch=2, clusters=clusters, seed=seed)
        assert collections.Counter(tuple(piece[2:]) for piece in pieces.tolist()) == tiles(form, 512, 320, 2)


OFFSETS = {
    "even and odd rows of tiles": [0, 300, 428, 800],
    "empty ones": [0, 0, 700, 700],
    "more rows than groups": [130, 260, 261, 600],
    "none": [200, 200, 200, 200],
}


def tiles_of_groups(form, offsets, m, n):
    """(row, column, group) of all tiles: of rows also those of no group, numbered behind the others."""
    parts = (0, 64) if "cooperative" in form else (0,)
    columns = list(range(0, n, 64))
    found = []
    if form[0] == "k":
        of_cluster = 256
        rows = range(0, -(-m // of_cluster) * of_cluster, 128)
        found = [(row + part, column, of) for row in rows for column in columns for of in range(3) for part in parts]
        return collections.Counter(found)
    for of, (first, end) in enumerate([*itertools.pairwise(offsets), (offsets[-1], m), (0, offsets[0])]):
        rows = range(first, end, 128)
        for i, row in enumerate(rows):
            is_odd = "alone" not in form and i == len(rows) - 1 and i % 2 == 0
            beyond = [len(columns) * 64] if is_odd and len(columns) % 2 else []
            found += [(row + part, column, of) for column in columns + beyond for part in parts]
    return collections.Counter(found)


@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("form", GROUPED)
def test_every_tile_of_groups_once(run, form, offsets):
    """Some clusters have tiles without products, and in an odd row of tiles a cluster's two do not share b's."""
    for seed in range(6):
        m, n, k = (400, 328, 900) if form[0] == "k" else (900, 328, (64, 200)[seed % 2])
        clusters = (1, 5, 40)[seed % 3]
        pieces = run(form, m, n, k, batch=3, clusters=clusters, seed=seed, offsets=offsets)
        found = collections.Counter(tuple(piece[2:]) for piece in pieces.tolist())
        assert found == tiles_of_groups(form, offsets, m, n)


GROUP_FAULTS = {
    "stages that are not there": ("mainloop_sm90", "at.advance(stages_of(i + 1));", "at.advance(stages_of(i));"),
    "stages of no product": ("mainloop_sm90", "if (!rows_in_groups || has_product(work)) release", "release"),
    "claims without a stage": (
        "mainloop_sm90",
        "all_take_stages = rows_in_groups && Config::claims",
        "all_take_stages = false",
    ),
    "claims without a slot": ("mainloop_sm90", "skip_operands(load_ring(shared, consumer), at);", ";"),
    "operands of no product": (
        "mainloop_sm90",
        "if (has_product(work))\n          prefetch",
        "if (true)\n          prefetch",
    ),
    "tiles apart share b": ("grouped_scheduler", "row_end, in_odd_row >= 0};", "row_end, false};"),
    "half of b": ("mainloop_sm90", "part < Config::cluster_m; ++part)", "part < 1; ++part)"),
    "k of another group": ("grouped_scheduler", "first_k = table.row(tile.batch),", "first_k = 0,"),
    "k of a from the first row": (
        "mainloop_sm90",
        "tile.batch : 0;\n    if constexpr (k_in_groups) k += tile.first_k;",
        "tile.batch : 0;",
    ),
    "k of b from the first row": (
        "mainloop_sm90",
        "// of a half\n    if constexpr (k_in_groups) k += tile.first_k;",
        "",
    ),
    "no barrier of the warp": (
        "grouped_scheduler",
        "read_rows(offsets, m, lane);\n      __syncwarp();",
        "read_rows(offsets, m, lane);",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", GROUP_FAULTS.values(), ids=GROUP_FAULTS)
def test_a_fault_of_groups_shows(folder, tmp_path, fault):
    name, there, instead = fault
    shutil.copytree(folder, tmp_path / "fault")
    text = (tmp_path / "fault" / f"{name}.cuh").read_text()
    assert text.count(there) == 1, there
    (tmp_path / "fault" / f"{name}.cuh").write_text(text.replace(there, instead))
    assert not (said := compiled(tmp_path / "fault", f"-DSTAGES={STAGES}")), said
    run = runner(ctypes.CDLL(str(tmp_path / "fault" / "run.so")))
    with pytest.raises(AssertionError):
        for form in GROUPED:
            for offsets in OFFSETS.values():
                test_every_tile_of_groups_once(run, form, offsets)
