// Loads and stores between memory and a thread's registers: single words of global memory, and fragments of tiles in
// swizzled shared memory. One warp handles 16 rows; the fragment is that of accumulator_sm90.cuh.
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

template <DType dtype>
__device__ __forceinline__ int is_beyond(float value) {
  return dtype == DType::e4m3 ? is_beyond_e4m3(value) : is_beyond_e5m2(value);
}

/// Two values in a word.
template <DType dtype>
__device__ __forceinline__ ptx::uint32 packed(float low, float high) {
  static_assert(dtype == DType::bf16 || dtype == DType::f16, "there is no conversion of this dtype");
  return dtype == DType::bf16 ? ptx::pack_bf16(low, high) : ptx::pack_f16(low, high);
}

/// Two values of a dtype of 8 bits. Beyond its range they are the largest finite one if it `saturates`, else XLA's: the
/// next byte, which is NaN (e4m3) or infinite (e5m2).
template <DType dtype, bool saturates>
__device__ __forceinline__ ptx::uint16 packed_bytes(float low, float high) {
  static_assert(dtype == DType::e4m3 || dtype == DType::e5m2, "there is no conversion of this dtype");
  ptx::uint16 bytes = dtype == DType::e4m3 ? ptx::pack_e4m3(low, high) : ptx::pack_e5m2(low, high);
  if constexpr (!saturates) bytes += is_beyond<dtype>(low) + (is_beyond<dtype>(high) << 8);
  return bytes;
}

/// The same of four, the first in the lowest byte.
template <DType dtype, bool saturates>
__device__ __forceinline__ ptx::uint32 packed_bytes(float v0, float v1, float v2, float v3) {
  return ptx::joined(packed_bytes<dtype, saturates>(v0, v1), packed_bytes<dtype, saturates>(v2, v3));
}

// ---- one value in global memory

/// A load without __ldg: the array may have been written while this kernel began, and a compiler may move such loads
/// before any wait; the assembler moves them before the barrier that wakes the other consumer.
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

/// The same for one value, or for two adjacent ones at once, from an even index of an array aligned to pairs.
template <DType dtype, int count>
__device__ __forceinline__ void load_adjacent(const void* base, long long index, Word (&words)[2]) {
  const void* from = static_cast<const char*>(base) + index * bytes_of(dtype);
  if constexpr (count == 1) {
    words[0] = load_word<dtype>(base, index);
  } else if constexpr (bytes_of(dtype) == 4) {
    const int2 both = *static_cast<const int2*>(from);
    words[0].i = both.x;
    words[1].i = both.y;
  } else if constexpr (dtype == DType::pred) {
    const ptx::uint16 both = *static_cast<const ptx::uint16*>(from);
    words[0].i = (both & 0xFF) != 0;
    words[1].i = both >> 8 != 0;
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

/// Columns 8 j to 8 j + 15 of a row are stored in contraction order, 0 8 1 9 2 10 ... 7 15 of them. A thread then has
/// four adjacent ones, of groups j and j + 1.
template <DType dtype, bool saturates, int columns>
__device__ __forceinline__ ptx::uint32 word_in_order(const Fragment<columns>& fragment, int j, int r) {
  const float (&one)[2] = fragment.value[j][r], (&next)[2] = fragment.value[j + 1][r];
  return packed_bytes<dtype, saturates>(one[0], next[0], one[1], next[1]);
}

/// A box of rows of `columns` elements in TMA's layout: the swizzle is as wide as a row, and permutes the 16-byte
/// chunks of a row by the row's position in its group of 8. All accesses below are free of bank conflicts for types of
/// 16 and of 8 bits.
template <DType dtype, int columns>
struct Box {
  static constexpr int row_bytes = columns * bytes_of(dtype);
  static_assert(row_bytes == 32 || row_bytes == 64 || row_bytes == 128, "a box row is 32, 64 or 128 bytes");

  /// The offset in the box of a lane's chunk of the first columns: a matrix instruction's row, or its pair of the
  /// fragment. The chunk `bytes` further along the row is at this offset ^ bytes.
  __device__ __forceinline__ static ptx::uint32 matrix_offset(int lane) { return offset(lane & 15, lane >> 4); }
  __device__ __forceinline__ static ptx::uint32 pair_offset(int lane) {
    return offset(lane / 4, (lane & 3) / 2) + 8 * (lane & 1);
  }
  __device__ __forceinline__ static ptx::uint32 bytes_offset(int lane) {  // of a pair of 8 bits each
    return offset(lane / 4, 0) + 2 * (lane & 3);
  }
  __device__ __forceinline__ static ptx::uint32 offset(int row, int chunk) {
    const int exchange = row_bytes == 128 ? row & 7 : row_bytes == 64 ? (row >> 1) & 3 : (row >> 2) & 1;
    return row * row_bytes + ((chunk ^ exchange) << 4);
  }

  /// Loads the columns of the fragment, from `first` on.
  template <int count>
  __device__ __forceinline__ static void load(ptx::uint32 box, int lane, int first, Fragment<count>& fragment) {
    if constexpr (bytes_of(dtype) == 1) {
      const ptx::uint32 from = bytes_offset(lane);
#pragma unroll
      for (int j = 0; j < count / 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const ptx::uint16 bytes = ptx::load_2_bytes(box + (from ^ (first + 8 * j)) + 8 * r * row_bytes);
          const ptx::uint32 both = dtype == DType::e4m3 ? ptx::e4m3_to_f16(bytes) : ptx::e5m2_to_f16(bytes);
          fragment.value[j][r][0] = ptx::f16_to_float(static_cast<ptx::uint16>(both));
          fragment.value[j][r][1] = ptx::f16_to_float(static_cast<ptx::uint16>(both >> 16));
        }
    } else if constexpr (bytes_of(dtype) == 2) {
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

  /// Stores a fragment of a dtype of 8 bits: in the order of the columns, pair by pair, or in contraction order by
  /// matrix instructions.
  template <bool contraction_order, bool saturates, int count>
  __device__ __forceinline__ static void store_bytes(ptx::uint32 box, int lane, int first,
                                                     const Fragment<count>& fragment) {
    if constexpr (contraction_order) {
      constexpr int matrices = count % 32 == 0 ? 4 : 2;
      const ptx::uint32 to = matrix_offset(lane);
#pragma unroll
      for (int j = 0; j < count / 8; j += matrices) {
        ptx::uint32 words[matrices];
#pragma unroll
        for (int i = 0; i < matrices; ++i) words[i] = word_in_order<dtype, saturates>(fragment, j + i / 2 * 2, i % 2);
        ptx::store_matrices(box + (to ^ (first + 8 * j)), words);
      }
    } else {
      const ptx::uint32 to = bytes_offset(lane);
#pragma unroll
      for (int j = 0; j < count / 8; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          ptx::store_2_bytes(box + (to ^ (first + 8 * j)) + 8 * r * row_bytes,
                             packed_bytes<dtype, saturates>(fragment.value[j][r][0], fragment.value[j][r][1]));
    }
  }
};

}  // namespace coda
