// Runs a generated Epilogue over one accumulator tile, a box of 64 rows x `box_n` columns at a time.
// Intermediates stay in registers.
#pragma once

#include "accumulator_sm90.cuh"
#include "epilogue_operands_sm90.cuh"
#include "epilogue_results_sm90.cuh"
#include "transposed_results_sm90.cuh"

namespace coda {

/// One object for each consumer thread, which calls `begin` before a tile's products, `read_ahead` while the last of
/// them run, `visit` after them, and `finish` before the kernel ends.
template <class Config, class Epilogue, class Params>
struct EpilogueVisitor : WholeTerms<Epilogue::whole_reductions>, TransposedSlot<(Epilogue::transposed_stores > 0)> {
  using Layout = EpilogueLayout<Config, Epilogue>;
  using Operands = EpilogueOperands<Config, Epilogue, Params>;
  using Results = EpilogueResults<Config, Epilogue, Params>;
  using Transposed = TransposedResults<Config, Epilogue, Params>;
  using Subtile = typename Operands::Subtile;
  using OfColumns = typename Operands::OfColumns;
  using RopeTables = typename Operands::RopeTables;
  static constexpr int groups = Subtile::groups;
  // A box's slot is released when its operands are read. An epilogue that works on a box in several subtiles releases
  // it after its results: one fence then serves both, which saves up to 0.9 % of the product in a gate's backward pass.
  static constexpr bool releases_late = Layout::subtiles > 1;
  // Nothing hides the epilogue of cooperative consumers. They read a tile's first box while its last products run, so
  // that its slot is also filled again earlier: 0.3 % of a product with a residual and k = 8192.
  static constexpr bool reads_ahead =
      Layout::cooperative && Layout::column_passes == 1 && Layout::subtiles == 1 && Epilogue::tile_loads > 0;

  using TileAccumulator = Accumulator<Layout::blocks, Config::tile_n>;
  using HeadValue = float[at_least_one(Epilogue::head_values)];
  using RowTotals = RowTotal[at_least_one(Epilogue::row_reductions)][Layout::blocks][2];
  using Loads = Subtile[at_least_one(Epilogue::tile_loads)];

  /// A tile and its accumulator.
  struct Accumulated {
    const Tile& tile;
    const TileAccumulator& accumulator;
  };
  /// A subtile of a tile: the block of 64 rows, the column pass, and the first column, counted from that of the pass.
  struct Place {
    int block, column_pass, first;
  };
  /// One of a thread's elements of a subtile: group j of 8 columns, upper or lower row r, column c of a pair.
  struct Cell {
    int j, r, c;
  };
  /// The totals of reductions along the tile's rows, and of those along the columns of a box.
  struct Totals {
    RowTotals& row;
    typename Results::OfBox& column;
  };

  Operands operands;
  Results results;
  Loads ahead;  // of the tile's first box, if the epilogue `reads_ahead`

  __device__ __forceinline__ EpilogueVisitor(const Params& params, ptx::uint32 base, Ring<Layout::load_slots> ring,
                                             int warpgroup, int warp, int lane)
      : operands(params, base, ring, warp, lane), results(params, base, warpgroup, warp, lane) {
    if constexpr (Epilogue::whole_reductions > 0)
      static_for<Epilogue::whole_reductions>(
          [&](auto index) { this->whole[index] = neutral<Epilogue::whole_reduction[index].op>(); });
  }

  __device__ __forceinline__ void begin(const Tile& tile) { operands.begin(tile); }
  __device__ __forceinline__ void read_ahead() {
    if constexpr (reads_ahead) read_tiles(0, ahead);
  }
  __device__ __forceinline__ void finish() const {
    if constexpr (Epilogue::whole_reductions > 0) results.write_whole(this->whole);
    results.finish();
  }

