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

/// The arrays beside a result: the Epilogue's vectors and scalars, its reductions (a word of each warp for a maximum, a
/// head's columns of each warp for one along columns, a word of each row and head for one along rows), the tiles that
/// it reads (batch, rows, heads, width), and its stores in order, tiles and transposed ones.
///
/// `which` tells those of several results apart.
template <int count, int which = 0>
struct Pointers {
  void* pointer[count];
};
template <int which>
struct Pointers<0, which> {};

/// A warp's fragment: its sequence of `batches`, the first of its rows, its head, and its number among all that store.
struct FragmentPlace {
  int batch, batches, row, rows, head, heads;
  long long warp;

  /// The place of a row's columns of the head in a tile (batch, rows, heads, width), and of a column of the head in a
  /// transposed one (heads, width, batch, rows).
  template <int width>
  __device__ __forceinline__ long long in_rows(int of_row) const {
    return ((static_cast<long long>(batch) * rows + of_row) * heads + head) * width;
  }
  template <int width>
  __device__ __forceinline__ long long in_columns(int of_column) const {
    return ((static_cast<long long>(head) * width + of_column) * batches + batch) * rows;
  }
};

/// A fragment whose stores are columns of tiles that several results share, (batch, rows, columns), transposed
/// (columns, batch, rows): its head begins at `column`.
struct JoinedPlace : FragmentPlace {
  int column, columns;

  template <int width>
  __device__ __forceinline__ long long in_rows(int of_row) const {
    return (static_cast<long long>(batch) * rows + of_row) * columns + column;
  }
  template <int width>
  __device__ __forceinline__ long long in_columns(int of_column) const {
    return (static_cast<long long>(column + of_column) * batches + batch) * rows;
  }
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
/// Epilogue, result_pointers, and first_store, the number of the first pointer to a tile.
///
/// An element is two columns, half a head apart, where the Epilogue combines the halves of a head.
template <class Config, DType input, int width, int outputs>
struct Results {
  using Epilogue = CompleteEpilogue<typename Config::Epilogue>;
  static constexpr int halves = Epilogue::halves;
  static constexpr int columns = 64, groups = columns / 8, half_groups = groups / halves;  // at a time
  static constexpr int tiles = Epilogue::tile_values(0) / halves;
  using Made = Fragment<columns>[at_least_one(tiles)];
  using Maxima = float[at_least_one(Epilogue::whole_reductions)];
  using OfRows = float[at_least_one(Epilogue::row_reductions)][2];
  using OfColumns = float[at_least_one(Epilogue::column_reductions)][2];  // of a group, each of one half
  static_assert(2 * outputs % columns == 0 && width % 8 == 0, "a thread has whole groups of 64 columns");
  static_assert(halves == 1 ||
                    (halves == 2 && Epilogue::head == width && !Epilogue::interleaved && width % columns == 0),
                "halves are those of heads of whole groups of 64 columns");
  static_assert(Epilogue::acc_halves == halves && Epilogue::tile_values(0) % halves == 0, "results have whole heads");
  static_assert(Epilogue::sections == 1 && Epilogue::row_vectors == 0, "a result is of all columns, and of no vector");
  static_assert(Epilogue::head_values == 0 || halves == 2, "values of a head are of all of its columns");

  /// The values that are the same for all columns of a thread's rows.
  struct Beside {
    Word scalar[at_least_one(Epilogue::scalars)];
    Word column_vector[at_least_one(Epilogue::column_vectors)][2];
  };
  /// The words of a head's vectors and tables for a pair of adjacent columns.
  struct OfPair {
    Word head_vector[at_least_one(Epilogue::head_vectors)][2];
    Word rope_table[at_least_one(Epilogue::rope_tables)][2];
  };
  using OfHead = float[2][at_least_one(Epilogue::head_values)];  // of the thread's rows
  /// The values of the tiles that it reads, of the columns at a time.
  using Loads = Fragment<columns / halves>[at_least_one(Epilogue::tile_loads)];

