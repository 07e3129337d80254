// The positions of the columns that a generated Epilogue combines, and the shared memory that it needs.
#pragma once

#include "fragment_sm90.cuh"
#include "scheduler.cuh"

namespace coda {

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
  // Consumers compute tiles in turn (pingpong), or are cooperative: each has half of the rows of every tile.
  static constexpr bool cooperative = Config::consumer_m < Config::tile_m;
  // The two halves whose columns an element combines are those of N (then a tile has the same columns of both, and
  // `n_halves` is 2), those of a head, or a head's interleaved columns. A thread has pairs of the latter: one element
  // of two columns (`entry_values` is 2) in the place of two elements.
  static constexpr int head = Epilogue::head;
  static constexpr int entry_values = Epilogue::entry_values;
  static constexpr int n_halves = head > 0 ? 1 : Epilogue::acc_halves;
  static constexpr int columns = Config::tile_n * entry_values / Epilogue::acc_halves;  // of a tile, within a half
  // Tiles are copied from and to memory in boxes of `box_n` columns, whose rows should be whole cache lines. The
  // epilogue works on subtiles of `subtile_n` columns, as many as registers hold.
  static constexpr int box_n = Config::box_n;
  static constexpr int boxes = columns / box_n;
  static constexpr int subtile_n = Config::subtile_n;
  static constexpr int subtiles = box_n / subtile_n;  // of a box
  static constexpr int blocks = Config::consumer_m / 64;
  static constexpr int head_boxes = head > 0 ? head / 2 * entry_values / box_n : boxes;  // of one head
  // Code that exceeds the instruction cache is fetched again for each tile, several times more slowly than it runs. So
  // a long epilogue runs the same code over a tile in several column passes, each over some of the boxes.
  static constexpr int column_passes = Config::column_passes;
  static constexpr int pass_boxes = boxes / column_passes, pass_columns = pass_boxes * box_n;
  static_assert(columns % box_n == 0 && box_n % subtile_n == 0 && subtile_n % 16 == 0,
                "a tile is whole boxes, a box whole subtiles of 16 columns or more");
  static_assert(boxes % column_passes == 0 && (head == 0 || pass_boxes % head_boxes == 0),
                "a column pass is whole boxes and whole heads");
  static_assert(head == 0 || (columns % (head / 2) == 0 && (head / 2) % box_n == 0),
                "a tile has whole heads, and half a head whole boxes");

  /// The column, of the pair that a thread has in each group of 8, of value i of an Element or Result, which belongs to
  /// entry i / entry_values.
  __host__ __device__ static constexpr int side(int i, int c) { return entry_values > 1 ? i % entry_values : c; }

  /// The column in memory of column `at` of a half, counted from the tile's first (within that half of N).
  __host__ __device__ static constexpr int memory_column(int half, int at) {
    if constexpr (head > 0 && entry_values == 1) return at / (head / 2) * head + half * (head / 2) + at % (head / 2);
    return at;
  }
  /// The same in the accumulator.
  __host__ __device__ static constexpr int fragment_column(int half, int at) {
    return (head > 0 ? 0 : half * columns) + memory_column(half, at);
  }

  /// Bytes of the tile operands (or results) before the i-th, for one row of a box.
  __host__ __device__ static constexpr int load_row_bytes(int before) {
    int bytes = 0;
    for (int i = 0; i < before; ++i) bytes += box_n * bytes_of(Epilogue::tile_load[i].dtype);
    return bytes;
  }
  __host__ __device__ static constexpr int store_row_bytes(int variant, int before) {
    int bytes = 0;
    for (int i = 0; i < before; ++i) {
      const int element_bytes = bytes_of(Epilogue::tile_store[first_section_of<Epilogue>(variant)][i].dtype);
      bytes += box_n * (element_bytes < least_store_bytes ? least_store_bytes : element_bytes);
    }
    return bytes;
  }
  /// Boxes of 4-byte elements have rows of the widest swizzle, and begin at multiples of 1024 bytes. Beside them, boxes
  /// of 1-byte elements have the room of 2 bytes each.
  __host__ __device__ static constexpr int least_bytes_of_stores() {
    for (const auto& stores : Epilogue::tile_store)
      for (const TileAccess& store : stores)
        if (!store.is_none() && bytes_of(store.dtype) == 4) return 2;
    return 1;
  }
  static constexpr int least_store_bytes = least_bytes_of_stores();
  __host__ __device__ static constexpr int widest_store_row_bytes() {
    int widest = 0;
    for (int variant = 0; variant < Epilogue::variants; ++variant) {
      const int bytes = store_row_bytes(variant, Epilogue::tile_stores(variant));
      widest = bytes > widest ? bytes : widest;
    }
    return widest;
  }
  static constexpr int load_slot_bytes = 64 * load_row_bytes(Epilogue::tile_loads);  // of a warpgroup
  static constexpr int loaded_bytes =
      (Config::loaded_rows < 64 ? Config::loaded_rows : 64) * load_row_bytes(Epilogue::tile_loads);
  static constexpr int store_slot_bytes = 16 * widest_store_row_bytes();  // of a warp
  static constexpr int load_slots = Epilogue::tile_loads > 0 ? Config::load_slots : 1;
  static constexpr int store_slots = Config::store_slots;

  // The columns of a transposed result of a box are the rows of boxes whose rows have at most 128 bytes. A slot has the
  // boxes of all transposed results, and the warps of a warpgroup fill it together.
  __host__ __device__ static constexpr int transposed_rows(DType dtype) {
    return Config::consumer_m < 128 / bytes_of(dtype) ? Config::consumer_m : 128 / bytes_of(dtype);
  }
  __host__ __device__ static constexpr int transposed_offset(int before) {
    int bytes = 0;
    for (int i = 0; i < before; ++i)
      bytes += box_n * Config::consumer_m * bytes_of(Epilogue::transposed_store[i].dtype);
    return bytes;
  }
  static constexpr int transposed_slots = store_slots;
  static constexpr int transposed_slot_bytes = transposed_offset(Epilogue::transposed_stores);

  // The memory of one consumer warpgroup, from its base: slots of transposed results, load ring, store rings of its
  // four warps, column reductions, and vectors over columns of a tile and of the next.
  static constexpr int load_offset = transposed_slots * transposed_slot_bytes;
  static constexpr int store_offset = load_offset + (Epilogue::tile_loads > 0 ? load_slots * load_slot_bytes : 0);
  static constexpr int column_offset = store_offset + 4 * store_slots * store_slot_bytes;
  static constexpr int column_bytes = Epilogue::column_reductions * 4 * columns * 4;
  static constexpr int vector_offset = column_offset + column_bytes;
  static constexpr int vector_bytes = (Epilogue::row_vectors + Epilogue::head_vectors) * columns * 4;
  static constexpr int bytes = (vector_offset + 2 * vector_bytes + 1023) / 1024 * 1024;

  /// The output's row of a thread; the fragment's r-th half is 8 rows further down.
  __device__ __forceinline__ static int row(const Tile& tile, int warp, int lane, int block, int r) {
    return tile.row + 64 * block + 16 * warp + lane / 4 + 8 * r;
  }
  /// Column, within a half of N, of pair j of the subtile that begins `at` columns into the tile; the pair's second
  /// element is the next one.
  __device__ __forceinline__ static int column(const Tile& tile, int lane, int half, int at, int j) {
    return tile.column + memory_column(half, at) + 8 * j + 2 * (lane & 3);
  }
};

}  // namespace coda
