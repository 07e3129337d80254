// A loop whose variable is a constant expression.
#pragma once

namespace coda {

template <int value_>
struct Index {
  static constexpr int value = value_;
  __device__ __forceinline__ constexpr operator int() const { return value; }
};

/// Calls f(Index<0>()), ..., f(Index<count - 1>()).
template <int count, int at = 0, class F>
__device__ __forceinline__ void static_for(F&& f) {
  if constexpr (at < count) {
    f(Index<at>());
    static_for<count, at + 1>(f);
  }
}

}  // namespace coda