  /// All results of a fragment, of which `value(i)` is that of a thread's register i.
  template <class Arrays, class Place, class Value>
  __device__ __forceinline__ static void store(const Arrays& arrays, const Place& place, const Value& value) {
    Beside beside;
    Maxima maxima;
    OfRows of_rows;
    static_for<Epilogue::scalars>([&](auto index) {
      constexpr VectorAccess access = Epilogue::scalar[index];
      beside.scalar[index] = load_word<access.dtype>(arrays.pointer[access.pointer], 0);
    });
    static_for<Epilogue::column_vectors>([&](auto index) {
      constexpr VectorAccess access = Epilogue::column_vector[index];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        beside.column_vector[index][r] = load_word<access.dtype>(arrays.pointer[access.pointer], product_row(place, r));
    });
    OfHead of_head;
    if constexpr (Epilogue::head_values > 0) reduce_heads(arrays, place, beside, value, of_head);
    static_for<Epilogue::whole_reductions>(
        [&](auto index) { maxima[index] = neutral<Epilogue::whole_reduction[index].op>(); });
    static_for<Epilogue::row_reductions>(
        [&](auto index) { of_rows[index][0] = of_rows[index][1] = neutral<Epilogue::row_reduction[index].op>(); });
#pragma unroll
    for (int first = 0; first < 2 * outputs && first < width; first += columns) {
      const Place here = hidden(place);
      Made made;
      Loads loads;
      load_tiles(arrays, here, first, loads);
      evaluate(arrays, here, first, beside, loads, of_head, value, made, maxima, of_rows);
      store_rows(arrays, here, first, made);
      store_columns(arrays, here, first, made);
    }
    static_for<Epilogue::whole_reductions>([&](auto index) {
      constexpr ReductionAccess access = Epilogue::whole_reduction[index];
      const float of_warp = combine_lanes<access.op, 31>(maxima[index]);
      if (threadIdx.x % 32 == 0) static_cast<float*>(arrays.pointer[access.pointer])[place.warp] = of_warp;
    });
    static_for<Epilogue::row_reductions>([&](auto index) {
      constexpr ReductionAccess access = Epilogue::row_reduction[index];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float of_row = combine_lanes<access.op, 1 | 2>(of_rows[index][r]);
        if (threadIdx.x % 4 == 0 && row_of(place, r) < place.rows)
          static_cast<float*>(arrays.pointer[access.pointer])[product_row(place, r) * place.heads + place.head] =
              of_row;
      }
    });
  }

 private:
  /// The array of a tile, whose tensor map would have this number behind the two of a product's factors.
  template <int map, class Arrays>
  __device__ __forceinline__ static void* array_of(const Arrays& arrays) {
    return arrays.pointer[Config::first_store + map - 2];
  }
  __device__ __forceinline__ static int row_of(const FragmentPlace& place, int r) {
    return place.row + static_cast<int>(threadIdx.x % 32 / 4) + 8 * r;
  }
  /// A row among those of all sequences; of one that is outside, the last one of its sequence.
  __device__ __forceinline__ static long long product_row(const FragmentPlace& place, int r) {
    return static_cast<long long>(place.batch) * place.rows + min(row_of(place, r), place.rows - 1);
  }
  /// The first column of a group of those at a time. Groups of the second half follow those of the first.
  __device__ __forceinline__ static constexpr int column_of(int first, int group) {
    return halves == 1 ? first + 8 * group : group / half_groups * (width / 2) + first / 2 + 8 * (group % half_groups);
  }

