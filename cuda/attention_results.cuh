// What a kernel of attention makes of a result as it stores it: a generated Epilogue (coda_jax/epilogue/emit.py) of
// single elements, beside the result as a matrix (batch x rows, heads x width).
//
// It sees the result as it is stored. A warp has 16 rows of one head in the fragment of accumulator_sm90.cuh, and
// stores all that it makes from registers: lanes exchange values until each has 16 bytes that are adjacent in memory,
// of a row, or in a transposed result of a column. So no shared memory and no barrier is needed.
#pragma once

#include "attention_masks.cuh"
#include "reductions_sm90.cuh"
#include "static_for.cuh"

namespace coda::attention {

/// The arrays beside a result: the Epilogue's scalars, for each maximum a word of each warp, and its stores in order,
/// tiles (batch, rows, heads, width) and transposed ones (heads, width, batch, rows).
template <int count>
struct Pointers {
  void* pointer[count];
};
template <>
struct Pointers<0> {};

/// A warp's fragment: its sequence of `batches`, the first of its rows, its head, and its number among all that store.
struct FragmentPlace {
  int batch, batches, row, rows, head, heads;
  long long warp;
};

template <class Config>
constexpr bool has_results = requires { typename Config::Epilogue; };

/// Whether the result itself is stored.
template <class Config>
CODA_CONSTEXPR bool keeps_result() {
  if constexpr (has_results<Config>) {
    return Config::keeps_result;
  } else {
    return true;
  }
}

template <class Config>
CODA_CONSTEXPR int result_pointers() {
  if constexpr (has_results<Config>) {
    return Config::result_pointers;
  } else {
    return 0;
  }
}

/// The results beside one of `input` and of this width, of which a thread has `outputs` values in registers. Config:
/// Epilogue, result_pointers, and first_store, the number of the stores' first pointer.
template <class Config, DType input, int width, int outputs>
struct Results {
  using Epilogue = CompleteEpilogue<typename Config::Epilogue>;
  using Arrays = Pointers<Config::result_pointers>;
  static constexpr int columns = 64, groups = columns / 8;  // at a time
  using Made = Fragment<columns>[at_least_one(Epilogue::tile_values(0))];
  using Scalars = Word[at_least_one(Epilogue::scalars)];
  using Maxima = float[at_least_one(Epilogue::whole_reductions)];
  static_assert(2 * outputs % columns == 0 && width % 8 == 0, "a thread has whole groups of 64 columns");
  static_assert(Epilogue::halves == 1 && Epilogue::sections == 1 && Epilogue::head_values == 0 &&
                    Epilogue::tile_loads == 0 && Epilogue::row_vectors == 0 && Epilogue::column_vectors == 0 &&
                    Epilogue::row_reductions == 0 && Epilogue::column_reductions == 0,
                "an epilogue of attention is of single elements and scalars, with maxima of all");

  /// All results of a fragment, of which `value(i)` is that of a thread's register i.
  template <class Value>
  __device__ __forceinline__ static void store(const Arrays& arrays, const FragmentPlace& place, const Value& value) {
    Scalars scalars;
    Maxima maxima;
    static_for<Epilogue::scalars>([&](auto index) {
      constexpr VectorAccess access = Epilogue::scalar[index];
      scalars[index] = load_word<access.dtype>(arrays.pointer[access.pointer], 0);
    });
    static_for<Epilogue::whole_reductions>(
        [&](auto index) { maxima[index] = neutral<Epilogue::whole_reduction[index].op>(); });
#pragma unroll
    for (int first = 0; first < 2 * outputs && first < width; first += columns) {
      Made made;
      evaluate(place, first, scalars, value, made, maxima);
      store_rows(arrays, place, first, made);
      store_columns(arrays, place, first, made);
    }
    static_for<Epilogue::whole_reductions>([&](auto index) {
      constexpr ReductionAccess access = Epilogue::whole_reduction[index];
      const float of_warp = combine_lanes<access.op, 31>(maxima[index]);
      if (threadIdx.x % 32 == 0) static_cast<float*>(arrays.pointer[access.pointer])[place.warp] = of_warp;
    });
  }

 private:
  /// The array of a store, whose tensor map would have this number behind the two of a product's factors.
  template <int map>
  __device__ __forceinline__ static void* array_of(const Arrays& arrays) {
    return arrays.pointer[Config::first_store + map - 2];
  }
  __device__ __forceinline__ static int row_of(const FragmentPlace& place, int r) {
    return place.row + static_cast<int>(threadIdx.x % 32 / 4) + 8 * r;
  }

  template <class Value>
  __device__ __forceinline__ static void evaluate(const FragmentPlace& place, int first, const Scalars& scalars,
                                                  const Value& value, Made& made, Maxima& maxima) {
#pragma unroll
    for (int j = 0; j < groups; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          typename Epilogue::Element element;
          typename Epilogue::Result result;
          element.acc[0] = value(first / 2 + 4 * j + 2 * r + c);
          static_for<Epilogue::scalars>([&](auto index) { element.scalar[index] = scalars[index]; });
          Epilogue::template evaluate<0>(element, result);
          static_for<Epilogue::tile_values(0)>([&](auto index) { made[index].value[j][r][c] = result.tile[index]; });
          if constexpr (Epilogue::whole_reductions > 0) {
            const bool is_inside = first + 8 * j < width && row_of(place, r) < place.rows;
            static_for<Epilogue::whole_reductions>([&](auto index) {
              constexpr Op op = Epilogue::whole_reduction[index].op;
              if (is_inside) maxima[index] = combine<op>(maxima[index], result.whole[index]);
            });
          }
        }
  }

