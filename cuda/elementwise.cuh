// The functions of one element that generated epilogues call. Compiles for the device (NVRTC, no includes) and for the
// host, where tests run generated epilogues.
#pragma once

#ifdef __CUDACC__
#define CODA_DEVICE __device__ __forceinline__
#define CODA_COLD static __device__ __noinline__
#define CODA_TABLE static __constant__ const
#else
#define CODA_DEVICE inline
#define CODA_COLD static
#define CODA_TABLE static const
#include <cmath>
#include <cstring>
#endif

namespace coda {

CODA_DEVICE float from_bits(unsigned bits) {
#ifdef __CUDACC__
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

CODA_DEVICE unsigned to_bits(float value) {
#ifdef __CUDACC__
  return __float_as_uint(value);
#else
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
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

// ---- rounding to 8 bits: to nearest, ties to even, NaN stays NaN

/// x rounded to `mantissa_bits`, and to no finer spacing than that of float32 near `grid`: that of subnormal numbers.
CODA_DEVICE float round_mantissa(float x, int mantissa_bits, float smallest_normal, float grid) {
  const float magnitude = fabsf(x);
  const unsigned bits = to_bits(magnitude), shift = 23 - mantissa_bits, half = (1u << (shift - 1)) - 1;
  const float normal = from_bits((bits + half + (bits >> shift & 1u)) >> shift << shift);
  return copysignf(magnitude < smallest_normal ? (magnitude + grid) - grid : normal, x);
}

/// The largest value beyond the range.
CODA_DEVICE float saturate_to_e4m3(float x) {
#ifdef __CUDACC__
  unsigned short bits;
  unsigned halves;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(bits) : "f"(x));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bits));
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(halves)));
  return x;
#else
  if (x != x) return x;
  return fabsf(x) > 448.f ? copysignf(448.f, x) : round_mantissa(x, 3, 0x1p-6f, 0x1.8p14f);
#endif
}

CODA_DEVICE float saturate_to_e5m2(float x) {
#ifdef __CUDACC__
  unsigned short bits;
  unsigned halves;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %1;" : "=h"(bits) : "f"(x));
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(bits));
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(static_cast<unsigned short>(halves)));
  return x;
#else
  if (x != x) return x;
  return fabsf(x) > 57344.f ? copysignf(57344.f, x) : round_mantissa(x, 2, 0x1p-14f, 0x1.8p7f);
#endif
}

/// Whether x is not rounded to a finite value: it is beyond the middle between the largest value and the one that would
/// be next. If that one is even, as for e5m2, the middle is rounded to it, too.
CODA_DEVICE bool is_beyond_e4m3(float x) {
  return fabsf(x) > 464.f;
}
CODA_DEVICE bool is_beyond_e5m2(float x) {
  return fabsf(x) >= 61440.f;
}

/// NaN beyond the range, as in XLA.
CODA_DEVICE float round_to_e4m3(float x) {
  if (x != x) return x;
  if (is_beyond_e4m3(x)) return copysignf(nan(), x);
  return saturate_to_e4m3(x);
}

