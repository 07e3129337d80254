// Split-K's partial sums: accumulators that are sent through global memory to the CTA that owns the tile.
#pragma once

#include "accumulator_sm90.cuh"
#include "scheduler.cuh"

namespace coda {

/// A slot for every CTA, which sends at most one tile, and a flag for each of its warps, 0 when the kernel starts. A
/// warp reads what the same warp of another CTA has sent, so that no barrier is needed. One object for each consumer
/// thread.
template <class Accumulator>
struct PartialTiles {
  static constexpr int quads = Accumulator::columns / 8;  // of a thread's registers in one block
  static constexpr int at_once = 8;                       // loads on their way
  static_assert(quads % at_once == 0, "no load is left over");
  float4* const slots;
  int* const flags;
  const int warp, lane;

  /// Writes this CTA's sums to its slot, and sets this warp's flag for the CTA that owns the tile.
  __device__ __forceinline__ void send(const Accumulator& accumulator) const {
    float4* const slot = slot_of(blockIdx.x);
#pragma unroll
    for (int block = 0; block < Accumulator::blocks; ++block)
#pragma unroll
      for (int i = 0; i < quads; ++i) {
        const float* from = accumulator.registers[block] + 4 * i;
        __stcg(slot + 128 * (block * quads + i), make_float4(from[0], from[1], from[2], from[3]));
      }
    __syncwarp();  // orders what all lanes have stored before lane 0's release
    if (lane == 0) ptx::store_release(flags + 4 * blockIdx.x + warp, 1);
  }

  /// Waits for the sums of the other CTAs, and adds them in their order.
  __device__ __forceinline__ void add(const Others& others, Accumulator& accumulator) const {
    if (lane < others.count) {
      while (ptx::load_acquire(flags + 4 * (others.first + lane * others.stride) + warp) == 0) __nanosleep(32);
    }
    __syncwarp();
#pragma unroll 1
    for (int other = 0; other < others.count; ++other) {
      const float4* const slot = slot_of(others.first + other * others.stride);
#pragma unroll
      for (int block = 0; block < Accumulator::blocks; ++block)
#pragma unroll
        for (int i = 0; i < quads; i += at_once) {
          float4 more[at_once];
#pragma unroll
          for (int j = 0; j < at_once; ++j) more[j] = __ldcg(slot + 128 * (block * quads + i + j));
#pragma unroll
          for (int j = 0; j < at_once; ++j) {
            float* to = accumulator.registers[block] + 4 * (i + j);
            to[0] += more[j].x;
            to[1] += more[j].y;
            to[2] += more[j].z;
            to[3] += more[j].w;
          }
        }
    }
  }

 private:
  /// This thread's first quad in a CTA's slot; the next one is 128 on.
  __device__ __forceinline__ float4* slot_of(int cta) const {
    return slots + static_cast<long long>(cta) * (Accumulator::blocks * quads * 128) + 32 * warp + lane;
  }
};

}  // namespace coda
