// Backward attention, with the masks of the forward pass. FlashAttention-2's formulas (arXiv 2307.08691):
//
//   s^T = k q^T            dp^T = v dy^T                   (both factors in shared memory)
//   p^T = exp(score(scale s^T) + bias - lse)               columns are queries: lse and delta are read for each pair
//   ds^T = p^T (dp^T - delta)                              delta = sum(y dy) - dlse
//   ds^T *= score'(scale s^T)
//   dv += p^T dy           dk += ds^T q                    (p^T and ds^T in registers)
//   dq += ds k                                             (ds through shared memory), float32 in memory
//
// With dropout z p^T and z dp^T take the places of p^T in dv and of dp^T, where z is 0 or 1 / (1 - rate). A sink is in
// lse alone.
//
// A CTA has a tile of keys of one head of keys in shared memory, and goes over all tiles of queries that see one of
// them, and for each over the heads of queries that share the head: dk and dv stay in registers. Of narrow heads a
// consumer has 64 of 128 keys; of wide ones both have the same 64 keys, and each half of the columns.
//
// dq is added in the order of the accumulator's registers, 16 bytes a thread and instruction, and `finish_dq` brings it
// into rows. It is added in one order, that of the tiles of keys, if the kernel is deterministic: a count for each tile
// of queries says how many tiles have been added. A CTA waits for tiles that began before its own, and the first of
// them stores. Two warps keep these turns, so that no consumer waits for memory.
#pragma once

#include "attention_masks.cuh"
#include "attention_results.cuh"
#include "attention_scores.cuh"

namespace coda::attention {

/// Whether results are made of dq, dk and dv in their place. Config has those of keys and of values, OfKeys and
/// OfValues.
template <class Config>
constexpr bool makes_results = requires { typename Config::OfKeys; };

template <class Config>
CODA_CONSTEXPR int key_pointers() {
  if constexpr (makes_results<Config>) {
    return Config::OfKeys::result_pointers;
  } else {
    return 0;
  }
}

template <class Config>
CODA_CONSTEXPR int value_pointers() {
  if constexpr (makes_results<Config>) {
    return Config::OfValues::result_pointers;
  } else {
    return 0;
  }
}

template <class Config>
struct BackwardParams {
  ptx::TensorMap q, k, v, dy;                 // (columns, heads, rows, batch), boxes of 64 columns of one head
  const float *lse, *delta;                   // (batch, heads, padded(queries)); lse log2(e)
  Operands<false, Config::has_dropout> mask;  // tiles are those of keys
  const uint32* needed_keys;                  // (batch, tiles of queries, words)
  const int* positions;                       // (batch, tiles of keys): in the order of the mask
  float* dq;
  void *dk, *dv;  // (batch, keys, key heads, width); with splits float32, (splits, batch, keys, key heads, width)
  int* turns;     // (batch, heads, tiles of queries), zeros
  [[no_unique_address]] ScorePointers<ScoreOf<Config>::Type::arrays> score;
  [[no_unique_address]] GradientPointers<ScoreOf<Config>::Type::gradients> gradient;
  [[no_unique_address]] EntryPointers<gradients_of_tables<typename ScoreOf<Config>::Type>()> entries;
  [[no_unique_address]] Pointers<key_pointers<Config>(), 0> of_keys;  // in the place of dk and dv
  [[no_unique_address]] Pointers<value_pointers<Config>(), 1> of_values;
  int batch, queries, keys, heads, key_heads;
  Broadcast dense, bias;
  int left, right;  // of a band
  int splits;       // of the heads of queries that share a head of keys
  float scale;
};

/// Config: as that of Forward, but for consumers and q_stages; and dim (a padded width: 64, 128 or 256), keys and
/// queries (of a tile), stages, is_split, deterministic.
template <class Config>
struct Backward {
  static constexpr DType input = Config::input;
  static constexpr int dim = Config::dim, keys = Config::keys, queries = Config::queries, stages = Config::stages;
  static constexpr bool is_wide = dim == 256, has_arrays = Config::has_arrays, deterministic = Config::deterministic;
  using Score = typename ScoreOf<Config>::Type;
  using Params = BackwardParams<Config>;
  static constexpr bool has_score = ScoreOf<Config>::is_there, has_gradients = Score::gradients > 0;
  // Consumers of wide heads have the same keys: one of them sums for both.
  static constexpr int summing_warps = is_wide ? 4 : 8;
  using Sums = ScoreSums<Score, queries, summing_warps>;
  static constexpr int of_product = gradients_of_product<Score>(), tables = gradients_of_tables<Score>();
  using Diagonals = DiagonalSums<queries, (tables > 0)>;
  static constexpr bool scales_in_exponent = !Config::has_bias && !has_score;
  static_assert(is_wide ? keys == 64 && queries == 64 : keys == 128 && queries * dim == 8192,
                "a consumer has 64 x 64 of dq, or of wide heads 64 x 128");
  static constexpr int threads = 384, consumers = 2;
  static constexpr int consumer_registers = 240, producer_registers = 24;
  static constexpr int chunks = dim / 64;                         // of k and q in shared memory
  static constexpr int loaded_chunks = (Config::head + 63) / 64;  // the others are zeros
  static constexpr int loaded_value_chunks = (Config::value_head + 63) / 64;
  static constexpr int value_chunks = is_wide && Config::value_head <= 128 ? 2 : chunks;  // of v and dy
  static constexpr int steps = (Config::head + 15) / 16, value_steps = (Config::value_head + 15) / 16;
  static constexpr int own_chunks = is_wide ? chunks / 2 : chunks;  // of a consumer's dk
  static constexpr int own_value_chunks = is_wide ? value_chunks / 2 : value_chunks;
  static constexpr int registers = queries / 2, words = queries / 4;
  static constexpr int dq_part = 64 * (is_wide ? 128 : 64);  // of a consumer
  using PSlope = uint32[of_product > 0 ? of_product : 1][words];
  /// The distances of a warp's keys from a tile's queries: the place of the first in arrays by distance, and the entry
  /// of each table that all of them read, several_entries or no_entry.
  struct Distances {
    int first, entry[tables > 0 ? tables : 1];
  };

