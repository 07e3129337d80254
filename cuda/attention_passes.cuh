// The passes over activations before and after the backward kernel: statistics of rows, and dq in rows or what is made
// of it.
#pragma once

#include "attention_masks.cuh"
#include "attention_results.cuh"

namespace coda::attention {

struct PrepareParams {
  const unsigned short *y, *dy;  // (batch, queries, heads, width)
  const float *lse, *dlse;       // (batch, heads, queries)
  float *lse_2, *delta;          // (batch, heads, padded(queries))
  int batch, queries, heads;
};

/// lse log2(e), and the sum of y dy less the log-sum-exp's cotangent. A row that sees nothing, and one that is padding,
/// gets infinity and 0: its probabilities are then 0.
template <class Config>
struct Prepare {
  static constexpr int width = Config::value_head, threads = 256, rows = 32, heads = 8;  // of a block
  static constexpr int lanes = width <= 64 ? 8 : width <= 128 ? 16 : 32;                 // of a row, 8 columns each
  static constexpr int at_once = threads / lanes, turns = rows * heads / at_once, unrolled = 8;

  __device__ __forceinline__ static void run(const PrepareParams& p) {
    __shared__ float sums[heads][rows + 1];
    ptx::wait_for_earlier_kernels();
    ptx::launch_dependents();
    const int blocks_of_heads = (p.heads + heads - 1) / heads, blocks_of_rows = padded(p.queries) / rows;
    int i = blockIdx.x;
    const int first_head = i % blocks_of_heads * heads;
    i /= blocks_of_heads;
    const int first_row = i % blocks_of_rows * rows, batch = i / blocks_of_rows;
    const int lane = threadIdx.x % lanes, column = 8 * lane;
#pragma unroll 1
    for (int turn = 0; turn < turns; turn += unrolled) {
      uint4 y[unrolled], dy[unrolled];
#pragma unroll
      for (int u = 0; u < unrolled; ++u) {
        const int one = (turn + u) * at_once + threadIdx.x / lanes;
        const int head = first_head + one % heads, row = first_row + one / heads;
        y[u] = dy[u] = {0, 0, 0, 0};
        if (row < p.queries && head < p.heads && column < width) {
          const long long at = ((static_cast<long long>(batch) * p.queries + row) * p.heads + head) * width + column;
          y[u] = *reinterpret_cast<const uint4*>(p.y + at);
          dy[u] = *reinterpret_cast<const uint4*>(p.dy + at);
        }
      }
#pragma unroll
      for (int u = 0; u < unrolled; ++u) {
        float sum = dot(y[u].x, dy[u].x) + dot(y[u].y, dy[u].y) + dot(y[u].z, dy[u].z) + dot(y[u].w, dy[u].w);
#pragma unroll
        for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
        const int one = (turn + u) * at_once + threadIdx.x / lanes;
        if (lane == 0) sums[one % heads][one / heads] = sum;
      }
    }
    __syncthreads();
    const int head = first_head + threadIdx.x / rows, row = first_row + threadIdx.x % rows;
    if (head >= p.heads) return;
    const long long of_head = static_cast<long long>(batch) * p.heads + head;
    float lse = -infinity(), delta = 0;
    if (row < p.queries) {
      lse = p.lse[of_head * p.queries + row];
      delta = sums[threadIdx.x / rows][threadIdx.x % rows] - p.dlse[of_head * p.queries + row];
    }
    const bool sees_nothing = lse == -infinity();
    p.lse_2[of_head * padded(p.queries) + row] = sees_nothing ? infinity() : lse == infinity() ? nan() : lse * log2_e;
    p.delta[of_head * padded(p.queries) + row] = sees_nothing ? 0 : delta;
  }
  __device__ __forceinline__ static float dot(uint32 a, uint32 b) {
    return fmaf(widened_half<Config::input>(a, 0), widened_half<Config::input>(b, 0),
                widened_half<Config::input>(a, 1) * widened_half<Config::input>(b, 1));
  }
};

template <class Config>
__device__ __forceinline__ void prepare(const PrepareParams& params) {
  Prepare<Config>::run(params);
}

struct FinishParams {
  const float* sums;
  const int* turns;    // how many tiles were added, or null: dq began as zeros
  unsigned short* dq;  // (batch, queries, heads, width)
  int batch, queries, heads;
  float scale;
};

/// dq in rows, from sums in the order of the backward kernel's registers: a block of 128 threads for a consumer's part
/// of a tile.
template <class Config>
__device__ __forceinline__ void finish_dq(const FinishParams& p) {
  constexpr bool is_wide = Config::dim == 256;
  constexpr int queries = Config::queries, registers = is_wide ? 64 : 32, part = 128 * registers;
  ptx::wait_for_earlier_kernels();
  ptx::launch_dependents();
  const int half = blockIdx.x % 2;
  int i = blockIdx.x / 2;
  const bool is_written = p.turns == nullptr || p.turns[i] > 0;
  const float4* from = reinterpret_cast<const float4*>(p.sums + static_cast<long long>(i) * 2 * part + half * part);
  const int tiles = tiles_of(p.queries, queries), tile = i % tiles;
  i /= tiles;
  const int head = i % p.heads, batch = i / p.heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = tile * queries + (queries == 128 ? 64 * half : 0) + 16 * warp + lane / 4;
  const int column = queries == 128 ? 0 : 2 * registers * half;
  float4 x[registers / 4];
#pragma unroll
  for (int j = 0; j < registers / 4; ++j) {
    x[j] = {0, 0, 0, 0};
    if (is_written && column + 8 * j < Config::head) x[j] = from[j * 128 + threadIdx.x];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = row + 8 * r;
    unsigned short* to = p.dq + ((static_cast<long long>(batch) * p.queries + query) * p.heads + head) * Config::head;
    store_row<Config::input, Config::head, registers>(query < p.queries ? to : nullptr, column, [&](int j, int c) {
      return p.scale * (r == 0 ? (c == 0 ? x[j].x : x[j].y) : (c == 0 ? x[j].z : x[j].w));
    });
  }
}

template <class Config>
struct FinishResultsParams {
  const float* sums;
  const int* turns;  // as those of FinishParams
  Pointers<Config::result_pointers> results;
  int batch, queries, heads, columns;  // columns of a tile
  float scale;
};

/// Stores the maps of dq, the first columns of tiles that may have those of dk and dv too. A block of 128 threads has
/// 64 rows of a tile, and whole heads. Config: as that of Results, and those of the backward kernel.
template <class Config>
__device__ __forceinline__ void finish_dq_results(const FinishResultsParams<Config>& p) {
  constexpr int dim = Config::dim, queries = Config::queries, head_width = Config::head;
  constexpr int registers = dim / 2, part = 128 * 32, blocks = queries / 64;  // a part is a consumer's, of 64 columns
  static_assert(dim <= 128 && queries * dim == 8192, "two parts of 64 x 64 are a tile");
  ptx::wait_for_earlier_kernels();
  ptx::launch_dependents();
  const int block = blockIdx.x % blocks;
  int i = blockIdx.x / blocks;
  const bool is_written = p.turns == nullptr || p.turns[i] > 0;
  const float* const from = p.sums + static_cast<long long>(i) * 2 * part + block * part;
  const int tiles = tiles_of(p.queries, queries), tile = i % tiles, warp = threadIdx.x / 32;
  float dq[registers];
#pragma unroll
  for (int j = 0; j < registers / 4; ++j) {
    float4 x = {0, 0, 0, 0};
    if (is_written && 8 * j < head_width)
      x = reinterpret_cast<const float4*>(from + j / 8 * part)[j % 8 * 128 + threadIdx.x];
    dq[4 * j] = x.x, dq[4 * j + 1] = x.y, dq[4 * j + 2] = x.z, dq[4 * j + 3] = x.w;
  }
  JoinedPlace place;
  place.warp = (static_cast<long long>(i) * blocks + block) * 4 + warp;
  i /= tiles;
  place.head = i % p.heads, place.heads = p.heads, place.batch = i / p.heads, place.batches = p.batch;
  place.row = tile * queries + 64 * block + 16 * warp, place.rows = p.queries;
  place.column = place.head * head_width, place.columns = p.columns;
  Results<Config, Config::input, head_width, registers>::store(
      p.results, place, [&](int i) { return rounded_half<Config::input>(p.scale * dq[i]); });
}

}  // namespace coda::attention
