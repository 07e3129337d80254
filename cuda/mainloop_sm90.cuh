// The one matrix product of the library: out tiles = Epilogue(a b), for Hopper.
//
// Persistent and warp-specialised: warpgroup 0 produces, warpgroups 1 and 2 consume. Producer warp 0 streams operand
// tiles through a ring of shared-memory stages (TMA, multicast over the cluster); producer warps 1 and 2 prefetch the
// epilogue's tile operands, one warp and one ring a consumer. The consumers play pingpong: each takes every second
// tile, and while one runs its epilogue the other one's products keep the tensor cores busy. Or they cooperate: each
// has half of the rows of every tile, which can then be larger, and reads less from L2 and shared memory; for products
// so long that an epilogue that nothing hides is nothing beside them.
#pragma once

#include "contracts.cuh"
#include "epilogue_sm90.cuh"
#include "partial_tiles_sm90.cuh"

namespace coda {

/// Shared memory: operand stages, the consumers' epilogue memory, barriers.
template <class Config, class Epilogue>
struct SharedLayout {
  static constexpr int a_bytes = Config::tile_m * Config::tile_k * 2;
  static constexpr int b_bytes = Config::tile_n * Config::tile_k * 2;
  static constexpr int stage_bytes = a_bytes + b_bytes;
  static constexpr int a_rows = Config::transpose_a ? Config::tile_m : Config::rows;
  static constexpr int loaded_bytes = a_rows * Config::tile_k * 2 + b_bytes;  // of a stage
  static constexpr int epilogue_offset = Config::stages * stage_bytes;
  static constexpr int stage_ring_offset = epilogue_offset + 2 * EpilogueLayout<Config, Epilogue>::bytes;
  static constexpr int load_ring_offset = stage_ring_offset + Ring<Config::stages>::bytes;
  static constexpr int bytes = load_ring_offset + 2 * Ring<EpilogueLayout<Config, Epilogue>::load_slots>::bytes;
};

/// Operand tiles arrive in chunks of 64 columns (a k-major operand: 64 rows; an mn-major one: 64 along m or n), each in
/// a place of 8192 bytes.
constexpr int chunk_bytes = 64 * 64 * 2;

template <class Config, class Epilogue, class Params>
struct Gemm {
  using Layout = SharedLayout<Config, Epilogue>;
  static constexpr int n_halves = EpilogueLayout<Config, Epilogue>::n_halves;
  using WorkScheduler =
      Scheduler<Config::tile_m, Config::tile_n / n_halves, Config::cluster_m, Config::split_k, Epilogue>;
  using TileAccumulator = Accumulator<Config::consumer_m / 64, Config::tile_n>;
  static constexpr int consumers = 2;
  static constexpr bool cooperative = EpilogueLayout<Config, Epilogue>::cooperative;
  static constexpr int turns = cooperative ? 1 : consumers;  // a consumer has every `turns`-th piece of work
  static_assert(!cooperative || (consumers * Config::consumer_m == Config::tile_m && !Config::split_k),
                "consumers that cooperate have equal shares of whole tiles");
  static constexpr int threads = 128 * (1 + consumers);
  static constexpr int order_threads = 128 * turns;  // at a consumer's barrier: its own, and those that wake it
  static_assert(Config::tile_m % 64 == 0 && Config::tile_n % 64 == 0 && Config::tile_k == 64,
                "a tile is whole operand chunks");
  static_assert(Layout::bytes == Config::shared_bytes, "shared memory as the host counted it");

  const Params& params;
  const ptx::uint32 shared;
  const int warpgroup, warp, lane;  // warp within the warpgroup
  const int rank;                   // of this CTA in its cluster
  const WorkScheduler scheduler;
  const Ring<Config::stages> stages;

  __device__ __forceinline__ Gemm(const Params& params, ptx::uint32 shared)
      : params(params),
        shared(shared),
        warpgroup(__shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0)),
        warp(__shfl_sync(0xFFFFFFFFu, threadIdx.x / 32 % 4, 0)),
        lane(threadIdx.x % 32),
        rank(Config::cluster_m > 1 ? static_cast<int>(ptx::cluster_rank()) : 0),
        scheduler(params.m, params.n / n_halves, params.k, (params.k + Config::tile_k - 1) / Config::tile_k,
                  params.batch),
        stages(stage_ring(shared)) {}

