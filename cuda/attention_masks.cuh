// Which tiles of keys a tile of queries sees, and which elements of a tile that it sees in part.
//
// Without arrays the mask is a band: query i sees keys i - left to i + right. With arrays, a query sees the keys in one
// or two intervals of its own, of these the ones with its id, and of these the ones that a dense mask has. Tiles are
// then listed as bits, made once in front of the kernels: bit j of a tile of queries is set if it sees something of
// tile j of keys, in `needed`, or all of it, in `full`.
#pragma once

#include "accumulator_sm90.cuh"
#include "elementwise.cuh"
#include "fragment_sm90.cuh"
#include "pipeline.cuh"

namespace coda::attention {

using ptx::uint32;

constexpr float log2_e = 1.4426950408889634f;
/// Of an element that is not seen: a power of two, so that two of them scaled differ by exactly 0.
constexpr float masked_score = -0x1p100f;

/// Rows of arrays that are loaded a tile at a time.
__device__ __forceinline__ constexpr int padded(int rows) {
  return (rows + 127) / 128 * 128;
}
/// How many tiles of `size` cover `count`.
__device__ __forceinline__ constexpr int tiles_of(int count, int size) {
  return (count + size - 1) / size;
}

/// The mask's arrays, as a kernel's parameters have them. Arrays that a kernel's Config does not
/// have are null.
struct Mask {
  const int* intervals;         // (batch, 2 or 4, padded(queries)): the first and the last key of an interval
  const int* query_ids;         // (batch, padded(queries))
  const int* key_ids;           // (batch, padded(keys))
  const uint32 *needed, *full;  // (batch, tiles, words): 32 tiles of the other axis to a word
  const int* order;             // (batch * tiles): tiles of all sequences, those that see the most first
  const unsigned char* dense;   // broadcastable to (batch, heads, queries, keys)
  const void* bias;             // the same, added to scores
};

/// Arrays behind those of the mask, where a kernel's Config has them: a term of each row's sum, and dropout's bits.
template <bool has_sinks>
struct Sinks {
  const float* sinks;  // (batch, heads)
};
template <>
struct Sinks<false> {};
template <bool has_dropout>
struct RandomBits {
  const int* row_bits;     // (batch, heads, queries); of the backward kernel (batch, heads, padded(queries))
  const int* column_bits;  // (padded(keys))
};
template <>
struct RandomBits<false> {};
template <bool has_sinks, bool has_dropout>
struct Operands : Mask, Sinks<has_sinks>, RandomBits<has_dropout> {};

/// An array that is broadcastable to (batch, heads, queries, keys): its sizes, 1 where all share an entry.
struct Broadcast {
  int batch, heads, queries, keys;

  __device__ __forceinline__ long long index(int b, int head, int query, int key) const {
    return ((static_cast<long long>(batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : head)) * queries +
            (queries == 1 ? 0 : query)) *
               keys +
           (keys == 1 ? 0 : key);
  }
  /// Entries of a row, from `index(.., 0)` on, for two adjacent keys, the first of which is even: in one load if rows
  /// have an even length (`is_even`). Keys beyond the end have entries of others.
  template <DType dtype, bool is_even>
  __device__ __forceinline__ void load_keys(const void* array, long long row, int key, Word (&entries)[2]) const {
    if constexpr (is_even) {
      load_adjacent<dtype, 2>(array, row + min(key, keys - 2), entries);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) entries[i] = load_word<dtype>(array, row + min(key + i, keys - 1));
    }
  }
};

/// Tiles of `size` of an axis of `count`, of which rows first_row to last_row of the other axis see those from
/// row - before to row + behind.
struct BandTiles {
  int first, end;            // seen, at least in part
  int first_full, end_full;  // seen entirely by all of the rows

  __device__ __forceinline__ BandTiles(int first_row, int last_row, int before, int behind, int size, int count) {
    const int last = min(count - 1, last_row + behind);
    first = max(0, first_row - before) / size;
    end = last < 0 ? 0 : last / size + 1;
    first_full = (max(0, last_row - before) + size - 1) / size;
    end_full = max(0, min(count, first_row + behind + 1)) / size;
  }
  __device__ __forceinline__ bool is_partial(int tile) const { return tile < first_full || tile >= end_full; }
};

/// Goes over the tiles that a tile sees, the last first.
template <bool has_arrays>
struct Walk;

template <>
struct Walk<false> {
  BandTiles band;
  int tile;

  __device__ __forceinline__ explicit Walk(BandTiles band) : band(band), tile(band.end) {}
  __device__ __forceinline__ bool next() { return --tile >= band.first; }
  __device__ __forceinline__ bool is_partial() const { return band.is_partial(tile); }
};

template <>
struct Walk<true> {
  const uint32 *needed, *full;  // of this tile
  int word, tile = 0;
  uint32 bits = 0, full_bits = 0;