/// An infinity beyond the range, as in XLA.
CODA_DEVICE float round_to_e5m2(float x) {
  if (x != x) return x;
  if (is_beyond_e5m2(x)) return copysignf(infinity(), x);
  return saturate_to_e5m2(x);
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

/// -1, 1, or x itself if it is a zero or NaN.
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

/// 1 / x, to a unit in the last place; 0 for infinities.
CODA_DEVICE float reciprocal_approximate(float x) {
#ifdef __CUDACC__
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#else
  return 1.f / x;
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

/// 1 / (1 + exp(-x)). Four instructions: with expf and a full division in its place, SwiGLU costs 5 % of a product at
/// k = 2048. The relative error is 1e-7 (1 + |x|).
CODA_DEVICE float logistic(float x) {
  return reciprocal_approximate(1.f + exp2_approximate(-1.44269504f * x));
}

/// 1 - erf(x): 2^p(q) exp(-a^2) / (a + 1.75) for a = |x|, and 2 less that for a negative x, where p is a minimax
/// polynomial in q = (a - 1.75) / (a + 1.75), right to 1e-7. The relative error is at most 8e-7 (1 + x^2) unless the
/// result is subnormal. Seventeen instructions: with CUDA's erfcf in its place, which has 45, the exact GELU costs 50 %
/// of a product at k = 2048 instead of 2.
CODA_DEVICE float erfc(float x) {
  const float a = fabsf(x), r = reciprocal_approximate(a + 1.75f), q = fmaf(-3.5f, r, 1.f);
  float p = fmaf(1.08436064e-3f, q, 2.28057546e-3f);
  p = fmaf(p, q, -3.34920781e-3f);
  p = fmaf(p, q, -0.0136033818f);
  p = fmaf(p, q, 4.66962857e-3f);
  p = fmaf(p, q, 0.0729051977f);
  p = fmaf(p, q, -7.79310474e-3f);
  p = fmaf(p, q, -0.878077686f);
  p = fmaf(p, q, -3.75187979e-3f);
  const float tail = r * exp2_approximate(fmaf(a * a, -1.44269504f, p));
  return x < 0.f ? 2.f - tail : tail;
}

// ---- sine and cosine

/// An angle as quadrant * pi / 2 and a remainder from -1.2 to 1.2.
struct Angle {
  float remainder;
  unsigned quadrant;  // its two lowest bits count
};

CODA_TABLE unsigned two_over_pi[] = {0, 0xA2F9836Eu, 0x4E441529u, 0xFC2757D1u, 0xF534DDC0u, 0xDB629599u, 0x3C439041u};

/// The angle x, finite and at least 4. Its mantissa times 64 bits of 2 / pi, from the first that counts modulo 4, is
/// the angle in units of 2^-62 quadrants (Payne and Hanek). Not inlined: an epilogue has 64 of them.
CODA_COLD Angle large_angle(float x) {
  using uint64 = unsigned long long;
  const unsigned bits = to_bits(x), first = (bits >> 23 & 0xFFu) - 120, shift = first % 32;
  const unsigned* word = two_over_pi + first / 32;
  const uint64 high = (static_cast<uint64>(word[0]) << 32 | word[1]) << shift >> 32;
  const uint64 low = (static_cast<uint64>(word[1]) << 32 | word[2]) << shift >> 32;
  const uint64 magnitude = ((bits & 0x7FFFFFu) | 0x800000u) * (high << 32 | low);
  const uint64 quarters = x < 0.f ? 0 - magnitude : magnitude;
  const uint64 quadrant = (quarters + (1ull << 61)) >> 62;
  const float rest = static_cast<float>(static_cast<long long>(quarters - (quadrant << 62)));
  return {rest * 3.40612151e-19f, static_cast<unsigned>(quadrant)};  // pi / 2 * 2^-62
}

/// The angle x - error, where the error is at most half a unit in the last place of x. Up to |x| = 2^22 three parts of
/// pi / 2 are subtracted (Cody and Waite); beyond, the error is neglected. CUDA's sinf and cosf, in their place, double
/// the instructions of an epilogue that rotates heads, and keep Payne's and Hanek's words in local memory.
CODA_DEVICE Angle angle_of(float x, float error) {
  if (!(fabsf(x) <= 4194304.f)) return is_finite(x) ? large_angle(x) : Angle{nan(), 0};
  const float shifted = fmaf(x, 0.636619747f, 12582912.f);  // 1.5 * 2^23: leaves the nearest integer in the lowest bits
  const float count = shifted - 12582912.f;
  float rest = fmaf(count, -1.57079625f, x);  // exact; the parts are all positive, so that -0 stays -0
  rest = fmaf(count, -7.54978942e-8f, rest);
  return {fmaf(count, -5.39030295e-15f, rest - error), to_bits(shifted)};
}
CODA_DEVICE Angle angle(float x) {
  return angle_of(x, 0.f);
}
/// The angle x * y, not rounded.
CODA_DEVICE Angle angle(float x, float y) {
  const float product = x * y;
  return angle_of(product, fmaf(-x, y, product));
}

/// Sine and cosine of the remainder: minimax polynomials, right to 1e-8.
CODA_DEVICE float sine_of_remainder(float x) {
  const float square = x * x;
  const float sum =
      fmaf(fmaf(fmaf(2.66384745e-6f, square, -1.98292851e-4f), square, 8.33326951e-3f), square, -0.166666657f);
  return fmaf(fmaf(x, square, 0.f), sum, x);  // + 0 keeps the sign of a zero
}
CODA_DEVICE float cosine_of_remainder(float x) {
  const float square = x * x;
  const float sum = fmaf(fmaf(2.39618039e-5f, square, -1.38807029e-3f), square, 0.0416664183f);
  return fmaf(fmaf(sum, square, -0.5f), square, 1.f);
}

/// To 2e-7.
CODA_DEVICE float sine(Angle angle) {
  const float sine_value = sine_of_remainder(angle.remainder), cosine_value = cosine_of_remainder(angle.remainder);
  const float magnitude = angle.quadrant & 1 ? cosine_value : sine_value;
  return angle.quadrant & 2 ? -magnitude : magnitude;
}
CODA_DEVICE float cosine(Angle angle) {
  return sine(Angle{angle.remainder, angle.quadrant + 1});
}

/// log(exp(a) + exp(b)).
CODA_DEVICE float log_add_exp(float a, float b) {
  return a == b ? a + 0.693147181f : maximum(a, b) + log1pf(expf(-fabsf(a - b)));
}

/// log(sum(exp(values))) of values that are added a few at a time: their maximum first, so that each costs one
/// exponential. `maximum` stays finite, so that infinities give correct results: exp(-inf - maximum) = 0.
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