  using LoadRing = Ring<EpilogueLayout<Config, Epilogue>::load_slots>;
  __device__ __forceinline__ static Ring<Config::stages> stage_ring(ptx::uint32 shared) {
    return {shared + Layout::stage_ring_offset};
  }
  __device__ __forceinline__ static LoadRing load_ring(ptx::uint32 shared, int consumer) {
    return {shared + Layout::load_ring_offset + consumer * LoadRing::bytes};
  }
  __device__ __forceinline__ ptx::uint32 epilogue_base(int consumer) const {
    return shared + Layout::epilogue_offset + consumer * EpilogueLayout<Config, Epilogue>::bytes;
  }

  /// The kernel's first steps: tensor maps are fetched, barriers set up. Meanwhile an object is made; `run` waits.
  __device__ __forceinline__ static void initialize(const Params& params, ptx::uint32 shared) {
    if (threadIdx.x == 32) {
      for (const ptx::TensorMap& map : params.map) ptx::tma_prefetch_map(map);
    }
    if (threadIdx.x == 0) {
      // Emptied by the four warps of a consumer, or of all, in every CTA of the cluster.
      stage_ring(shared).init(1, 4 * (consumers / turns) * Config::cluster_m);
      for (int consumer = 0; consumer < consumers; ++consumer) load_ring(shared, consumer).init(1, 4);
      ptx::mbarrier_init_fence();
    }
    if constexpr (Config::cluster_m > 1) {
      __syncwarp();
      ptx::cluster_arrive();
    }
  }