  static constexpr int k_bytes = keys * chunks * 128, v_bytes = keys * value_chunks * 128;
  static constexpr int q_bytes = queries * chunks * 128, dy_bytes = queries * value_chunks * 128;
  static constexpr int ds_bytes = keys * queries * 2, ds_tiles = 2;  // two in turn, or of wide heads one a consumer
  static constexpr int vector_bytes = queries * 4;
  // Vectors of a stage: lse, delta, what a mask's arrays say about queries, and bits of dropout.
  static constexpr int interval_vectors = has_arrays ? (Config::has_second ? 4 : 2) : 0;
  static constexpr int id_vector = 2 + interval_vectors, bits_vector = id_vector + (Config::has_ids ? 1 : 0);
  static constexpr int vectors = bits_vector + (Config::has_dropout ? 1 : 0);
  static constexpr int loaded_bytes = queries * (loaded_chunks + loaded_value_chunks) * 128 + vectors * vector_bytes;
  static constexpr int v_at = k_bytes, ds_at = v_at + v_bytes, q_at = ds_at + ds_tiles * ds_bytes;
  static constexpr int dy_at = q_at + stages * q_bytes, vectors_at = dy_at + stages * dy_bytes;
  static constexpr int ring_at = vectors_at + stages * vectors * vector_bytes;
  static constexpr int turn_slots = 4;
  static constexpr int turns_at = ring_at + Ring<stages>::bytes, added_at = turns_at + Ring<turn_slots>::bytes;
  static constexpr int ranks_at = added_at + 8 * turn_slots, barriers_at = ranks_at + 8 * turn_slots;
  static constexpr int clean_at = barriers_at + 16;
  static constexpr int steps_at = clean_at + 8 * stages, marks_at = steps_at + 4 * stages,
                       key_marks_at = marks_at + stages * (queries / 8);
  static constexpr int diagonals_at = key_marks_at + 32;
  static constexpr int diagonals_end = diagonals_at + summing_warps * Diagonals::bytes;
  static constexpr int shared_bytes = diagonals_end + 1024;  // aligned to 1024
  using CleanKeys = Cleaner<input, keys, chunks, 8>;
  using CleanValues = Cleaner<input, keys, value_chunks, 8>;
  using CleanQueries = Cleaner<input, queries, chunks, 1>;
  using CleanCotangents = Cleaner<input, queries, value_chunks, 1>;
  using Tiles = Walk<has_arrays>;
  enum Warp { producer = 0, waits_for_turns = 1, passes_turns = 2, cleaner = 3 };
  enum Barrier { ds_ready = 1 };
  static_assert(Config::shared_bytes == shared_bytes, "shared_bytes is not what the kernel takes");

  const Params& p;
  const uint32 shared;
  const Ring<stages> ring;
  const Ring<turn_slots> turn_ring;
  int key_head, batch, key, first_head, end_head, position;

  __device__ __forceinline__ Backward(const Params& p, uint32 shared)
      : p(p), shared(shared), ring{shared + ring_at}, turn_ring{shared + turns_at} {}

