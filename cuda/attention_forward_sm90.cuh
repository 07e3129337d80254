// Forward attention: y = softmax(scale q k^T + bias) v over the keys that a query sees (attention_masks.cuh), and the
// log-sum-exp of its scores. FlashAttention-2 (arXiv 2307.08691), in the schedule of FlashAttention-3 (2407.08608).
//
// A CTA has 64 queries of one head for each consumer warpgroup, and goes over the tiles of keys that they see, the last
// first. The producer loads tiles by TMA into two rings. A consumer's product of probabilities and values of one tile
// runs under its exponentials of the next one, and consumers take turns on the tensor cores. Probabilities stay in
// registers: the fragment of a result is that of a factor.
#pragma once

#include "attention_masks.cuh"

namespace coda::attention {

struct ForwardParams {
  ptx::TensorMap q, k, v;  // (columns, heads, rows, batch), boxes of 64 columns of one head
  unsigned short* y;       // (batch, queries, heads, value width)
  float* lse;              // (batch, heads, queries)
  Mask mask;
  int batch, queries, keys, heads, key_heads, padded_queries, padded_keys, tiles, words;
  int left, right;  // of a band
  Broadcast dense, bias;
  float scale;
};

/// Config: input, head, value_head (widths, multiples of 8), keys (of a tile), consumers, stages; has_arrays, and with
/// these has_second (intervals), has_ids, has_dense; has_bias and bias_type.
template <class Config>
struct Forward {
  static constexpr DType input = Config::input;
  static constexpr int consumers = Config::consumers, stages = Config::stages, keys = Config::keys;
  static constexpr int rows = 64 * consumers, threads = 128 * (1 + consumers);
  static constexpr int chunks = (Config::head + 63) / 64, value_chunks = (Config::value_head + 63) / 64;
  static constexpr int steps = (Config::head + 15) / 16;  // of a score's sum
  static constexpr int value_columns = value_chunks == 3 ? 256 : 64 * value_chunks;
  static constexpr int registers = keys / 2, words = keys / 4, outputs = value_columns / 2;
  static constexpr int consumer_registers = consumers == 3 ? 160 : 240, producer_registers = 32;
  static constexpr bool has_arrays = Config::has_arrays, scales_in_exponent = !Config::has_bias;

  static constexpr int q_bytes = rows * chunks * 128, k_bytes = keys * chunks * 128;
  static constexpr int v_bytes = keys * (value_columns / 64) * 128;
  static constexpr int k_at = q_bytes, v_at = k_at + stages * k_bytes, rings_at = v_at + stages * v_bytes;
  static constexpr int clean_at = rings_at + 2 * Ring<stages>::bytes + 8, marks_at = clean_at + 8 * stages + 8;
  static constexpr int mark_bytes = keys / 8;
  static constexpr int shared_bytes = marks_at + (has_arrays ? stages * mark_bytes : 0) + 1024;  // aligned to 1024
  using Clean = Cleaner<input, keys, value_columns / 64>;
  enum Warp { producer = 0, first_cleaner = 2 };

  const ForwardParams& p;
  const uint32 shared;
  const Ring<stages> k_ring, v_ring;
  const uint32 q_barrier;
  int head, batch, row;

  __device__ __forceinline__ Forward(const ForwardParams& p, uint32 shared)
      : p(p),
        shared(shared),
        k_ring{shared + rings_at},
        v_ring{shared + rings_at + Ring<stages>::bytes},
        q_barrier(shared + rings_at + 2 * Ring<stages>::bytes) {}

  __device__ __forceinline__ uint32 clean(uint32 slot) const { return shared + clean_at + 8 * slot; }
  __device__ __forceinline__ uint32 marks(uint32 slot) const { return shared + marks_at + mark_bytes * slot; }

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      k_ring.init(1, 4 * consumers);
      v_ring.init(1, 4 * consumers);
      ptx::mbarrier_init(q_barrier, 1);
      if constexpr (has_arrays)
        for (int slot = 0; slot < stages; ++slot) ptx::mbarrier_init(clean(slot), 2);
      ptx::mbarrier_init_fence();
    }
    // Heads fastest, so that those of one head of keys run together; of causal rows the longest first.
    int i = blockIdx.x;
    head = i % p.heads, i /= p.heads;
    batch = i % p.batch, i /= p.batch;
    row = (p.tiles - 1 - i) * rows;
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

  __device__ __forceinline__ Walk<has_arrays> walk() const {
    if constexpr (has_arrays)
      return Walk<true>(p.mask, static_cast<long long>(batch) * p.tiles + row / rows, p.words);
    else
      return Walk<false>(BandTiles(row, min(row + rows, p.queries) - 1, p.left, p.right, keys, p.keys));
  }

