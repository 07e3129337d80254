// Score functions, which coda_jax/attend/score/text.py generates: a score from a scaled product of a query and a key,
// its positions, and entries of arrays that are broadcastable to (batch, heads, queries, keys).
//
// A generated Score has: array[], its arrays, and their number `arrays`; `unit_slope`, whether its derivative by the
// product is 1; `keeps_hidden`, whether the score of a product that is far below all others is so, too; value(product,
// row, column, operand), where operand[i] is the entry of array i; and with a further argument also the derivative. In
// a backward kernel that makes gradients of arrays: gradient[], these, and their number `gradients`; slopes(product,
// row, column, operand, slope), the derivatives by them; and, if one is of a table that is read by distance, place(row,
// column, operand), the number of a distance in its array. With has_entries value and slopes take `ScoreEntries` behind
// operand: arrays that are tables, of which a function reads an entry whose number it computes.
#pragma once

#include "attention_masks.cuh"
#include "reductions_sm90.cuh"
#include "static_for.cuh"

namespace coda::attention {

/// A score of this or less hides its key: the rule of coda_jax/attend/score/program.py. A power of two, as
/// `masked_score` is.
constexpr float hidden_score = -0x1p96f;

/// An array of a score: its dtype, and the axes along which its entries differ; of a table their number.
struct ScoreArray {
  DType dtype = DType::f32;
  bool batch = false, heads = false, queries = false, keys = false;
  int entries = 0;
};

/// An array of a score of which the backward kernel makes the gradient; it has no axis of both queries and keys.
struct ScoreGradient {
  int array;
  bool of_product = false;  // the derivative by it depends on the product
  bool of_one = false;      // it is 1
  int entries = 0;          // of the table that an array by distance is made of: sums are by its entries
};

/// The place of gradient i among those whose derivatives depend on the product, or their number.
template <class Score>
constexpr int gradients_of_product(int i = Score::gradients) {
  int count = 0;
  if constexpr (Score::gradients > 0)
    for (int before = 0; before < i; ++before) count += Score::gradient[before].of_product;
  return count;
}

/// The place of gradient i among those of tables, or their number.
template <class Score>
constexpr int gradients_of_tables(int i = Score::gradients) {
  int count = 0;
  if constexpr (Score::gradients > 0)
    for (int before = 0; before < i; ++before) count += Score::gradient[before].entries > 0;
  return count;
}

/// The addresses of a score's arrays.
template <int count>
struct ScorePointers {
  const void* array[count];
};
template <>
struct ScorePointers<0> {};

/// The addresses of the sums of which the gradients are made, zeros before.
template <int count>
struct GradientPointers {
  float* sums[count];
};
template <>
struct GradientPointers<0> {};

/// The entries that distances read of the tables of which gradients are made, and those that windows of distances read,
/// as coda_jax/attend/score/distances.py has them.
template <int count>
struct EntryPointers {
  const int* of[count];
};
template <>
struct EntryPointers<0> {};
constexpr int window_step = 16, several_entries = -1, no_entry = -2;

/// In the place of a score that is the product itself.
struct NoScore {
  static constexpr int arrays = 0, gradients = 0;
  static constexpr bool unit_slope = true;
};
template <class Config>
struct ScoreOf {
  using Type = NoScore;
  static constexpr bool is_there = false;
};
template <class Config>
  requires requires { typename Config::Score; }
struct ScoreOf<Config> {
  using Type = typename Config::Score;
  static constexpr bool is_there = true;
};

/// Entries of a score's arrays for a pair.
template <class Score>
struct ScoreWords {
  Word word[Score::arrays > 0 ? Score::arrays : 1];