  __device__ __forceinline__ int key_tiles() const { return tiles_of(p.keys, keys); }
  __device__ __forceinline__ int query_tiles() const { return tiles_of(p.queries, queries); }
  __device__ __forceinline__ uint32 q_of(uint32 slot) const { return shared + q_at + slot * q_bytes; }
  __device__ __forceinline__ uint32 dy_of(uint32 slot) const { return shared + dy_at + slot * dy_bytes; }
  __device__ __forceinline__ uint32 vector(uint32 slot, int i) const {
    return shared + vectors_at + (slot * vectors + i) * vector_bytes;
  }
  __device__ __forceinline__ uint32 step(uint32 slot) const { return shared + steps_at + 4 * slot; }
  __device__ __forceinline__ uint32 keys_loaded() const { return shared + barriers_at; }
  __device__ __forceinline__ uint32 keys_clean() const { return shared + barriers_at + 8; }
  __device__ __forceinline__ uint32 clean(uint32 slot) const { return shared + clean_at + 8 * slot; }
  __device__ __forceinline__ uint32 marks(uint32 slot) const { return shared + marks_at + slot * (queries / 8); }
  __device__ __forceinline__ uint32 key_marks() const { return shared + key_marks_at; }
  __device__ __forceinline__ uint32 rank_at(uint32 slot) const { return shared + ranks_at + 8 * slot; }
  __device__ __forceinline__ uint32 added(uint32 slot) const { return shared + added_at + 8 * slot; }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      ring.init(1, arriving_lanes * (has_arrays ? 8 + 1 : 8));
      turn_ring.init(1, 1);
      for (int slot = 0; slot < turn_slots; ++slot) ptx::mbarrier_init(added(slot), 8 * arriving_lanes);
      ptx::mbarrier_init(keys_loaded(), 1);
      ptx::mbarrier_init(keys_clean(), 8 * arriving_lanes);
      if constexpr (has_arrays)
        for (int slot = 0; slot < stages; ++slot) ptx::mbarrier_init(clean(slot), arriving_lanes);
      ptx::mbarrier_init_fence();
      for (const ptx::TensorMap* map : {&p.q, &p.k, &p.v, &p.dy}) ptx::tma_prefetch_map(*map);
    }
    zero_other_chunks();
    // CTAs start in this order, in which they add to dq: the keys that the most queries see first; where all see all,
    // those of a head together, so that its dq stays in the L2 cache.
    int i = blockIdx.x;
    const int split = Config::is_split ? i % p.splits : 0;
    if constexpr (Config::is_split) i /= p.splits;
    if (!has_arrays && p.left >= p.queries && p.right >= p.keys)
      i = (i % key_tiles() * p.batch + i / key_tiles() / p.key_heads) * p.key_heads + i / key_tiles() % p.key_heads;
    key_head = i % p.key_heads, i /= p.key_heads;
    position = i;
    if (has_arrays && p.mask.order != nullptr) {
      ptx::wait_for_earlier_kernels();
      i = p.mask.order[i];
      batch = i / key_tiles(), key = i % key_tiles() * keys;
    } else {
      batch = i % p.batch, key = i / p.batch * keys;
    }
    const int groups = p.heads / p.key_heads, each = Config::is_split ? groups / p.splits : groups;
    first_head = key_head * groups + split * each, end_head = first_head + each;
    __syncthreads();
    ptx::wait_for_earlier_kernels();
    ptx::launch_dependents();
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      ptx::registers_decrease<producer_registers>();
      const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
      if (threadIdx.x == 0) produce();
      if (deterministic && warp == waits_for_turns) wait_for_turns();
      if (deterministic && warp == passes_turns) pass_turns();
      if (has_arrays && warp == cleaner) clean_queries();
    } else {
      ptx::registers_increase<consumer_registers>();
      consume(warpgroup - 1, split);
    }
  }

  /// TMA fills columns beyond an array's end with zeros more slowly than it loads them: chunks that have only such
  /// columns are filled once.
  __device__ __forceinline__ void zero_other_chunks() const {
    const auto zero = [&](uint32 from, int bytes) {
      for (int i = 16 * threadIdx.x; i < bytes; i += 16 * threads) ptx::store_zeros(from + i);
    };
    if constexpr (loaded_chunks < chunks) {
      zero(shared + keys * loaded_chunks * 128, keys * (chunks - loaded_chunks) * 128);
      for (int slot = 0; slot < stages; ++slot)
        zero(q_of(slot) + queries * loaded_chunks * 128, queries * (chunks - loaded_chunks) * 128);
    }
    if constexpr (loaded_value_chunks < value_chunks) {
      zero(shared + v_at + keys * loaded_value_chunks * 128, keys * (value_chunks - loaded_value_chunks) * 128);
      for (int slot = 0; slot < stages; ++slot)
        zero(dy_of(slot) + queries * loaded_value_chunks * 128, queries * (value_chunks - loaded_value_chunks) * 128);
    }
    if constexpr (loaded_chunks < chunks || loaded_value_chunks < value_chunks) ptx::fence_async_proxy();
  }

  __device__ __forceinline__ Tiles walk() const {
    if constexpr (has_arrays)
      return Tiles(p.mask, static_cast<long long>(batch) * key_tiles() + key / keys, tiles_of(query_tiles(), 32));
    else
      return Tiles(BandTiles(key, min(key + keys, p.keys) - 1, p.right, p.left, queries, p.queries));
  }
  /// Columns beyond the keys' end are hidden.
  __device__ __forceinline__ bool is_partial(const Tiles& tiles) const {
    if constexpr (has_arrays)
      return tiles.is_partial();
    else
      return tiles.is_partial() || key + keys > p.keys;
  }

  __device__ __forceinline__ void produce() const {
    Tiles tiles = walk();
    if (!tiles.next()) return;
    ptx::mbarrier_arrive_expect(keys_loaded(), keys * (loaded_chunks + loaded_value_chunks) * 128);
#pragma unroll
    for (int c = 0; c < loaded_chunks; ++c)
      ptx::tma_load(shared + c * keys * 128, p.k, keys_loaded(), 64 * c, key_head, key, batch);
#pragma unroll
    for (int c = 0; c < loaded_value_chunks; ++c)
      ptx::tma_load(shared + v_at + c * keys * 128, p.v, keys_loaded(), 64 * c, key_head, key, batch);
    RingPosition<stages> at;
    bool has_more = true;
    while (has_more) {
      const int tile = tiles.tile, row = tile * queries;
      const bool hides = is_partial(tiles);
      has_more = tiles.next();
#pragma unroll 1
      for (int head = first_head; head < end_head; ++head) {
        const uint32 full = ring.full(at.slot);
        const long long statistics = (static_cast<long long>(batch) * p.heads + head) * padded(p.queries) + row;
        ring.wait_empty(at);
        ptx::store_word(step(at.slot), Step::of(tile, hides, !has_more && head + 1 == end_head).word);
        ptx::mbarrier_arrive_expect(full, loaded_bytes);
#pragma unroll
        for (int c = 0; c < loaded_chunks; ++c)
          ptx::tma_load(q_of(at.slot) + c * queries * 128, p.q, full, 64 * c, head, row, batch);
#pragma unroll
        for (int c = 0; c < loaded_value_chunks; ++c)
          ptx::tma_load(dy_of(at.slot) + c * queries * 128, p.dy, full, 64 * c, head, row, batch);
        ptx::bulk_load(vector(at.slot, 0), p.lse + statistics, vector_bytes, full);
        ptx::bulk_load(vector(at.slot, 1), p.delta + statistics, vector_bytes, full);
        if constexpr (has_arrays) {
          const long long of_batch = static_cast<long long>(batch) * padded(p.queries);
#pragma unroll
          for (int i = 0; i < interval_vectors; ++i)
            ptx::bulk_load(
                vector(at.slot, 2 + i),
                p.mask.intervals + of_batch * interval_vectors + i * static_cast<long long>(padded(p.queries)) + row,
                vector_bytes, full);
          if constexpr (Config::has_ids)
            ptx::bulk_load(vector(at.slot, id_vector), p.mask.query_ids + of_batch + row, vector_bytes, full);
        }
        if constexpr (Config::has_dropout)
          ptx::bulk_load(vector(at.slot, bits_vector), p.mask.row_bits + statistics, vector_bytes, full);
        at.advance();
      }
    }
  }

  // ---- the order of dq

  /// How many tiles of keys are added to a tile of queries before this one: called by a whole warp.
  __device__ __forceinline__ int rank(int query_tile) const {
    const int own = key / keys;
    if constexpr (has_arrays) {
      const uint32* needed =
          p.needed_keys + (static_cast<long long>(batch) * query_tiles() + query_tile) * tiles_of(key_tiles(), 32);
      if (p.mask.order == nullptr) return tiles_before(needed, own);
      return tiles_before(needed, p.positions + batch * key_tiles(), key_tiles(), position);
    } else {
      return own - max(0, query_tile * queries - p.left) / keys;
    }
  }

  /// One warp waits for this CTA's turn at each tile, some steps before it is there, and says which turn it is.
  __device__ __forceinline__ void wait_for_turns() const {
    Tiles tiles = walk();
    RingPosition<turn_slots> at;
    bool has_more = tiles.next();
#pragma unroll 1
    while (has_more) {
      const int tile = tiles.tile, before = rank(tile);
      has_more = tiles.next();
      if (threadIdx.x % 32 == 0) {
#pragma unroll 1
        for (int head = first_head; head < end_head; ++head) {
          const int turn = (batch * p.heads + head) * query_tiles() + tile;
          turn_ring.wait_empty(at);
          while (before > 0 && ptx::load_acquire(p.turns + turn) != before) {
          }
          ptx::store_word(rank_at(at.slot), Step::of(before, false, !has_more && head + 1 == end_head).word);
          ptx::store_word(rank_at(at.slot) + 4, turn);
          ptx::mbarrier_arrive(turn_ring.full(at.slot));
          at.advance();
        }
      }
      __syncwarp();
    }
  }
  /// Another one passes the turn on when the additions of all consumers have been issued.
  __device__ __forceinline__ void pass_turns() const {
    if (threadIdx.x % 32 != 0 || !walk().next()) return;
    RingPosition<turn_slots> at;
    Step now;
    do {
      ptx::mbarrier_wait(added(at.slot), at.phase);
      now = {ptx::load_word(rank_at(at.slot))};
      ptx::store_release(p.turns + ptx::load_word(rank_at(at.slot) + 4), now.tile() + 1);
      ptx::mbarrier_arrive(turn_ring.empty(at.slot));
      at.advance();
    } while (!now.is_last());
  }

  // ---- values that are not finite

  /// The consumers: keys and values of a tile, when they are there.
  __device__ __forceinline__ void clean_keys() const {
    const int warp = threadIdx.x / 32 - 4;
    CleanKeys::begin(key_marks(), warp);
    CleanKeys::mark(shared, key_marks(), warp);
    CleanValues::mark(shared + v_at, key_marks(), warp);
    CleanKeys::clear(shared, key_marks(), warp);
    CleanValues::clear(shared + v_at, key_marks(), warp);
    warp_arrive(keys_clean());
  }
  /// One warp: rows of queries, and of y's cotangents, in tiles that are seen in part. What their statistics are says
  /// which rows are not finite; those of rows that see nothing are cleared too.
  __device__ __forceinline__ void clean_queries() const {
    if (!walk().next()) return;
    ptx::mbarrier_wait(keys_clean(), 0);
    const bool marks_keys = CleanKeys::has_marks(key_marks());
    RingPosition<stages> at;
    Step now;
    do {
      ring.wait_full(at);
      now = {ptx::load_word(step(at.slot))};
      if (marks_keys || now.is_partial()) {
        mark_by_statistics(at.slot);
        CleanQueries::clear(q_of(at.slot), marks(at.slot), 0);
        CleanCotangents::clear(dy_of(at.slot), marks(at.slot), 0);
      }
      warp_arrive(clean(at.slot));
      warp_arrive(ring.empty(at.slot));
      at.advance();
    } while (!now.is_last());
  }
  /// Marks rows whose statistics are not finite, and makes them those of a row that sees nothing.
  __device__ __forceinline__ void mark_by_statistics(uint32 slot) const {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int word = 0; word < CleanQueries::words; ++word) {
      const int at = 4 * (word * 32 + lane);
      const float lse = __int_as_float(ptx::load_word(vector(slot, 0) + at));
      const float delta = __int_as_float(ptx::load_word(vector(slot, 1) + at));
      const bool is_marked = !(lse < infinity() && fabsf(delta) < infinity());
      if (is_marked) {
        ptx::store_word(vector(slot, 0) + at, __float_as_int(infinity()));
        ptx::store_word(vector(slot, 1) + at, 0);
      }
      const uint32 marked = __ballot_sync(0xFFFFFFFFu, is_marked);
      if (lane == 0) ptx::store_word(CleanQueries::word_at(marks(slot), 0, word), marked);
    }
    __syncwarp();
  }

  // ---- products

  /// d (64 keys x queries) = a b^T over the columns of a head.
  template <int steps>
  __device__ __forceinline__ static void over_columns(float (&d)[registers], uint32 a, uint32 b) {
#pragma unroll
    for (int step = 0; step < steps; ++step)
      wgmma::multiply<input, input, 0, 0>(d, wgmma::descriptor(a + step / 4 * keys * 128 + step % 4 * 32),
                                          wgmma::descriptor(b + step / 4 * queries * 128 + step % 4 * 32), step > 0);
    wgmma::commit();
  }
  /// d (64 keys x own columns) += w b, w in registers.
  template <int count>
  __device__ __forceinline__ static void over_queries(float (&d)[count], const uint32 (&w)[words], uint32 b) {
#pragma unroll
    for (int step = 0; step < queries / 16; ++step)
      wgmma::multiply_fragment<input, 1>(d, w + 4 * step, wgmma::descriptor<queries>(b + step * 16 * 128), 1);
    wgmma::commit();
  }

  /// d (64 queries x 64 columns) = ds k, whose rows are both along the keys.
  __device__ __forceinline__ static void over_keys(float (&d)[32], uint32 ds, uint32 k) {
#pragma unroll
    for (int step = 0; step < keys / 16; ++step)
      wgmma::multiply<input, input, 1, 1>(d, wgmma::descriptor<keys>(ds + step * 16 * 128),
                                          wgmma::descriptor<keys>(k + step * 16 * 128), step > 0);
    wgmma::commit();
  }

  __device__ __forceinline__ void consume(int consumer, int split) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int my_key = key + (is_wide ? 0 : 64 * consumer) + 16 * warp + lane / 4;
    const float unit = scales_in_exponent ? p.scale * log2_e : log2_e;
    float dk[32 * own_chunks], dv[32 * own_value_chunks];
