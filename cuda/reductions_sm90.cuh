// Reductions in registers: over a thread's values, over the lanes of a warp. Elements outside the array count as the
// neutral element.
#pragma once

#include "epilogue_abi.cuh"

namespace coda {

template <Op op>
__device__ __forceinline__ float neutral() {
  return op == Op::sum ? 0.f : op == Op::min ? infinity() : -infinity();
}
template <Op op>
__device__ __forceinline__ float combine(float a, float b) {
  return op == Op::sum ? a + b : op == Op::max ? maximum(a, b) : minimum(a, b);
}

/// Combines over the lanes whose numbers differ in the bits of `mask` (1 | 2: a row's quad; 4 | 8 | 16: a column).
template <Op op, int mask>
__device__ __forceinline__ float combine_lanes(float value) {
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2)
    if (mask & bit) value = combine<op>(value, __shfl_xor_sync(0xFFFFFFFFu, value, bit));
  return value;
}

/// Combines `count` values over the lanes whose numbers differ in `bit` and the bits above it. At each step a lane
/// keeps half of the values, so that each step has half as many shuffles. Returns the index of the first value that
/// this lane has in the end, in value[0] and after it.
template <Op op, int count, int bit, int size>
__device__ __forceinline__ int combine_halving(int lane, float (&value)[size]) {
  if constexpr (bit == 32) {
    return 0;
  } else if constexpr (count == 1) {
    value[0] = combine_lanes<op, bit>(value[0]);
    return combine_halving<op, 1, 2 * bit>(lane, value);
  } else {
    constexpr int half = count / 2;
    const bool is_upper = lane & bit;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = is_upper ? value[i + half] : value[i], sent = is_upper ? value[i] : value[i + half];
      value[i] = combine<op>(kept, __shfl_xor_sync(0xFFFFFFFFu, sent, bit));
    }
    return (is_upper ? half : 0) + combine_halving<op, half, 2 * bit>(lane, value);
  }
}

/// A thread's partial result of a row reduction.
struct RowTotal {
  float value;    // of any other reduction
  LogSumExp lse;  // for a log-sum-exp

  template <Op op>
  __device__ __forceinline__ float over_quad() const {
    if constexpr (op == Op::logsumexp) {
      LogSumExp total = lse;
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
        LogSumExp other;
        other.maximum = __shfl_xor_sync(0xFFFFFFFFu, total.maximum, bit);
        other.sum = __shfl_xor_sync(0xFFFFFFFFu, total.sum, bit);
        total.merge(other);
      }
      return total.result();
    } else {
      return combine_lanes<op, 1 | 2>(value);
    }
  }
};

}  // namespace coda