  /// Loads those of the arrays that have an axis, or have it not.
  template <bool ScoreArray::* axis, bool has_axis, class Params>
  __device__ __forceinline__ void load(const Params& p, int batch, int head, int query, int key) {
    if constexpr (Score::arrays > 0)
      static_for<Score::arrays>([&](auto i) {
        constexpr ScoreArray of = Score::array[i.value];
        if constexpr (of.*axis == has_axis && of.entries == 0) {
          long long at = of.batch ? batch : 0;
          if constexpr (of.heads) at = at * p.heads + head;
          if constexpr (of.queries) at = at * p.queries + min(query, p.queries - 1);
          if constexpr (of.keys) at = at * p.keys + min(key, p.keys - 1);
          word[i.value] = load_word<of.dtype>(p.score.array[i.value], at);
        }
      });
  }
};

/// Tables of a score, for a sequence and a head.
template <class Score, class Params>
struct ScoreEntries {
  const Params& p;
  int batch, head;

  /// An entry of table i; the nearest, where the index may be out of range.
  template <int i, bool is_inside>
  __device__ __forceinline__ Word at(int index) const {
    constexpr ScoreArray of = Score::array[i];
    if constexpr (!is_inside) index = min(max(index, 0), of.entries - 1);
    int before = of.batch ? batch : 0;
    if constexpr (of.heads) before = before * p.heads + head;
    return load_word<of.dtype>(p.score.array[i], static_cast<long long>(before) * of.entries + index);
  }
};

/// A score's value for a pair.
/// Args:
///   rest: a float for the derivative by the product, or none.
template <class Score, class Params, class... Rest>
__device__ __forceinline__ float value_of(const Params& p, int batch, int head, float product, int row, int column,
                                          const ScoreWords<Score>& words, Rest&... rest) {
  if constexpr (requires { Score::has_entries; })
    return Score::value(product, row, column, words.word, ScoreEntries<Score, Params>{p, batch, head}, rest...);
  else
    return Score::value(product, row, column, words.word, rest...);
}
/// Its derivatives by arrays.
template <class Score, class Params>
__device__ __forceinline__ void slopes_of(const Params& p, int batch, int head, float product, int row, int column,
                                          const ScoreWords<Score>& words, float (&slopes)[Score::gradients]) {
  if constexpr (requires { Score::has_entries; })
    Score::slopes(product, row, column, words.word, ScoreEntries<Score, Params>{p, batch, head}, slopes);
  else
    Score::slopes(product, row, column, words.word, slopes);
}

/// What a thread's pairs of a tile add to the gradients of a score's arrays, in the accumulator's order: query 8 j + c,
/// and key 8 r, of the lane's first ones.
///
/// A sum is kept for each entry that a thread has to itself: of an array without queries and keys for each warp and
/// tile of keys; with keys for each key; with queries for each query and warp. So no two threads add to one sum but for
/// those with queries, which are added in the turns of dq: in the order of one thread, or of the turns, and so always
/// in one. Those of tables are `DiagonalSums`.
template <class Score, int queries, int warps>
struct ScoreSums {};
template <class Score, int queries, int warps>
  requires(Score::gradients > 0)
struct ScoreSums<Score, queries, warps> {
  static constexpr int count = Score::gradients;
  static constexpr ScoreArray of(int i) { return Score::array[Score::gradient[i].array]; }
  static constexpr bool is_of_table(int i) { return Score::gradient[i].entries > 0; }
  static constexpr int size(int i) { return is_of_table(i) ? 0 : of(i).queries ? queries / 4 : of(i).keys ? 2 : 1; }
  static constexpr int first(int i) { return i == 0 ? 0 : first(i - 1) + size(i - 1); }

  float sum[first(count) > 0 ? first(count) : 1] = {};

  /// Adds a pair's terms.
  /// Args:
  ///   ds: the cotangent of its score; 0 where its key is hidden, whatever a slope is there.
  ///   dp: that of its probability.
  ///   slope: the derivatives that do not depend on the product.
  ///   p_slope(i): the probability times derivative i, where that does.
  template <class Products>
  __device__ __forceinline__ void add(int j, int r, int c, float ds, float dp, const float (&slope)[count],
                                      const Products& p_slope) {
    static_for<count>([&](auto i) {
      if constexpr (is_of_table(i.value)) return;
      float& to = sum[first(i.value) + (of(i.value).queries ? 2 * j + c : of(i.value).keys ? r : 0)];
      if constexpr (Score::gradient[i.value].of_product)
        to = fmaf(p_slope(i), dp, to);
      else if (ds != 0)
        to = fmaf(ds, slope[i.value], to);
    });
  }

