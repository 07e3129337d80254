// Tiles that clusters claim from a counter while the kernel runs, for programs of several devices: there NCCL's kernels
// occupy some SMs for a while, and a tile must not wait for a block that has no SM to run on. Nor must NCCL wait long
// for an SM: in a long product a cluster ends when it has computed its share, and the grid's next cluster goes on.
#pragma once

#include "pipeline.cuh"

namespace coda {

/// A cluster's claims in shared memory: for its i-th piece of work an mbarrier and the tile's number. The producer of
/// the first CTA reads numbers from a counter in global memory, 0 when the kernel starts, and sends each to all CTAs of
/// the cluster. Readers do not acknowledge: a slot is used again `slots` pieces later, and the producer cannot be that
/// far ahead of any reader (`slots_suffice`).
template <int cluster_m>
struct Claims {
  static constexpr int slots = 16, bytes = 12 * slots;
  ptx::uint32 address;

  /// With `stages` k blocks in shared memory, and pieces of as few as one, the producer is at most so many pieces ahead
  /// of the last one whose products are complete. The warp that fetches operands of epilogues may still read the number
  /// of the piece before that one, and at the end the producer sends two numbers at once.
  static constexpr bool slots_suffice(int stages) { return stages + 4 <= slots; }

  __device__ __forceinline__ ptx::uint32 barrier(int i) const { return address + 8 * (i % slots); }
  __device__ __forceinline__ ptx::uint32 number(int i) const { return address + 8 * slots + 4 * (i % slots); }

  __device__ __forceinline__ void init() const {
    for (int slot = 0; slot < slots; ++slot) ptx::mbarrier_init(barrier(slot), 1);
  }
  /// The producer of each CTA, before it waits for the i-th number.
  __device__ __forceinline__ void expect(int i) const {
    if constexpr (cluster_m > 1) ptx::mbarrier_arrive_expect(barrier(i), 4);
  }

  /// The producer of the first CTA. A CTA must not end before all that was sent to it has arrived.
  __device__ __forceinline__ void send(int i, int tile) const {
    if constexpr (cluster_m > 1) {
#pragma unroll
      for (int rank = 0; rank < cluster_m; ++rank) ptx::store_async(number(i), tile, barrier(i), rank);
    } else {
      ptx::store_word(number(i), tile);
      ptx::mbarrier_arrive(barrier(i));
    }
  }
  /// Waits for the i-th number, and returns it.
  __device__ __forceinline__ int wait(int i) const {
    ptx::mbarrier_wait(barrier(i), i / slots & 1);
    return ptx::load_word(number(i));
  }
};

}  // namespace coda