  __device__ __forceinline__ static void store_rows(const Arrays& arrays, const FragmentPlace& place, int first,
                                                    const Made& made) {
    static_for<Epilogue::tile_stores(0)>([&](auto index) {
      constexpr TileAccess access = Epilogue::tile_store[0][index];
      using Bits = typename Stored<access.dtype>::Bits;
      const Fragment<columns>& of = made[index];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(place, r);
        const long long at = (static_cast<long long>(place.batch) * place.rows + row) * place.heads + place.head;
        Bits* const to = row < place.rows ? static_cast<Bits*>(array_of<access.map>(arrays)) + at * width : nullptr;
        if constexpr (bytes_of(access.dtype) == 1) {
          uint32 words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            words[i] = pair<access>(of, 2 * i, r) | static_cast<uint32>(pair<access>(of, 2 * i + 1, r)) << 16;
          store_bytes(to, first + 16 * static_cast<int>(threadIdx.x % 4), gathered(words));
        } else if constexpr (bytes_of(access.dtype) == 2) {
          store_row<access.dtype, width, columns / 2>(to, first, [&](int j, int c) { return of.value[j][r][c]; });
        } else {
          static_assert(access.dtype == DType::f32, "a result is of floats");
#pragma unroll
          for (int j = 0; j < groups; ++j) {
            const int column = first + 8 * j + 2 * static_cast<int>(threadIdx.x % 4);
            if (to != nullptr && column < width)
              *reinterpret_cast<float2*>(to + column) = {of.value[j][r][0], of.value[j][r][1]};
          }
        }
      }
    });
  }

  /// Transposed results have 8 bits, and rows that are a multiple of 16: a warp's are all inside, or none.
  __device__ __forceinline__ static void store_columns(const Arrays& arrays, const FragmentPlace& place, int first,
                                                       const Made& made) {
    static_for<Epilogue::transposed_stores>([&](auto index) {
      constexpr TransposedAccess access = Epilogue::transposed_store[index];
      static_assert(bytes_of(access.dtype) == 1, "a transposed result has 8 bits");
      const int lane = threadIdx.x % 32;
      const Fragment<columns>& of = made[access.value];
#pragma unroll
      for (int j = 0; j < groups; j += 4) {
        uint32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = rows_of_column(pair<access>(of, j + i, 0), pair<access>(of, j + i, 1));
        const uint4 column = gathered(words);
        const int at = first + 8 * (j + lane % 4) + lane / 4;
        const long long to =
            ((static_cast<long long>(place.head) * width + at) * place.batches + place.batch) * place.rows;
        if (at < width && place.row < place.rows)
          *reinterpret_cast<uint4*>(static_cast<unsigned char*>(array_of<access.map>(arrays)) + to + place.row) =
              column;
      }
    });
  }

  /// A row's pair of columns of a group.
  template <auto access>
  __device__ __forceinline__ static ptx::uint16 pair(const Fragment<columns>& of, int j, int r) {
    return packed_bytes<access.dtype, access.saturates>(of.value[j][r][0], of.value[j][r][1]);
  }

  /// From pairs of columns of rows lane / 4 and lane / 4 + 8 to four rows of column lane / 4: rows 2 (lane % 4) and the
  /// next one, and the two that are 8 behind these.
  __device__ __forceinline__ static uint32 rows_of_column(ptx::uint16 upper, ptx::uint16 lower) {
    const int lane = threadIdx.x % 32, from = lane % 4 * 8 + lane / 8;
    const uint32 both = upper | static_cast<uint32>(lower) << 16;
    const uint32 even = __shfl_sync(0xFFFFFFFFu, both, from), odd = __shfl_sync(0xFFFFFFFFu, both, from + 4);
    const uint32 first = __byte_perm(even, odd, 0x6240), second = __byte_perm(even, odd, 0x7351);
    return lane / 4 % 2 == 0 ? first : second;
  }

  /// Lanes of a quad have bytes 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of each of four pieces of 16; then each has one piece.
  __device__ __forceinline__ static uint4 gathered(uint32 (&words)[4]) {
    exchange_in_quad(words);
    return {__byte_perm(words[0], words[1], 0x5410), __byte_perm(words[2], words[3], 0x5410),
            __byte_perm(words[0], words[1], 0x7632), __byte_perm(words[2], words[3], 0x7632)};
  }

  /// 16 bytes of a row from a column on, as far as they are inside.
  __device__ __forceinline__ static void store_bytes(unsigned char* row, int column, uint4 bytes) {
    if (row == nullptr || column >= width) return;
    if constexpr (width % 16 == 0) {
      *reinterpret_cast<uint4*>(row + column) = bytes;
    } else {
      *reinterpret_cast<uint2*>(row + column) = {bytes.x, bytes.y};
      if (column + 8 < width) *reinterpret_cast<uint2*>(row + column + 8) = {bytes.z, bytes.w};
    }
  }
};

}  // namespace coda::attention
