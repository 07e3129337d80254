// The kernels of attention as their launches call them. The test defines Tiles, the Config of both.
#include "threads.h"  // first: it is compiled already
// clang-format does not sort what follows in front of it.
#include "attention_backward_sm90.cuh"
#include "attention_forward_sm90.cuh"
#include "attention_passes.cuh"

using namespace coda;
#include "tiles.h"

namespace coda::attention {
unsigned char memory[1];  // shared: ptx::shared_address knows where it is
}

/// As tests/attention_cases.py has it.
struct Problem {
  int batch, queries, keys, heads, key_heads, left, right, splits;
  int dense_sizes[4], bias_sizes[4];
  float scale;
  emulated::Schedule schedule;
  const unsigned short *q, *k, *v, *dy;
  const float* dlse;
  unsigned short* y;
  float* lse;
  int* claimed;
  const int *intervals, *query_ids, *key_ids;
  const unsigned *needed, *full;
  const int* order;
  const unsigned *needed_rows, *full_rows, *needed_keys;
  const int *order_of_keys, *positions;
  const unsigned char* dense;
  const void* bias;
  const float* sinks;
  const int *row_bits, *padded_row_bits, *column_bits;
  float *lse_2, *delta, *sums;
  int* turns;
  void *dk, *dv;
  unsigned short* dq;
  const void* score_arrays[4];
  float* gradient_sums[4];
  const int* entries[4];
  void* results[8];
  void *of_queries[16], *of_keys[16], *of_values[16];
  int columns;

  ptx::TensorMap map(const unsigned short* of, int width, int of_heads, int rows, int box_rows) const {
    return {of, {width, of_heads, rows, batch}, box_rows};
  }
  template <int count>
  attention::ScorePointers<count> score() const {
    attention::ScorePointers<count> of;
    if constexpr (count > 0) std::copy(score_arrays, score_arrays + count, of.array);
    return of;
  }
  template <int count>
  attention::GradientPointers<count> gradients() const {
    attention::GradientPointers<count> of;
    if constexpr (count > 0) std::copy(gradient_sums, gradient_sums + count, of.sums);
    return of;
  }
  template <int count>
  attention::EntryPointers<count> entries_of_tables() const {
    attention::EntryPointers<count> of;
    if constexpr (count > 0) std::copy(entries, entries + count, of.of);
    return of;
  }
  /// The arrays of results beside y, or in the place of a gradient.
  template <int count, int which = 0>
  static attention::Pointers<count, which> pointers(void* const* of) {
    attention::Pointers<count, which> found;
    if constexpr (count > 0) std::copy(of, of + count, found.pointer);
    return found;
  }
  attention::Broadcast broadcast(const int (&sizes)[4]) const { return {sizes[0], sizes[1], sizes[2], sizes[3]}; }
};
template <class Operands>
static Operands operands_of(const attention::Mask& mask, const Problem& p, const int* row_bits) {
  Operands operands = {};
  static_cast<attention::Mask&>(operands) = mask;
  if constexpr (requires { operands.sinks; }) operands.sinks = p.sinks;
  if constexpr (requires { operands.row_bits; })
    operands.row_bits = row_bits, operands.column_bits = p.column_bits;
  return operands;
}
static const char* run(const Problem& p, unsigned blocks, unsigned threads, int shared_bytes,
                       const std::function<void()>& kernel) {
  emulated::schedule = p.schedule;
  if (shared_bytes == 0) emulated::schedule.resident = 1;
  static std::string fault;
  fault = emulated::launch(blocks, threads, ptx::first_address + shared_bytes, kernel);
  return fault.c_str();
}

extern "C" const char* forward(const Problem& p) {
  using Kernel = attention::Forward<Tiles::Forward>;
  const int pieces = attention::tiles_of(p.queries, Kernel::rows) * p.batch * p.heads;
  using Params = Kernel::Params;
  const Params params = {
      p.map(p.q, Tiles::Forward::head, p.heads, p.queries, Kernel::rows),
      p.map(p.k, Tiles::Forward::head, p.key_heads, p.keys, Kernel::keys),
      p.map(p.v, Tiles::Forward::value_head, p.key_heads, p.keys, Kernel::keys),
      p.y,
      p.lse,
      p.claimed,
      operands_of<decltype(Params::mask)>(
          {p.intervals, p.query_ids, p.key_ids, p.needed, p.full, p.order, p.dense, p.bias}, p, p.row_bits),
      p.score<Kernel::Score::arrays>(),
      p.pointers<attention::result_pointers<Tiles::Forward>()>(p.results),
      p.batch,
      p.queries,
      p.keys,
      p.heads,
      p.key_heads,
      p.broadcast(p.dense_sizes),
      p.broadcast(p.bias_sizes),
      p.left,
      p.right,
      0,
      p.scale};
  return run(p, min(pieces, 2), Kernel::threads, Kernel::shared_bytes,
             [&] { attention::forward<Tiles::Forward>(params); });
}

