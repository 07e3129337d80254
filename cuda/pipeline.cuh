// How warps wait for each other. A ring of shared-memory slots, each guarded by a pair of mbarriers: `full` (data has
// arrived) and `empty` (data has been read). Producer and consumer each walk it with a RingPosition of their own.
#pragma once

#include "ptx_sm90.cuh"

namespace coda {

constexpr int consumers = 2;       // warpgroups of a CTA that multiply
constexpr int consumer_warps = 4;  // of each

/// The hardware's numbered barriers, after that of __syncthreads: each consumer has one of each kind.
enum class NamedBarrier {
  products = 1,
  column_results = products + consumers,
  transposed = column_results + consumers,
  end = transposed + consumers
};
static_assert(static_cast<int>(NamedBarrier::end) <= 16, "the hardware has 16 barriers");

__device__ __forceinline__ constexpr int barrier_number(NamedBarrier kind, int consumer) {
  return static_cast<int>(kind) + consumer;
}

/// Where the producer or a consumer of a ring is. Its n-th use of the ring takes slot n % slots, and (n / slots) % 2 is
/// the parity that tells the uses of one slot apart: an mbarrier completes phase after phase, and a wait names the
/// parity of the phase that it waits for.
template <int slots>
struct RingPosition {
  ptx::uint32 slot = 0;
  ptx::uint32 phase = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == slots) {
      slot = 0;
      phase ^= 1;
    }
  }
  /// Skips `count` uses: the k blocks that the other warpgroup consumes.
  __device__ __forceinline__ void advance(ptx::uint32 count) {
    const ptx::uint32 position = slot + count;
    phase ^= (position / slots) & 1;
    slot = position % slots;
  }
};

/// The barriers of one ring, at a shared-memory address: full[slots], then empty[slots].
template <int slots_>
struct Ring {
  static constexpr int slots = slots_;
  static constexpr int bytes = 16 * slots;
  ptx::uint32 address;

  __device__ __forceinline__ ptx::uint32 full(ptx::uint32 slot) const { return address + 8 * slot; }
  __device__ __forceinline__ ptx::uint32 empty(ptx::uint32 slot) const { return address + 8 * (slots + slot); }

  __device__ __forceinline__ void init(int full_arrivals, int empty_arrivals) const {
    for (int slot = 0; slot < slots; ++slot) {
      ptx::mbarrier_init(full(slot), full_arrivals);
      ptx::mbarrier_init(empty(slot), empty_arrivals);
    }
  }
  /// A fresh ring is empty: the producer's first wait on each slot asks for the phase before the first and passes.
  __device__ __forceinline__ void wait_empty(RingPosition<slots> at) const {
    ptx::mbarrier_wait(empty(at.slot), at.phase ^ 1);
  }
  __device__ __forceinline__ void wait_full(RingPosition<slots> at) const {
    ptx::mbarrier_wait(full(at.slot), at.phase);
  }
};

}  // namespace coda