  __device__ __forceinline__ Walk(const Mask& mask, long long tile, int words)
      : needed(mask.needed + tile * words), full(mask.full + tile * words), word(words) {}
  __device__ __forceinline__ bool next() {
    while (bits == 0) {
      if (--word < 0) return false;
      bits = needed[word];
      full_bits = full[word];
    }
    const int bit = 31 - __clz(bits);
    bits ^= 1u << bit;
    tile = 32 * word + bit;
    return true;
  }
  __device__ __forceinline__ bool is_partial() const { return (full_bits >> (tile % 32) & 1) == 0; }
};

/// What the producer says about a step with its tiles, so that consumers keep no walk: a tile's number, whether it is
/// seen in part, and whether it is the last one.
struct Step {
  int word;

  __device__ __forceinline__ static Step of(int tile, bool is_partial, bool is_last) {
    return {tile | (is_partial ? 1 << 29 : 0) | (is_last ? 1 << 30 : 0)};
  }
  __device__ __forceinline__ int tile() const { return word & ((1 << 29) - 1); }
  __device__ __forceinline__ bool is_partial() const { return (word & 1 << 29) != 0; }
  __device__ __forceinline__ bool is_last() const { return (word & 1 << 30) != 0; }
};

/// The sum of a value of each lane.
__device__ __forceinline__ int sum_of_warp(int value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  return value;
}
/// How many tiles before `tile` are listed: called by a whole warp.
__device__ __forceinline__ int tiles_before(const uint32* needed, int tile) {
  int count = 0;
  for (int word = threadIdx.x % 32; word <= tile / 32; word += 32)
    count += __popc(word < tile / 32 ? needed[word] : needed[word] & ((1u << tile % 32) - 1));
  return sum_of_warp(count);
}
/// How many of `tiles` tiles are listed and have a position before `position`.
__device__ __forceinline__ int tiles_before(const uint32* needed, const int* positions, int tiles, int position) {
  int count = 0;
#pragma unroll 2
  for (int tile = threadIdx.x % 32; tile < tiles; tile += 32)
    count += (needed[tile / 32] >> tile % 32 & 1) != 0 && positions[tile] < position ? 1 : 0;
  return sum_of_warp(count);
}

/// Two adjacent words in shared memory.
__device__ __forceinline__ void load_two(uint32 address, int& first, int& second) {
  float low, high;
  ptx::load_pair(address, low, high);
  first = __float_as_int(low), second = __float_as_int(high);
}

/// The keys that a query sees, but for ids and the dense mask.
template <bool has_second>
struct Seen {
  int first, last, second_first, second_last;

  __device__ __forceinline__ bool operator()(int key) const {
    bool seen = first <= key && key <= last;
    if constexpr (has_second) seen = seen || (second_first <= key && key <= second_last);
    return seen;
  }
  /// Whether it says that all keys of a tile are seen: if not, some of them may be.
  __device__ __forceinline__ bool has_all(int first_key, int last_key) const {
    return first <= first_key && last_key <= last;
  }
};

// ---- values that are not finite
//
// A tile that is seen in part may hold rows that some of its readers must not see, and 0 times NaN is NaN. So rows of
// such tiles are replaced by zeros where they hold NaN or an infinity, and marked; a reader that sees a marked row gets
// NaN.

/// Exponents of two values in a word are all ones where the sum has the sign of one.
template <DType input>
__device__ __forceinline__ uint32 exponent_carries(uint32 word) {
  constexpr uint32 exponents = input == DType::bf16 ? 0x7F807F80u : 0x7C007C00u;
  constexpr uint32 ones = input == DType::bf16 ? 0x00800080u : 0x04000400u;
  return (word & exponents) + ones;
}

/// What `warps` warps do with a tile in shared memory, `chunks` chunks of `rows` rows of 128 bytes, of which each has
/// its share. A bit of `marks` is a row: each word has `bits` of them. It needs few registers: a producer has no more.
template <DType input, int rows, int chunks, int warps>
struct Cleaner {
  static constexpr int own_rows = rows / warps, bits = own_rows < 32 ? own_rows : 32,
                       words = own_rows / bits;  // a warp's
  static constexpr int mark_bytes = 4 * warps * words;
  static_assert(own_rows % 4 == 0 && own_rows % bits == 0, "a warp reads four rows at a time");

