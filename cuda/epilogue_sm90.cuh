// Runs a generated Epilogue over one accumulator tile, a subtile of 64 rows x `subtile_n` columns at a time: tile
// operands come from a ring that a prefetch warp fills, results leave by TMA, warp by warp. Intermediates stay in
// registers.
#pragma once

#include "accumulator_sm90.cuh"
#include "operands.cuh"
#include "pipeline.cuh"
#include "scheduler.cuh"

namespace coda {

__host__ __device__ constexpr int at_least_one(int count) {
  return count > 0 ? count : 1;
}

/// Kernel parameters: tensor maps (a, b, tile operands, stores), pointers (vectors and scalars, partial reductions),
/// sizes.
template <int maps, int pointers>
struct Params {
  ptx::TensorMap map[maps];
  void* pointer[at_least_one(pointers)];
  int m, n, k, batch;
};

/// Geometry and shared memory of an Epilogue on a tile.
template <class Config, class Epilogue>
struct EpilogueLayout {
  // The ways of a program's values are the halves of N, which lie in two splits of every array, the halves of heads, or
  // neighbouring columns: these lie in one thread, which works on both (`spread`) where it otherwise works on one.
  static constexpr int head = Epilogue::head;
  static constexpr int spread = Epilogue::neighbours ? 2 : 1;
  static constexpr int splits = head > 0 ? 1 : Epilogue::acc_ways;
  static constexpr int columns = Config::tile_n * spread / Epilogue::acc_ways;  // columns of a tile within a way
  static constexpr int subtile_n = Config::subtile_n;
  static constexpr int subtiles = columns / subtile_n;
  static constexpr int blocks = Config::tile_m / 64;
  static constexpr int head_subtiles = head > 0 ? head / 2 * spread / subtile_n : subtiles;  // of one head
  static_assert(columns % subtile_n == 0 && subtile_n % 16 == 0,
                "a tile is a whole number of subtiles of 16 columns or more");
  static_assert(head == 0 || (columns % (head / 2) == 0 && (head / 2) % subtile_n == 0),
                "a tile has whole heads, and half a head whole subtiles");

  /// Of the pair of columns that a thread has in each group of 8: value i of an Element or Result belongs to entry
  /// i / spread, and to this one of the pair.
  __host__ __device__ static constexpr int side(int i, int c) { return spread > 1 ? i % spread : c; }

  /// From the tile's first column, where column `at` of a way lies in memory (within the way's split).
  __host__ __device__ static constexpr int memory_column(int way, int at) {
    if constexpr (head > 0 && spread == 1) return at / (head / 2) * head + way * (head / 2) + at % (head / 2);
    return at;
  }
  /// The same in the accumulator.
  __host__ __device__ static constexpr int fragment_column(int way, int at) {
    return (head > 0 ? 0 : way * columns) + memory_column(way, at);
  }

  /// The first section that runs a program, to stand for all of them: their stores differ in place alone.
  __host__ __device__ static constexpr int section_of(int program) {
    int section = 0;
    while (Epilogue::section[section].program != program) ++section;
    return section;
  }

  /// Bytes of the tile operands (or results) before the i-th, for one row of a subtile.
  __host__ __device__ static constexpr int load_row_bytes(int before) {
    int bytes = 0;
    for (int i = 0; i < before; ++i) bytes += subtile_n * bytes_of(Epilogue::tile_load[i].dtype);
    return bytes;
  }
  __host__ __device__ static constexpr int store_row_bytes(int program, int before) {
    int bytes = 0;
    for (int i = 0; i < before; ++i) bytes += subtile_n * bytes_of(Epilogue::tile_store[section_of(program)][i].dtype);
    return bytes;
  }
  __host__ __device__ static constexpr int widest_store_row_bytes() {
    int widest = 0;
    for (int program = 0; program < Epilogue::programs; ++program) {
      const int bytes = store_row_bytes(program, Epilogue::tile_stores[program]);
      widest = bytes > widest ? bytes : widest;
    }
    return widest;
  }
  static constexpr int load_slot_bytes = 64 * load_row_bytes(Epilogue::tile_loads);  // one a warpgroup
  static constexpr int store_slot_bytes = 16 * widest_store_row_bytes();             // one a warp
  static constexpr int load_slots = Epilogue::tile_loads > 0 ? Config::load_slots : 1;
  static constexpr int store_slots = Config::store_slots;