  /// Lanes of a quad load 16 bytes each of a row, and exchange them for their pairs of columns.
  template <class Arrays>
  __device__ __forceinline__ static void load_tiles(const Arrays& arrays, const FragmentPlace& place, int first,
                                                    Loads& loads) {
    static_for<Epilogue::tile_loads>([&](auto index) {
      constexpr TileAccess access = Epilogue::tile_load[index];
      static_assert(bytes_of(access.dtype) == 2, "a tile that is read has 16 bits");
      const auto* const array = static_cast<const unsigned short*>(array_of<access.map>(arrays));
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int j = 0; j < half_groups; j += 4) {
          const int at = column_of(first, access.half * half_groups + j) + 8 * static_cast<int>(threadIdx.x % 4);
          uint4 row = {0, 0, 0, 0};
          if (row_of(place, r) < place.rows && at < width)
            row = *reinterpret_cast<const uint4*>(array + place.template in_rows<width>(row_of(place, r)) + at);
          uint32 words[4] = {row.x, row.y, row.z, row.w};
          exchange_in_quad(words);
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < 2; ++c) loads[index].value[j + i][r][c] = widened_half<access.dtype>(words[i], c);
        }
    });
  }

  /// Words for a thread's pair of adjacent columns of a group, and for those half a head behind.
  template <class Arrays>
  __device__ __forceinline__ static void load_pair(const Arrays& arrays, const FragmentPlace& place, int first, int j,
                                                   int r, OfPair& of_pair) {
    constexpr int half_width = width / halves;
    const int column = column_of(first, j) + 2 * static_cast<int>(threadIdx.x % 4);
    static_for<Epilogue::head_vectors>([&](auto index) {
      constexpr VectorAccess access = Epilogue::head_vector[index];
      load_adjacent<access.dtype, 2>(arrays.pointer[access.pointer], access.half * half_width + column,
                                     of_pair.head_vector[index]);
    });
    static_for<Epilogue::rope_tables>([&](auto index) {
      constexpr VectorAccess access = Epilogue::rope_table[index];
      long long row = product_row(place, r);
      if constexpr (access.period > 0) row %= access.period;
      load_adjacent<access.dtype, 2>(arrays.pointer[access.pointer],
                                     row * (access.halves * half_width) + access.half * half_width + column,
                                     of_pair.rope_table[index]);
    });
  }

  /// The place, hidden from the compiler where heads have values: else ptxas keeps what one sweep over a head's columns
  /// loads in registers for the next one, and spills.
  template <class Place>
  __device__ __forceinline__ static Place hidden(Place place) {
    if constexpr (Epilogue::head_values > 0) place.row = __shfl_sync(0xFFFFFFFFu, place.row, threadIdx.x % 32);
    return place;
  }

  /// The values of a head of the thread's rows. Each sweep over its columns makes those that depend on earlier ones.
  template <class Arrays, class Value>
  __device__ __forceinline__ static void reduce_heads(const Arrays& arrays, const FragmentPlace& place,
                                                      const Beside& beside, const Value& value, OfHead& of_head) {
    static_for<Epilogue::head_passes>([&](auto index) {
      constexpr int sweep = index;
      OfHead total;
      static_for<Epilogue::head_values>(
          [&](auto index) { total[0][index] = total[1][index] = neutral<Epilogue::head_op[index]>(); });
#pragma unroll
      for (int first = 0; first < width; first += columns) {
        const FragmentPlace here = hidden(place);
        Loads loads;
        load_tiles(arrays, here, first, loads);
#pragma unroll
        for (int j = 0; j < half_groups; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            OfPair of_pair;
            load_pair(arrays, here, first, j, r, of_pair);
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              typename Epilogue::Element element;
              float terms[at_least_one(Epilogue::head_values)];
              fill(element, {first, j, r, c}, beside, of_pair, loads, of_head, value);
              Epilogue::template evaluate_heads<sweep>(element, terms);
              static_for<Epilogue::head_values>([&](auto index) {
                if constexpr (Epilogue::head_pass[0][index] == sweep)
                  total[r][index] = combine<Epilogue::head_op[index]>(total[r][index], terms[index]);
              });
            }
          }
      }
      static_for<Epilogue::head_values>([&](auto index) {
        if constexpr (Epilogue::head_pass[0][index] == sweep) {
#pragma unroll
          for (int r = 0; r < 2; ++r)
            of_head[r][index] = combine_lanes<Epilogue::head_op[index], 1 | 2>(total[r][index]);
        }
      });
    });
  }

  /// An element's place: the first of the columns at a time, its group of these, the row of two, the column of two.
  struct Cell {
    int first, j, r, c;
  };

  /// Fills in all inputs of an element.
  template <class Value>
  __device__ __forceinline__ static void fill(typename Epilogue::Element& element, Cell cell, const Beside& beside,
                                              const OfPair& of_pair, const Loads& loads, const OfHead& of_head,
                                              const Value& value) {
    const auto [first, j, r, c] = cell;
#pragma unroll
    for (int half = 0; half < halves; ++half)
      element.acc[half] = value(column_of(first, half * half_groups + j) / 2 + 2 * r + c);
    static_for<Epilogue::scalars>([&](auto index) { element.scalar[index] = beside.scalar[index]; });
    static_for<Epilogue::column_vectors>(
        [&](auto index) { element.column_vector[index] = beside.column_vector[index][r]; });
    static_for<Epilogue::head_vectors>([&](auto index) { element.head_vector[index] = of_pair.head_vector[index][c]; });
    static_for<Epilogue::rope_tables>([&](auto index) { element.rope_table[index] = of_pair.rope_table[index][c]; });
    static_for<Epilogue::tile_loads>([&](auto index) { element.tile[index].f = loads[index].value[j][r][c]; });
    static_for<Epilogue::head_values>([&](auto index) { element.head_value[index] = of_head[r][index]; });
  }

  template <class Arrays, class Value>
  __device__ __forceinline__ static void evaluate(const Arrays& arrays, const FragmentPlace& place, int first,
                                                  const Beside& beside, const Loads& loads, const OfHead& of_head,
                                                  const Value& value, Made& made, Maxima& maxima, OfRows& of_rows) {
#pragma unroll
    for (int j = 0; j < half_groups; ++j) {
      OfColumns of_columns;
      static_for<Epilogue::column_reductions>([&](auto index) {
        of_columns[index][0] = of_columns[index][1] = neutral<Epilogue::column_reduction[index].op>();
      });
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        OfPair of_pair;
        load_pair(arrays, place, first, j, r, of_pair);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          typename Epilogue::Element element;
          typename Epilogue::Result result;
          fill(element, {first, j, r, c}, beside, of_pair, loads, of_head, value);
          Epilogue::template evaluate<0>(element, result);
          static_for<Epilogue::tile_values(0)>([&](auto index) {
            made[index / halves].value[index % halves * half_groups + j][r][c] = result.tile[index];
          });
          const bool is_inside = column_of(first, j) < width && row_of(place, r) < place.rows;
          if constexpr (Epilogue::whole_reductions > 0) {
            static_for<Epilogue::whole_reductions>([&](auto index) {
              constexpr Op op = Epilogue::whole_reduction[index].op;
              if (is_inside) maxima[index] = combine<op>(maxima[index], result.whole[index]);
            });
          }
          static_for<Epilogue::column_reductions>([&](auto index) {
            constexpr Op op = Epilogue::column_reduction[index].op;
            if (is_inside) of_columns[index][c] = combine<op>(of_columns[index][c], result.column[index]);
          });
          static_for<Epilogue::row_reductions>([&](auto index) {
            constexpr Op op = Epilogue::row_reduction[index].op;
            if (column_of(first, j) < width) of_rows[index][r] = combine<op>(of_rows[index][r], result.row[index]);
          });
        }
      }
      reduce_columns(arrays, place, first, j, of_columns);
    }
  }

  template <class Arrays, class Place>
  __device__ __forceinline__ static void store_rows(const Arrays& arrays, const Place& place, int first,
                                                    const Made& made) {
    static_for<Epilogue::tile_stores(0) / halves>([&](auto index) {
      constexpr TileAccess access = Epilogue::tile_store[0][index * halves];
      static_assert(access.half == 0 && Epilogue::tile_store[0][index * halves + halves - 1].map == access.map,
                    "a tile has all halves, one after the other");
      using Bits = typename Stored<access.dtype>::Bits;
      const Fragment<columns>& of = made[index];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(place, r);
        const long long at = place.template in_rows<width>(row);
        Bits* const to = row < place.rows ? static_cast<Bits*>(array_of<access.map>(arrays)) + at : nullptr;
        if constexpr (bytes_of(access.dtype) == 1) {
          uint32 words[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            words[i] = pair<access>(of, 2 * i, r) | static_cast<uint32>(pair<access>(of, 2 * i + 1, r)) << 16;
          store_bytes(to, column_of(first, 2 * static_cast<int>(threadIdx.x % 4)), gathered(words));
        } else if constexpr (bytes_of(access.dtype) == 2) {
#pragma unroll
          for (int half = 0; half < halves; ++half)
            store_row<access.dtype, width, columns / 2 / halves>(
                to, column_of(first, half * half_groups),
                [&](int j, int c) { return of.value[half * half_groups + j][r][c]; });
        } else {
          static_assert(access.dtype == DType::f32, "a result is of floats");
#pragma unroll
          for (int j = 0; j < groups; ++j) {
            const int column = column_of(first, j) + 2 * static_cast<int>(threadIdx.x % 4);
            if (to != nullptr && column < width)
              *reinterpret_cast<float2*>(to + column) = {of.value[j][r][0], of.value[j][r][1]};
          }
        }
      }
    });
  }

  /// Reductions of a group's columns along the warp's rows.
  template <class Arrays>
  __device__ __forceinline__ static void reduce_columns(const Arrays& arrays, const FragmentPlace& place, int first,
                                                        int group, OfColumns& of_columns) {
    static_for<Epilogue::column_reductions>([&](auto index) {
      constexpr ReductionAccess access = Epilogue::column_reduction[index];
      const int lane = threadIdx.x % 32;
      const int own = combine_halving<access.op, 2, 4>(lane, of_columns[index]);  // of the lane's two columns
      const int column = column_of(first, access.half * half_groups + group) + 2 * (lane % 4) + own;
      if (lane < 8 && column < width)
        static_cast<float*>(arrays.pointer[access.pointer])[place.warp * width + column] = of_columns[index][0];
    });
  }

  /// Transposed results have 8 bits, and rows that are a multiple of 16: a warp's are all inside, or none.
  template <class Arrays, class Place>
  __device__ __forceinline__ static void store_columns(const Arrays& arrays, const Place& place, int first,
                                                       const Made& made) {
    static_for<Epilogue::transposed_stores / halves>([&](auto index) {
      constexpr TransposedAccess access = Epilogue::transposed_store[index * halves];
      static_assert(bytes_of(access.dtype) == 1, "a transposed result has 8 bits");
      static_assert(access.value % halves == 0 &&
                        Epilogue::transposed_store[index * halves + halves - 1].value == access.value + halves - 1,
                    "a transposed result has the halves of a tile");
      const int lane = threadIdx.x % 32;
      const Fragment<columns>& of = made[access.value / halves];
#pragma unroll
      for (int j = 0; j < groups; j += 4) {
        uint32 words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = rows_of_column(pair<access>(of, j + i, 0), pair<access>(of, j + i, 1));
        const uint4 column = gathered(words);
        const int at = column_of(first, j) + 8 * (lane % 4) + lane / 4;
        const long long to = place.template in_columns<width>(at);
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
