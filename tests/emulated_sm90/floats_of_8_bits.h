// The conversions of cuda/ptx_sm90.cuh to floats of 8 bits, on a host.
#pragma once

#include <algorithm>
#include <cmath>

namespace coda::ptx {

using uint16 = unsigned short;

/// A float of 8 bits, the largest finite one beyond its range: a multiple of 2^(exponent - mantissa bits).
inline uint16 to_byte(float x, int mantissa, int least_exponent, int largest) {
  if (x != x) return 0x7F;
  const double magnitude = std::fabs(static_cast<double>(x));
  int byte = largest;
  if (magnitude < 1e6) {
    const int exponent = magnitude == 0 ? least_exponent : std::max(least_exponent, std::ilogb(magnitude));
    const int multiple = static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa - exponent)));
    byte = std::min(largest, ((exponent - least_exponent) << mantissa) + multiple);
  }
  return byte | (std::signbit(x) ? 0x80 : 0);
}
inline uint16 pack_e4m3(float low, float high) {
  return to_byte(low, 3, -6, 0x7E) | to_byte(high, 3, -6, 0x7E) << 8;
}
inline uint16 pack_e5m2(float low, float high) {
  return to_byte(low, 2, -14, 0x7B) | to_byte(high, 2, -14, 0x7B) << 8;
}

}  // namespace coda::ptx
