// Score functions, which coda_jax/attend/score/text.py generates: a score from a scaled product of a query and a key,
// its positions, and entries of arrays that are broadcastable to (batch, heads, queries, keys).
//
// A generated Score has: array[], its arrays, and their number `arrays`; `unit_slope`, whether its derivative by the
// product is 1; `keeps_hidden`, whether the score of a product that is far below all others is so, too; value(product,
// row, column, operand), where operand[i] is the entry of array i; and with a further argument also the derivative.
#pragma once

#include "attention_masks.cuh"
#include "static_for.cuh"

namespace coda::attention {

/// A score of this or less hides its key: the rule of coda_jax/attend/score/program.py. A power of two, as
/// `masked_score` is.
constexpr float hidden_score = -0x1p96f;

/// An array of a score: its dtype, and the axes along which its entries differ.
struct ScoreArray {
  DType dtype = DType::f32;
  bool batch = false, heads = false, queries = false, keys = false;
};

/// The addresses of a score's arrays.
template <int count>
struct ScorePointers {
  const void* array[count];
};
template <>
struct ScorePointers<0> {};

/// In the place of a score that is the product itself.
struct NoScore {
  static constexpr int arrays = 0;
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
        if constexpr (of.*axis == has_axis) {
          long long at = of.batch ? batch : 0;
          if constexpr (of.heads) at = at * p.heads + head;
          if constexpr (of.queries) at = at * p.queries + min(query, p.queries - 1);
          if constexpr (of.keys) at = at * p.keys + min(key, p.keys - 1);
          word[i.value] = load_word<of.dtype>(p.score.array[i.value], at);
        }
      });
  }
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
