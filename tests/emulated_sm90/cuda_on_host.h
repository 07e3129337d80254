// CUDA's words, types and arithmetic of one thread, for a host's compiler.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

#define __device__
#define __host__
#define __shared__ static  // of one CTA at a time; dynamic shared memory is that of ptx_sm90.cuh
#define __forceinline__ inline
using std::max, std::min;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Place {
  unsigned x;
};
static Place threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned bits) {
  return std::bit_cast<float>(bits);
}
inline float __int_as_float(int bits) {
  return std::bit_cast<float>(bits);
}
inline int __float_as_int(float value) {
  return std::bit_cast<int>(value);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return out;
}
inline int __popc(unsigned bits) {
  return std::popcount(bits);
}
inline int __clz(unsigned bits) {
  return std::countl_zero(bits);
}
inline int __ffs(unsigned bits) {
  return bits == 0 ? 0 : std::countr_zero(bits) + 1;
}