#pragma unroll
    for (int i = 0; i < 32 * own_chunks; ++i) dk[i] = 0;
#pragma unroll
    for (int i = 0; i < 32 * own_value_chunks; ++i) dv[i] = 0;
    const uint32 my_k = shared + (is_wide ? 0 : consumer * 64 * 128), my_v = my_k + v_at;
    const uint32 my_columns = is_wide ? consumer * own_chunks * queries * 128 : 0;  // of q
    const uint32 my_value_columns = is_wide ? consumer * own_value_chunks * queries * 128 : 0;
    // ds^T goes to shared memory by matrices of 8 x 8: each lane has the address of a row of one.
    const uint32 ds_tile = shared + ds_at + (is_wide ? consumer * ds_bytes : 0);
    const int store_key = (is_wide ? 0 : 64 * consumer) + 16 * warp + 8 * (lane / 8 % 2) + lane % 8;
    const uint32 store_to = ds_tile + store_key * 128;
    const uint32 store_swizzle = (store_key % 8) * 16, store_column = lane / 16 * 16;
    // dq: this consumer's queries, or its columns.
    const uint32 dq_a = ds_tile + (queries == 128 ? consumer * keys * 128 : 0);
    const uint32 dq_b = shared + (queries == 128 ? 0 : consumer * (is_wide ? 2 : 1) * keys * 128);
    int ids[2] = {};
    if constexpr (Config::has_ids)
      for (int r = 0; r < 2; ++r)
        ids[r] = p.mask.key_ids[static_cast<long long>(batch) * padded(p.keys) + my_key + 8 * r];
    int column_bits[2] = {};
    if constexpr (Config::has_dropout)
      for (int r = 0; r < 2; ++r) column_bits[r] = p.mask.column_bits[my_key + 8 * r];
    RingPosition<stages> at;
    RingPosition<turn_slots> turn;
    uint32 buffer = 0;
    bool has_more = walk().next(), marks_keys = false;
    int head = first_head;
    if (has_more) {
      ptx::mbarrier_wait(keys_loaded(), 0);
      if constexpr (has_arrays) {
        clean_keys();
        ptx::mbarrier_wait(keys_clean(), 0);
        marks_keys = CleanKeys::has_marks(key_marks());
      }
    }
