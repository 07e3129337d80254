// The instructions of cuda/ptx_sm90.cuh on a host: shared memory is an array, whose accesses are checked.
#pragma once

#include "floats_of_8_bits.h"
#include "threads.h"

namespace coda::ptx {

using uint32 = unsigned int;
using uint64 = unsigned long long;
using emulated::cta, emulated::fail, emulated::events;

// ---- shared memory

/// Where dynamic shared memory begins: not at a multiple of what a kernel aligns it to.
constexpr uint32 first_address = 16;

inline uint32 shared_address(const void*) {
  return first_address;
}
inline unsigned char* at(uint32 address, int bytes, int alignment) {
  if (address % alignment != 0) fail("a misaligned access to shared memory");
  if (address < first_address || address + bytes > cta->shared.size()) fail("an access outside of shared memory");
  return cta->shared.data() + address;
}
inline uint32 swizzled(uint32 address) {
  return address ^ (address >> 7 & 7) << 4;
}
template <class T>
T loaded(uint32 address) {
  T value;
  std::memcpy(static_cast<void*>(&value), at(address, sizeof(T), sizeof(T)), sizeof(T));
  cta->read.add(address, sizeof(T));
  return value;
}
template <class T>
void stored(uint32 address, T value) {
  std::memcpy(at(address, sizeof(T), sizeof(T)), &value, sizeof(T));
  cta->written.add(address, sizeof(T));
}
inline int load_word(uint32 address) {
  return loaded<int>(address);
}
inline int4 load_16_bytes(uint32 address) {
  return loaded<int4>(address);
}
inline void load_pair(uint32 address, float& first, float& second) {
  const float2 pair = loaded<float2>(address);
  first = pair.x, second = pair.y;
}
inline void store_word(uint32 address, int word) {
  stored(address, word);
}
inline void store_word_if(bool stores, uint32 address, int word) {
  if (stores) stored(address, word);
}
inline void store_zeros(uint32 address) {
  stored(address, int4{});
}
inline void store_matrices(uint32 address, const uint32 (&words)[4]) {
  const auto& addresses = emulated::exchanged("stmatrix", {address});
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    at(addresses[8 * i + lane / 4][0], 16, 16);
    stored(addresses[8 * i + lane / 4][0] + 4 * (lane % 4), words[i]);
  }
}
inline void fence_async_proxy() {
  cta->read.fence(), cta->written.fence();
}

// ---- barriers

inline void named_barrier(int id, int threads, bool waits) {
  emulated::NamedBarrier& barrier = cta->named[id];
  if (barrier.arrived != 0 && barrier.expected != threads) fail("threads disagree about who is at a named barrier");
  barrier.expected = threads;
  const int generation = barrier.generation;
  ++events;
  if (++barrier.arrived == threads)
    barrier.arrived = 0, ++barrier.generation;
  else if (waits)
    emulated::wait_while(barrier.generation, generation);
}
inline void named_barrier_sync(int id, int threads) {
  named_barrier(id, threads, true);
}
inline void named_barrier_arrive(int id, int threads) {
  named_barrier(id, threads, false);
}
inline emulated::Mbarrier& mbarrier(uint32 address) {
  const auto found = cta->mbarriers.find(address);
  if (found == cta->mbarriers.end()) fail("an mbarrier that nobody has made");
  return found->second;
}
inline void complete(emulated::Mbarrier& barrier) {
  ++events;
  if (barrier.left < 0 || barrier.bytes < 0) fail("more arrives at an mbarrier than it expects");
  if (barrier.left == 0 && barrier.bytes == 0) barrier.left = barrier.arrivals, ++barrier.phase;
}
inline void mbarrier_init(uint32 address, int arrivals) {
  at(address, 8, 8);
  if (cta->mbarriers.contains(address)) fail("an mbarrier is made twice");
  cta->mbarriers[address] = {arrivals, arrivals};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect(uint32 address, int bytes) {
  emulated::Mbarrier& barrier = mbarrier(address);
  barrier.bytes += bytes, --barrier.left;
  complete(barrier);
}
inline void mbarrier_arrive(uint32 address) {
  mbarrier_arrive_expect(address, 0);
  emulated::hand_over();  // whoever waits for this goes on before the other lanes
}
inline bool mbarrier_has_completed(uint32 address, uint32 parity) {
  return mbarrier(address).phase % 2 != static_cast<int>(parity);
}
inline void mbarrier_wait(uint32 address, uint32 parity) {
  const int& phase = mbarrier(address).phase;
  if (phase % 2 == static_cast<int>(parity)) emulated::wait_while(phase, phase);
}

// ---- the copy engine

/// Arrays of two-byte elements (columns, heads, rows, batch), the first axis contiguous; boxes of 64 columns.
struct TensorMap {
  const uint16* base;
  int sizes[4];
  int box_rows;
};

/// Does it now, or when nothing else can go on.
template <class Copy>
void copied(uint32 target, int bytes, uint32 barrier, const Copy& copy) {
  at(target, bytes, 16);
  mbarrier(barrier);
  const auto arrives = [=] {
    copy();
    mbarrier(barrier).bytes -= bytes;
    complete(mbarrier(barrier));
  };
  if (emulated::schedule.late_copies) {
    emulated::copies.push_back({cta, arrives});
    return;
  }
  for (uint32 address = target; address < target + bytes; address += 4)
    if (cta->read.has(address) || cta->written.has(address)) fail("a copy overtakes an access without a fence");
  arrives();
}
inline void tma_load(uint32 target, const TensorMap& map, uint32 barrier, int column, int head, int row, int batch) {
  if (target % 1024 != 0) fail("a misaligned box");
  copied(target, map.box_rows * 128, barrier, [=, &map] {
    const auto [columns, heads, rows, batches] = map.sizes;
    for (int r = 0; r < map.box_rows; ++r)
      for (int c = 0; c < 64; ++c) {
        uint16 value = 0;
        if (column + c < columns && head < heads && row + r < rows && batch < batches)
          value = map.base[((static_cast<long long>(batch) * rows + row + r) * heads + head) * columns + column + c];
        std::memcpy(at(swizzled(target + r * 128 + c * 2), 2, 2), &value, 2);
      }
  });
}
inline void bulk_load(uint32 target, const void* source, int bytes, uint32 barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<size_t>(source) % 16 != 0) fail("a misaligned copy");
  copied(target, bytes, barrier, [=] { std::memcpy(at(target, bytes, 16), source, bytes); });
}