  __device__ __forceinline__ void produce() const {
    Walk<has_arrays> tiles = walk();
    RingPosition<stages> at;
    const int key_head = head / (p.heads / p.key_heads);
    if (!tiles.next()) return;
    ptx::mbarrier_arrive_expect(q_barrier, q_bytes);
#pragma unroll
    for (int c = 0; c < chunks; ++c) ptx::tma_load(shared + c * rows * 128, p.q, q_barrier, 64 * c, head, row, batch);
    do {
      load<chunks, k_bytes>(k_ring, at, p.k, k_at, key_head, tiles.tile);
      load<value_columns / 64, v_bytes>(v_ring, at, p.v, v_at, key_head, tiles.tile);
      at.advance();
    } while (tiles.next());
  }
  template <int chunks, int bytes>
  __device__ __forceinline__ void load(const Ring<stages>& ring, RingPosition<stages> at, const ptx::TensorMap& map,
                                       int offset, int key_head, int tile) const {
    ring.wait_empty(at);
    ptx::mbarrier_arrive_expect(ring.full(at.slot), bytes);
#pragma unroll
    for (int c = 0; c < chunks; ++c)
      ptx::tma_load(shared + offset + at.slot * bytes + c * keys * 128, map, ring.full(at.slot), 64 * c, key_head,
                    tile * keys, batch);
  }