#pragma unroll 1
    while (has_more) {
      const uint32 q = q_of(at.slot), dy = dy_of(at.slot);
      const uint32 lse = vector(at.slot, 0) + lane % 4 * 8, delta = lse + vector_bytes;
      float s[registers], dp[registers];
      uint32 w[words], dw[words], kept[words];
      PSlope p_slope;
      ScoreWords<Score> of_keys[2];
      ring.wait_full(at);
      const Step now = {ptx::load_word(step(at.slot))};
      const int query_tile = now.tile(), row = query_tile * queries;
      const bool hides = now.is_partial() || marks_keys;
      has_more = !now.is_last();
      Distances distances;
      if constexpr (tables > 0) distances = distances_of(head, row, my_key - lane / 4, consumer);
      if constexpr (has_arrays)
        if (hides) ptx::mbarrier_wait(clean(at.slot), at.phase);
      if constexpr (has_score)
        for (int r = 0; r < 2; ++r)
          of_keys[r].template load<&ScoreArray::queries, false>(p, batch, head, 0, my_key + 8 * r);
      wgmma::fence();
      over_columns<steps>(s, my_k, q);
      over_columns<value_steps>(dp, my_v, dy);
      wgmma::wait<1>();
      wgmma::keep_behind_wait(s);
      if constexpr (Config::has_bias && !has_score) add_bias(s, head, row, my_key);
      if (hides) hide(s, head, row, my_key, ids, at.slot);
      if constexpr (has_score) {
        probabilities_of_scores(s, w, dw, p_slope, head, row, my_key, of_keys, lse);
      } else {
#pragma unroll
        for (int j = 0; j < queries / 8; ++j) {
          float l[2];
          ptx::load_pair(lse + 32 * j, l[0], l[1]);
#pragma unroll
          for (int i = 0; i < 4; ++i) s[4 * j + i] = ptx::exp2_unit(fmaf(s[4 * j + i], unit, -l[i % 2]));
        }
        if constexpr (Config::has_dropout)
          sign_dropped(vector(at.slot, bits_vector), column_bits, [&](int i, uint32 sign) {
            s[i] = __int_as_float(__float_as_int(s[i]) | static_cast<int>(sign));
          });
#pragma unroll
        for (int i = 0; i < words; ++i) w[i] = packed<input>(s[2 * i], s[2 * i + 1]);
      }
      if constexpr (Config::has_dropout) {
        if constexpr (has_score)
          sign_dropped(vector(at.slot, bits_vector), column_bits,
                       [&](int i, uint32 sign) { w[i / 2] |= i % 2 == 0 ? sign >> 16 : sign; });
#pragma unroll
        for (int i = 0; i < words; ++i) kept[i] = without_negatives<input>(w[i]);
        wgmma::fence();
        over_queries(dv, kept, dy + my_value_columns);
      } else {
        wgmma::fence();
        over_queries(dv, w, dy + my_value_columns);
      }
      wgmma::wait<1>();  // dp^T; dv's product runs on
      wgmma::keep_behind_wait(dp);
      Sums sums;
      if constexpr (tables > 1)  // each in a loop of its own, but for the last
        over_tables([&](auto g, auto table) {
          if constexpr (table.value < tables - 1)
            add_table<g.value>(sums, s, w, p_slope, dp, delta, head, row, my_key, of_keys, distances, consumer);
        });
      Diagonals diagonals = diagonals_of<tables - 1>(distances, consumer);
#pragma unroll
      for (int j = 0; j < queries / 8; ++j) {
        float d[2];
        ptx::load_pair(delta + 32 * j, d[0], d[1]);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = 4 * j + 2 * r;
          // From p as it is rounded, or p times the score's derivative, where that saves the registers.
          const uint32 both = Score::unit_slope ? w[i / 2] : dw[i / 2];
          const float p0 = queries == 128 ? widened_half<input>(both, 0) : s[i];
          const float p1 = queries == 128 ? widened_half<input>(both, 1) : s[i + 1];
          if constexpr (Config::has_dropout)
            dw[i / 2] = packed_ds(ds_of(p0, w[i / 2], 0, dp[i], d[0]), ds_of(p1, w[i / 2], 1, dp[i + 1], d[1]));
          else
            dw[i / 2] = packed_ds(p0 * (dp[i] - d[0]), p1 * (dp[i + 1] - d[1]));
          if constexpr (tables > 0)
            add_terms<tables - 1>(sums, j, r, s, w, p_slope, dp, d, head, row, my_key, of_keys[r], diagonals);
          else if constexpr (has_gradients)
            add_terms<-1>(sums, j, r, s, w, p_slope, dp, d, head, row, my_key, of_keys[r]);
        }
      }
      if constexpr (is_wide) ptx::named_barrier_sync(ds_ready + consumer, 128);  // dq of the tile before has read it
