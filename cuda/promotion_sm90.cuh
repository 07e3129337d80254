// Promotion of the accumulator of long products into a second one.
//
// The tensor cores align the addends of an 8-bit product to the largest one, and truncate them 13 bits below it. So
// every few k blocks the accumulator is added to a total in float32, and begins at zero again.
#pragma once

#include "accumulator_sm90.cuh"

namespace coda {

/// After how many k blocks the accumulator is added to a second one; 0 for a Config without promotion.
template <class Config>
CODA_CONSTEXPR int promote_blocks() {
  if constexpr (requires { Config::promote_blocks; }) {
    return Config::promote_blocks;
  } else {
    return 0;
  }
}

template <class Config>
struct Promotion {
  static constexpr int blocks = promote_blocks<Config>();  // of k, after which the accumulator is added; 0: never
  static_assert(blocks == 0 ||
                    (Config::consumer_m == 64 && 2 * Config::consumer_m == Config::tile_m && Config::tile_n <= 192),
                "registers have room for an accumulator and a total of 64 x 192, and no part of a tile is sent");
  using Total = Accumulator<1, blocks ? Config::tile_n : 2>;
};

template <int columns>
__device__ __forceinline__ void clear(Accumulator<1, columns>& sums) {
#pragma unroll
  for (float& sum : sums.registers[0]) sum = 0.f;
}

template <int columns>
__device__ __forceinline__ void add(Accumulator<1, columns>& sums, const Accumulator<1, columns>& more) {
#pragma unroll
  for (int i = 0; i < columns / 2; ++i) sums.registers[0][i] += more.registers[0][i];
}

}  // namespace coda