  __device__ __forceinline__ static uint32 word_at(uint32 marks, int warp, int word) {
    return marks + 4 * (warp * words + word);
  }
  __device__ __forceinline__ static bool is_marked(uint32 marks, int row) {
    return (ptx::load_word(marks + 4 * (row / bits)) >> row % bits & 1) != 0;
  }
  __device__ __forceinline__ static bool has_marks(uint32 marks) {
    uint32 any = 0;
#pragma unroll
    for (int at = 0; at < mark_bytes; at += 4) any |= ptx::load_word(marks + at);
    return any != 0;
  }
  __device__ __forceinline__ static void begin(uint32 marks, int warp) {
    if (threadIdx.x % 32 < words) ptx::store_word(word_at(marks, warp, threadIdx.x % 32), 0);
    __syncwarp();
  }
  /// Marks rows of `tile` that are not finite, in addition to those that are marked.
  __device__ __forceinline__ static void mark(uint32 tile, uint32 marks, int warp) {
    const int lane = threadIdx.x % 32;
    uint32 from = tile + warp * own_rows * 128 + lane * 16;
#pragma unroll 1
    for (int word = 0; word < words; ++word) {
      uint32 marked = 0;
#pragma unroll 1
      for (int group = 0; group < bits; group += 4, from += 4 * 128) {  // of four rows, eight lanes each
        uint32 carries = 0;
#pragma unroll 2
        for (int chunk = 0; chunk < chunks; ++chunk) {
          const int4 some = ptx::load_16_bytes(from + chunk * rows * 128);
          carries |= exponent_carries<input>(some.x) | exponent_carries<input>(some.y) |
                     exponent_carries<input>(some.z) | exponent_carries<input>(some.w);
        }
        const uint32 lanes = __ballot_sync(0xFFFFFFFFu, (carries & 0x80008000u) != 0);
        if (lanes == 0) continue;
        for (int row = 0; row < 4; ++row)
          if ((lanes >> 8 * row & 0xFF) != 0) marked |= 1u << (group + row);
      }
      if (marked != 0 && lane == 0) {
        const uint32 to = word_at(marks, warp, word);
        ptx::store_word(to, ptx::load_word(to) | marked);
      }
    }
    __syncwarp();
  }
  /// Replaces marked rows of `tile` by zeros.
  __device__ __forceinline__ static void clear(uint32 tile, uint32 marks, int warp) {
#pragma unroll 1
    for (int word = 0; word < words; ++word) {
#pragma unroll 1
      for (uint32 left = ptx::load_word(word_at(marks, warp, word)); left != 0; left &= left - 1) {
        const uint32 row = tile + (warp * own_rows + word * bits + __ffs(left) - 1) * 128;
#pragma unroll 1
        for (int piece = threadIdx.x % 32; piece < 8 * chunks; piece += 32)
          ptx::store_zeros(row + piece / 8 * rows * 128 + piece % 8 * 16);
      }
    }
    ptx::fence_async_proxy();
  }
};

// ---- values of 16 bits, two in a word

template <DType input>
__device__ __forceinline__ float widened_half(uint32 word, int half) {
  if constexpr (input == DType::bf16)
    return __uint_as_float(half ? word & 0xFFFF0000u : word << 16);
  else
    return ptx::f16_to_float(static_cast<ptx::uint16>(half ? word >> 16 : word));
}

template <DType input>
__device__ __forceinline__ float rounded_half(float value) {
  return widened_half<input>(packed<input>(value, value), 0);
}
/// Two values, of which negative ones become 0; NaN stays.
template <DType input>
__device__ __forceinline__ uint32 without_negatives(uint32 word) {
  if constexpr (input == DType::bf16)
    return ptx::without_negatives_bf16(word);
  else
    return ptx::without_negatives_f16(word);
}

// ---- dropout

/// A probability p, or -p if it is dropped, by the epilogue of `coda.dropout` (coda_jax/attend/dropout.py).
template <class Dropout>
__device__ __forceinline__ float signed_if_dropped(float p, int row_bits, int column_bits) {
  struct {
    float acc[1];
    Word row_vector[1], column_vector[1];
  } in;
  struct {
    float tile[1];
  } out;
  in.acc[0] = p, in.column_vector[0].i = row_bits, in.row_vector[0].i = column_bits;
  Dropout::template evaluate<0>(in, out);
  return out.tile[0];
}

/// The sign bit, if a probability is dropped.
template <class Dropout>
__device__ __forceinline__ uint32 sign_if_dropped(int row_bits, int column_bits) {
  return static_cast<uint32>(__float_as_int(signed_if_dropped<Dropout>(1.0f, row_bits, column_bits))) & 0x80000000u;
}

/// Four lanes have a pair of each of four groups of 8 columns; then each has the four pairs of one group.
__device__ __forceinline__ void exchange_in_quad(uint32 (&words)[4]) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool is_upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int low = 0; low < 4; ++low) {
      if ((low & step) != 0) continue;
      const uint32 other = __shfl_xor_sync(0xFFFFFFFFu, is_upper ? words[low] : words[low + step], step);
      (is_upper ? words[low] : words[low + step]) = other;
    }
  }
}

/// Stores columns `column` and on of a row of `width`, 16 bytes a lane, from `count` / 4 groups of 8 of an accumulator:
/// value(j, c) is the lane's value c of group j. All lanes of a warp call it; a row that is null is not stored.
template <DType input, int width, int count, class Value>
__device__ __forceinline__ void store_row(unsigned short* row, int column, const Value& value) {
  constexpr int groups = count / 4;
#pragma unroll
  for (int j = 0; j < groups; j += 4) {
    uint32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = packed<input>(value(j + i, 0), value(j + i, 1));
    exchange_in_quad(words);
    const int at = column + 8 * (j + threadIdx.x % 4);
    if (row != nullptr && at < width) *reinterpret_cast<uint4*>(row + at) = {words[0], words[1], words[2], words[3]};
  }
}

/// Chunks of 64 columns of an accumulator: one, two or four.
CODA_CONSTEXPR int value_chunks_of(int chunks) {
  return chunks == 3 ? 4 : chunks;
}

}  // namespace coda::attention
