// Warpgroup matrix products (wgmma) on a float32 accumulator in registers, and the positions of its elements.
#pragma once

#include "epilogue_abi.cuh"
#include "ptx_sm90.cuh"

namespace coda {

/// The float32 accumulator of one consumer warpgroup: `blocks` blocks of 64 rows x `columns`, adjacent along m, each
/// distributed over the warpgroup's 128 threads as wgmma does it.
///
/// A warp has 16 rows. Four neighbouring lanes, a quad, share two of them, 8 rows apart (r = 0, 1), and each lane has a
/// pair of columns (c = 0, 1) of every group j of 8. Element (block, j, r, c) of a thread is
///   registers[block][4 j + 2 r + c],
///   row 64 block + 16 warp + lane / 4 + 8 r, column 8 j + 2 (lane % 4) + c.
template <int blocks_, int columns_>
struct Accumulator {
  static constexpr int blocks = blocks_;
  static constexpr int columns = columns_;
  float registers[blocks][columns / 2];
};

namespace wgmma {

__device__ __forceinline__ void fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// Keeps the compiler from moving uses of the accumulator above the wait for the products that write it.
template <int count>
__device__ __forceinline__ void keep_behind_wait(float (&registers)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

/// Shared-memory matrix descriptor for the 128-byte swizzle. Offsets in bytes: `leading` between 64-wide chunks of an
/// mn-major tile (ignored for a k-major one), which has `chunk_rows` rows; `stride` between groups of eight rows.
template <int chunk_rows = 64>
__device__ __forceinline__ ptx::uint64 descriptor(ptx::uint32 address) {
  constexpr ptx::uint64 leading = chunk_rows * factor_row_bytes, stride = 8 * factor_row_bytes, swizzle_128 = 1;
  return (static_cast<ptx::uint64>(address & 0x3FFFF) >> 4) | (leading >> 4) << 16 | (stride >> 4) << 32 |
         swizzle_128 << 62;
}

// Sixteen registers of an accumulator: as operands of an asm statement, and by their numbers in its text.
#define CODA_OPERANDS_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CODA_OPERANDS_16(d, i) \
  CODA_OPERANDS_4(d, i), CODA_OPERANDS_4(d, i + 4), CODA_OPERANDS_4(d, i + 8), CODA_OPERANDS_4(d, i + 12)
#define CODA_OPERANDS_32(d) CODA_OPERANDS_16(d, 0), CODA_OPERANDS_16(d, 16)
#define CODA_OPERANDS_64(d) CODA_OPERANDS_32(d), CODA_OPERANDS_16(d, 32), CODA_OPERANDS_16(d, 48)
#define CODA_OPERANDS_96(d) CODA_OPERANDS_64(d), CODA_OPERANDS_16(d, 64), CODA_OPERANDS_16(d, 80)
#define CODA_OPERANDS_128(d) CODA_OPERANDS_96(d), CODA_OPERANDS_16(d, 96), CODA_OPERANDS_16(d, 112)
#define CODA_NUMBERS_32                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CODA_NUMBERS_64                                                                \
  CODA_NUMBERS_32                                                                      \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CODA_NUMBERS_96                                                                \
  CODA_NUMBERS_64                                                                      \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CODA_NUMBERS_128                                                                           \
  CODA_NUMBERS_96                                                                                  \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// The operands after the accumulator: descriptors of a and b, whether to add, majorness of a and b.
#define CODA_WGMMA(shape, type, numbers, operands, a_at, b_at, add_at, a_major_at, b_major_at)         \
  asm volatile(                                                                                        \
      "{\n"                                                                                            \
      ".reg .pred accumulate;\n"                                                                       \
      "setp.ne.b32 accumulate, " add_at                                                                \
      ", 0;\n"                                                                                         \
      "wgmma.mma_async.sync.aligned." shape "k16.f32." type "." type " {" numbers "}, " a_at ", " b_at \
      ", accumulate, 1, 1, " a_major_at ", " b_major_at                                                \
      ";\n"                                                                                            \
      "}\n"                                                                                            \
      : operands                                                                                       \
      : "l"(a), "l"(b), "r"(accumulate), "n"(a_is_mn_major), "n"(b_is_mn_major))
#define CODA_WGMMA_N64(type) \
  CODA_WGMMA("m64n64", type, CODA_NUMBERS_32, CODA_OPERANDS_32(d), "%32", "%33", "%34", "%35", "%36")
#define CODA_WGMMA_N128(type) \
  CODA_WGMMA("m64n128", type, CODA_NUMBERS_64, CODA_OPERANDS_64(d), "%64", "%65", "%66", "%67", "%68")
#define CODA_WGMMA_N192(type) \
  CODA_WGMMA("m64n192", type, CODA_NUMBERS_96, CODA_OPERANDS_96(d), "%96", "%97", "%98", "%99", "%100")
#define CODA_WGMMA_N256(type) \
  CODA_WGMMA("m64n256", type, CODA_NUMBERS_128, CODA_OPERANDS_128(d), "%128", "%129", "%130", "%131", "%132")

// For factors of 8 bits, each with its own type, both k-major.
#define CODA_WGMMA_OF_8_BITS(shape, types, numbers, operands, a_at, b_at, add_at)              \
  asm volatile(                                                                                \
      "{\n"                                                                                    \
      ".reg .pred accumulate;\n"                                                               \
      "setp.ne.b32 accumulate, " add_at                                                        \
      ", 0;\n"                                                                                 \
      "wgmma.mma_async.sync.aligned." shape "k32.f32." types " {" numbers "}, " a_at ", " b_at \
      ", accumulate, 1, 1;\n"                                                                  \
      "}\n"                                                                                    \
      : operands                                                                               \
      : "l"(a), "l"(b), "r"(accumulate))
#define CODA_WGMMA_OF_TYPES(types)                                                                     \
  if constexpr (registers == 32)                                                                       \
    CODA_WGMMA_OF_8_BITS("m64n64", types, CODA_NUMBERS_32, CODA_OPERANDS_32(d), "%32", "%33", "%34");  \
  if constexpr (registers == 64)                                                                       \
    CODA_WGMMA_OF_8_BITS("m64n128", types, CODA_NUMBERS_64, CODA_OPERANDS_64(d), "%64", "%65", "%66"); \
  if constexpr (registers == 96)                                                                       \
    CODA_WGMMA_OF_8_BITS("m64n192", types, CODA_NUMBERS_96, CODA_OPERANDS_96(d), "%96", "%97", "%98"); \
  if constexpr (registers == 128)                                                                      \
    CODA_WGMMA_OF_8_BITS("m64n256", types, CODA_NUMBERS_128, CODA_OPERANDS_128(d), "%128", "%129", "%130");

/// Bytes along k of one instruction.
constexpr int k_step_bytes = 32;

template <DType input_a, DType input_b, int registers>
__device__ __forceinline__ void multiply_8_bits(float (&d)[registers], ptx::uint64 a, ptx::uint64 b, int accumulate) {
  constexpr bool a_is_e4m3 = input_a == DType::e4m3, b_is_e4m3 = input_b == DType::e4m3;
  static_assert((a_is_e4m3 || input_a == DType::e5m2) && (b_is_e4m3 || input_b == DType::e5m2),
                "there is no instruction for factors of these dtypes");
  if constexpr (a_is_e4m3 && b_is_e4m3) {
    CODA_WGMMA_OF_TYPES("e4m3.e4m3")
  } else if constexpr (a_is_e4m3) {
    CODA_WGMMA_OF_TYPES("e4m3.e5m2")
  } else if constexpr (b_is_e4m3) {
    CODA_WGMMA_OF_TYPES("e5m2.e4m3")
  } else {
    CODA_WGMMA_OF_TYPES("e5m2.e5m2")
  }
}

/// d (64 x N) = a (64 x k step) b (k step x N) + (accumulate ? d : 0), a and b through descriptors; N is 64, 128, 192
/// or 256. Asynchronous. Factors of 16 bits have one dtype.
template <DType input, DType input_b, int a_is_mn_major, int b_is_mn_major, int registers>
__device__ __forceinline__ void multiply(float (&d)[registers], ptx::uint64 a, ptx::uint64 b, int accumulate) {
  static_assert(registers == 32 || registers == 64 || registers == 96 || registers == 128,
                "products of 64, 128, 192 or 256 columns");
  static_assert(bytes_of(input) == 1 || ((input == DType::bf16 || input == DType::f16) && input_b == input),
                "there is no instruction for factors of this dtype");
  if constexpr (bytes_of(input) == 1) {
    static_assert(!a_is_mn_major && !b_is_mn_major, "factors of 8 bits are stored along k");
    multiply_8_bits<input, input_b>(d, a, b, accumulate);
  } else if constexpr (input == DType::bf16) {
    if constexpr (registers == 32) CODA_WGMMA_N64("bf16");
    if constexpr (registers == 64) CODA_WGMMA_N128("bf16");
    if constexpr (registers == 96) CODA_WGMMA_N192("bf16");
    if constexpr (registers == 128) CODA_WGMMA_N256("bf16");
  } else {
    if constexpr (registers == 32) CODA_WGMMA_N64("f16");
    if constexpr (registers == 64) CODA_WGMMA_N128("f16");
    if constexpr (registers == 96) CODA_WGMMA_N192("f16");
    if constexpr (registers == 128) CODA_WGMMA_N256("f16");
  }
}

// For a factor a in registers, four words a thread.
#define CODA_WGMMA_OF_FRAGMENT(shape, type, numbers, operands, a0, a1, a2, a3, b_at, add_at, b_major_at)            \
  asm volatile(                                                                                                     \
      "{\n"                                                                                                         \
      ".reg .pred accumulate;\n"                                                                                    \
      "setp.ne.b32 accumulate, " add_at                                                                             \
      ", 0;\n"                                                                                                      \
      "wgmma.mma_async.sync.aligned." shape "k16.f32." type "." type " {" numbers "}, {" a0 ", " a1 ", " a2 ", " a3 \
      "}, " b_at ", accumulate, 1, 1, " b_major_at                                                                  \
      ";\n"                                                                                                         \
      "}\n"                                                                                                         \
      : operands                                                                                                    \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(b_is_mn_major))
#define CODA_WGMMA_OF_FRAGMENTS(type)                                                                                \
  if constexpr (registers == 32)                                                                                     \
    CODA_WGMMA_OF_FRAGMENT("m64n64", type, CODA_NUMBERS_32, CODA_OPERANDS_32(d), "%32", "%33", "%34", "%35", "%36",  \
                           "%37", "%38");                                                                            \
  if constexpr (registers == 64)                                                                                     \
    CODA_WGMMA_OF_FRAGMENT("m64n128", type, CODA_NUMBERS_64, CODA_OPERANDS_64(d), "%64", "%65", "%66", "%67", "%68", \
                           "%69", "%70");                                                                            \
  if constexpr (registers == 128)                                                                                    \
    CODA_WGMMA_OF_FRAGMENT("m64n256", type, CODA_NUMBERS_128, CODA_OPERANDS_128(d), "%128", "%129", "%130", "%131",  \
                           "%132", "%133", "%134");

/// d (64 x N) = a (64 x 16) b (16 x N) + (accumulate ? d : 0), a in registers: the words of a thread are rows lane / 4
/// and 8 more of columns 2 (lane % 4) and the next, then the same of columns 8 further; N is 64, 128 or 256.
template <DType input, int b_is_mn_major, int registers>
__device__ __forceinline__ void multiply_fragment(float (&d)[registers], const ptx::uint32* a, ptx::uint64 b,
                                                  int accumulate) {
  static_assert(registers == 32 || registers == 64 || registers == 128, "products of 64, 128 or 256 columns");
  static_assert(input == DType::bf16 || input == DType::f16, "there is no instruction for factors of this dtype");
  if constexpr (input == DType::bf16) {
    CODA_WGMMA_OF_FRAGMENTS("bf16")
  } else {
    CODA_WGMMA_OF_FRAGMENTS("f16")
  }
}

#undef CODA_WGMMA_OF_FRAGMENTS
#undef CODA_WGMMA_OF_FRAGMENT
#undef CODA_WGMMA_OF_TYPES
#undef CODA_WGMMA_OF_8_BITS
#undef CODA_WGMMA_N256
#undef CODA_WGMMA_N192
#undef CODA_WGMMA_N128
#undef CODA_WGMMA_N64
#undef CODA_WGMMA
#undef CODA_NUMBERS_128
#undef CODA_NUMBERS_96
#undef CODA_NUMBERS_64
#undef CODA_NUMBERS_32
#undef CODA_OPERANDS_128
#undef CODA_OPERANDS_96
#undef CODA_OPERANDS_64
#undef CODA_OPERANDS_32
#undef CODA_OPERANDS_16
#undef CODA_OPERANDS_4

}  // namespace wgmma
}  // namespace coda
