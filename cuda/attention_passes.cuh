// The passes over activations before and after the backward kernel: statistics of rows, and dq in rows.
#pragma once

#include "attention_masks.cuh"

namespace coda::attention {

struct PrepareParams {
  const unsigned short *y, *dy;  // (batch, queries, heads, width)
  const float *lse, *dlse;       // (batch, heads, queries)
  float *lse_2, *delta;          // (batch, heads, padded queries)
  int batch, queries, heads, padded_queries;
};

/// lse log2(e), and the sum of y dy less the log-sum-exp's cotangent, a warp a row and head. A row that sees nothing,
/// and one that is padding, gets infinity and 0: its probabilities are then 0.
template <class Config>
__device__ __forceinline__ void prepare(const PrepareParams& p) {
  constexpr int width = Config::value_head;
  ptx::wait_for_earlier_kernels();
  ptx::launch_dependents();
  const int lane = threadIdx.x % 32;
  long long i = static_cast<long long>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int head = i % p.heads;
  i /= p.heads;
  const int row = i % p.padded_queries, batch = i / p.padded_queries;
  if (batch >= p.batch) return;
  const long long to = (static_cast<long long>(batch) * p.heads + head) * p.padded_queries + row;
  float lse = -infinity(), delta = 0;
  if (row < p.queries) {
    const long long from = (static_cast<long long>(batch) * p.heads + head) * p.queries + row;
    const long long values = ((static_cast<long long>(batch) * p.queries + row) * p.heads + head) * (width / 2);
    const uint32* y = reinterpret_cast<const uint32*>(p.y) + values;
    const uint32* dy = reinterpret_cast<const uint32*>(p.dy) + values;
    lse = p.lse[from];
#pragma unroll
    for (int c = 0; c < (width / 2 + 31) / 32; ++c) {
      if (lane + 32 * c >= width / 2) break;
      const uint32 a = y[lane + 32 * c], b = dy[lane + 32 * c];
      delta = fmaf(widened_half<Config::input>(a, 0), widened_half<Config::input>(b, 0), delta);
      delta = fmaf(widened_half<Config::input>(a, 1), widened_half<Config::input>(b, 1), delta);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) delta += __shfl_xor_sync(0xFFFFFFFFu, delta, step);
    delta -= p.dlse[from];
  }
  if (lane == 0) {
    const bool sees_nothing = lse == -infinity();
    p.lse_2[to] = sees_nothing ? infinity() : lse == infinity() ? not_a_number() : lse * log2_e;
    p.delta[to] = sees_nothing ? 0 : delta;
  }
}

struct FinishParams {
  const float* sums;
  const int* turns;    // how many tiles were added, or null: dq began as zeros
  unsigned short* dq;  // (batch, queries, heads, width)
  int batch, queries, heads, tiles;
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
  const int tile = i % p.tiles;
  i /= p.tiles;
  const int head = i % p.heads, batch = i / p.heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = tile * queries + (queries == 128 ? 64 * half : 0) + 16 * warp + lane / 4;
  const int column = (queries == 128 ? 0 : 2 * registers * half) + 2 * (lane % 4);
#pragma unroll
  for (int j = 0; j < registers / 4; ++j) {
    if (column + 8 * j >= Config::head) continue;
    float4 x = {0, 0, 0, 0};
    if (is_written) x = from[j * 128 + threadIdx.x];
    unsigned short* to =
        p.dq + ((static_cast<long long>(batch) * p.queries + row) * p.heads + head) * Config::head + column + 8 * j;
    if (row < p.queries) *reinterpret_cast<uint32*>(to) = packed_pair<Config::input>(x.x * p.scale, x.y * p.scale);
    if (row + 8 < p.queries)
      *reinterpret_cast<uint32*>(to + 8ll * p.heads * Config::head) =
          packed_pair<Config::input>(x.z * p.scale, x.w * p.scale);
  }
}

}  // namespace coda::attention