inline void tma_prefetch_map(const TensorMap&) {}

// ---- global memory

inline void store_release(int* flag, int value) {
  ++events;
  *flag = value;
}
inline int load_acquire(const int* flag) {
  emulated::poll();
  return *flag;
}
inline void add_in_memory(float* to, float a, float b, float c, float d) {
  if (reinterpret_cast<size_t>(to) % 16 != 0) fail("a misaligned addition");
  to[0] += a, to[1] += b, to[2] += c, to[3] += d;
}
inline void add_in_memory_if(bool adds, float* to, float a) {
  if (adds) *to += a;
}
inline void wait_for_earlier_kernels() {}
inline void launch_dependents() {}
template <int>
void registers_decrease() {}
template <int>
void registers_increase() {}

// ---- conversions

/// Results that are not normal are 0, as the instruction's.
inline float exp2_unit(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0 : y;
}
inline uint16 to_bf16(float x) {
  const uint32 bits = std::bit_cast<uint32>(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32 pack_bf16(float low, float high) {
  return to_bf16(low) | static_cast<uint32>(to_bf16(high)) << 16;
}
inline uint32 pack_f16(float low, float high) {
  return std::bit_cast<uint16>(static_cast<_Float16>(low)) |
         static_cast<uint32>(std::bit_cast<uint16>(static_cast<_Float16>(high))) << 16;
}
/// `nan` is the first pattern, without the sign, that is no number.
inline uint32 without_negatives(uint32 pair, uint32 nan) {
  uint32 result = 0;
  for (int half = 0; half < 32; half += 16) {
    const uint32 bits = pair >> half & 0xFFFF;
    const bool is_nan = (bits & 0x7FFF) >= nan;
    result |= (is_nan ? 0x7FFFu : bits >> 15 != 0 ? 0u : bits) << half;
  }
  return result;
}
inline uint32 without_negatives_bf16(uint32 pair) {
  return without_negatives(pair, 0x7F81);
}
inline uint32 without_negatives_f16(uint32 pair) {
  return without_negatives(pair, 0x7C01);
}
inline float f16_to_float(uint16 bits) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}

// ---- what headers name and nothing here runs

#define CODA_NOT_RUN(name)  \
  template <class... T>     \
  int name(T&&...) {        \
    fail(#name " has run"); \
    return 0;               \
  }
CODA_NOT_RUN(e4m3_to_f16)
CODA_NOT_RUN(e5m2_to_f16)
CODA_NOT_RUN(joined)
CODA_NOT_RUN(load_2_bytes)
CODA_NOT_RUN(load_matrices)
CODA_NOT_RUN(store_2_bytes)
CODA_NOT_RUN(store_async)
CODA_NOT_RUN(store_pair)
#undef CODA_NOT_RUN

}  // namespace coda::ptx

inline void __syncthreads() {
  coda::ptx::named_barrier_sync(0, blockDim.x);
}
inline int atomicAdd(int* to, int value) {
  const int before = *to;
  *to += value;
  return before;
}
