// Forward attention: y = softmax(score(scale q k^T) + bias) v over the keys that a query sees (attention_masks.cuh),
// and the log-sum-exp of its scores. With sinks a row's sum has one more term; dropout is of what multiplies v.
// FlashAttention-2 (arXiv 2307.08691), in the schedule of FlashAttention-3 (2407.08608).
//
// A piece of work is a tile of queries of one head, 64 for each consumer warpgroup, and all tiles of keys that they
// see, the last first. CTAs are persistent and claim pieces (claims.cuh). The producer loads tiles by TMA into two
// rings. A consumer's product of probabilities and values of one tile runs under its exponentials of the next one, and
// consumers take turns on the tensor cores. Probabilities stay in registers: the fragment of a result is that of a
// factor.
#pragma once

#include "attention_results.cuh"
#include "attention_scores.cuh"
#include "claims.cuh"

namespace coda::attention {

template <class Config>
struct ForwardParams {
  ptx::TensorMap q, k, v;  // (columns, heads, rows, batch), boxes of 64 columns of one head
  unsigned short* y;       // (batch, queries, heads, value width)
  float* lse;              // (batch, heads, queries)
  int* claimed;            // how many pieces are claimed, 0
  Operands<Config::has_sinks, Config::has_dropout> mask;
  [[no_unique_address]] ScorePointers<ScoreOf<Config>::Type::arrays> score;
  [[no_unique_address]] Pointers<result_pointers<Config>()> results;  // beside y
  int batch, queries, keys, heads, key_heads;
  Broadcast dense, bias;
  int left, right;  // of a band
  int yields;       // whether a CTA ends when it has had its share of the pieces
  float scale;
};

/// Config: input, head, value_head (widths, multiples of 8), keys (of a tile), consumers, stages, q_stages; has_arrays,
/// and with these has_second (intervals), has_ids, has_dense; has_bias and bias_type; has_even_rows (the last two's);
/// has_sinks; kept_factor, 1 / (1 - rate of dropout); has_dropout, and with it Dropout; Score, if there is one; with
/// results beside y also what attention_results.cuh says.
template <class Config>
struct Forward {
  static constexpr DType input = Config::input;
  static constexpr int consumers = Config::consumers, stages = Config::stages, keys = Config::keys;
  static constexpr int rows = 64 * consumers, threads = 128 * (1 + consumers);
  static constexpr int chunks = (Config::head + 63) / 64,
                       value_chunks = value_chunks_of((Config::value_head + 63) / 64);
  static constexpr int steps = (Config::head + 15) / 16;  // of a score's sum
  static constexpr int registers = keys / 2, words = keys / 4, outputs = 32 * value_chunks;
  using Score = typename ScoreOf<Config>::Type;
  using Params = ForwardParams<Config>;
  static constexpr bool has_score = ScoreOf<Config>::is_there, has_arrays = Config::has_arrays;
  static constexpr bool scales_in_exponent = !Config::has_bias && !has_score;
  static constexpr float masked = has_score ? hidden_score : masked_score;
  static constexpr int consumer_registers = consumers == 3 ? 160 : has_arrays ? 232 : 240;
  static constexpr int producer_registers = consumers == 3 ? 32 : has_arrays ? 40 : 24;

  static constexpr int q_bytes = rows * chunks * 128, q_stages = Config::q_stages, k_bytes = keys * chunks * 128,
                       v_bytes = keys * value_chunks * 128;
  static constexpr int k_at = q_stages * q_bytes, v_at = k_at + stages * k_bytes, rings_at = v_at + stages * v_bytes;
  static constexpr int q_ring_at = rings_at + 2 * Ring<stages>::bytes, clean_at = q_ring_at + Ring<q_stages>::bytes;
  static constexpr int claims_at = clean_at + 8 * stages, steps_at = claims_at + Claims<1>::bytes;
  static constexpr int marks_at = steps_at + 4 * stages;
  static constexpr int mark_bytes = keys / 8,
                       ids_at = (marks_at + (has_arrays ? stages * mark_bytes : 0) + 15) / 16 * 16;
  static constexpr int id_bytes = Config::has_ids ? 4 * keys : 0;
  static constexpr int shared_bytes = ids_at + stages * id_bytes + 1024;  // aligned to 1024
  using Clean = Cleaner<input, keys, value_chunks, 2>;
  enum Warp { producer = 0, first_cleaner = 2 };
  static_assert(Config::shared_bytes == shared_bytes, "shared_bytes is not what the kernel takes");