  // Of one consumer warpgroup, from its base: load ring, store rings of its four warps, column reductions.
  static constexpr int load_offset = 0;
  static constexpr int store_offset = load_offset + (Epilogue::tile_loads > 0 ? load_slots * load_slot_bytes : 0);
  static constexpr int column_offset = store_offset + 4 * store_slots * store_slot_bytes;
  static constexpr int column_bytes = Epilogue::column_reductions * 4 * columns * 4;
  static constexpr int bytes = (column_offset + column_bytes + 1023) / 1024 * 1024;
};

/// Producer's side: loads the tile operands of one warpgroup's tile, subtile by subtile, in the order of visit().
template <class Config, class Epilogue, class Params>
__device__ __forceinline__ void prefetch_operands(const Params& params, const Tile& tile, ptx::uint32 base,
                                                  Ring<EpilogueLayout<Config, Epilogue>::load_slots> ring,
                                                  RingPosition<EpilogueLayout<Config, Epilogue>::load_slots>& at) {
  using Layout = EpilogueLayout<Config, Epilogue>;
  for (int subtile = 0; subtile < Layout::subtiles; ++subtile) {
    for (int block = 0; block < Layout::blocks; ++block) {
      ring.wait_empty(at);
      ptx::mbarrier_arrive_expect(ring.full(at.slot), Layout::load_slot_bytes);
      const ptx::uint32 slot = base + Layout::load_offset + at.slot * Layout::load_slot_bytes;
      static_for<Epilogue::tile_loads>([&](auto index) {
        constexpr TileAccess access = Epilogue::tile_load[decltype(index)::value];
        ptx::tma_load(slot + 64 * Layout::load_row_bytes(decltype(index)::value), params.map[access.map],
                      ring.full(at.slot), tile.column + Layout::memory_column(access.way, subtile * Layout::subtile_n),
                      Layout::head > 0 ? 0 : access.way, tile.row + 64 * block, access.batched ? tile.batch : 0);
      });
      at.advance();
    }
  }
}

/// Consumer's side. One object a thread; `begin` before the tile's products, `visit` after them.
template <class Config, class Epilogue, class Params>
struct EpilogueVisitor {
  using Layout = EpilogueLayout<Config, Epilogue>;
  using Subtile = Fragment<Layout::subtile_n>;
  static constexpr int groups = Subtile::groups;

  const Params& params;
  const ptx::uint32 base;  // this warpgroup's shared memory
  const int warpgroup, warp, lane;
  const int n;  // within a split
  const Ring<Layout::load_slots> ring;
  RingPosition<Layout::load_slots> loaded;
  int store_slot = 0;
  Word column_vector[at_least_one(Epilogue::column_vectors)][Layout::blocks][2];
  Word scalar[at_least_one(Epilogue::scalars)];

  __device__ __forceinline__ EpilogueVisitor(const Params& params, ptx::uint32 base, Ring<Layout::load_slots> ring,
                                             int warpgroup, int warp, int lane)
      : params(params),
        base(base),
        warpgroup(warpgroup),
        warp(warp),
        lane(lane),
        n(params.n / Layout::splits),
        ring(ring) {}

  /// Row within the output of this thread's rows; the fragment's r-th half is 8 rows further down.
  __device__ __forceinline__ int row(const Tile& tile, int block, int r) const {
    return tile.row + 64 * block + 16 * warp + lane / 4 + 8 * r;
  }
  /// Column within a way's split; the pair's second element is the next one.
  __device__ __forceinline__ int column(const Tile& tile, int way, int subtile, int j) const {
    return tile.column + Layout::memory_column(way, subtile * Layout::subtile_n) + 8 * j + 2 * (lane & 3);
  }

  /// Loads what does not depend on the column, early enough to hide the latency under the products.
  __device__ __forceinline__ void begin(const Tile& tile) {
    static_for<Epilogue::scalars>([&](auto index) {
      constexpr VectorAccess access = Epilogue::scalar[decltype(index)::value];
      scalar[decltype(index)::value] =
          load_word<access.dtype>(params.pointer[access.pointer], access.batched ? tile.batch : 0);
    });
    static_for<Epilogue::column_vectors>([&](auto index) {
      constexpr VectorAccess access = Epilogue::column_vector[decltype(index)::value];
      const long long offset = access.batched ? static_cast<long long>(tile.batch) * params.m : 0;
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int at = row(tile, block, r);
          column_vector[decltype(index)::value][block][r] =
              load_word<access.dtype>(params.pointer[access.pointer], offset + min(at, params.m - 1));
        }
    });
  }

