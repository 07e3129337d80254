// Between memory and a thread's registers: single words of global memory, and fragments of tiles in swizzled shared
// memory. One warp handles 16 rows; the fragment is that of accumulator_sm90.cuh.
#pragma once

#include "epilogue_abi.cuh"
#include "ptx_sm90.cuh"

namespace coda {

// ---- conversions of the floating types that are not float32

template <DType dtype>
__device__ __forceinline__ float widened(typename Stored<dtype>::Bits bits) {
  static_assert(dtype == DType::bf16 || dtype == DType::f16, "there is no conversion of this dtype");
  if constexpr (dtype == DType::bf16) return __uint_as_float(static_cast<ptx::uint32>(bits) << 16);
  return ptx::f16_to_float(bits);
}

/// Two values in a word.
template <DType dtype>
__device__ __forceinline__ ptx::uint32 packed(float low, float high) {
  static_assert(dtype == DType::bf16 || dtype == DType::f16, "there is no conversion of this dtype");
  return dtype == DType::bf16 ? ptx::pack_bf16(low, high) : ptx::pack_f16(low, high);
}

// ---- one value in global memory

/// Not by __ldg: the array may have been written while this kernel began, and a compiler may move such loads in front
/// of any wait; the assembler does, in front of the barrier that wakes the other consumer.
template <DType dtype>
__device__ __forceinline__ Word load_word(const void* base, long long index) {
  Word word;
  if constexpr (bytes_of(dtype) == 4) {
    word.i = static_cast<const int*>(base)[index];
  } else if constexpr (dtype == DType::pred) {
    word.i = static_cast<const unsigned char*>(base)[index] != 0;
  } else {
    word.f = widened<dtype>(static_cast<const typename Stored<dtype>::Bits*>(base)[index]);
  }
  return word;
}

/// The same, or two adjacent ones at once, then from an even index of an array aligned to pairs.
template <DType dtype, int count>
__device__ __forceinline__ void load_adjacent(const void* base, long long index, Word (&words)[2]) {
  const void* from = static_cast<const char*>(base) + index * bytes_of(dtype);
  if constexpr (count == 1) {
    words[0] = load_word<dtype>(base, index);
  } else if constexpr (bytes_of(dtype) == 4) {
    const int2 both = *static_cast<const int2*>(from);
    words[0].i = both.x;
    words[1].i = both.y;
  } else {
    static_assert(bytes_of(dtype) == 2, "a pair is one word");
    const ptx::uint32 both = *static_cast<const ptx::uint32*>(from);
    words[0].f = widened<dtype>(static_cast<ptx::uint16>(both));
    words[1].f = widened<dtype>(static_cast<ptx::uint16>(both >> 16));
  }
}

// ---- a fragment in shared memory: 16 rows x `columns`, TMA's swizzle

/// Values of one thread: [8-column group j][row half r][column c].
template <int columns>
struct Fragment {
  static constexpr int groups = columns / 8;
  float value[groups][2][2];
};

/// A box of rows of `columns` elements as TMA lays it out: the swizzle is the row's bytes, and exchanges the 16-byte
/// chunks of a row by the row's position in its group of 8. All accesses below are free of bank conflicts for 16-bit
/// types.
template <DType dtype, int columns>
struct Box {
  static constexpr int row_bytes = columns * bytes_of(dtype);
  static_assert(row_bytes == 32 || row_bytes == 64 || row_bytes == 128, "a box row is 32, 64 or 128 bytes");
  static_assert(bytes_of(dtype) == 2 || bytes_of(dtype) == 4, "elements move by matrix instructions or as words");

  /// Where a lane's chunk of the first columns lies in the box: a matrix instruction's row, or its pair of the
  /// fragment. The chunk `bytes` further along the row is at this offset ^ bytes.
  __device__ __forceinline__ static ptx::uint32 matrix_offset(int lane) { return offset(lane & 15, lane >> 4); }
  __device__ __forceinline__ static ptx::uint32 pair_offset(int lane) {
    return offset(lane / 4, (lane & 3) / 2) + 8 * (lane & 1);
  }
  __device__ __forceinline__ static ptx::uint32 offset(int row, int chunk) {
    const int exchange = row_bytes == 128 ? row & 7 : row_bytes == 64 ? (row >> 1) & 3 : (row >> 2) & 1;
    return row * row_bytes + ((chunk ^ exchange) << 4);
  }

  /// The columns of the fragment, from `first` on.
  template <int count>
  __device__ __forceinline__ static void load(ptx::uint32 box, int lane, int first, Fragment<count>& fragment) {
    if constexpr (bytes_of(dtype) == 2) {
      const ptx::uint32 from = matrix_offset(lane);
#pragma unroll
      for (int j = 0; j < count / 8; j += 2) {
        ptx::uint32 words[4];
        ptx::load_matrices(box + (from ^ (2 * first + 16 * j)), words);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float (&pair)[2] = fragment.value[j + i / 2][i % 2];
          pair[0] = widened<dtype>(static_cast<ptx::uint16>(words[i]));
          pair[1] = widened<dtype>(static_cast<ptx::uint16>(words[i] >> 16));
        }
      }
    } else {
      const ptx::uint32 from = pair_offset(lane);
#pragma unroll
      for (int j = 0; j < count / 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          ptx::load_pair(box + (from ^ (4 * first + 32 * j)) + 8 * r * row_bytes, fragment.value[j][r][0],
                         fragment.value[j][r][1]);
    }
  }

  template <int count>
  __device__ __forceinline__ static void store(ptx::uint32 box, int lane, int first, const Fragment<count>& fragment) {
    if constexpr (bytes_of(dtype) == 2) {
      const ptx::uint32 to = matrix_offset(lane);
#pragma unroll
      for (int j = 0; j < count / 8; j += 2) {
        ptx::uint32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&pair)[2] = fragment.value[j + i / 2][i % 2];
          words[i] = packed<dtype>(pair[0], pair[1]);
        }
        ptx::store_matrices(box + (to ^ (2 * first + 16 * j)), words);
      }
    } else {
      const ptx::uint32 to = pair_offset(lane);
#pragma unroll
      for (int j = 0; j < count / 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          ptx::store_pair(box + (to ^ (4 * first + 32 * j)) + 8 * r * row_bytes, fragment.value[j][r][0],
                          fragment.value[j][r][1]);
    }
  }
};

}  // namespace coda