  /// One of two warps: values of tiles that are seen in part.
  __device__ __forceinline__ void clean_values(int warp) const {
    Walk<has_arrays> tiles = walk();
    RingPosition<stages> at;
#pragma unroll 1
    while (tiles.next()) {
      v_ring.wait_full(at);
      if (tiles.is_partial()) {
        uint32 marked[Clean::own_words] = {};
        const uint32 tile = shared + v_at + at.slot * v_bytes;
        Clean::mark(tile, warp, marked);
        Clean::clear(tile, warp, marked);
        Clean::publish(marks(at.slot), warp, marked);
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(clean(at.slot));
      at.advance();
    }
  }

  __device__ __forceinline__ void my_turn(int consumer) const { ptx::named_barrier_sync(1 + consumer, 256); }
  __device__ __forceinline__ void next_turn(int consumer) const {
    ptx::named_barrier_arrive(1 + (consumer + 1 == consumers ? 0 : consumer + 1), 256);
  }

  __device__ __forceinline__ void scores(float (&s)[registers], int consumer, int slot) const {
    const uint32 q = shared + consumer * 64 * 128, k = shared + k_at + slot * k_bytes;
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
  __device__ __forceinline__ void release(const Ring<stages>& ring, int slot) const {
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(ring.empty(slot));
  }

  /// The keys that rows my_row and 8 more see.
  using SeenBy = Seen<Config::has_second>;
  __device__ __forceinline__ SeenBy seen_by(int query) const {
    if constexpr (has_arrays) {
      const int at = min(query, p.queries - 1);
      constexpr int count = Config::has_second ? 4 : 2;
      const int* of = p.mask.intervals + static_cast<long long>(batch) * count * p.padded_queries + at;
      if constexpr (Config::has_second)
        return {of[0], of[p.padded_queries], of[2 * p.padded_queries], of[3 * p.padded_queries]};
      else
        return {of[0], of[p.padded_queries], 0, 0};
    } else {
      return {query - p.left, min(query + p.right, p.keys - 1), 0, 0};
    }
  }

  __device__ __forceinline__ void add_bias(float (&s)[registers], int tile, int my_row) const {
    const int lane_key = tile * keys + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < registers; ++i) {
      const int query = min(my_row + 8 * (i / 2 % 2), p.queries - 1);
      const int key = min(lane_key + 8 * (i / 4) + i % 2, p.keys - 1);
      const Word bias = load_word<Config::bias_type>(p.mask.bias, p.bias.index(batch, head, query, key));
      s[i] = fmaf(s[i], p.scale, bias.f);
    }
  }

  /// Scores of a tile that is seen in part.
  __device__ __forceinline__ void hide(float (&s)[registers], int tile, int my_row, const SeenBy (&seen)[2],
                                       const int (&ids)[2], RingPosition<stages> at) const {
    const int lane_key = tile * keys + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < registers; ++i) {
      const int key = lane_key + 8 * (i / 4) + i % 2, r = i / 2 % 2;
      bool is_seen = seen[r](key);
      if constexpr (Config::has_ids) {
        is_seen = is_seen && p.mask.key_ids[static_cast<long long>(batch) * p.padded_keys + key] == ids[r];
      }
      if constexpr (Config::has_dense) {
        const int query = min(my_row + 8 * r, p.queries - 1);
        is_seen = is_seen && p.mask.dense[p.dense.index(batch, head, query, min(key, p.keys - 1))] != 0;
      }
      if (!is_seen) s[i] = masked_score;
    }
    if constexpr (has_arrays) {
      ptx::mbarrier_wait(clean(at.slot), at.phase);
      uint32 marked[keys / 32], any = 0;
#pragma unroll
      for (int word = 0; word < keys / 32; ++word) any |= marked[word] = ptx::load_word(marks(at.slot) + 4 * word);
      if (any != 0) {
#pragma unroll
        for (int i = 0; i < registers; ++i) {
          const int key = 8 * (i / 4) + i % 2 + 2 * (threadIdx.x % 4);
          if (s[i] != masked_score && (marked[i / 16] >> key % 32 & 1) != 0) s[i] = not_a_number();
        }
      }
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
      const float shift = -m * unit;
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
  __device__ __forceinline__ static void pack(const float (&s)[registers], uint32 (&w)[words]) {
#pragma unroll
    for (int i = 0; i < words; ++i) w[i] = packed_pair<input>(s[2 * i], s[2 * i + 1]);
  }

  __device__ __forceinline__ void consume(int consumer) const {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int my_row = row + 64 * consumer + 16 * warp + lane / 4;
    const float unit = scales_in_exponent ? p.scale * log2_e : log2_e;
    float s[registers], o[outputs], maximum[2] = {masked_score, masked_score}, total[2] = {0, 0}, factor[2];
    uint32 w[words];
#pragma unroll
    for (int i = 0; i < outputs; ++i) o[i] = 0;
    Walk<has_arrays> tiles = walk();
    if (tiles.next()) {
      const SeenBy seen[2] = {seen_by(my_row), seen_by(my_row + 8)};
      int ids[2] = {};
      if constexpr (Config::has_ids)
        for (int r = 0; r < 2; ++r)
          ids[r] =
              p.mask.query_ids[static_cast<long long>(batch) * p.padded_queries + min(my_row + 8 * r, p.queries - 1)];
      RingPosition<stages> at;
      if (consumer == consumers - 1) next_turn(consumer);
      ptx::mbarrier_wait(q_barrier, 0);
      k_ring.wait_full(at);
      my_turn(consumer);
      wgmma::fence();
      scores(s, consumer, at.slot);
      next_turn(consumer);
      wgmma::wait<0>();
      wgmma::keep_behind_wait(s);
      release(k_ring, at.slot);
      if constexpr (!scales_in_exponent) add_bias(s, tiles.tile, my_row);
      if (tiles.is_partial()) hide(s, tiles.tile, my_row, seen, ids, at);
      exponentials(s, maximum, total, factor, unit);
      pack(s, w);
#pragma unroll 1
      while (tiles.next()) {
        RingPosition<stages> next = at;
        next.advance();
        k_ring.wait_full(next);
        my_turn(consumer);
        wgmma::fence();
        scores(s, consumer, next.slot);
        v_ring.wait_full(at);
        sums(o, w, at.slot);
        next_turn(consumer);
        wgmma::wait<1>();
        wgmma::keep_behind_wait(s);
        release(k_ring, next.slot);
        if constexpr (!scales_in_exponent) add_bias(s, tiles.tile, my_row);
        if (tiles.is_partial()) hide(s, tiles.tile, my_row, seen, ids, next);
        exponentials(s, maximum, total, factor, unit);
        wgmma::wait<0>();
        wgmma::keep_behind_wait(o);
        release(v_ring, at.slot);
        pack(s, w);
#pragma unroll
        for (int i = 0; i < outputs; ++i) o[i] *= factor[i / 2 % 2];
        at = next;
      }
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
    }
    store(o, total, maximum, my_row, unit);
  }

  /// y of the tile and the rows' log-sum-exps: 0 and -infinity for a row that has seen nothing.
  __device__ __forceinline__ void store(const float (&o)[outputs], const float (&total)[2], const float (&maximum)[2],
                                        int my_row, float unit) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = my_row + 8 * r;
      if (query >= p.queries) continue;
      const bool has_seen = maximum[r] != masked_score || total[r] != total[r];
      const float inverse = 1.0f / total[r];
      unsigned short* to =
          p.y + ((static_cast<long long>(batch) * p.queries + query) * p.heads + head) * Config::value_head;
#pragma unroll
      for (int j = 0; j < Config::value_head / 8; ++j) {
        const uint32 pair = packed_pair<input>(o[4 * j + 2 * r] * inverse, o[4 * j + 2 * r + 1] * inverse);
        *reinterpret_cast<uint32*>(to + 8 * j + 2 * (threadIdx.x % 4)) = has_seen ? pair : 0;
      }
      if (threadIdx.x % 4 == 0)
        p.lse[(static_cast<long long>(batch) * p.heads + head) * p.queries + query] =
            has_seen ? (maximum[r] * unit + log2f(total[r])) / log2_e : -infinity();
    }
  }
};

template <class Config>
__device__ __forceinline__ void forward(const ForwardParams& params) {
  extern __shared__ unsigned char memory[];
  Forward<Config>(params, (ptx::shared_address(memory) + 1023) & ~1023u).run();
}

}  // namespace coda::attention