  __device__ __forceinline__ void run() {
    if constexpr (Config::cluster_m > 1) {
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
    ptx::launch_dependents();
    ptx::wait_for_earlier_kernels();
    if (warpgroup == 0) {
      ptx::registers_decrease<24>();
      if (warp == 0 && lane == 0) produce();
      if (warp - 1 >= 0 && warp - 1 < consumers && lane == 0) prefetch(warp - 1);
    } else {
      ptx::registers_increase<240>();
      consume(warpgroup - 1);
    }
  }

 private:
  __device__ __forceinline__ void produce() {
    RingPosition<Config::stages> at;
    for (int i = 0; i < scheduler.count; ++i) {
      const Work work = scheduler.work(i, rank);
#pragma unroll 1  // the producer has few registers
      for (int k_block = work.first_block; k_block < work.first_block + work.blocks; ++k_block) {
        stages.wait_empty(at);
        ptx::mbarrier_arrive_expect(stages.full(at.slot), Layout::loaded_bytes);
        const ptx::uint32 stage = shared + at.slot * Layout::stage_bytes;
        load_a(work.tile, k_block * Config::tile_k, stage, stages.full(at.slot));
        load_b(work.tile, k_block * Config::tile_k, stage + Layout::a_bytes, stages.full(at.slot));
        at.advance();
      }
    }
    if constexpr (Config::cluster_m > 1) {
#pragma unroll 1  // no CTA leaves while a consumer of another one may still arrive on its barriers
      for (int slot = 0; slot < Config::stages; ++slot) {
        stages.wait_empty(at);
        at.advance();
      }
    }
  }

  /// Of a product with fewer rows than a tile, only its `rows`: what becomes of the others is stored nowhere.
  __device__ __forceinline__ void load_a(const Tile& tile, int k, ptx::uint32 target, ptx::uint32 barrier) const {
    const int batch = Config::a_batched ? tile.batch : 0;
    if constexpr (Config::transpose_a) {
      for (int chunk = 0; chunk < Config::tile_m / 64; ++chunk)
        ptx::tma_load(target + chunk * chunk_bytes, params.map[0], barrier, tile.row + 64 * chunk, 0, k, batch);
    } else {
      ptx::tma_load(target, params.map[0], barrier, k, 0, tile.row, batch);
    }
  }

  /// The CTAs of a cluster share b: each loads a part of every stage for all of them.
  __device__ __forceinline__ void load_b(const Tile& tile, int k, ptx::uint32 target, ptx::uint32 barrier) const {
    constexpr int columns = Config::tile_n / n_halves;  // of a split
    if constexpr (Config::transpose_b) {
      // Rows of k; a box has those of one CTA's part, or of one split.
      constexpr int boxes = Config::cluster_m > n_halves ? Config::cluster_m : n_halves;
      constexpr int rows = Config::tile_n / boxes, boxes_per_split = boxes / n_halves;
#pragma unroll
      for (int i = 0; i < boxes / Config::cluster_m; ++i) {
        const int box = i * Config::cluster_m + rank;
        load_b_box(target + box * rows * 128, barrier, k, box / boxes_per_split,
                   tile.column + box % boxes_per_split * rows, tile.batch);
      }
    } else {
      // Chunks of 64 columns: an equal number of them for each CTA, or else of each chunk an equal number of its rows.
      constexpr int chunks = Config::tile_n / 64, chunks_per_split = columns / 64;
      static_assert(columns % 64 == 0, "a split is whole chunks");
      constexpr bool by_chunk = chunks % Config::cluster_m == 0;
      constexpr int rows = by_chunk ? 64 : 64 / Config::cluster_m;
#pragma unroll
      for (int i = 0; i < chunks / (by_chunk ? Config::cluster_m : 1); ++i) {
        const int chunk = by_chunk ? i * Config::cluster_m + rank : i, row = by_chunk ? 0 : rank * rows;
        load_b_box(target + chunk * chunk_bytes + row * 128, barrier, tile.column + 64 * (chunk % chunks_per_split),
                   chunk / chunks_per_split, k + row, tile.batch);
      }
    }
  }

  __device__ __forceinline__ void load_b_box(ptx::uint32 target, ptx::uint32 barrier, int inner, int split, int outer,
                                             int batch) const {
    const int of_b = Config::b_batched ? batch : 0;
    if constexpr (Config::cluster_m > 1) {
      constexpr ptx::uint16 everyone = (1 << Config::cluster_m) - 1;
      ptx::tma_load_multicast(target, params.map[1], barrier, inner, split, outer, of_b, everyone);
    } else {
      ptx::tma_load(target, params.map[1], barrier, inner, split, outer, of_b);
    }
  }

  __device__ __forceinline__ void prefetch(int consumer) {
    if constexpr (Epilogue::tile_loads > 0) {
      RingPosition<LoadRing::slots> at;
      for (int i = first_turn(consumer); i < scheduler.count; i += turns) {
        const Work work = work_of(i, consumer);
        if (work.has_tile())
          prefetch_operands<Config, Epilogue>(params, work.tile, epilogue_base(consumer), load_ring(shared, consumer),
                                              at);
      }
    }
  }

  __device__ __forceinline__ static int first_turn(int consumer) { return cooperative ? 0 : consumer; }

  /// Piece i; its tile is this consumer's rows of it.
  __device__ __forceinline__ Work work_of(int i, int consumer) const {
    Work work = scheduler.work(i, rank);
    if constexpr (cooperative) {
      work.tile.row += consumer * Config::consumer_m;
      work.tile.index_m = work.tile.index_m * consumers + consumer;
    }
    return work;
  }

  /// The workspace's address is the last but one of the kernel's pointers, the flags' the last.
  __device__ __forceinline__ PartialTiles<TileAccumulator> partial_tiles() const {
    constexpr int last = sizeof(params.pointer) / sizeof(void*) - 1;
    return {static_cast<float4*>(params.pointer[last - 1]), static_cast<int*>(params.pointer[last]), warp, lane};
  }

  __device__ __forceinline__ void consume(int consumer) {
    EpilogueVisitor<Config, Epilogue, Params> epilogue(params, epilogue_base(consumer), load_ring(shared, consumer),
                                                       consumer, warp, lane);
    RingPosition<Config::stages> at;
    if (!cooperative && consumer == 1 && scheduler.count > 0) {
      at.advance(scheduler.work(0, rank).blocks);
      wake(0);
    }
    for (int i = first_turn(consumer); i < scheduler.count; i += turns) {
      const Work work = work_of(i, consumer);
      if (work.has_tile()) epilogue.begin(work.tile);

      // Pingpong: this consumer's products follow the other one's, which it wakes when its own are all issued. In both
      // modes the barrier is between the vectors that the epilogue's `begin` puts into shared memory and their readers.
      const bool is_last = cooperative || i + 1 == scheduler.count;
      ptx::named_barrier_sync(1 + consumer, order_threads);
      TileAccumulator accumulator;
      RingPosition<Config::stages> previous = at;
      for (int k_block = 0; k_block < work.blocks; ++k_block) {
        stages.wait_full(at);
        multiply(consumer, at.slot, k_block > 0, accumulator);
        if (k_block > 0) {
          wgmma::wait<1>();
          release(previous.slot);
        }
        previous = at;
        at.advance();
      }
      if (!is_last) wake(consumer ^ 1);
      epilogue.read_ahead();  // only of a whole tile: consumers that cooperate never have a part of one
      wgmma::wait<0>();
#pragma unroll
      for (int block = 0; block < Config::consumer_m / 64; ++block)
        wgmma::keep_behind_wait(accumulator.registers[block]);
      release(previous.slot);
      if (!is_last) at.advance(scheduler.work(i + 1, rank).blocks);

      if constexpr (Config::split_k) {
        if (!work.has_tile()) {
          partial_tiles().send(accumulator);
          continue;
        }
        if (work.blocks < scheduler.k_blocks) partial_tiles().add(scheduler.others(), accumulator);
      }
      epilogue.visit(work.tile, accumulator);
    }
    epilogue.finish();
  }

  __device__ __forceinline__ static void wake(int consumer) { ptx::named_barrier_arrive(1 + consumer, order_threads); }

  /// Issues the products of one stage. A k step of 16 is 32 bytes of a k-major tile's rows and 16 rows of an mn-major
  /// one's.
  __device__ __forceinline__ void multiply(int consumer, int slot, bool accumulate,
                                           TileAccumulator& accumulator) const {
    constexpr int a_step = Config::transpose_a ? 2048 : 32, b_step = Config::transpose_b ? 32 : 2048;
    const ptx::uint32 stage = shared + slot * Layout::stage_bytes;
    const ptx::uint32 share = cooperative ? consumer * (Config::consumer_m / 64) * chunk_bytes : 0;
    const ptx::uint64 a = wgmma::descriptor(stage + share), b = wgmma::descriptor(stage + Layout::a_bytes);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < Config::tile_k / 16; ++step)
#pragma unroll
      for (int block = 0; block < Config::consumer_m / 64; ++block)
        wgmma::multiply<Config::input, Config::transpose_a, !Config::transpose_b>(
            accumulator.registers[block], a + (block * chunk_bytes + step * a_step) / 16, b + step * b_step / 16,
            accumulate || step > 0);
    wgmma::commit();
  }

  __device__ __forceinline__ void release(int slot) const {
    if constexpr (Config::cluster_m > 1) {
      if (lane < Config::cluster_m) ptx::mbarrier_arrive_remote(stages.empty(slot), lane);
    } else {
      if (lane == 0) ptx::mbarrier_arrive(stages.empty(slot));
    }
  }
};

/// The kernel's body, for a generated Config and Epilogue.
template <class Config, class Epilogue, class Params>
__device__ __forceinline__ void gemm(const Params& params) {
  if constexpr (check_config<Config>() && check_epilogue<Epilogue>()) {
    extern __shared__ __align__(1024) unsigned char shared_memory[];
    using Kernel = Gemm<Config, CompleteEpilogue<Epilogue>, Params>;
    const ptx::uint32 shared = ptx::shared_address(shared_memory);
    Kernel::initialize(params, shared);
    Kernel(params, shared).run();
  }
}

}  // namespace coda