  __device__ __forceinline__ void visit(const Tile& tile,
                                        const Accumulator<Layout::blocks, Config::tile_n>& accumulator) {
    if constexpr (Epilogue::programs == 1) {
      run<0>(tile, accumulator);
    } else {
      static_for<Epilogue::sections>([&](auto index) {
        constexpr int program = Epilogue::section[decltype(index)::value].program;
        if constexpr (Layout::section_of(program) == decltype(index)::value)
          if (runs<program>(tile)) run<program>(tile, accumulator);
      });
    }
  }

  /// Before the kernel ends: the copy engine has read all that this thread asked it to store.
  __device__ __forceinline__ static void finish() { ptx::tma_store_wait_read<0>(); }

 private:
  /// Vectors over the columns of a subtile, and a block's head tables.
  struct OfColumns {
    Word row_vector[at_least_one(Epilogue::row_vectors)][groups][2];
    Word head_vector[at_least_one(Epilogue::head_vectors)][groups][2];
  };
  using HeadTables = Word[at_least_one(Epilogue::head_tables)][groups][2][2];

  template <int program>
  __device__ __forceinline__ static bool runs(const Tile& tile) {
    bool found = false;
    static_for<Epilogue::sections>([&](auto index) {
      constexpr int section = decltype(index)::value;
      if constexpr (Epilogue::section[section].program == program) found = found || tile.section == section;
    });
    return found;
  }

