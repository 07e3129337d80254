// The matrix product of all kernels of the library: out tiles = Epilogue(a b), for Hopper.
//
// Persistent: a CTA works on tile after tile, its own (scheduler.cuh) or those that it claims (claims.cuh).
// Warp-specialised: the first of its three warpgroups produces, and two consume.
//
//   warpgroup 0  warp 0     `produce`: a's and b's tiles, k block by k block, into a ring of stages in shared memory,
//                           by the copy engine (TMA); b's to all CTAs of the cluster (multicast)
//                warp 1, 2  `prefetch`: the epilogue's tile operands, a ring for each consumer
//   warpgroup 1             `consume`, consumer 0: waits for a stage, multiplies it (wgmma) into an accumulator in
//                           registers, gives the stage back; after the last one the epilogue
//   warpgroup 2             `consume`, consumer 1
//
// The consumers share work in one of two ways. Pingpong: each computes every second tile, and while one runs its
// epilogue the other one's products keep the tensor cores busy. Cooperative: each has half of the rows of every tile.
// The tile can then be larger, which reads less from L2 and shared memory, but nothing hides its epilogue: this is for
// products that are much longer than their epilogue.
#pragma once

#include "contracts.cuh"
#include "epilogue_sm90.cuh"
#include "partial_tiles_sm90.cuh"
#include "promotion_sm90.cuh"
#include "shared_layout_sm90.cuh"

namespace coda {

/// Operand tiles consist of chunks of 64 rows. The rows of a k-major operand are 64 along m or n. Those of an mn-major
/// one, which has 16 bits, are the k of a stage, and each row is 64 elements along m or n.
constexpr int chunk_bytes = 64 * factor_row_bytes;

template <class Config, class Epilogue, class Params>
struct Gemm {
  using Layout = SharedLayout<Config, Epilogue>;
  static constexpr int n_halves = EpilogueLayout<Config, Epilogue>::n_halves;
  static constexpr bool rows_in_groups = Config::ragged == Ragged::m, k_in_groups = Config::ragged == Ragged::k;
  // Where tiles of groups are claimed, a tile without a product still uses a stage, and a slot for operands: otherwise
  // the producer could be further ahead of a warp than there are slots for claims.
  static constexpr bool all_take_stages = rows_in_groups && Config::claims;
  using WorkScheduler = typename SchedulerOf<Config, Config::tile_n / n_halves, Epilogue, Config::ragged>::Type;
  using Work = typename WorkScheduler::Work;
  using WorkTile = decltype(Work::tile);
  using TileAccumulator = Accumulator<Config::consumer_m / 64, Config::tile_n>;
  static constexpr bool cooperative = EpilogueLayout<Config, Epilogue>::cooperative;
  static constexpr int consumer_stride = cooperative ? 1 : consumers;  // from one piece of its work to the next
  static_assert(!cooperative || (consumers * Config::consumer_m == Config::tile_m && !Config::split_k),
                "cooperative consumers have equal shares of whole tiles");
  static_assert(!Config::claims || (Claims<Config::cluster_m>::slots_suffice(Config::stages) && !Config::split_k),
                "whole tiles are claimed, and no claim is overwritten before it is read");
  static constexpr int threads = 128 * (1 + consumers);
  // At a consumer's barrier: its own threads, and in pingpong those of the other one, which wake it.
  static constexpr int products_threads = 32 * consumer_warps * consumer_stride;
  static_assert(Config::tile_m % 64 == 0 && Config::tile_n % 64 == 0 &&
                    Config::tile_k == factor_row_elements(Config::input),
                "a tile is whole operand chunks");
  static_assert(!Layout::is_grouped || !Config::split_k, "tiles of groups are whole");
  static_assert(!k_in_groups || (Config::transpose_a && !Config::transpose_b), "rows of k are rows of both factors");
  static_assert(bytes_of(Config::input) == 2 || (!Config::transpose_a && Config::transpose_b),
                "wgmma reads mn-major operands of 16 bits only");
  static_assert(bytes_of(dtype_of_b<Config>()) == bytes_of(Config::input), "factors have as many bits");
  static constexpr int promote_after = Promotion<Config>::blocks;
  using Total = typename Promotion<Config>::Total;
  static_assert(Layout::bytes == Config::shared_bytes, "shared memory as the host counted it");