  /// Sums over the lanes that have the same entries, while products run.
  __device__ __forceinline__ void reduce() {
    static_for<count>([&](auto i) {
      if constexpr (is_of_table(i.value)) return;
      float* const own = sum + first(i.value);
      if constexpr (of(i.value).queries) {
        float each[queries / 4];
#pragma unroll
        for (int v = 0; v < queries / 4; ++v) each[v] = own[v];
        combine_halving<Op::sum, queries / 4, 4>(threadIdx.x % 32, each);
#pragma unroll
        for (int v = 0; v < queries / 32; ++v) own[v] = each[v];
      } else if constexpr (of(i.value).keys) {
        own[0] = combine_lanes<Op::sum, 1 | 2>(own[0]), own[1] = combine_lanes<Op::sum, 1 | 2>(own[1]);
      } else {
        own[0] = combine_lanes<Op::sum, 31>(own[0]);
      }
    });
  }

  /// Adds the sums of arrays that have an axis of queries, or have it not, to those in memory.
  /// Args:
  ///   row, key: the first query of the tile, and the lane's first key.
  ///   warp: of those that have keys of their own; beyond `warps` nothing is added.
  template <bool has_queries, class Params>
  __device__ __forceinline__ void add_to_memory(const Params& p, long long head, int key_tile, int key_tiles, int row,
                                                int key, int warp) const {
    const int lane = threadIdx.x % 32;
    const bool adds = warp < warps;
    static_for<count>([&](auto i) {
      constexpr ScoreArray array = of(i.value);
      if constexpr (array.queries == has_queries && !is_of_table(i.value)) {
        float* const to = p.gradient.sums[i.value];
        const float* const own = sum + first(i.value);
        if constexpr (array.queries) {
          constexpr int each = queries / 32;  // of a lane
          const int at = (lane / 4 % 2 * 4 + lane / 8 % 2 * 2 + lane / 16) * each;
#pragma unroll
          for (int v = 0; v < each; ++v) {
            const int query = row + (at + v) / 2 * 8 + 2 * (lane % 4) + v % 2;
            ptx::add_in_memory_if(adds && query < p.queries, to + (head * warps + warp) * p.queries + query, own[v]);
          }
        } else if constexpr (array.keys) {
#pragma unroll
          for (int r = 0; r < 2; ++r)
            ptx::add_in_memory_if(adds && lane % 4 == 0 && key + 8 * r < p.keys, to + head * p.keys + key + 8 * r,
                                  own[r]);
        } else {
          ptx::add_in_memory_if(adds && lane == 0, to + (head * key_tiles + key_tile) * warps + warp, own[0]);
        }
      }
    });
  }
};

/// A warp's sums of a tile along its diagonals, for the gradient of a table whose index depends on the distance of
/// query and key alone: of 16 keys and all queries, in the accumulator's order. A thread has at most two pairs of a
/// diagonal, of keys 8 apart, and adds them up. If all distances of the tile read one entry, as most do in long
/// sequences, there is one sum of all; else those of threads go to shared memory, from which each lane takes other
/// diagonals. Sums of entries are a warp's own, so that all is added in one order.
template <int queries, bool are_there = true>
struct DiagonalSums {
  static constexpr int rows = queries / 8 + 1;  // of sums of threads, 8 queries each, twice: the first has 8 keys alone
  static constexpr int row_bytes = 4 * 33;      // so that 32 adjacent diagonals are in as many banks
  static constexpr int bytes = 2 * rows * row_bytes, count = queries + 15;

  float total[2] = {}, before[2] = {}, above[2] = {};
  const bool stores;
  const uint32 to;

  /// Args:
  ///   stores: whether the diagonals read several entries.
  ///   from: `bytes` of shared memory of this warp.
  __device__ __forceinline__ DiagonalSums(bool stores, uint32 from)
      : stores(stores), to(from + 4 * (threadIdx.x % 32)) {}

