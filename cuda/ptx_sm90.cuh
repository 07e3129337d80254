// The PTX instructions of Hopper (sm_90a) that the kernel needs, one thin function each. No state, no policy.
#pragma once

namespace coda::ptx {

using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
  return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// ---- threads, clusters, named barriers

__device__ __forceinline__ uint32 cluster_rank() {
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// Orders no memory but what `mbarrier_init_fence` has. All threads of a warp together, as the next one.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- kernels that follow each other (programmatic dependent launch)

/// Lets the stream's next kernel begin where this one's CTAs have ended, if it asks for that and once all of them run.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
/// Waits for all that the stream's earlier kernels have written. Nothing before it may touch global memory.
__device__ __forceinline__ void wait_for_earlier_kernels() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- flags between CTAs

__device__ __forceinline__ void store_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ int load_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// ---- registers of a warpgroup

template <int registers>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---- mbarrier

__device__ __forceinline__ void mbarrier_init(uint32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect(uint32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

/// Arrives on the barrier at the same offset in another CTA of the cluster. Unqualified on purpose: with
/// `.release.cluster` the compiler emits a device-wide memory barrier in the k loop and the product runs at half speed.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32 barrier, uint32 rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// Waits until the phase with this parity has completed. The caller is at most one phase behind.
__device__ __forceinline__ void mbarrier_wait(uint32 barrier, uint32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// Stores a word at the same offset in a CTA of the cluster, which has several, and completes 4 bytes there.
__device__ __forceinline__ void store_async(uint32 address, int word, uint32 barrier, uint32 rank) {
  asm volatile(
      "{\n"
      ".reg .b32 target, remote;\n"
      "mapa.shared::cluster.u32 target, %0, %3;\n"
      "mapa.shared::cluster.u32 remote, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.s32 [target], %1, [remote];\n"
      "}\n" ::"r"(address),
      "r"(word), "r"(barrier), "r"(rank)
      : "memory");
}

// ---- TMA: four coordinates, innermost first (column, half, row, batch)

struct alignas(64) TensorMap {
  uint64 opaque[16];
};

__device__ __forceinline__ void tma_prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void tma_load(uint32 target, const TensorMap& map, uint32 barrier, int column, int half,
                                         int row, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(half), "r"(row), "r"(batch)
      : "memory");
}

/// The box arrives in every CTA of `mask`, at the same offset, and completes the barrier at the same offset there.
__device__ __forceinline__ void tma_load_multicast(uint32 target, const TensorMap& map, uint32 barrier, int column,
                                                   int half, int row, int batch, uint16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(target),
      "l"(&map), "r"(barrier), "r"(column), "r"(half), "r"(row), "r"(batch), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void tma_store(const TensorMap& map, uint32 source, int column, int half, int row,
                                          int batch) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(column), "r"(half), "r"(row), "r"(batch)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until at most `pending` of this thread's store groups still read shared memory.
template <int pending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

/// Orders this thread's ordinary shared-memory stores before the copy engine's reads of them.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- shared memory, a fragment at a time

__device__ __forceinline__ void load_matrices(uint32 address, uint32 (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32 address, const uint32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
__device__ __forceinline__ void store_matrices(uint32 address, const uint32 (&words)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(words[0]), "r"(words[1])
               : "memory");
}
/// What is a row of a matrix becomes a column of it.
__device__ __forceinline__ void store_matrices_transposed(uint32 address, const uint32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32 address, const uint32 (&words)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(words[0]),
               "r"(words[1])
               : "memory");
}
__device__ __forceinline__ void store_2_bytes(uint32 address, uint16 bits) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(bits) : "memory");
}
__device__ __forceinline__ uint16 load_2_bytes(uint32 address) {
  uint16 bits;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
  return bits;
}
__device__ __forceinline__ void store_word(uint32 address, int word) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}
__device__ __forceinline__ int load_word(uint32 address) {
  int word;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ void store_zeros(uint32 address) {  // 16 bytes
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}
__device__ __forceinline__ int4 load_16_bytes(uint32 address) {
  int4 words;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}
__device__ __forceinline__ void load_pair(uint32 address, float& first, float& second) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(first), "=f"(second) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_pair(uint32 address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}

// ---- conversions

__device__ __forceinline__ uint32 pack_bf16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ uint32 pack_f16(float low, float high) {
  uint32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float f16_to_float(uint16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

/// Two values in two bytes; beyond the dtype's range the largest finite one.
__device__ __forceinline__ uint16 pack_e4m3(float low, float high) {
  uint16 packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ uint16 pack_e5m2(float low, float high) {
  uint16 packed;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
/// Two values in a word of two f16.
__device__ __forceinline__ uint32 e4m3_to_f16(uint16 bits) {
  uint32 values;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(values) : "h"(bits));
  return values;
}
__device__ __forceinline__ uint32 e5m2_to_f16(uint16 bits) {
  uint32 values;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(values) : "h"(bits));
  return values;
}

/// As one move: an `or` of both keeps the assembler from converting into the halves of a word.
__device__ __forceinline__ uint32 joined(uint16 low, uint16 high) {
  uint32 word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(low), "h"(high));
  return word;
}

}  // namespace coda::ptx