  const Params& p;
  const uint32 shared;
  const Ring<stages> k_ring, v_ring;
  const Ring<q_stages> q_ring;
  const Claims<1> claims;

  __device__ __forceinline__ Forward(const Params& p, uint32 shared)
      : p(p),
        shared(shared),
        k_ring{shared + rings_at},
        v_ring{shared + rings_at + Ring<stages>::bytes},
        q_ring{shared + q_ring_at},
        claims{shared + claims_at} {}

  __device__ __forceinline__ uint32 clean(uint32 slot) const { return shared + clean_at + 8 * slot; }
  __device__ __forceinline__ uint32 ids(uint32 slot) const { return shared + ids_at + id_bytes * slot; }
  __device__ __forceinline__ uint32 step(uint32 slot) const { return shared + steps_at + 4 * slot; }
  __device__ __forceinline__ Step step_at(RingPosition<stages> at) const {
    k_ring.wait_full(at);
    return {ptx::load_word(step(at.slot))};
  }
  __device__ __forceinline__ uint32 marks(uint32 slot) const { return shared + marks_at + mark_bytes * slot; }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      k_ring.init(1, arriving_lanes * 4 * consumers);
      v_ring.init(1, arriving_lanes * (4 * consumers + (has_arrays ? 2 : 0)));
      q_ring.init(1, arriving_lanes * 4 * consumers);
      claims.init();
      if constexpr (has_arrays)
        for (int slot = 0; slot < stages; ++slot) ptx::mbarrier_init(clean(slot), 2 * arriving_lanes);
      ptx::mbarrier_init_fence();
      for (const ptx::TensorMap* map : {&p.q, &p.k, &p.v}) ptx::tma_prefetch_map(*map);
    }
    __syncthreads();
    ptx::wait_for_earlier_kernels();
    ptx::launch_dependents();
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      ptx::registers_decrease<producer_registers>();
      const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
      if (threadIdx.x == 0) produce();
      if (has_arrays && warp >= first_cleaner) clean_values(warp - first_cleaner);
    } else {
      ptx::registers_increase<consumer_registers>();
      consume(warpgroup - 1);
    }
  }

  __device__ __forceinline__ int tiles() const { return tiles_of(p.queries, rows); }

  struct Piece {
    int head, batch, row;
  };
  __device__ __forceinline__ Piece piece(int number) const {
    const int rest = number / p.heads, batch = rest / tiles();
    return {number - rest * p.heads, batch, (rest - batch * tiles()) * rows};
  }
  /// The number of the i-th piece. Heads fastest, so that those of one head of keys run together; the longest first.
  __device__ __forceinline__ int number_of(int i) const {
    const int rest = i / p.heads, head = i - rest * p.heads;
    if constexpr (has_arrays) return p.mask.order[rest] * p.heads + head;
    const int tile = rest / p.batch;
    return ((rest - tile * p.batch) * tiles() + tiles() - 1 - tile) * p.heads + head;
  }
  __device__ __forceinline__ int pieces() const { return p.heads * p.batch * tiles(); }

  __device__ __forceinline__ Walk<has_arrays> walk(const Piece& at) const {
    if constexpr (has_arrays)
      return Walk<true>(p.mask, static_cast<long long>(at.batch) * tiles() + at.row / rows,
                        tiles_of(tiles_of(p.keys, keys), 32));
    else
      return Walk<false>(BandTiles(at.row, min(at.row + rows, p.queries) - 1, p.left, p.right, keys, p.keys));
  }

  __device__ __forceinline__ void produce() const {
    const int grid = gridDim.x, most = p.yields ? (pieces() + grid - 1) / grid : pieces();
    RingPosition<stages> at;
    RingPosition<q_stages> q_at;
    int next = blockIdx.x, end = 0;
#pragma unroll 1
    for (int i = 0; i < most && next < pieces(); ++i) {
      const int claimed = number_of(next);
      // One piece ahead, so that the answer is there in time.
      if (i + 1 < most) next = grid + atomicAdd(p.claimed, 1);
      const Piece work = piece(claimed);
      Walk<has_arrays> tiles = walk(work);
      bool has_more = tiles.next();
      claims.send(i, 2 * claimed + has_more);
      q_ring.wait_empty(q_at);
      ptx::mbarrier_arrive_expect(q_ring.full(q_at.slot), q_bytes);
#pragma unroll
      for (int c = 0; c < chunks; ++c)
        ptx::tma_load(shared + q_at.slot * q_bytes + c * rows * 128, p.q, q_ring.full(q_at.slot), 64 * c, work.head,
                      work.row, work.batch);
      q_at.advance();
      const int key_head = work.head / (p.heads / p.key_heads);
#pragma unroll 1
      while (has_more) {
        const int tile = tiles.tile;
        const bool is_partial = tiles.is_partial();
        has_more = tiles.next();
        k_ring.wait_empty(at);
        ptx::store_word(step(at.slot), Step::of(tile, is_partial, !has_more).word);
        load<chunks, k_bytes, id_bytes>(k_ring, at, p.k, k_at, key_head, tile, work.batch);
        if constexpr (Config::has_ids)
          ptx::bulk_load(ids(at.slot),
                         p.mask.key_ids + static_cast<long long>(work.batch) * padded(p.keys) + tile * keys, id_bytes,
                         k_ring.full(at.slot));
        v_ring.wait_empty(at);
        load<value_chunks, v_bytes, 0>(v_ring, at, p.v, v_at, key_head, tile, work.batch);
        at.advance();
      }
      end = i + 1;
    }
    claims.send(end, -1);
  }
  template <int chunks, int bytes, int bytes_beside>
  __device__ __forceinline__ void load(const Ring<stages>& ring, RingPosition<stages> at, const ptx::TensorMap& map,
                                       int offset, int key_head, int tile, int batch) const {
    ptx::mbarrier_arrive_expect(ring.full(at.slot), bytes + bytes_beside);
#pragma unroll
    for (int c = 0; c < chunks; ++c)
      ptx::tma_load(shared + offset + at.slot * bytes + c * keys * 128, map, ring.full(at.slot), 64 * c, key_head,
                    tile * keys, batch);
  }

  /// One of two warps: values of tiles that are seen in part.
  __device__ __forceinline__ void clean_values(int warp) const {
    RingPosition<stages> at;
#pragma unroll 1
    for (int i = 0;; ++i) {
      const int claimed = claims.wait(i);
      if (claimed < 0) break;
      Walk<has_arrays> tiles = walk(piece(claimed / 2));
#pragma unroll 1
      while (tiles.next()) {
        v_ring.wait_full(at);
        if (tiles.is_partial()) {
          const uint32 tile = shared + v_at + at.slot * v_bytes;
          Clean::begin(marks(at.slot), warp);
          Clean::mark(tile, marks(at.slot), warp);
          Clean::clear(tile, marks(at.slot), warp);
        }
        warp_arrive(clean(at.slot));
        warp_arrive(v_ring.empty(at.slot));
        at.advance();
      }
    }
  }

  __device__ __forceinline__ void my_turn(int consumer) const { ptx::named_barrier_sync(1 + consumer, 256); }
  __device__ __forceinline__ void next_turn(int consumer) const {
    ptx::named_barrier_arrive(1 + (consumer + 1 == consumers ? 0 : consumer + 1), 256);
  }

  __device__ __forceinline__ void scores(float (&s)[registers], int consumer, int q_slot, int slot) const {
    const uint32 q = shared + q_slot * q_bytes + consumer * 64 * 128, k = shared + k_at + slot * k_bytes;
#pragma unroll
    for (int step = 0; step < steps; ++step)
      wgmma::multiply<input, input, 0, 0>(s, wgmma::descriptor(q + step / 4 * rows * 128 + step % 4 * 32),
                                          wgmma::descriptor(k + step / 4 * keys * 128 + step % 4 * 32), step > 0);
    wgmma::commit();
  }
  __device__ __forceinline__ void sums(float (&o)[outputs], const uint32 (&w)[words], int slot) const {
    const uint32 v = shared + v_at + slot * v_bytes;
#pragma unroll
    for (int step = 0; step < keys / 16; ++step)
      wgmma::multiply_fragment<input, 1>(o, w + 4 * step, wgmma::descriptor<keys>(v + step * 16 * 128), 1);
    wgmma::commit();
  }
  /// After ids in a slot of keys have been read by ordinary loads: TMA would refill it under them without the fence.
  __device__ __forceinline__ void release_ids(int slot) const {
    ptx::fence_async_proxy();
    warp_arrive(k_ring.empty(slot));
  }

  /// The keys that a query sees.
  using SeenBy = Seen<Config::has_second>;
  __device__ __forceinline__ SeenBy seen_by(int query, int batch) const {
    if constexpr (has_arrays) {
      const int at = min(query, p.queries - 1);
      constexpr int count = Config::has_second ? 4 : 2;
      const int* of = p.mask.intervals + static_cast<long long>(batch) * count * padded(p.queries) + at;
      if constexpr (Config::has_second)
        return {of[0], of[padded(p.queries)], of[2 * padded(p.queries)], of[3 * padded(p.queries)]};
      else
        return {of[0], of[padded(p.queries)], 0, 0};
    } else {
      return {query - p.left, min(query + p.right, p.keys - 1), 0, 0};
    }
  }

  /// The score function of scaled products.
  __device__ __forceinline__ void apply_score(float (&s)[registers], int tile, int my_row, const Piece& work,
                                              const ScoreWords<Score> (&of_rows)[2]) const {
    const int lane_key = tile * keys + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < keys / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2, row = my_row + 8 * r, key = lane_key + 8 * j + i % 2;
        ScoreWords<Score> words = of_rows[r];
        words.template load<&ScoreArray::keys, true>(p, work.batch, work.head, row, key);
        s[4 * j + i] = value_of(p, work.batch, work.head, s[4 * j + i] * p.scale, row, key, words);
      }
  }
  __device__ __forceinline__ void add_bias(float (&s)[registers], int tile, int my_row, const Piece& work) const {
    const int lane_key = tile * keys + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const long long row = p.bias.index(work.batch, work.head, min(my_row + 8 * r, p.queries - 1), 0);
#pragma unroll
      for (int j = 0; j < keys / 8; ++j) {
        Word bias[2];
        p.bias.template load_keys<Config::bias_type, Config::has_even_rows>(p.mask.bias, row, lane_key + 8 * j, bias);
#pragma unroll
        for (int c = 0; c < 2; ++c)
          s[4 * j + 2 * r + c] = fmaf(s[4 * j + 2 * r + c], has_score ? 1.0f : p.scale, bias[c].f);
      }
    }
  }

  /// Scores of a tile that is seen in part.
  __device__ __forceinline__ void hide(float (&s)[registers], int tile, int my_row, const Piece& work,
                                       const SeenBy (&seen)[2], const int (&query_ids)[2], int slot) const {
    if constexpr (!Config::has_second && !Config::has_ids && !Config::has_dense) {
      const int last_key = tile * keys + keys - 1;
      const bool has_all = seen[0].has_all(tile * keys, last_key) && seen[1].has_all(tile * keys, last_key);
      if (__all_sync(0xFFFFFFFFu, has_all)) return;  // other rows of the tile do not see all
    }
    const int lane_key = tile * keys + 2 * (threadIdx.x % 4);
    long long dense_row[2];
    if constexpr (Config::has_dense)
      for (int r = 0; r < 2; ++r)
        dense_row[r] = p.dense.index(work.batch, work.head, min(my_row + 8 * r, p.queries - 1), 0);
#pragma unroll
    for (int j = 0; j < keys / 8; ++j) {
      int key_ids[2] = {};
      Word dense[2][2];
      if constexpr (Config::has_dense)
        for (int r = 0; r < 2; ++r)
          p.dense.template load_keys<DType::pred, Config::has_even_rows>(p.mask.dense, dense_row[r], lane_key + 8 * j,
                                                                         dense[r]);
      if constexpr (Config::has_ids) load_two(ids(slot) + 4 * (8 * j + 2 * (threadIdx.x % 4)), key_ids[0], key_ids[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = lane_key + 8 * j + i % 2, r = i / 2;
        bool is_seen = seen[r](key);
        if constexpr (Config::has_ids) is_seen = is_seen && key_ids[i % 2] == query_ids[r];
        if constexpr (Config::has_dense) is_seen = is_seen && dense[r][i % 2].i != 0;
        if (!is_seen) s[4 * j + i] = masked;
      }
    }
  }
  /// Probabilities of a tile that is seen in part, when its values are clean: those of marked rows become NaN.
  __device__ __forceinline__ void mark(uint32 (&w)[words], RingPosition<stages> at) const {
    v_ring.wait_full(at);  // until the cleaners have done with the slot's use before, whose parity is the other
    ptx::mbarrier_wait(clean(at.slot), at.phase);
    if (!Clean::has_marks(marks(at.slot))) return;
    constexpr uint32 seen = Config::has_dropout ? 0x7FFF : 0xFFFF;  // what is not seen may be -0
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const int key = 8 * (i / 2) + 2 * (threadIdx.x % 4);
      if ((w[i] & seen) != 0 && Clean::is_marked(marks(at.slot), key)) w[i] |= 0x7FFFu;
      if ((w[i] >> 16 & seen) != 0 && Clean::is_marked(marks(at.slot), key + 1)) w[i] |= 0x7FFF0000u;
    }
  }

  /// s becomes exp(s - maximum), of a score that is s `unit` in powers of 2; `factor` is that of earlier sums.
  __device__ __forceinline__ void exponentials(float (&s)[registers], float (&maximum)[2], float (&total)[2],
                                               float (&factor)[2], float unit) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = maximum[r];