  const Params& params;
  const ptx::uint32 shared;
  const int warpgroup, warp, lane;  // warp within the warpgroup
  const int rank;                   // of this CTA in its cluster
  WorkScheduler scheduler;
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
  __device__ __forceinline__ static Claims<Config::cluster_m> claims(ptx::uint32 shared) {
    return {shared + Layout::claims_offset};
  }
  __device__ __forceinline__ ptx::uint32 epilogue_base(int consumer) const {
    return shared + Layout::epilogue_offset + consumer * EpilogueLayout<Config, Epilogue>::bytes;
  }

  /// The kernel's first steps: fetches tensor maps, and sets up barriers. Meanwhile the Gemm is constructed, which
  /// needs some divisions in the scheduler; `run` waits for the barriers.
  __device__ __forceinline__ static void initialize(const Params& params, ptx::uint32 shared) {
    if (threadIdx.x == 32) {
      for (const ptx::TensorMap& map : params.map) ptx::tma_prefetch_map(map);
    }
    if (threadIdx.x == 0) {
      // A stage is emptied by the warps of one consumer, or of both if cooperative, in every CTA of the cluster.
      stage_ring(shared).init(1, consumer_warps * (consumers / consumer_stride) * Config::cluster_m);
      for (int consumer = 0; consumer < consumers; ++consumer) load_ring(shared, consumer).init(1, consumer_warps);
      if constexpr (Config::claims) claims(shared).init();
      ptx::mbarrier_init_fence();
    }
    if constexpr (Config::cluster_m > 1) {
      __syncwarp();
      ptx::cluster_arrive();
    }
  }