  /// Stores zeros in all tile results of a tile, whose rows are in no group.
  __device__ __forceinline__ void store_zeros(const Tile& tile) {
    if constexpr (Config::claims && Epilogue::tile_loads > 0) {  // the slot of `skip_operands`
      operands.wait_tiles();
      __syncwarp();
      operands.template release_tiles<true>();
    }
    static_for<Epilogue::sections>([&](auto index) {
      constexpr int variant = Epilogue::section[index].variant;
      if constexpr (first_section_of<Epilogue>(variant) == index)
        if (Epilogue::variants == 1 || runs<variant>(tile)) results.template store_zeros<variant>(tile);
    });
  }

  /// Runs the epilogue of a tile, and overwrites its accumulator.
  __device__ __forceinline__ void visit(const Tile& tile, TileAccumulator& accumulator) {
    if constexpr (Epilogue::variants == 1) {
      run<0>(tile, accumulator);
    } else {
      static_for<Epilogue::sections>([&](auto index) {
        constexpr int variant = Epilogue::section[index].variant;
        if constexpr (first_section_of<Epilogue>(variant) == index)
          if (runs<variant>(tile)) run<variant>(tile, accumulator);
      });
    }
  }

 private:
  template <int variant>
  __device__ __forceinline__ static bool runs(const Tile& tile) {
    bool found = false;
    static_for<Epilogue::sections>([&](auto index) {
      constexpr int section = index;
      if constexpr (Epilogue::section[section].variant == variant) found = found || tile.section == section;
    });
    return found;
  }

  template <int variant>
  __device__ __forceinline__ void run(const Tile& tile, TileAccumulator& accumulator) {
    RowTotals row_total;
    static_for<Epilogue::row_reductions>([&](auto index) {
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block)
#pragma unroll
        for (int r = 0; r < 2; ++r) row_total[index][block][r].value = neutral<Epilogue::row_reduction[index].op>();
    });

    if constexpr (Layout::column_passes == 1) {
      run_column_pass<variant>(tile, accumulator, 0, row_total);
    } else {
#pragma unroll 1
      for (int column_pass = 0; column_pass < Layout::column_passes; ++column_pass) {
        if (column_pass > 0) move_up(accumulator);
        run_column_pass<variant>(tile, accumulator, column_pass, row_total);
      }
    }
    results.write_rows(tile, row_total);
    results.write_columns(tile);
  }

  /// Moves the accumulator of each column pass to the registers of the pass before it.
  __device__ __forceinline__ static void move_up(TileAccumulator& accumulator) {
    constexpr int half_registers = Config::tile_n / Layout::n_halves / 2,
                  pass_registers = half_registers / Layout::column_passes;
#pragma unroll
    for (int block = 0; block < Layout::blocks; ++block)
#pragma unroll
      for (int half = 0; half < Layout::n_halves; ++half)
#pragma unroll
        for (int i = 0; i < half_registers - pass_registers; ++i)
          accumulator.registers[block][half * half_registers + i] =
              accumulator.registers[block][half * half_registers + i + pass_registers];
  }