#pragma unroll
      for (int j = 0; j < keys / 8; ++j) m = fmaxf(m, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFu, m, 2));
      factor[r] = ptx::exp2_unit((maximum[r] - m) * unit);
      maximum[r] = m;
      // A row that has seen nothing yet has no probabilities either: marked rows would make NaN of them.
      const float shift = m == masked ? -infinity() : -m * unit;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < keys / 4; ++j) {
        float& one = s[4 * (j / 2) + 2 * r + j % 2];
        one = ptx::exp2_unit(fmaf(one, unit, shift));
        sum += one;
      }
      total[r] = fmaf(total[r], factor[r], sum);
    }
  }
  /// Probabilities that are dropped become negative: they are in the row's sum, and `mark` finds them.
  __device__ __forceinline__ void sign_dropped(float (&s)[registers], const int (&row_bits)[2], int tile) const {
    const int* of_lane = p.mask.column_bits + tile * keys + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int j = 0; j < keys / 8; ++j) {
      const int2 column_bits = *reinterpret_cast<const int2*>(of_lane + 8 * j);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        s[4 * j + i] = signed_if_dropped<typename Config::Dropout>(s[4 * j + i], row_bits[i / 2],
                                                                   i % 2 == 0 ? column_bits.x : column_bits.y);
    }
  }
  __device__ __forceinline__ static void drop(uint32 (&w)[words]) {
#pragma unroll
    for (int i = 0; i < words; ++i) w[i] = without_negatives<input>(w[i]);
  }
  __device__ __forceinline__ static void pack(const float (&s)[registers], uint32 (&w)[words]) {
#pragma unroll
    for (int i = 0; i < words; ++i) w[i] = packed<input>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void consume(int consumer) const {
    RingPosition<stages> at;
    RingPosition<q_stages> q_at;
    if (consumer == consumers - 1) next_turn(consumer);
#pragma unroll 1
    for (int i = 0;; ++i) {
      const int claimed = claims.wait(i);
      if (claimed < 0) break;
      attend(consumer, piece(claimed / 2), claimed % 2 != 0, at, q_at);
    }
  }

  __device__ __forceinline__ void attend(int consumer, const Piece& work, bool has_tiles, RingPosition<stages>& at,
                                         RingPosition<q_stages>& q_at) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int my_row = work.row + 64 * consumer + 16 * warp + lane / 4;
    const float unit = scales_in_exponent ? p.scale * log2_e : log2_e;
    float s[registers], o[outputs], maximum[2] = {masked, masked}, total[2] = {0, 0}, factor[2];
    uint32 w[words];
#pragma unroll
    for (int i = 0; i < outputs; ++i) o[i] = 0;
    q_ring.wait_full(q_at);
    if (!has_tiles) {
      warp_arrive(q_ring.empty(q_at.slot));
    } else {
      const SeenBy seen[2] = {seen_by(my_row, work.batch), seen_by(my_row + 8, work.batch)};
      int query_ids[2] = {};
      if constexpr (Config::has_ids)
        for (int r = 0; r < 2; ++r)
          query_ids[r] = p.mask.query_ids[static_cast<long long>(work.batch) * padded(p.queries) +
                                          min(my_row + 8 * r, p.queries - 1)];
      int row_bits[2] = {};
      if constexpr (Config::has_dropout)
        for (int r = 0; r < 2; ++r) row_bits[r] = p.mask.row_bits[begin(work) + min(my_row + 8 * r, p.queries - 1)];
      ScoreWords<Score> of_rows[2];  // what is the same for all keys
      if constexpr (has_score)
        for (int r = 0; r < 2; ++r)
          of_rows[r].template load<&ScoreArray::keys, false>(p, work.batch, work.head, my_row + 8 * r, 0);
      Step step = step_at(at);
      my_turn(consumer);
      wgmma::fence();
      scores(s, consumer, q_at.slot, at.slot);
      next_turn(consumer);
      wgmma::wait<0>();
      wgmma::keep_behind_wait(s);
      if constexpr (!Config::has_ids) warp_arrive(k_ring.empty(at.slot));
      if (step.is_last()) warp_arrive(q_ring.empty(q_at.slot));
      if constexpr (has_score) apply_score(s, step.tile(), my_row, work, of_rows);
      if constexpr (Config::has_bias) add_bias(s, step.tile(), my_row, work);
      if (step.is_partial()) hide(s, step.tile(), my_row, work, seen, query_ids, at.slot);
      if constexpr (Config::has_ids) release_ids(at.slot);
      exponentials(s, maximum, total, factor, unit);
      if constexpr (Config::has_dropout) sign_dropped(s, row_bits, step.tile());
      pack(s, w);
#pragma unroll 1
      while (!step.is_last()) {
        RingPosition<stages> next = at;
        next.advance();
        if constexpr (has_arrays)
          if (step.is_partial()) mark(w, at);
        if constexpr (Config::has_dropout) drop(w);
        step = step_at(next);
        my_turn(consumer);
        wgmma::fence();
        scores(s, consumer, q_at.slot, next.slot);
        v_ring.wait_full(at);
        sums(o, w, at.slot);
        next_turn(consumer);
        wgmma::wait<1>();
        wgmma::keep_behind_wait(s);
        if constexpr (!Config::has_ids) warp_arrive(k_ring.empty(next.slot));
        if (step.is_last()) warp_arrive(q_ring.empty(q_at.slot));
        if constexpr (has_score) apply_score(s, step.tile(), my_row, work, of_rows);
        if constexpr (Config::has_bias) add_bias(s, step.tile(), my_row, work);
        if (step.is_partial()) hide(s, step.tile(), my_row, work, seen, query_ids, next.slot);
        if constexpr (Config::has_ids) release_ids(next.slot);
        exponentials(s, maximum, total, factor, unit);
        if constexpr (Config::has_dropout) sign_dropped(s, row_bits, step.tile());
        wgmma::wait<0>();
        wgmma::keep_behind_wait(o);
        warp_arrive(v_ring.empty(at.slot));
        pack(s, w);
#pragma unroll
        for (int i = 0; i < outputs; ++i) o[i] *= factor[i / 2 % 2];
        at = next;
      }
      if constexpr (has_arrays)
        if (step.is_partial()) mark(w, at);
      if constexpr (Config::has_dropout) drop(w);
      v_ring.wait_full(at);
      wgmma::fence();
      sums(o, w, at.slot);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        total[r] += __shfl_xor_sync(0xFFFFFFFFu, total[r], 1);
        total[r] += __shfl_xor_sync(0xFFFFFFFFu, total[r], 2);
      }
      wgmma::wait<0>();
      wgmma::keep_behind_wait(o);
      warp_arrive(v_ring.empty(at.slot));
      at.advance();
    }
    q_at.advance();
    if constexpr (Config::has_sinks) add_sink(o, total, maximum, work, unit);
    store(o, total, maximum, my_row, work, unit);
  }

  /// The index of a head's first row in arrays (batch, heads, queries).
  __device__ __forceinline__ long long begin(const Piece& work) const {
    return (static_cast<long long>(work.batch) * p.heads + work.head) * p.queries;
  }
  /// The last term of each row's sum, that of a score without a value. Rows that have seen nothing have no more.
  __device__ __forceinline__ void add_sink(float (&o)[outputs], float (&total)[2], float (&maximum)[2],
                                           const Piece& work, float unit) const {
    const float sink = p.mask.sinks[work.batch * p.heads + work.head] * log2_e;
    if (sink <= masked * unit) return;  // -infinity: there is none
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = maximum[r] * unit, most = fmaxf(before, sink), factor = ptx::exp2_unit(before - most);
      total[r] = fmaf(total[r], factor, ptx::exp2_unit(sink - most));
      maximum[r] = most / unit;
#pragma unroll
      for (int j = 0; j < outputs / 2; ++j) {
        float& one = o[4 * (j / 2) + 2 * r + j % 2];
        one = factor == 0 ? 0 : one * factor;
      }
    }
  }

  /// y of the tile and the rows' log-sum-exps: 0 for a row that has seen nothing, and its sink or -infinity.
  __device__ __forceinline__ void store(const float (&o)[outputs], const float (&total)[2], const float (&maximum)[2],
                                        int my_row, const Piece& work, float unit) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = my_row + 8 * r;
      const bool has_seen = maximum[r] != masked || total[r] != total[r];
      const float inverse = has_seen ? Config::kept_factor / total[r] : 0.0f;
      unsigned short* to =
          p.y + ((static_cast<long long>(work.batch) * p.queries + query) * p.heads + work.head) * Config::value_head;
      if constexpr (keeps_result<Config>())
        store_row<input, Config::value_head, outputs>(query < p.queries ? to : nullptr, 0, [&](int j, int c) {
          return has_seen ? o[4 * j + 2 * r + c] * inverse : 0.0f;
        });
      if (threadIdx.x % 4 == 0 && query < p.queries)
        p.lse[(static_cast<long long>(work.batch) * p.heads + work.head) * p.queries + query] =
            has_seen ? (maximum[r] * unit + log2f(total[r])) / log2_e : -infinity();
    }
    if constexpr (has_results<Config>) store_results(o, total, maximum, my_row, work);
  }

  /// Stores the maps of y, which see it as it is stored.
  __device__ __forceinline__ void store_results(const float (&o)[outputs], const float (&total)[2],
                                                const float (&maximum)[2], int my_row, const Piece& work) const {
    float inverse[2];
    bool has_seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      has_seen[r] = maximum[r] != masked || total[r] != total[r];
      inverse[r] = has_seen[r] ? Config::kept_factor / total[r] : 0.0f;
    }
    const int row = my_row - static_cast<int>(threadIdx.x % 32 / 4);
    const long long tile = (static_cast<long long>(work.batch) * p.heads + work.head) * tiles() + work.row / rows;
    const FragmentPlace place = {
        work.batch, p.batch, row, p.queries, work.head, p.heads, tile * (rows / 16) + (row - work.row) / 16};
    Results<Config, input, Config::value_head, outputs>::store(p.results, place, [&](int i) {
      const int r = i / 2 % 2;
      return rounded_half<input>(has_seen[r] ? o[i] * inverse[r] : 0.0f);
    });
  }
};

template <class Config>
__device__ __forceinline__ void forward(const ForwardParams<Config>& params) {
  extern __shared__ unsigned char memory[];
  Forward<Config>(params, (ptx::shared_address(memory) + 1023) & ~1023u).run();
}

}  // namespace coda::attention