#pragma unroll
      for (int j = 0; j < queries / 8; j += 2) {
        const uint32 four[4] = {dw[2 * j], dw[2 * j + 1], dw[2 * j + 2], dw[2 * j + 3]};
        ptx::store_matrices(store_to + buffer + j / 8 * keys * 128 + ((j % 8 * 16 + store_column) ^ store_swizzle),
                            four);
      }
      ptx::fence_async_proxy();
      // All of ds that this consumer reads. Who is here has waited for its dq of the tile before, so that the buffer
      // of that tile may be overwritten.
      ptx::named_barrier_sync(is_wide ? ds_ready + consumer : ds_ready, is_wide ? 128 : 256);
      wgmma::fence();
      float dq[32];
      over_keys(dq, dq_a + buffer, dq_b);
      over_queries(dk, dw, q + my_columns);
      if constexpr (has_gradients) {
        sums.reduce();
        add_sums<false>(sums, head, row, my_key, consumer);
        if constexpr (tables > 0)
          over_tables([&](auto g, auto table) {
            if constexpr (table.value == tables - 1) add_diagonals<g.value>(diagonals, distances, head, consumer);
          });
      }
      wgmma::wait<1>();  // dq, and dv before it
      wgmma::keep_behind_wait(dq);
      wgmma::keep_behind_wait(dv);
      const bool stores = begins_turn(turn);
      float* const to = dq_of(head, query_tile, consumer);
      add(dq, to, stores);
      if constexpr (has_gradients) add_sums<true>(sums, head, row, my_key, consumer);
      if constexpr (is_wide) {  // the consumer's other columns
        wgmma::fence();
        over_keys(dq, dq_a, dq_b + keys * 128);
        wgmma::wait<0>();
        wgmma::keep_behind_wait(dq);
        add(dq, to + 32 * 128, stores);
      }
      end_turn(turn);
      wgmma::wait<0>();
      wgmma::keep_behind_wait(dk);
      warp_arrive(ring.empty(at.slot));
      if constexpr (!is_wide) buffer ^= ds_bytes;
      if (++head == end_head) head = first_head;
      at.advance();
    }
    if constexpr (makes_results<Config>) {
      static_assert(!is_wide && !Config::is_split, "a thread has whole heads of dk and dv");
      constexpr bool reduces_heads = Config::OfKeys::Epilogue::head_values > 0;  // with dv in registers it spills
      if constexpr (!reduces_heads)
        store_results<typename Config::OfKeys, Config::head, 1>(p.of_keys, dk, consumer, p.scale);
      store_results<typename Config::OfValues, Config::value_head, 2>(p.of_values, dv, consumer, Config::kept_factor);
      if constexpr (reduces_heads)
        store_results<typename Config::OfKeys, Config::head, 1>(p.of_keys, dk, consumer, p.scale);
    } else {
      store<Config::head>(p.dk, dk, my_key, is_wide ? consumer * 64 * own_chunks : 0, split, p.scale);
      store<Config::value_head>(p.dv, dv, my_key, is_wide ? consumer * 64 * own_value_chunks : 0, split,
                                Config::kept_factor);
    }
  }

  /// The columns that tiles with maps of dk or dv have of the first `count` of dq, dk and dv. Of: has_queries, has_keys
  /// and has_values, whose columns they have.
  template <class Of>
  __device__ __forceinline__ int columns_of(int count) const {
    const int heads = (Of::has_queries ? p.heads : 0) + (Of::has_keys && count > 1 ? p.key_heads : 0);
    return heads * Config::head + (Of::has_values && count > 2 ? p.key_heads * Config::value_head : 0);
  }

  /// Stores the maps of dk (1) or dv (2).
  template <class Of, int width, int which, class Arrays, int count>
  __device__ __forceinline__ void store_results(const Arrays& arrays, const float (&d)[count], int consumer,
                                                float factor) const {
    const int warp = 4 * consumer + static_cast<int>(threadIdx.x / 32 % 4);
    const long long tile = (static_cast<long long>(batch) * p.key_heads + key_head) * key_tiles() + key / keys;
    JoinedPlace place;
    place.batch = batch, place.batches = p.batch, place.row = key + 16 * warp, place.rows = p.keys;
    place.head = key_head, place.heads = p.key_heads, place.warp = tile * (keys / 16) + warp;
    place.column = columns_of<Of>(which) + key_head * width, place.columns = columns_of<Of>(3);
    Results<Of, input, width, count>::store(arrays, place, [&](int i) { return rounded_half<input>(d[i] * factor); });
  }

  /// Probabilities that are dropped become negative: sign(i, the sign bit of probability i).
  template <class Sign>
  __device__ __forceinline__ static void sign_dropped(uint32 bits, const int (&column_bits)[2], const Sign& sign) {
#pragma unroll
    for (int j = 0; j < queries / 8; ++j) {
      int row_bits[2];
      load_two(bits + 4 * (8 * j + 2 * (threadIdx.x % 4)), row_bits[0], row_bits[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sign(4 * j + i, sign_if_dropped<typename Config::Dropout>(row_bits[i % 2], column_bits[i / 2]));
    }
  }
  /// ds from p, or its product with the score's derivative; the sign of p in `word` says whether it is dropped.
  __device__ __forceinline__ static float ds_of(float p, uint32 word, int half, float dp, float delta) {
    // A score's kernel has p itself in the word alone; without one, whoever has p needs no word.
    const bool is_dropped = has_score ? (word & (half ? 0x80000000u : 0x8000u)) != 0 : __float_as_int(p) < 0;
    if constexpr (Score::unit_slope) p = fabsf(p);  // it may be p with its sign
    return p * (is_dropped ? -delta : fmaf(dp, Config::kept_factor, -delta));
  }

  /// Products become probabilities of their scores, also packed in w. Where the score's derivative is not 1, s, or dw
  /// packed, has their products with it; p_slope has those with its derivatives by arrays that depend on the product.
  __device__ __forceinline__ void probabilities_of_scores(float (&s)[registers], uint32 (&w)[words],
                                                          uint32 (&dw)[words], PSlope& p_slope, int head, int row,
                                                          int my_key, const ScoreWords<Score> (&of_keys)[2],
                                                          uint32 lse) const {
#pragma unroll
    for (int j = 0; j < queries / 8; ++j) {
      float l[2];
      ptx::load_pair(lse + 32 * j, l[0], l[1]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        float probability[2], products[of_product > 0 ? of_product : 1][2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int query = row + 8 * j + 2 * static_cast<int>(threadIdx.x % 4) + c, of_key = my_key + 8 * r;
          ScoreWords<Score> words = of_keys[r];
          words.template load<&ScoreArray::queries, true>(p, batch, head, query, of_key);
          const bool is_hidden = !Score::keeps_hidden && s[i + c] == masked_score;
          float slope = 1, score;
          if constexpr (Score::unit_slope)
            score = value_of(p, batch, head, s[i + c] * p.scale, query, of_key, words);
          else
            score = value_of(p, batch, head, s[i + c] * p.scale, query, of_key, words, slope);
          if constexpr (Config::has_bias) score += bias_of(head, query, of_key);
          probability[c] = is_hidden ? 0.0f : ptx::exp2_unit(fmaf(score, log2_e, -l[c]));
          if constexpr (of_product > 0) {
            float slopes[Score::gradients];
            slopes_of(p, batch, head, s[i + c] * p.scale, query, of_key, words, slopes);
            over_products([&](auto g, int at) {
              products[at][c] = probability[c] == 0 ? probability[c] : probability[c] * slopes[g.value];
            });
          }
          // A slope may be infinite where a key is hidden.
          s[i + c] = Score::unit_slope || probability[c] == 0 ? probability[c] : probability[c] * slope;
        }
        w[i / 2] = packed<input>(probability[0], probability[1]);
        if constexpr (!Score::unit_slope && queries == 128) dw[i / 2] = packed<input>(s[i], s[i + 1]);
        if constexpr (of_product > 0)
          over_products([&](auto, int at) { p_slope[at][i / 2] = packed_ds(products[at][0], products[at][1]); });
      }
    }
  }
  /// Gradients whose derivatives depend on the product, and their numbers among these.
  template <class F>
  __device__ __forceinline__ static void over_products(const F& f) {
    static_for<Score::gradients>([&](auto g) {
      if constexpr (Score::gradient[g.value].of_product) f(g, gradients_of_product<Score>(g.value));
    });
  }

  /// Adds the terms of two queries and a key to the sums of which the gradients of the score's arrays are made.
  /// Args:
  ///   table: the number of a table, whose sums are `diagonals`; -1 without any.
  ///   is_table_alone: whether nothing is added to others.
  template <int table, bool is_table_alone = false, class... OfTable>
  __device__ __forceinline__ void add_terms(Sums& sums, int j, int r, const float (&s)[registers],
                                            const uint32 (&w)[words], const PSlope& p_slope,
                                            const float (&dp)[registers], const float (&delta)[2], int head, int row,
                                            int my_key, const ScoreWords<Score>& of_key, OfTable&... diagonals) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int i = 4 * j + 2 * r + c, query = row + 8 * j + 2 * static_cast<int>(threadIdx.x % 4) + c;
      float probability = Score::unit_slope && queries != 128 ? s[i] : widened_half<input>(w[i / 2], c);
      if constexpr (Config::has_dropout) probability = fabsf(probability);
      const float of_p = Config::has_dropout ? ds_of(1, w[i / 2], c, dp[i], delta[c]) : dp[i] - delta[c];
      ScoreWords<Score> words = of_key;
      words.template load<&ScoreArray::queries, true>(p, batch, head, query, my_key + 8 * r);
      float slopes[Score::gradients];
      slopes_of(p, batch, head, 0, query, my_key + 8 * r, words, slopes);
      if constexpr (!is_table_alone)
        sums.add(j, r, c, probability * of_p, of_p, slopes,
                 [&](auto g) { return widened_half<input>(p_slope[gradients_of_product<Score>(g.value)][i / 2], c); });
      if constexpr (sizeof...(diagonals) > 0)
        over_tables([&](auto g, auto number) {
          const auto p_slope_of = [&](auto of) {
            return widened_half<input>(p_slope[gradients_of_product<Score>(of.value)][i / 2], c);
          };
          if constexpr (number.value == table)
            (diagonals.add(j, r, c, table_term<g.value>(probability * of_p, of_p, slopes, p_slope_of)), ...);
        });
    }
  }
  /// Adds all terms of a tile to the sums of one table's gradient.
  template <int g>
  __device__ __forceinline__ void add_table(Sums& sums, const float (&s)[registers], const uint32 (&w)[words],
                                            const PSlope& p_slope, const float (&dp)[registers], uint32 delta, int head,
                                            int row, int my_key, const ScoreWords<Score> (&of_keys)[2],
                                            const Distances& distances, int consumer) const {
    constexpr int table = gradients_of_tables<Score>(g);
    Diagonals diagonals = diagonals_of<table>(distances, consumer);
#pragma unroll
    for (int j = 0; j < queries / 8; ++j) {
      float d[2];
      ptx::load_pair(delta + 32 * j, d[0], d[1]);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        add_terms<table, true>(sums, j, r, s, w, p_slope, dp, d, head, row, my_key, of_keys[r], diagonals);
    }
    add_diagonals<g>(diagonals, distances, head, consumer);
  }
  /// A pair's term of the gradient of a table's entry.
  /// Args:
  ///   ds, of_p, slopes, p_slope_of: as `ScoreSums::add` has them.
  template <int g, class Slopes, class Products>
  __device__ __forceinline__ static float table_term(float ds, float of_p, const Slopes& slopes,
                                                     const Products& p_slope_of) {
    if constexpr (Score::gradient[g].of_product)
      return p_slope_of(Index<g>()) * of_p;
    else if constexpr (Score::gradient[g].of_one)
      return ds;
    else
      return ds != 0 ? ds * slopes[g] : 0;
  }
  /// Gradients of tables, and their numbers among these.
  template <class F>
  __device__ __forceinline__ static void over_tables(const F& f) {
    static_for<Score::gradients>([&](auto g) {
      if constexpr (Score::gradient[g.value].entries > 0) f(g, Index<gradients_of_tables<Score>(g.value)>());
    });
  }
  /// The distances of a warp's keys from a tile's queries.
  __device__ __forceinline__ Distances distances_of(int head, int row, int first_key, int consumer) const {
    Distances found;
    ScoreWords<Score> words;
    words.template load<&ScoreArray::queries, true>(p, batch, head, row, first_key);
    found.first = Score::place(row, first_key + 15, words.word);
    over_tables([&](auto g, auto table) {
      constexpr int size = Score::array[Score::gradient[g.value].array].entries;
      found.entry[table.value] = is_wide && consumer > 0 ? no_entry  // the other one adds
                                                         : p.entries.of[table.value][size + found.first / window_step];
    });
    return found;
  }
  template <int table>
  __device__ __forceinline__ Diagonals diagonals_of(const Distances& distances, int consumer) const {
    if constexpr (tables > 0) {
      const int warp = 4 * consumer + threadIdx.x / 32 % 4;
      return Diagonals(distances.entry[table] == several_entries, shared + diagonals_at + warp * Diagonals::bytes);
    } else {
      return {};
    }
  }
  template <int g>
  __device__ __forceinline__ void add_diagonals(const Diagonals& diagonals, const Distances& distances, int head,
                                                int consumer) const {
    constexpr int table = gradients_of_tables<Score>(g), entries = Score::gradient[g].entries;
    const long long tile = (static_cast<long long>(batch) * p.heads + head) * key_tiles() + key / keys;
    const int warp = 4 * consumer + threadIdx.x / 32 % 4;
    diagonals.add_to_memory(distances.entry[table], p.entries.of[table] + distances.first,
                            p.gradient.sums[g] + (tile * summing_warps + warp) * entries);
  }
  template <bool has_queries>
  __device__ __forceinline__ void add_sums(const Sums& sums, int head, int row, int my_key, int consumer) const {
    const int warp = 4 * consumer + threadIdx.x / 32 % 4;
    sums.template add_to_memory<has_queries>(p, static_cast<long long>(batch) * p.heads + head, key / keys, key_tiles(),
                                             row, my_key, warp);
  }

  /// float16 has no room for all cotangents: beyond it they are its largest.
  __device__ __forceinline__ static uint32 packed_ds(float low, float high) {
    if constexpr (input == DType::f16) {
      constexpr float largest = 65504.0f;
      low = low > largest ? largest : low < -largest ? -largest : low;  // NaN stays
      high = high > largest ? largest : high < -largest ? -largest : high;
    }
    return packed<input>(low, high);
  }

  __device__ __forceinline__ void add_bias(float (&s)[registers], int head, int row, int my_key) const {
#pragma unroll
    for (int i = 0; i < registers; ++i) {
      const int query = row + 8 * (i / 4) + 2 * static_cast<int>(threadIdx.x % 4) + i % 2;
      s[i] = fmaf(s[i], p.scale, bias_of(head, query, my_key + 8 * (i / 2 % 2)));
    }
  }
  __device__ __forceinline__ float bias_of(int head, int query, int of_key) const {
    const long long at = p.bias.index(batch, head, min(query, p.queries - 1), min(of_key, p.keys - 1));
    return load_word<Config::bias_type>(p.mask.bias, at).f;
  }

  /// Scores of a tile that is seen in part.
  __device__ __forceinline__ void hide(float (&s)[registers], int head, int row, int my_key, const int (&ids)[2],
                                       uint32 slot) const {
    const int lane_query = 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < queries / 8; ++j) {
      Seen<Config::has_second> seen[2];
      int id[2] = {};
      seen_by(seen, slot, 8 * j + lane_query, row);
      if constexpr (Config::has_ids) load_two(vector(slot, id_vector) + 4 * (8 * j + lane_query), id[0], id[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = i % 2, r = i / 2, of_key = my_key + 8 * r;
        bool is_seen = seen[c](of_key);
        if constexpr (Config::has_ids) is_seen = is_seen && id[c] == ids[r];
        if constexpr (Config::has_dense)
          is_seen = is_seen && p.mask.dense[p.dense.index(batch, head, min(row + 8 * j + lane_query + c, p.queries - 1),
                                                          min(of_key, p.keys - 1))] != 0;
        if (!is_seen) s[4 * j + i] = masked_score;
      }
    }
    if constexpr (has_arrays)
      if (CleanQueries::has_marks(marks(slot)) || CleanKeys::has_marks(key_marks())) mark(s, my_key, slot);
  }
  /// Scores of marked rows that are seen become NaN.
  __device__ __forceinline__ void mark(float (&s)[registers], int my_key, uint32 slot) const {
    const bool key_marked[2] = {CleanKeys::is_marked(key_marks(), my_key - key),
                                CleanKeys::is_marked(key_marks(), my_key - key + 8)};
#pragma unroll
    for (int j = 0; j < queries / 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const bool query_marked = CleanQueries::is_marked(marks(slot), 8 * j + 2 * (threadIdx.x % 4) + c);
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if ((query_marked || key_marked[r]) && s[4 * j + 2 * r + c] != masked_score) s[4 * j + 2 * r + c] = nan();
      }
  }
  /// The keys that two adjacent queries of a tile see.
  __device__ __forceinline__ void seen_by(Seen<Config::has_second> (&seen)[2], uint32 slot, int in_tile,
                                          int row) const {
    if constexpr (has_arrays) {
      const auto from = [&](int i) { return vector(slot, 2 + i) + 4 * in_tile; };
      load_two(from(0), seen[0].first, seen[1].first);
      load_two(from(1), seen[0].last, seen[1].last);
      if constexpr (Config::has_second) {
        load_two(from(2), seen[0].second_first, seen[1].second_first);
        load_two(from(3), seen[0].second_last, seen[1].second_last);
      }
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        seen[c].first = row + in_tile + c - p.left;
        seen[c].last = min(row + in_tile + c + p.right, p.keys - 1);
      }
    }
  }

  /// Waits for this CTA's turn; whether it is the first to add to the tile of queries.
  __device__ __forceinline__ bool begins_turn(RingPosition<turn_slots> turn) const {
    if constexpr (!deterministic) return false;
    turn_ring.wait_full(turn);
    return Step{ptx::load_word(rank_at(turn.slot))}.tile() == 0;
  }
  __device__ __forceinline__ void end_turn(RingPosition<turn_slots>& turn) const {
    if constexpr (!deterministic) return;
    warp_arrive(added(turn.slot));
    turn.advance();
  }
  /// Where a consumer's part of a tile of dq is: in the order of its registers, four a thread.
  __device__ __forceinline__ float* dq_of(int head, int query_tile, int consumer) const {
    const long long tile = (static_cast<long long>(batch) * p.heads + head) * query_tiles() + query_tile;
    return p.dq + (tile * 2 + consumer) * dq_part + threadIdx.x % 128 * 4;
  }
  /// Adds 64 x 64 of dq, or stores them.
  __device__ __forceinline__ static void add(const float (&dq)[32], float* to, bool stores) {
    if (stores) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        *reinterpret_cast<float4*>(to + i * 512) = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        ptx::add_in_memory(to + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
  }

  /// dk or dv: of a width, from a column on.
  template <int width, int count>
  __device__ __forceinline__ void store(void* to, const float (&d)[count], int my_key, int column, int split,
                                        float factor) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at_key = my_key + 8 * r;
      long long at = static_cast<long long>(batch) * p.keys + at_key;
      if constexpr (Config::is_split) at += static_cast<long long>(split) * p.batch * p.keys;
      at = (at * p.key_heads + key_head) * width;
      if constexpr (Config::is_split) {
        if (at_key >= p.keys) continue;
#pragma unroll
        for (int j = 0; j < count / 4; ++j)
          if (column + 8 * j < width)
            *reinterpret_cast<float2*>(static_cast<float*>(to) + at + column + 8 * j + 2 * (threadIdx.x % 4)) = {
                d[4 * j + 2 * r] * factor, d[4 * j + 2 * r + 1] * factor};
      } else {
        store_row<input, width, count>(at_key < p.keys ? static_cast<unsigned short*>(to) + at : nullptr, column,
                                       [&](int j, int c) { return d[4 * j + 2 * r + c] * factor; });
      }
    }
  }
};

template <class Config>
__device__ __forceinline__ void backward(const BackwardParams<Config>& params) {
  extern __shared__ unsigned char memory[];
  Backward<Config>(params, (ptx::shared_address(memory) + 1023) & ~1023u).run();
}

}  // namespace coda::attention