  /// Adds the value of query 8 j + c and key 8 r of the lane's first ones: all, by j, then by r.
  __device__ __forceinline__ void add(int j, int r, int c, float value) {
    if (r == 0) {
      above[c] = value;
    } else {
      end(j, c, before[c] + value);
      before[c] = above[c];
      if (j == queries / 8 - 1) end(j + 1, c, before[c]);
    }
  }

  /// Adds the sums to those of entries in memory.
  /// Args:
  ///   entry: what all distances read, or several_entries or no_entry.
  ///   entries: of each distance, from that of the first query and the last key on.
  ///   sums: the warp's own.
  __device__ __forceinline__ void add_to_memory(int entry, const int* entries, float* sums) const {
    const int lane = threadIdx.x % 32;
    if (entry == several_entries) {
      __syncwarp();
#pragma unroll 1
      for (int first = 0; first < count; first += 32) {
        const int at = first + lane, own = at < count ? entries[at] : no_entry;
        const uint32 of_entry = __match_any_sync(0xFFFFFFFFu, own);
        const float sum = over_lanes(of_entry, at < count ? diagonal(at) : 0);
        ptx::add_in_memory_if(own >= 0 && __ffs(of_entry) - 1 == lane, sums + max(own, 0), sum);
        __syncwarp();  // another lane may add to the same sum behind it
      }
    } else {
      const float sum = combine_lanes<Op::sum, 31>(total[0] + total[1]);
      ptx::add_in_memory_if(lane == 0 && entry >= 0, sums + max(entry, 0), sum);
    }
  }

 private:
  /// The sum of the thread's pairs on the diagonal of query 8 row + c and key 8 of its first ones.
  __device__ __forceinline__ void end(int row, int c, float value) {
    total[c] += value;
    ptx::store_word_if(stores, to + (c * rows + row) * row_bytes, __float_as_int(value));
  }
  /// The sum of a diagonal, counted from that of the first query and the last key: of each query modulo 8 one lane had
  /// it, whose key is one further each time, or 8 back, one row before.
  __device__ __forceinline__ float diagonal(int at) const {
    const int first_key = (7 - at) & 7, row = (at + first_key - 7) / 8;
    const uint32 same = to - 4 * (threadIdx.x % 32) + row * row_bytes + 16 * first_key,
                 back = same - row_bytes - 16 * 8;
    const bool has_same = row < rows, has_back = row > 0;
    float sum = 0;
#pragma unroll
    for (int query = 0; query < 8; ++query) {
      const bool is_back = first_key + query >= 8;
      const uint32 from = (is_back ? back : same) + 16 * query + 4 * (query / 2) + query % 2 * rows * row_bytes;
      if (is_back ? has_back : has_same) sum += __int_as_float(ptx::load_word(from));
    }
    return sum;
  }
  /// The sum of the values of some lanes, those of one entry, in one order; the first of them has it.
  __device__ __forceinline__ static float over_lanes(uint32 of_entry, float value) {
    const uint32 lane = threadIdx.x % 32;
    uint32 behind = of_entry & 0xFFFFFFFEu << lane;
    int place = __popc(of_entry & ((1u << lane) - 1));
#pragma unroll
    for (int step = 0; step < 5; ++step) {
      const int next = __ffs(behind);
      const float other = __shfl_sync(0xFFFFFFFFu, value, next > 0 ? next - 1 : lane);
      if (next > 0) value += other;
      behind &= __ballot_sync(0xFFFFFFFFu, place % 2 == 0);
      place /= 2;
    }
    return value;
  }
};

/// `DiagonalSums` of a kernel without tables: no sums.
template <int queries>
struct DiagonalSums<queries, false> {
  static constexpr int bytes = 0;
};

/// For scores: with a relative error of 2^-11. CUDA's tanhf branches, which ends the overlap of products with it.
CODA_DEVICE float tanh_approximate(float x) {
#ifdef __CUDACC__
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return tanhf(x);
#endif
}

}  // namespace coda::attention