  template <int program>
  __device__ __forceinline__ void run(const Tile& tile,
                                      const Accumulator<Layout::blocks, Config::tile_n>& accumulator) {
    float head_value[Layout::blocks][2][at_least_one(Epilogue::head_values)];  // of the head that a subtile is in
    RowTotal row_total[at_least_one(Epilogue::row_reductions)][Layout::blocks][2];
    static_for<Epilogue::row_reductions>([&](auto index) {
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          row_total[decltype(index)::value][block][r].value =
              neutral<Epilogue::row_reduction[decltype(index)::value].op>();
    });

#pragma unroll
    for (int subtile = 0; subtile < Layout::subtiles; ++subtile) {
      if constexpr (Epilogue::head_values > 0)
        if (subtile % Layout::head_subtiles == 0) reduce_heads<program>(tile, accumulator, subtile, head_value);
      OfColumns of_columns;
      load_row_vectors(tile, subtile, of_columns.row_vector);
      load_head_vectors(tile, subtile, of_columns.head_vector);
      float column_result[at_least_one(Epilogue::column_reductions)][groups][2];
      static_for<Epilogue::column_reductions>([&](auto index) {
#pragma unroll
        for (int j = 0; j < groups; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c)
            column_result[decltype(index)::value][j][c] =
                neutral<Epilogue::column_reduction[decltype(index)::value].op>();
      });

#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block) {
        Subtile loads[at_least_one(Epilogue::tile_loads)], stores[at_least_one(Epilogue::tile_stores[program])];
        float row_value[at_least_one(Epilogue::row_reductions)][2][2 * groups];  // of a log-sum-exp
        load_tiles(loads);
        HeadTables head_table;
        load_head_tables(tile, subtile, block, head_table);
#pragma unroll
        for (int j = 0; j < groups; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int c = 0; c < 2; c += Layout::spread) {
              typename Epilogue::Element element;
              typename Epilogue::Result result;
              fill(element, tile, accumulator, subtile, block, j, r, c, of_columns, head_table, head_value[block][r]);
              const bool row_is_inside = element.row < params.m, column_is_inside = element.column[0] < tile.column_end;
              static_for<Epilogue::tile_loads * Layout::spread>([&](auto index) {
                constexpr int i = decltype(index)::value;
                element.tile[i].f = loads[i / Layout::spread].value[j][r][Layout::side(i, c)];
              });

              Epilogue::template evaluate<program>(element, result);

              static_for<Epilogue::tile_stores[program] * Layout::spread>([&](auto index) {
                constexpr int i = decltype(index)::value;
                stores[i / Layout::spread].value[j][r][Layout::side(i, c)] = result.tile[i];
              });
              static_for<Epilogue::row_reductions>([&](auto index) {
                constexpr Op op = Epilogue::row_reduction[decltype(index)::value].op;
                float& total = row_total[decltype(index)::value][block][r].value;
                if constexpr (op == Op::logsumexp) {
                  row_value[decltype(index)::value][r][2 * j + c] =
                      column_is_inside ? result.row[decltype(index)::value] : neutral<op>();
                  if constexpr (Layout::spread > 1) row_value[decltype(index)::value][r][2 * j + 1] = neutral<op>();
                } else if (column_is_inside)
                  total = combine<op>(total, result.row[decltype(index)::value]);
              });
              static_for<Epilogue::column_reductions * Layout::spread>([&](auto index) {
                constexpr int i = decltype(index)::value;
                constexpr Op op = Epilogue::column_reduction[i / Layout::spread].op;
                float& total = column_result[i / Layout::spread][j][Layout::side(i, c)];
                if (row_is_inside) total = combine<op>(total, result.column[i]);
              });
            }
        static_for<Epilogue::row_reductions>([&](auto index) {
          if constexpr (Epilogue::row_reduction[decltype(index)::value].op == Op::logsumexp) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
              row_total[decltype(index)::value][block][r].lse.add(row_value[decltype(index)::value][r]);
          }
        });
        store_tiles<program>(tile, subtile, block, stores);
      }
      share_columns(subtile, column_result);
    }
    write_rows(tile, row_total);
    write_columns(tile);
  }

  /// All that an element's program reads but tile operands.
  __device__ __forceinline__ void fill(typename Epilogue::Element& element, const Tile& tile,
                                       const Accumulator<Layout::blocks, Config::tile_n>& accumulator, int subtile,
                                       int block, int j, int r, int c, const OfColumns& of_columns,
                                       const HeadTables& head_table,
                                       const float (&head_value)[at_least_one(Epilogue::head_values)]) const {
    element.row = row(tile, block, r);
#pragma unroll
    for (int way = 0; way < Epilogue::acc_ways; ++way) {
      const int group = Layout::fragment_column(way, subtile * Layout::subtile_n) / 8 + j;
      element.acc[way] = accumulator.registers[block][4 * group + 2 * r + Layout::side(way, c)];
    }
#pragma unroll
    for (int way = 0; way < Epilogue::ways; ++way)
      element.column[way] = (Layout::head > 0 ? 0 : way * n) + column(tile, way, subtile, j) + Layout::side(way, c);
    static_for<Epilogue::row_vectors * Layout::spread>([&](auto index) {
      constexpr int i = decltype(index)::value;
      element.row_vector[i] = of_columns.row_vector[i / Layout::spread][j][Layout::side(i, c)];
    });
    static_for<Epilogue::column_vectors>([&](auto index) {
      element.column_vector[decltype(index)::value] = column_vector[decltype(index)::value][block][r];
    });
    static_for<Epilogue::scalars>(
        [&](auto index) { element.scalar[decltype(index)::value] = scalar[decltype(index)::value]; });
    static_for<Epilogue::head_tables * Layout::spread>([&](auto index) {
      constexpr int i = decltype(index)::value;
      element.head_table[i] = head_table[i / Layout::spread][j][r][Layout::side(i, c)];
    });
    static_for<Epilogue::head_vectors * Layout::spread>([&](auto index) {
      constexpr int i = decltype(index)::value;
      element.head_vector[i] = of_columns.head_vector[i / Layout::spread][j][Layout::side(i, c)];
    });
    static_for<Epilogue::head_values>(
        [&](auto index) { element.head_value[decltype(index)::value] = head_value[decltype(index)::value]; });
  }

  /// The same value, but the compiler does not see that it is. Of what the passes over a head compute from the same
  /// vectors, such as acc * rstd, it would keep all for the last one, beside the accumulator, and spill.
  __device__ __forceinline__ int hidden(int value) const { return __shfl_sync(0xFFFFFFFFu, value, lane); }

  /// The values of the head that begins at `first_subtile`, for this thread's rows: one pass over its columns for all
  /// that need no other value of the head, one for all that need only these, and so on.
  template <int program>
  __device__ __forceinline__ void reduce_heads(
      const Tile& tile, const Accumulator<Layout::blocks, Config::tile_n>& accumulator, int first_subtile,
      float (&head_value)[Layout::blocks][2][at_least_one(Epilogue::head_values)]) const {
    Word of_all[at_least_one(Epilogue::scalars)];
    static_for<Epilogue::scalars>(
        [&](auto index) { of_all[decltype(index)::value].i = hidden(scalar[decltype(index)::value].i); });
    static_for<Epilogue::head_passes>([&](auto level) {
      constexpr int pass = decltype(level)::value;
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block) {
        Word of_row[2][at_least_one(Epilogue::column_vectors)];
        static_for<Epilogue::column_vectors>([&](auto index) {
          constexpr int i = decltype(index)::value;
#pragma unroll
          for (int r = 0; r < 2; ++r) of_row[r][i].i = hidden(column_vector[i][block][r].i);
        });
        float total[2][at_least_one(Epilogue::head_values)];
        static_for<Epilogue::head_values>([&](auto index) {
          constexpr int i = decltype(index)::value;
          total[0][i] = total[1][i] = neutral<Epilogue::head_op[i]>();
        });
#pragma unroll
        for (int of_head = 0; of_head < Layout::head_subtiles; ++of_head) {
          const int subtile = first_subtile + of_head;
          OfColumns of_columns;
          load_row_vectors(tile, subtile, of_columns.row_vector);
          load_head_vectors(tile, subtile, of_columns.head_vector);
          HeadTables head_table;
          load_head_tables(tile, subtile, block, head_table);
#pragma unroll
          for (int j = 0; j < groups; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
              for (int c = 0; c < 2; c += Layout::spread) {
                typename Epilogue::Element element;
                float value[at_least_one(Epilogue::head_values)];
                fill(element, tile, accumulator, subtile, block, j, r, c, of_columns, head_table, head_value[block][r]);
                static_for<Epilogue::column_vectors>([&](auto index) {
                  element.column_vector[decltype(index)::value] = of_row[r][decltype(index)::value];
                });
                static_for<Epilogue::scalars>(
                    [&](auto index) { element.scalar[decltype(index)::value] = of_all[decltype(index)::value]; });
                Epilogue::template evaluate_heads<pass>(element, value);
                static_for<Epilogue::head_values>([&](auto index) {
                  constexpr int i = decltype(index)::value;
                  if constexpr (Epilogue::head_pass[program][i] == pass)
                    total[r][i] = combine<Epilogue::head_op[i]>(total[r][i], value[i]);
                });
              }
        }
        static_for<Epilogue::head_values>([&](auto index) {
          constexpr int i = decltype(index)::value;
          if constexpr (Epilogue::head_pass[program][i] == pass) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
              head_value[block][r][i] = combine_lanes<Epilogue::head_op[i], 1 | 2>(total[r][i]);
          }
        });
      }
    });
  }

  __device__ __forceinline__ void load_row_vectors(
      const Tile& tile, int subtile, Word (&row_vector)[at_least_one(Epilogue::row_vectors)][groups][2]) const {
    static_for<Epilogue::row_vectors>([&](auto index) {
      constexpr VectorAccess access = Epilogue::row_vector[decltype(index)::value];
      const int width = Layout::head > 0 ? n : access.ways * n;
      const long long offset =
          (access.batched ? static_cast<long long>(tile.batch) * width : 0) + (Layout::head > 0 ? 0 : access.way * n);
#pragma unroll
      for (int j = 0; j < groups; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          row_vector[decltype(index)::value][j][c] = load_word<access.dtype>(
              params.pointer[access.pointer], offset + min(column(tile, access.way, subtile, j) + c, n - 1));
    });
  }

  /// First column, within an array over heads, of this thread's pair in a subtile. `shared`: see load_pair.
  template <int way, int shared>
  __device__ __forceinline__ int column_of_head(int subtile) const {
    constexpr int half = Layout::head / 2;
    const int pair = (Epilogue::head_values > 0 ? hidden(lane) : lane) & 3;  // lest words are kept from head to head
    return way * half + (subtile * Layout::subtile_n % (half * Layout::spread) + 2 * pair) / shared;
  }
  /// A pair of columns; an array of half a head has one word for two neighbours, in the first (`shared` is 2).
  template <DType dtype, int shared>
  __device__ __forceinline__ static void load_pair(const void* base, long long at, Word (&pair)[2]) {
    if constexpr (shared == 1) {
      load_words<dtype>(base, at, pair);
    } else {
      pair[0] = load_word<dtype>(base, at);
    }
  }

  __device__ __forceinline__ void load_head_vectors(
      const Tile& tile, int subtile, Word (&vector)[at_least_one(Epilogue::head_vectors)][groups][2]) const {
    static_for<Epilogue::head_vectors>([&](auto index) {
      constexpr VectorAccess access = Epilogue::head_vector[decltype(index)::value];
      constexpr int shared = access.ways == 1 ? Layout::spread : 1;
      const int first = (access.batched ? tile.batch * access.ways * (Layout::head / 2) : 0) +
                        column_of_head<access.way, shared>(subtile);
#pragma unroll
      for (int j = 0; j < groups; ++j)
        load_pair<access.dtype, shared>(params.pointer[access.pointer], first + 8 * j / shared,
                                        vector[decltype(index)::value][j]);
    });
  }

  /// A head table's rows are those of the tile, its columns those of a way of a head. The heads of a tile read the same
  /// words, which the first brings into L1.
  __device__ __forceinline__ void load_head_tables(
      const Tile& tile, int subtile, int block,
      Word (&table)[at_least_one(Epilogue::head_tables)][groups][2][2]) const {
    static_for<Epilogue::head_tables>([&](auto index) {
      constexpr VectorAccess access = Epilogue::head_table[decltype(index)::value];
      constexpr int width = access.ways * (Layout::head / 2);
      constexpr int shared = access.ways == 1 ? Layout::spread : 1;
      const int first = column_of_head<access.way, shared>(subtile);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const long long at = (access.batched ? static_cast<long long>(tile.batch) * params.m : 0) +
                             min(row(tile, block, r), params.m - 1);
#pragma unroll
        for (int j = 0; j < groups; ++j)
          load_pair<access.dtype, shared>(params.pointer[access.pointer], at * width + first + 8 * j / shared,
                                          table[decltype(index)::value][j][r]);
      }
    });
  }

  __device__ __forceinline__ void load_tiles(Subtile (&loads)[at_least_one(Epilogue::tile_loads)]) {
    if constexpr (Epilogue::tile_loads > 0) {
      ring.wait_full(loaded);
      const ptx::uint32 slot = base + Layout::load_offset + loaded.slot * Layout::load_slot_bytes;
      static_for<Epilogue::tile_loads>([&](auto index) {
        using Operand = Box<Epilogue::tile_load[decltype(index)::value].dtype, Layout::subtile_n>;
        Operand::load(slot + 64 * Layout::load_row_bytes(decltype(index)::value) + 16 * warp * Operand::row_bytes, lane,
                      loads[decltype(index)::value]);
      });
      // Without the fence the copy engine may overwrite the slot before it has been read: in 10 of 300 launches at
      // 4096 x 4096 x 256, and in none at smaller sizes.
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(ring.empty(loaded.slot));
      loaded.advance();
    }
  }

  /// Where a store of `program` goes, in the tile's section.
  template <int program, int store>
  __device__ __forceinline__ static TileAccess store_access(const Tile& tile) {
    constexpr TileAccess of_first = Epilogue::tile_store[Layout::section_of(program)][store];
    TileAccess access = of_first;
    if constexpr (Epilogue::sections > 1) {
      static_for<Epilogue::sections>([&](auto index) {
        constexpr int section = decltype(index)::value;
        if constexpr (Epilogue::section[section].program == program) {
          constexpr TileAccess of_section = Epilogue::tile_store[section][store];
          if (tile.section == section) access = of_section;
        }
      });
    }
    return access;
  }

  /// Each warp stores its own 16 rows: no barrier across warps.
  template <int program>
  __device__ __forceinline__ void store_tiles(const Tile& tile, int subtile, int block,
                                              const Subtile (&stores)[at_least_one(Epilogue::tile_stores[program])]) {
    if constexpr (Epilogue::tile_stores[program] > 0) {
      const ptx::uint32 slot =
          base + Layout::store_offset + (warp * Layout::store_slots + store_slot) * Layout::store_slot_bytes;
      if (lane == 0) ptx::tma_store_wait_read<Layout::store_slots - 1>();
      __syncwarp();
      static_for<Epilogue::tile_stores[program]>([&](auto index) {
        constexpr TileAccess access = Epilogue::tile_store[Layout::section_of(program)][decltype(index)::value];
        Box<access.dtype, Layout::subtile_n>::store(
            slot + 16 * Layout::store_row_bytes(program, decltype(index)::value), lane, stores[decltype(index)::value]);
      });
      ptx::fence_async_proxy();
      __syncwarp();
      if (lane == 0) {
        static_for<Epilogue::tile_stores[program]>([&](auto index) {
          const TileAccess access = store_access<program, decltype(index)::value>(tile);
          ptx::tma_store(params.map[access.map], slot + 16 * Layout::store_row_bytes(program, decltype(index)::value),
                         tile.column - access.first + Layout::memory_column(access.way, subtile * Layout::subtile_n),
                         Layout::head > 0 ? 0 : access.way, tile.row + 64 * block + 16 * warp, tile.batch);
        });
        ptx::tma_store_commit();
      }
      store_slot = store_slot + 1 == Layout::store_slots ? 0 : store_slot + 1;
    }
  }

  __device__ __forceinline__ void write_rows(
      const Tile& tile, const RowTotal (&row_total)[at_least_one(Epilogue::row_reductions)][Layout::blocks][2]) const {
    static_for<Epilogue::row_reductions>([&](auto index) {
      constexpr ReductionAccess access = Epilogue::row_reduction[decltype(index)::value];
      const int tiles_n =
          Scheduler<Config::tile_m, Config::tile_n / Layout::splits, Config::cluster_m, Epilogue>::tiles_along_n(n);
      float* partial = static_cast<float*>(params.pointer[access.pointer]) +
                       (static_cast<long long>(tile.batch) * tiles_n + tile.index_n) * params.m;
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float total = row_total[decltype(index)::value][block][r].template over_quad<access.op>();
          const int at = row(tile, block, r);
          if ((lane & 3) == 0 && at < params.m) partial[at] = total;
        }
    });
  }

  /// Address of this warpgroup's column results: [reduction][warp][column].
  __device__ __forceinline__ float* columns_of(int reduction, int of_warp) const {
    extern __shared__ unsigned char shared[];
    return reinterpret_cast<float*>(shared + (base - ptx::shared_address(shared)) + Layout::column_offset) +
           (reduction * 4 + of_warp) * Layout::columns;
  }

  __device__ __forceinline__ void share_columns(
      int subtile, const float (&column_result)[at_least_one(Epilogue::column_reductions)][groups][2]) const {
    static_for<Epilogue::column_reductions>([&](auto index) {
      constexpr Op op = Epilogue::column_reduction[decltype(index)::value].op;
#pragma unroll
      for (int j = 0; j < groups; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float total = combine_lanes<op, 4 | 8 | 16>(column_result[decltype(index)::value][j][c]);
          if (lane < 4)
            columns_of(decltype(index)::value, warp)[subtile * Layout::subtile_n + 8 * j + 2 * lane + c] = total;
        }
    });
  }

  __device__ __forceinline__ void write_columns(const Tile& tile) const {
    if constexpr (Epilogue::column_reductions > 0) {
      const int barrier = 3 + warpgroup;
      ptx::named_barrier_sync(barrier, 128);
      const int at = 32 * warp + lane;
      static_for<Epilogue::column_reductions>([&](auto index) {
        constexpr ReductionAccess access = Epilogue::column_reduction[decltype(index)::value];
        const int width = Layout::head > 0 ? n : access.ways * n;
        const int tiles_m = (params.m + Config::tile_m - 1) / Config::tile_m;
        float* partial = static_cast<float*>(params.pointer[access.pointer]) +
                         (static_cast<long long>(tile.batch) * tiles_m + tile.index_m) * width +
                         (Layout::head > 0 ? 0 : access.way * n);
        const int column = tile.column + Layout::memory_column(access.way, at);
        if (at < Layout::columns && column < tile.column_end && tile.row < params.m) {
          float total = columns_of(decltype(index)::value, 0)[at];
#pragma unroll
          for (int other = 1; other < 4; ++other)
            total = combine<access.op>(total, columns_of(decltype(index)::value, other)[at]);
          partial[column] = total;
        }
      });
      ptx::named_barrier_sync(barrier, 128);
    }
  }
};

}  // namespace coda