  __device__ __forceinline__ void run() {
    // 1. All barriers are set up, in all CTAs of the cluster.
    if constexpr (Config::cluster_m > 1) {
      ptx::cluster_wait();
    } else {
      __syncthreads();
    }
    // 2. The next kernel may start as CTAs end; this one waits for all writes of earlier ones.
    ptx::launch_dependents();
    ptx::wait_for_earlier_kernels();
    if constexpr (Layout::is_grouped)
      scheduler.read_groups(static_cast<const int*>(params.pointer[Config::offsets]), shared + Layout::groups_offset);
    // 3. Each warp runs its role. The producer gives registers to the consumers.
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
  /// One thread. A stage: wait until it is empty, announce its bytes, start the copies that will fill it.
  __device__ __forceinline__ void produce() {
    RingPosition<Config::stages> at;
    int next = Config::claims ? take_number(0) : 0;
    for (int i = 0; i < count(i, next); ++i) {
      const Work work = piece(i);
#pragma unroll 1  // the producer has few registers
      for (int k_block = work.first_block; k_block < work.first_block + work.blocks; ++k_block) {
        stages.wait_empty(at);
        ptx::mbarrier_arrive_expect(stages.full(at.slot), Layout::loaded_bytes);
        const ptx::uint32 stage = shared + at.slot * Layout::stage_bytes;
        load_a(work.tile, k_block * Config::tile_k, stage, stages.full(at.slot));
        bool is_apart = false;
        if constexpr (rows_in_groups && Config::cluster_m > 1) is_apart = work.tile.is_apart;
        if (is_apart) {
          for (int part = 0; part < Config::cluster_m; ++part)
            load_b<false>(work.tile, k_block * Config::tile_k, stage + Layout::a_bytes, stages.full(at.slot), part);
        } else {
          load_b<(Config::cluster_m > 1)>(work.tile, k_block * Config::tile_k, stage + Layout::a_bytes,
                                          stages.full(at.slot), rank);
        }
        at.advance();
      }
      if constexpr (all_take_stages) {
        if (!has_product(work)) {
          stages.wait_empty(at);
          ptx::mbarrier_arrive(stages.full(at.slot));
          at.advance();
        }
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

  /// The number of the cluster's i-th piece; called a piece early, so that nothing waits for the counter. A cluster
  /// that has computed its share gets a number that no piece has, and ends, and the grid's next cluster starts on its
  /// SMs. The last clusters, as many as run at one time, run as long as there are pieces.
  __device__ __forceinline__ int take_number(int i) const {
    constexpr int counter = sizeof(params.pointer) / sizeof(void*) - 1;
    if (rank != 0) return 0;
    const int total = scheduler.total(params.batch), later = scheduler.clusters() - scheduler.cluster();
    const bool may_claim = later <= Config::multiprocessors / Config::cluster_m || i * scheduler.clusters() < total;
    return may_claim ? atomicAdd(static_cast<int*>(params.pointer[counter]), 1) : total;
  }

  /// Makes `number` the cluster's i-th piece, and gets the next number.
  __device__ __forceinline__ void claim(int i, int& number) const {
    claims(shared).expect(i);
    if (rank == 0) claims(shared).send(i, number);
    number = take_number(i + 1);
  }

  /// The number of this CTA's pieces of work. If it claims them: i + 1 if there is an i-th piece, else i.
  __device__ __forceinline__ int count(int i) const {
    if constexpr (Config::claims) return claims(shared).wait(i) < scheduler.total(params.batch) ? i + 1 : i;
    return scheduler.count;
  }
  /// The same for the producer, which claims the i-th.
  __device__ __forceinline__ int count(int i, int& next) const {
    if constexpr (Config::claims) {
      claim(i, next);
      if (count(i) == i) {  // no piece i; a consumer may wait for the next number, too
        claim(i + 1, next);
        claims(shared).wait(i + 1);
      }
    }
    return count(i);
  }
  __device__ __forceinline__ Work piece(int i) const {
    if constexpr (Config::claims) return scheduler.claimed(claims(shared).wait(i), rank);
    return scheduler.work(i, rank);
  }

  /// Loads a k block of a's tile. In a product with fewer rows than a tile only these rows are loaded: the rest of the
  /// stage is multiplied too, but the results are not stored.
  __device__ __forceinline__ void load_a(const WorkTile& tile, int k, ptx::uint32 target, ptx::uint32 barrier) const {
    const int batch = Config::a_batched ? tile.batch : 0;
    if constexpr (k_in_groups) k += tile.first_k;
    if constexpr (Config::transpose_a) {
      for (int chunk = 0; chunk < Config::tile_m / 64; ++chunk)
        ptx::tma_load(target + chunk * chunk_bytes, params.map[0], barrier, tile.row + 64 * chunk, 0, k, batch);
    } else {
      ptx::tma_load(target, params.map[0], barrier, k, 0, tile.row, batch);
    }
  }

  /// Loads a share of a k block of b's tile: one of as many as a cluster has CTAs, each of which loads one for all.
  template <bool for_all>
  __device__ __forceinline__ void load_b(const WorkTile& tile, int k, ptx::uint32 target, ptx::uint32 barrier,
                                         int part) const {
    constexpr int columns = Config::tile_n / n_halves;  // of a half
    if constexpr (k_in_groups) k += tile.first_k;
    if constexpr (Config::transpose_b) {
      // Rows along k; a box has the rows of one CTA's share, or of one half.
      constexpr int boxes = Config::cluster_m > n_halves ? Config::cluster_m : n_halves;
      constexpr int rows = Config::tile_n / boxes, boxes_per_half = boxes / n_halves;
#pragma unroll
      for (int i = 0; i < boxes / Config::cluster_m; ++i) {
        const int box = i * Config::cluster_m + part;
        load_b_box<for_all>(target + box * rows * factor_row_bytes, barrier, k, box / boxes_per_half,
                            tile.column + box % boxes_per_half * rows, tile.batch);
      }
    } else {
      // Chunks of 64 columns: the same number of chunks for each CTA, or else the same number of rows of each chunk.
      constexpr int chunks = Config::tile_n / 64, chunks_per_half = columns / 64;
      static_assert(columns % 64 == 0, "a half is whole chunks");
      constexpr bool by_chunk = chunks % Config::cluster_m == 0;
      constexpr int rows = by_chunk ? 64 : 64 / Config::cluster_m;
#pragma unroll
      for (int i = 0; i < chunks / (by_chunk ? Config::cluster_m : 1); ++i) {
        const int chunk = by_chunk ? i * Config::cluster_m + part : i, row = by_chunk ? 0 : part * rows;
        load_b_box<for_all>(target + chunk * chunk_bytes + row * factor_row_bytes, barrier,
                            tile.column + 64 * (chunk % chunks_per_half), chunk / chunks_per_half, k + row, tile.batch);
      }
    }
  }

  template <bool for_all>
  __device__ __forceinline__ void load_b_box(ptx::uint32 target, ptx::uint32 barrier, int inner, int half, int outer,
                                             int batch) const {
    const int b_batch = Config::b_batched ? batch : 0;
    if constexpr (for_all) {
      constexpr ptx::uint16 everyone = (1 << Config::cluster_m) - 1;
      ptx::tma_load_multicast(target, params.map[1], barrier, inner, half, outer, b_batch, everyone);
    } else {
      ptx::tma_load(target, params.map[1], barrier, inner, half, outer, b_batch);
    }
  }

  /// The number of stages of the i-th piece, without a search for its group.
  __device__ __forceinline__ int stages_of(int i) const {
    if constexpr (rows_in_groups) {
      if constexpr (Config::claims) return max(1, scheduler.blocks_of(claims(shared).wait(i)));
      return scheduler.blocks_of(i * scheduler.clusters() + scheduler.cluster());
    }
    return piece(i).blocks;
  }

  /// One thread for each consumer.
  __device__ __forceinline__ void prefetch(int consumer) {
    if constexpr (Epilogue::tile_loads > 0) {
      RingPosition<LoadRing::slots> at;
      for (int i = first_piece(consumer); i < count(i); i += consumer_stride) {
        const Work work = work_of(i, consumer);
        if (has_product(work))
          prefetch_operands<Config, Epilogue>(params, work.tile, epilogue_base(consumer), load_ring(shared, consumer),
                                              at);
        else if constexpr (all_take_stages)
          skip_operands(load_ring(shared, consumer), at);
      }
    }
  }

  __device__ __forceinline__ static int first_piece(int consumer) { return cooperative ? 0 : consumer; }

  /// Piece i of work; its tile has this consumer's rows.
  __device__ __forceinline__ Work work_of(int i, int consumer) const {
    Work work = piece(i);
    if constexpr (cooperative) {
      work.tile.row += consumer * Config::consumer_m;
      work.tile.index_m = work.tile.index_m * consumers + consumer;
    }
    return work;
  }

  /// Whether a piece has the product of a tile. Rows in no group have none: their results are zeros.
  __device__ __forceinline__ static bool has_product(const Work& work) {
    if constexpr (rows_in_groups) return work.blocks > 0;
    return work.has_tile();
  }

  /// The workspace's address is the last but one of the kernel's pointers, the flags' the last.
  __device__ __forceinline__ PartialTiles<TileAccumulator> partial_tiles() const {
    constexpr int last = sizeof(params.pointer) / sizeof(void*) - 1;
    return {static_cast<float4*>(params.pointer[last - 1]), static_cast<int*>(params.pointer[last]), warp, lane};
  }

  /// The loop of a consumer warpgroup. Both consumers advance through the ring of stages in the order of the work, and
  /// in pingpong each skips the stages of the other one.
  __device__ __forceinline__ void consume(int consumer) {
    EpilogueVisitor<Config, Epilogue, Params> epilogue(params, epilogue_base(consumer), load_ring(shared, consumer),
                                                       consumer, warp, lane);
    RingPosition<Config::stages> at;
    if (!cooperative && consumer == 1 && count(0) > 0) {
      at.advance(stages_of(0));
      wake(0);
    }
    for (int i = first_piece(consumer); i < count(i); i += consumer_stride) {
      // 1. The epilogue's vectors and scalars, whose latency the products hide.
      const Work work = work_of(i, consumer);
      if (has_product(work)) epilogue.begin(work.tile);

      // 2. Pingpong: wait until the other consumer's products are all issued. In both modes the barrier is also between
      //    the vectors that `begin` puts into shared memory and the warps that read them.
      ptx::named_barrier_sync(barrier_number(NamedBarrier::products, consumer), products_threads);

      // 3. The products, one stage ahead: when those of a stage are issued, those of the stage before it are waited for
      //    and that stage is given back.
      TileAccumulator accumulator;
      RingPosition<Config::stages> previous = at;
      Total total;
      if constexpr (promote_after > 0) {
        multiply_promoted(consumer, work.blocks, at, previous, accumulator, total);
      } else {
        for (int k_block = 0; k_block < work.blocks; ++k_block) {
          stages.wait_full(at);
          if constexpr (k_in_groups) {
            const int left = work.tile.k_end - work.tile.first_k - k_block * Config::tile_k;
            if (left < Config::tile_k) zero_behind(consumer, at.slot, left);
          }
          multiply(consumer, at.slot, k_block > 0, accumulator);
          if (k_block > 0) {
            wgmma::wait<1>();
            release(previous.slot);
          }
          previous = at;
          at.advance();
        }
      }

      if constexpr (all_take_stages) {
        if (!has_product(work)) {
          stages.wait_full(at);
          release(at.slot);
          at.advance();
        }
      }

      // 4. All products are issued: the other consumer's follow. While the last ones run, the epilogue's first box is
      //    read. The tile is not split, as cooperative consumers have no split-K.
      const bool is_last = cooperative || i + 1 == count(i + 1);
      if (!is_last) wake(consumer ^ 1);
      if (!rows_in_groups || has_product(work)) epilogue.read_ahead();

      // 5. The accumulator is complete; the last stage is given back, and the other consumer's are skipped.
      wgmma::wait<0>();
#pragma unroll
      for (int block = 0; block < Config::consumer_m / 64; ++block)
        wgmma::keep_behind_wait(accumulator.registers[block]);
      if constexpr (promote_after > 0) add(accumulator, total);
      if (!rows_in_groups || has_product(work)) release(previous.slot);
      if (!is_last) at.advance(stages_of(i + 1));

      // 6. Split-K: a k slice that does not own the tile ends here; the one that does adds the others' sums.
      if constexpr (Config::split_k) {
        if (!work.has_tile()) {
          partial_tiles().send(accumulator);
          continue;
        }
        if (work.blocks < scheduler.k_blocks) partial_tiles().add(scheduler.others(), accumulator);
      }

      // 7. The epilogue, under the other consumer's products.
      if constexpr (rows_in_groups) {
        if (!has_product(work)) {
          epilogue.store_zeros(work.tile);
          continue;
        }
      }
      epilogue.visit(work.tile, accumulator);
    }
    epilogue.finish();
  }

  __device__ __forceinline__ static void wake(int consumer) {
    ptx::named_barrier_arrive(barrier_number(NamedBarrier::products, consumer), products_threads);
  }

  /// Issues the products of one stage. A k step is 32 bytes of a k-major tile's rows, and as many rows of an mn-major
  /// one's as it has elements.
  __device__ __forceinline__ void multiply(int consumer, int slot, bool accumulate,
                                           TileAccumulator& accumulator) const {
    constexpr int k_step = wgmma::k_step_bytes / bytes_of(Config::input);
    constexpr int a_step = Config::transpose_a ? k_step * factor_row_bytes : wgmma::k_step_bytes;
    constexpr int b_step = Config::transpose_b ? wgmma::k_step_bytes : k_step * factor_row_bytes;
    const ptx::uint32 stage = shared + slot * Layout::stage_bytes;
    const ptx::uint32 share = cooperative ? consumer * (Config::consumer_m / 64) * chunk_bytes : 0;
    const ptx::uint64 a = wgmma::descriptor(stage + share), b = wgmma::descriptor(stage + Layout::a_bytes);
    wgmma::fence();
#pragma unroll
    for (int step = 0; step < Config::tile_k / k_step; ++step)
#pragma unroll
      for (int block = 0; block < Config::consumer_m / 64; ++block)
        wgmma::multiply<Config::input, dtype_of_b<Config>(), Config::transpose_a, !Config::transpose_b>(
            accumulator.registers[block], a + (block * chunk_bytes + step * a_step) / 16, b + step * b_step / 16,
            accumulate || step > 0);
    wgmma::commit();
  }

  /// All products of a tile. The last ones are not waited for, and not yet in the total.
  __device__ __forceinline__ void multiply_promoted(int consumer, int blocks, RingPosition<Config::stages>& at,
                                                    RingPosition<Config::stages>& previous,
                                                    TileAccumulator& accumulator, Total& total) const {
    clear(total);
    for (int k_block = 0; k_block < blocks; ++k_block) {
      const bool begins = k_block % at_least_one(promote_after) == 0;
      if (begins && k_block > 0) {
        wgmma::wait<0>();
        wgmma::keep_behind_wait(accumulator.registers[0]);
        release(previous.slot);
        add(total, accumulator);
      }
      stages.wait_full(at);
      multiply(consumer, at.slot, !begins, accumulator);
      if (!begins) {
        wgmma::wait<1>();
        release(previous.slot);
      }
      previous = at;
      at.advance();
    }
  }

  /// Zeroes a stage's rows of k from `first` on, as far as this consumer multiplies them: in both factors, as the other
  /// factor's rows may be infinite.
  __device__ __forceinline__ void zero_behind(int consumer, int slot, int first) const {
    const ptx::uint32 stage = shared + slot * Layout::stage_bytes;
    constexpr int chunks_of_a = Config::consumer_m / 64, chunks_of_b = Config::tile_n / 64;
    const ptx::uint32 a = stage + (cooperative ? consumer * chunks_of_a * chunk_bytes : 0);
    for (int chunk = 0; chunk < chunks_of_a + chunks_of_b; ++chunk) {
      const ptx::uint32 rows =
          chunk < chunks_of_a ? a + chunk * chunk_bytes : stage + Layout::a_bytes + (chunk - chunks_of_a) * chunk_bytes;
      for (int at = first * factor_row_bytes + 16 * (32 * warp + lane); at < chunk_bytes; at += 16 * 128)
        ptx::store_zeros(rows + at);
    }
    ptx::fence_async_proxy();
    ptx::named_barrier_sync(barrier_number(NamedBarrier::column_results, consumer), 32 * consumer_warps);
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
