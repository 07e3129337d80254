// What a generated epilogue is made of: the types that describe its operands, and functions of one element. Compiles
// for the device (NVRTC, no includes) and for the host, where tests run generated epilogues.
#pragma once

#ifdef __CUDACC__
#define CODA_DEVICE __device__ __forceinline__
#else
#define CODA_DEVICE inline
#include <cmath>
#include <cstring>
#endif

namespace coda {

/// One operand value in a register: .f for floating types (converted to float32), .i for int32 and bool.
union Word {
  float f;
  int i;
};

enum class DType { bf16, f16, f32, i32, pred };
enum class Op { sum, max, min, logsumexp };

/// Columns first .. end of the product, which tiles do not straddle, and what runs on them. {0, 0, 0}: all.
struct Section {
  int program;
  int first;
  int end;
};

/// A tile read or written: its tensor map, which of its ways this entry stands for, and the product's column that is
/// its first.
struct TileAccess {
  int map;
  int way;
  int first;
  DType dtype;
  bool batched;
};

/// A row vector, column vector, scalar, head table or head vector: its pointer, the way, and how many of them the array
/// spans.
struct VectorAccess {
  int pointer;
  int way;
  int ways;
  DType dtype;
  bool batched;
};

/// A reduction's partial results.
struct ReductionAccess {
  int pointer;
  int way;
  int ways;
  Op op;
};

CODA_DEVICE float from_bits(unsigned bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

CODA_DEVICE float infinity() {
  return from_bits(0x7F800000u);
}
CODA_DEVICE float nan() {
  return from_bits(0x7FC00000u);
}
CODA_DEVICE float largest_finite() {
  return 3.40282347e+38f;
}

// ---- rounding to 16 bits: to nearest, ties to even, NaN stays NaN

CODA_DEVICE float round_to_bf16(float x) {
#ifdef __CUDACC__
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
#else
  if (x != x) return x;
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return from_bits((bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u);
#endif
}

CODA_DEVICE float round_to_f16(float x) {
#ifdef __CUDACC__
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
#else
  return static_cast<float>(static_cast<_Float16>(x));
#endif
}

// ---- maximum and minimum: NaN if either is NaN, as in JAX

CODA_DEVICE float maximum(float a, float b) {
#ifdef __CUDACC__
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return a != a || a > b ? a : b;
#endif
}
CODA_DEVICE float minimum(float a, float b) {
#ifdef __CUDACC__
  float out;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return a != a || a < b ? a : b;
#endif
}
CODA_DEVICE int maximum(int a, int b) {
  return a > b ? a : b;
}
CODA_DEVICE int minimum(int a, int b) {
  return a < b ? a : b;
}

/// min(max(x, low), high).
template <class T>
CODA_DEVICE T clamp(T low, T x, T high) {
  return minimum(maximum(x, low), high);
}

// ---- floating point

/// -1, 1, or x itself where it is a zero or NaN.
CODA_DEVICE float sign(float x) {
  return x > 0.f ? 1.f : x < 0.f ? -1.f : x;
}

CODA_DEVICE bool is_finite(float x) {
  return fabsf(x) <= largest_finite();
}

CODA_DEVICE float rsqrt(float x) {
#ifdef __CUDACC__
  return rsqrtf(x);
#else
  return 1.f / sqrtf(x);
#endif
}

/// 1 / (1 + exp(-x)). Four instructions: with expf and a full division in its place, SwiGLU costs 5 % of a product at
/// k = 2048. The relative error is 1e-7 (1 + |x|).
CODA_DEVICE float logistic(float x) {
#ifdef __CUDACC__
  float exponential, reciprocal;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(-1.44269504f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.f + exponential));
  return reciprocal;
#else
  return 1.f / (1.f + expf(-x));
#endif
}

/// 2^x; 0 for -inf.
CODA_DEVICE float exp2_approximate(float x) {
#ifdef __CUDACC__
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return exp2f(x);
#endif
}

/// log(exp(a) + exp(b)).
CODA_DEVICE float log_add_exp(float a, float b) {
  return a == b ? a + 0.693147181f : maximum(a, b) + log1pf(expf(-fabsf(a - b)));
}

/// log(sum(exp(values))) of values that come a few at a time: their maximum is taken first, so that each costs one
/// exponential. `maximum` stays finite, whatever comes, so that infinities give what they should: exp(-inf - it) = 0.
struct LogSumExp {
  float maximum = -largest_finite(), sum = 0.f;  // of exp(value - maximum)

  template <int count>
  CODA_DEVICE void add(const float (&values)[count]) {
    float greater = maximum;
#pragma unroll
    for (int i = 0; i < count; ++i) greater = fmaxf(greater, values[i]);
    rescale(fminf(greater, largest_finite()));
#pragma unroll
    for (int i = 0; i < count; ++i) sum += scaled(values[i]);
  }
  CODA_DEVICE void merge(const LogSumExp& other) {
    rescale(fmaxf(maximum, other.maximum));
    sum += other.sum * scaled(other.maximum);
  }
  CODA_DEVICE float result() const { return maximum + logf(sum); }

 private:
  CODA_DEVICE float scaled(float value) const { return exp2_approximate(1.44269504f * (value - maximum)); }
  CODA_DEVICE void rescale(float greater) {
    sum *= exp2_approximate(1.44269504f * (maximum - greater));
    maximum = greater;
  }
};

/// x to a constant power, by squaring.
template <int power, class T>
CODA_DEVICE T integer_power(T x) {
  if constexpr (power < 0) {
    return T(1) / integer_power<-power>(x);
  } else if constexpr (power == 0) {
    return T(1);
  } else if constexpr (power == 1) {
    return x;
  } else {
    const T half = integer_power<power / 2>(x);
    if constexpr (power % 2 == 0) return half * half;
    return half * half * x;
  }
}

// ---- integers, where C++ leaves open what XLA defines

/// Truncated and saturated; 0 for NaN.
CODA_DEVICE int to_int(float x) {
#ifdef __CUDACC__
  return __float2int_rz(x);
#else
  return x != x ? 0 : x >= 2147483648.f ? 2147483647 : x < -2147483648.f ? -2147483647 - 1 : static_cast<int>(x);
#endif
}
CODA_DEVICE int absolute(int x) {
  return x < 0 ? static_cast<int>(0u - static_cast<unsigned>(x)) : x;
}
CODA_DEVICE int sign(int x) {
  return (x > 0) - (x < 0);
}
/// a / 0 is -1.
CODA_DEVICE int divide(int a, int b) {
  return b == 0 ? -1 : b == -1 ? static_cast<int>(0u - static_cast<unsigned>(a)) : a / b;
}
/// a % 0 is a.
CODA_DEVICE int remainder(int a, int b) {
  return b == 0 ? a : b == -1 ? 0 : a % b;
}

}  // namespace coda
