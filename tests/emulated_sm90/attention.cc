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

/// As tests/test_attention_kernels.py has it.
struct Problem {
  int batch, queries, keys, heads, key_heads, padded_queries, padded_keys, left, right, splits;
  int dense_sizes[4], bias_sizes[4];
  float scale;
  emulated::Schedule schedule;
  const unsigned short *q, *k, *v, *dy;
  const float* dlse;
  unsigned short* y;
  float* lse;
  const int *intervals, *query_ids, *key_ids;
  const unsigned *needed, *full, *needed_rows, *full_rows, *needed_keys;
  const unsigned char* dense;
  const void* bias;
  float *lse_2, *delta, *sums;
  int* turns;
  void *dk, *dv;
  unsigned short* dq;

  ptx::TensorMap map(const unsigned short* of, int width, int of_heads, int rows, int box_rows) const {
    return {of, {width, of_heads, rows, batch}, box_rows};
  }
  attention::Broadcast broadcast(const int (&sizes)[4]) const { return {sizes[0], sizes[1], sizes[2], sizes[3]}; }
};
static int ceil_of(int count, int size) {
  return (count + size - 1) / size;
}
static const char* run(const Problem& p, unsigned blocks, unsigned threads, int shared_bytes,
                       const std::function<void()>& kernel) {
  emulated::schedule = p.schedule;
  static std::string fault;
  fault = emulated::launch(blocks, threads, ptx::first_address + shared_bytes, kernel);
  return fault.c_str();
}

extern "C" const char* forward(const Problem& p) {
  using Kernel = attention::Forward<Tiles::Forward>;
  const int tiles = ceil_of(p.queries, Kernel::rows);
  const attention::ForwardParams params = {
      p.map(p.q, Tiles::Forward::head, p.heads, p.queries, Kernel::rows),
      p.map(p.k, Tiles::Forward::head, p.key_heads, p.keys, Kernel::keys),
      p.map(p.v, Tiles::Forward::value_head, p.key_heads, p.keys, Kernel::keys),
      p.y,
      p.lse,
      {p.intervals, p.query_ids, p.key_ids, p.needed, p.full, p.dense, p.bias},
      p.batch,
      p.queries,
      p.keys,
      p.heads,
      p.key_heads,
      p.padded_queries,
      p.padded_keys,
      tiles,
      ceil_of(ceil_of(p.keys, Kernel::keys), 32),
      p.left,
      p.right,
      p.broadcast(p.dense_sizes),
      p.broadcast(p.bias_sizes),
      p.scale};
  return run(p, tiles * p.batch * p.heads, Kernel::threads, Kernel::shared_bytes,
             [&] { attention::forward<Tiles::Forward>(params); });
}

extern "C" const char* prepare(const Problem& p) {
  const attention::PrepareParams params = {p.y,     p.dy,    p.lse,     p.dlse,  p.lse_2,
                                           p.delta, p.batch, p.queries, p.heads, p.padded_queries};
  return run(p, ceil_of(p.batch * p.padded_queries * p.heads, 4), 128, 0,
             [&] { attention::prepare<Tiles::Backward>(params); });
}

extern "C" const char* backward(const Problem& p) {
  using Kernel = attention::Backward<Tiles::Backward>;
  const int query_tiles = ceil_of(p.queries, Kernel::queries), key_tiles = ceil_of(p.keys, Kernel::keys);
  const attention::BackwardParams params = {
      p.map(p.q, Tiles::Backward::head, p.heads, p.queries, Kernel::queries),
      p.map(p.k, Tiles::Backward::head, p.key_heads, p.keys, Kernel::keys),
      p.map(p.v, Tiles::Backward::value_head, p.key_heads, p.keys, Kernel::keys),
      p.map(p.dy, Tiles::Backward::value_head, p.heads, p.queries, Kernel::queries),
      p.lse_2,
      p.delta,
      {p.intervals, p.query_ids, p.key_ids, p.needed_rows, p.full_rows, p.dense, p.bias},
      p.needed_keys,
      p.sums,
      p.dk,
      p.dv,
      p.turns,
      p.batch,
      p.queries,
      p.keys,
      p.heads,
      p.key_heads,
      p.padded_queries,
      p.padded_keys,
      query_tiles,
      key_tiles,
      ceil_of(query_tiles, 32),
      ceil_of(key_tiles, 32),
      p.left,
      p.right,
      p.broadcast(p.dense_sizes),
      p.broadcast(p.bias_sizes),
      p.splits,
      p.scale};
  return run(p, key_tiles * p.batch * p.key_heads * p.splits, Kernel::threads, Kernel::shared_bytes,
             [&] { attention::backward<Tiles::Backward>(params); });
}

extern "C" const char* finish_dq(const Problem& p) {
  using Kernel = attention::Backward<Tiles::Backward>;
  const int tiles = ceil_of(p.queries, Kernel::queries);
  const attention::FinishParams params = {p.sums,    p.turns, p.dq,  p.batch,
                                          p.queries, p.heads, tiles, p.scale};
  return run(p, p.batch * p.heads * tiles * 2, 128, 0, [&] { attention::finish_dq<Tiles::Backward>(params); });
}