extern "C" const char* prepare(const Problem& p) {
  using Kernel = attention::Prepare<Tiles::Backward>;
  const attention::PrepareParams params = {p.y, p.dy, p.lse, p.dlse, p.lse_2, p.delta, p.batch, p.queries, p.heads};
  const int blocks =
      p.batch * attention::padded(p.queries) / Kernel::rows * attention::tiles_of(p.heads, Kernel::heads);
  return run(p, blocks, Kernel::threads, 0, [&] { attention::prepare<Tiles::Backward>(params); });
}

extern "C" const char* backward(const Problem& p) {
  using Kernel = attention::Backward<Tiles::Backward>;
  using Params = attention::BackwardParams<Tiles::Backward>;
  const Params params = {
      p.map(p.q, Tiles::Backward::head, p.heads, p.queries, Kernel::queries),
      p.map(p.k, Tiles::Backward::head, p.key_heads, p.keys, Kernel::keys),
      p.map(p.v, Tiles::Backward::value_head, p.key_heads, p.keys, Kernel::keys),
      p.map(p.dy, Tiles::Backward::value_head, p.heads, p.queries, Kernel::queries),
      p.lse_2,
      p.delta,
      operands_of<decltype(Params::mask)>(
          {p.intervals, p.query_ids, p.key_ids, p.needed_rows, p.full_rows, p.order_of_keys, p.dense, p.bias}, p,
          p.padded_row_bits),
      p.needed_keys,
      p.positions,
      p.sums,
      p.dk,
      p.dv,
      p.turns,
      p.score<Kernel::Score::arrays>(),
      p.gradients<Kernel::Score::gradients>(),
      p.entries_of_tables<Kernel::tables>(),
      p.pointers<attention::key_pointers<Tiles::Backward>(), 0>(p.of_keys),
      p.pointers<attention::value_pointers<Tiles::Backward>(), 1>(p.of_values),
      p.batch,
      p.queries,
      p.keys,
      p.heads,
      p.key_heads,
      p.broadcast(p.dense_sizes),
      p.broadcast(p.bias_sizes),
      p.left,
      p.right,
      p.splits,
      p.scale};
  return run(p, attention::tiles_of(p.keys, Kernel::keys) * p.batch * p.key_heads * p.splits, Kernel::threads,
             Kernel::shared_bytes, [&] { attention::backward<Tiles::Backward>(params); });
}

/// What is made of dq. A template: not all Tiles have results of it.
template <class Config>
static const char* finish_dq_results(const Problem& p) {
  const attention::FinishResultsParams<Config> params = {
      p.sums, p.turns, p.pointers<Config::result_pointers>(p.of_queries), p.batch, p.queries, p.heads, p.columns,
      p.scale};
  const int blocks = p.batch * p.heads * attention::tiles_of(p.queries, Config::queries) * (Config::queries / 64);
  return run(p, blocks, 128, 0, [&] { attention::finish_dq_results<Config>(params); });
}
template <class Of>
static const char* finished(const Problem& p) {
  if constexpr (attention::makes_results<typename Of::Backward>) {
    return finish_dq_results<typename Of::OfQueries>(p);
  } else {
    return nullptr;
  }
}

extern "C" const char* finish_dq(const Problem& p) {
  using Kernel = attention::Backward<Tiles::Backward>;
  if (const char* made = finished<Tiles>(p)) return made;
  const attention::FinishParams params = {p.sums, p.turns, p.dq, p.batch, p.queries, p.heads, p.scale};
  return run(p, p.batch * p.heads * attention::tiles_of(p.queries, Kernel::queries) * 2, 128, 0,
             [&] { attention::finish_dq<Tiles::Backward>(params); });
}