  template <int variant>
  __device__ __forceinline__ void run_column_pass(const Tile& tile, const TileAccumulator& accumulator, int column_pass,
                                                  RowTotals& row_total) {
    HeadValue head_value[Layout::blocks][2];  // of the subtile's head
#pragma unroll
    for (int box = 0; box < Layout::pass_boxes; ++box) {
      // 1. At a head's first box: the values of the head, from all of its columns.
      if constexpr (Epilogue::head_values > 0)
        if (box % Layout::head_boxes == 0)
          reduce_heads<variant>(tile, accumulator, column_pass, box * Layout::box_n, head_value);

      // 2. Each block of 64 rows, subtile by subtile: loads operands, and puts results into the box's slot, which is
      //    then sent.
      typename Results::OfBox column_result;
      static_for<Epilogue::column_reductions>([&](auto index) {
#pragma unroll
        for (int i = 0; i < Results::values; ++i)
          column_result[index][i] = neutral<Epilogue::column_reduction[index].op>();
      });
      const int box_of_tile = column_pass * Layout::pass_boxes + box;
      if constexpr (Epilogue::transposed_stores > 0) transposed().wait_slot();
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block) {
#pragma unroll
        for (int subtile = 0; subtile < Layout::subtiles; ++subtile)
          visit_subtile<variant>({tile, accumulator},
                                 {block, column_pass, box * Layout::box_n + subtile * Layout::subtile_n}, subtile,
                                 head_value[block], {row_total, column_result});
        results.template send_tiles<variant>(tile, box_of_tile, block);
        if constexpr (releases_late) operands.template release_tiles<(Epilogue::tile_stores(variant) > 0)>();
      }
      if constexpr (Epilogue::transposed_stores > 0) transposed().send(tile, box_of_tile);

      // 3. The box's column results, combined over the warp's rows.
      results.share_columns(box_of_tile, column_result);
    }
  }

  __device__ __forceinline__ void read_tiles(int subtile, Loads& loads) {
    if (subtile == 0) operands.wait_tiles();
    operands.load_tiles(subtile, loads);
    if constexpr (!releases_late) operands.template release_tiles<false>();
  }

  /// Runs the epilogue of a subtile; `subtile` is its number in the box.
  template <int variant>
  __device__ __forceinline__ void visit_subtile(const Accumulated& accumulated, const Place& place, int subtile,
                                                const HeadValue (&head_value)[2], const Totals& totals) {
    const Tile& tile = accumulated.tile;
    const auto [block, column_pass, first] = place;
    // 1. Operands into registers.
    OfColumns column_words;
    operands.load_vectors(column_pass * Layout::pass_columns + first, column_words);
    RopeTables here;
    const RopeTables& rope_table = operands.rope_tables(tile, first, block, here);
    Loads loads;
    Subtile stores[at_least_one(Epilogue::tile_values(variant))];
    float whole_value[at_least_one(Epilogue::whole_reductions)][2];  // of each row, over the columns inside the array
    static_for<Epilogue::whole_reductions>([&](auto index) {
      whole_value[index][0] = whole_value[index][1] = neutral<Epilogue::whole_reduction[index].op>();
    });
    float row_value[at_least_one(Epilogue::row_reductions)][2][2 * groups];  // of a log-sum-exp
    // Columns of the subtile that are inside the array. With reductions of all columns they are whole groups of 8.
    const int columns_left =
        tile.column_end - tile.column - Layout::memory_column(0, column_pass * Layout::pass_columns + first);
    const bool is_ahead = reads_ahead && first == 0 && block == 0;
    if (!is_ahead) read_tiles(subtile, loads);

    // 2. The generated function for each element; its results into registers.
#pragma unroll
    for (int j = 0; j < groups; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < 2; c += Layout::entry_values) {
          typename Epilogue::Element element;
          typename Epilogue::Result result;
          fill(element, accumulated, place, {j, r, c}, column_words, rope_table, head_value[r]);
          const bool row_is_inside = element.row < operands.params.m,
                     column_is_inside = element.column[0] < tile.column_end;
          static_for<Epilogue::tile_loads * Layout::entry_values>([&](auto index) {
            constexpr int i = index;
            element.tile[i].f = (is_ahead ? ahead : loads)[i / Layout::entry_values].value[j][r][Layout::side(i, c)];
          });

          Epilogue::template evaluate<variant>(element, result);

          static_for<Epilogue::tile_values(variant) * Layout::entry_values>([&](auto index) {
            constexpr int i = index;
            stores[i / Layout::entry_values].value[j][r][Layout::side(i, c)] = result.tile[i];
          });
          static_for<Epilogue::row_reductions>([&](auto index) {
            constexpr Op op = Epilogue::row_reduction[index].op;
            float& total = totals.row[index][block][r].value;
            if constexpr (op == Op::logsumexp) {
              row_value[index][r][2 * j + c] = column_is_inside ? result.row[index] : neutral<op>();
              if constexpr (Layout::entry_values > 1) row_value[index][r][2 * j + 1] = neutral<op>();
            } else if (column_is_inside)
              total = combine<op>(total, result.row[index]);
          });
          static_for<Epilogue::column_reductions * Layout::entry_values>([&](auto index) {
            constexpr int i = index;
            constexpr Op op = Epilogue::column_reduction[i / Layout::entry_values].op;
            float& total = totals.column[i / Layout::entry_values][2 * (subtile * groups + j) + Layout::side(i, c)];
            if (row_is_inside) total = combine<op>(total, result.column[i]);
          });
          if constexpr (Epilogue::whole_reductions > 0) {
            static_for<Epilogue::whole_reductions>([&](auto index) {
              float& total = whole_value[index][r];
              if (8 * j < columns_left)
                total = combine<Epilogue::whole_reduction[index].op>(total, result.whole[index]);
            });
          }
        }
    if constexpr (Epilogue::whole_reductions > 0) {
      static_for<Epilogue::whole_reductions>([&](auto index) {
        float& total = this->whole[index];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (row_of(tile, block, r) < operands.params.m)
            total = combine<Epilogue::whole_reduction[index].op>(total, whole_value[index][r]);
      });
    }
    static_for<Epilogue::row_reductions>([&](auto index) {
      if constexpr (Epilogue::row_reduction[index].op == Op::logsumexp) {
#pragma unroll
        for (int r = 0; r < 2; ++r) totals.row[index][block][r].lse.add(row_value[index][r]);
      }
    });

    // 3. Results into the box's slot in shared memory.
    if (subtile == 0) results.template wait_slot<variant>();
    results.template put_tiles<variant>(subtile, stores);
    if constexpr (Epilogue::transposed_stores > 0) transposed().put(block, subtile, stores);
  }

  __device__ __forceinline__ Transposed transposed() {
    return {results.params, results.base, results.consumer, results.warp, results.lane, this->transposed_slot};
  }

  /// A row of this thread. In programs of halves it is hidden from the compiler, which otherwise keeps predicates of
  /// all rows for a maximum over them, so that a gate spills 20 bytes in 128 x 192.
  __device__ __forceinline__ int row_of(const Tile& tile, int block, int r) const {
    const int lane = Layout::n_halves > 1 ? operands.hidden(operands.lane) : operands.lane;
    return Layout::row(tile, operands.warp, lane, block, r);
  }

  /// Fills in all inputs of an element but tile operands.
  __device__ __forceinline__ void fill(typename Epilogue::Element& element, const Accumulated& accumulated, Place place,
                                       Cell cell, const OfColumns& column_words, const RopeTables& rope_table,
                                       const HeadValue& head_value) const {
    const auto& [tile, accumulator] = accumulated;
    const auto [block, column_pass, first] = place;
    const auto [j, r, c] = cell;
    element.row = Layout::row(tile, operands.warp, operands.lane, block, r);
#pragma unroll
    for (int half = 0; half < Epilogue::acc_halves; ++half) {
      const int group = Layout::fragment_column(half, first) / 8 + j;
      element.acc[half] = accumulator.registers[block][4 * group + 2 * r + Layout::side(half, c)];
    }
#pragma unroll
    for (int half = 0; half < Epilogue::halves; ++half)
      element.column[half] = (Layout::head > 0 ? 0 : half * operands.n) +
                             Layout::column(tile, operands.lane, half, column_pass * Layout::pass_columns + first, j) +
                             Layout::side(half, c);
    static_for<Epilogue::row_vectors * Layout::entry_values>([&](auto index) {
      constexpr int i = index;
      element.row_vector[i] = column_words.row_vector[i / Layout::entry_values][j][Layout::side(i, c)];
    });
    static_for<Epilogue::column_vectors>(
        [&](auto index) { element.column_vector[index] = operands.column_vector[index][block][r]; });
    static_for<Epilogue::scalars>([&](auto index) { element.scalar[index] = operands.scalar[index]; });
    static_for<Epilogue::rope_tables * Layout::entry_values>([&](auto index) {
      constexpr int i = index;
      element.rope_table[i] = rope_table[i / Layout::entry_values][j][r][Layout::side(i, c)];
    });
    static_for<Epilogue::head_vectors * Layout::entry_values>([&](auto index) {
      constexpr int i = index;
      element.head_vector[i] = column_words.head_vector[i / Layout::entry_values][j][Layout::side(i, c)];
    });
    static_for<Epilogue::head_values>([&](auto index) { element.head_value[index] = head_value[index]; });
  }

  /// The values of the head that begins `first` columns into the column pass, for this thread's rows. Each pass over
  /// the head's columns computes values that depend only on those of earlier passes.
  template <int variant>
  __device__ __forceinline__ void reduce_heads(const Tile& tile, const TileAccumulator& accumulator, int column_pass,
                                               int first, HeadValue (&head_value)[Layout::blocks][2]) const {
    Word scalar_words[at_least_one(Epilogue::scalars)];
    static_for<Epilogue::scalars>(
        [&](auto index) { scalar_words[index].i = operands.hidden(operands.scalar[index].i); });
    static_for<Epilogue::head_passes>([&](auto index) {
      constexpr int head_pass = index;
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block) {
        Word row_words[2][at_least_one(Epilogue::column_vectors)];
        static_for<Epilogue::column_vectors>([&](auto index) {
          constexpr int i = index;
#pragma unroll
          for (int r = 0; r < 2; ++r) row_words[r][i].i = operands.hidden(operands.column_vector[i][block][r].i);
        });
        float total[2][at_least_one(Epilogue::head_values)];
        static_for<Epilogue::head_values>([&](auto index) {
          constexpr int i = index;
          total[0][i] = total[1][i] = neutral<Epilogue::head_op[i]>();
        });
#pragma unroll
        for (int subtile = 0; subtile < Layout::head_boxes * Layout::subtiles; ++subtile) {
          const int at = first + subtile * Layout::subtile_n;
          OfColumns column_words;
          operands.load_vectors(column_pass * Layout::pass_columns + at, column_words);
          RopeTables here;
          const RopeTables& rope_table = operands.rope_tables(tile, at, block, here);
#pragma unroll
          for (int j = 0; j < groups; ++j)
#pragma unroll
            for (int r = 0; r < 2; ++r)
#pragma unroll
              for (int c = 0; c < 2; c += Layout::entry_values) {
                typename Epilogue::Element element;
                float value[at_least_one(Epilogue::head_values)];
                fill(element, {tile, accumulator}, {block, column_pass, at}, {j, r, c}, column_words, rope_table,
                     head_value[block][r]);
                static_for<Epilogue::column_vectors>(
                    [&](auto index) { element.column_vector[index] = row_words[r][index]; });
                static_for<Epilogue::scalars>([&](auto index) { element.scalar[index] = scalar_words[index]; });
                Epilogue::template evaluate_heads<head_pass>(element, value);
                static_for<Epilogue::head_values>([&](auto index) {
                  constexpr int i = index;
                  if constexpr (Epilogue::head_pass[variant][i] == head_pass)
                    total[r][i] = combine<Epilogue::head_op[i]>(total[r][i], value[i]);
                });
              }
        }
        static_for<Epilogue::head_values>([&](auto index) {
          constexpr int i = index;
          if constexpr (Epilogue::head_pass[variant][i] == head_pass) {
#pragma unroll
            for (int r = 0; r < 2; ++r)
              head_value[block][r][i] = combine_lanes<Epilogue::head_op[i], 1 | 2>(total[r][i]);
          }
        });
      }
    });
  }
};

}  // namespace coda
