// A generated Epilogue's operands: tiles are read from a ring that a prefetch warp fills, vectors over columns from
// shared memory, all others from global memory.
#pragma once

#include "epilogue_layout_sm90.cuh"
#include "pipeline.cuh"

namespace coda {

/// Producer's side: loads the tile operands of one warpgroup's tile, box by box, in the order in which they are read.
template <class Config, class Epilogue, class Params>
__device__ __forceinline__ void prefetch_operands(const Params& params, const Tile& tile, ptx::uint32 base,
                                                  Ring<EpilogueLayout<Config, Epilogue>::load_slots> ring,
                                                  RingPosition<EpilogueLayout<Config, Epilogue>::load_slots>& at) {
  using Layout = EpilogueLayout<Config, Epilogue>;
#pragma unroll 1
  for (int box = 0; box < Layout::boxes; ++box) {
#pragma unroll 1
    for (int block = 0; block < Layout::blocks; ++block) {
      ring.wait_empty(at);
      ptx::mbarrier_arrive_expect(ring.full(at.slot), Layout::loaded_bytes);
      const ptx::uint32 slot = base + Layout::load_offset + at.slot * Layout::load_slot_bytes;
      static_for<Epilogue::tile_loads>([&](auto index) {
        constexpr TileAccess access = Epilogue::tile_load[index];
        ptx::tma_load(slot + 64 * Layout::load_row_bytes(index), params.map[access.map], ring.full(at.slot),
                      tile.column + Layout::memory_column(access.half, box * Layout::box_n),
                      Layout::head > 0 ? 0 : access.half, tile.row + 64 * block, access.batched ? tile.batch : 0);
      });
      at.advance();
    }
  }
}

/// The same for a tile without operands, whose consumer still waits for a slot and releases it.
template <int slots>
__device__ __forceinline__ void skip_operands(Ring<slots> ring, RingPosition<slots>& at) {
  ring.wait_empty(at);
  ptx::mbarrier_arrive(ring.full(at.slot));
  at.advance();
}

/// Consumer's side: the operands in one thread's registers. `begin` runs before the tile's products; a barrier of the
/// warpgroup separates it from all that follows.
template <class Config, class Epilogue, class Params>
struct EpilogueOperands {
  using Layout = EpilogueLayout<Config, Epilogue>;
  using Subtile = Fragment<Layout::subtile_n>;
  static constexpr int groups = Subtile::groups;
  /// Vectors over the columns of a subtile, and a block's rope tables.
  struct OfColumns {
    Word row_vector[at_least_one(Epilogue::row_vectors)][groups][2];
    Word head_vector[at_least_one(Epilogue::head_vectors)][groups][2];
  };
  using RopeTables = Word[at_least_one(Epilogue::rope_tables)][groups][2][2];

  const Params& params;
  const ptx::uint32 base;  // this warpgroup's shared memory
  const int warp, lane;
  const int n;  // columns of a half of N, if a tile has columns of both; else N
  const Ring<Layout::load_slots> ring;
  RingPosition<Layout::load_slots> loaded;
  Word column_vector[at_least_one(Epilogue::column_vectors)][Layout::blocks][2];
  Word scalar[at_least_one(Epilogue::scalars)];
  static constexpr int head_subtiles = Layout::head_boxes * Layout::subtiles;
  RopeTables kept_tables[Layout::blocks][Config::keeps_tables ? head_subtiles : 1];  // the same for all heads of a tile
  ptx::uint32 vectors;  // address of the tile's vectors over columns in shared memory

  __device__ __forceinline__ EpilogueOperands(const Params& params, ptx::uint32 base, Ring<Layout::load_slots> ring,
                                              int warp, int lane)
      : params(params),
        base(base),
        warp(warp),
        lane(lane),
        n(params.n / Layout::n_halves),
        ring(ring),
        vectors(base + Layout::vector_offset) {}

  /// Loads vectors and scalars, early enough to hide the latency under the products.
  __device__ __forceinline__ void begin(const Tile& tile) {
    begin_vectors(tile);
    static_for<Epilogue::scalars>([&](auto index) {
      constexpr VectorAccess access = Epilogue::scalar[index];
      scalar[index] = load_word<access.dtype>(params.pointer[access.pointer], access.batched ? tile.batch : 0);
    });
    static_for<Epilogue::column_vectors>([&](auto index) {
      constexpr VectorAccess access = Epilogue::column_vector[index];
      const long long offset = access.batched ? static_cast<long long>(tile.batch) * params.m : 0;
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int at = Layout::row(tile, warp, lane, block, r);
          column_vector[index][block][r] =
              load_word<access.dtype>(params.pointer[access.pointer], offset + min(at, params.m - 1));
        }
    });
    if constexpr (Config::keeps_tables) {
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block)
#pragma unroll
        for (int subtile = 0; subtile < head_subtiles; ++subtile)
          load_rope_tables(tile, subtile * Layout::subtile_n, block, kept_tables[block][subtile]);
    }
  }

  /// Copies vectors over columns to shared memory, a word for each column of the tile. Another warp may still read the
  /// words of the previous tile, but not of an earlier one: so there are two places, used alternately.
  __device__ __forceinline__ void begin_vectors(const Tile& tile) {
    const ptx::uint32 first = base + Layout::vector_offset;
    vectors = vectors == first ? first + Layout::vector_bytes : first;
    static_for<Epilogue::row_vectors>([&](auto index) {
      constexpr VectorAccess access = Epilogue::row_vector[index];
      const int width = Layout::head > 0 ? n : access.halves * n;
      const long long offset =
          (access.batched ? static_cast<long long>(tile.batch) * width : 0) + (Layout::head > 0 ? 0 : access.half * n);
      put_words<access>(
          index, [&](int at) { return offset + min(tile.column + Layout::memory_column(access.half, at), n - 1); });
    });
    static_for<Epilogue::head_vectors>([&](auto index) {
      constexpr VectorAccess access = Epilogue::head_vector[index];
      const int offset = access.batched ? tile.batch * access.halves * (Layout::head / 2) : 0;
      put_words<access>(Epilogue::row_vectors + index,
                        [&](int at) { return offset + column_of_head<access.half, access.halves>(at); });
    });
  }
  /// `place` maps a column of the tile to its index in the array.
  template <VectorAccess access, class Place>
  __device__ __forceinline__ void put_words(int vector, const Place& place) const {
#pragma unroll  // so that loads of several vectors are in flight together
    for (int start = 0; start < Layout::columns; start += 128) {
      const int at = start + 32 * warp + lane;
      if (at < Layout::columns)
        ptx::store_word(word_address(vector, at), load_word<access.dtype>(params.pointer[access.pointer], place(at)).i);
    }
  }
  __device__ __forceinline__ ptx::uint32 word_address(int vector, int at) const {
    return vectors + 4 * (vector * Layout::columns + at);
  }

  /// Returns its argument, hidden from the compiler. Otherwise the compiler keeps products of one pass over a head,
  /// such as acc * rstd, in registers for the next pass, and spills.
  __device__ __forceinline__ int hidden(int value) const { return __shfl_sync(0xFFFFFFFFu, value, lane); }

  /// Loads this thread's columns of the subtile that begins `at` columns into the tile.
  __device__ __forceinline__ void load_vectors(int at, OfColumns& column_words) const {
    static_for<Epilogue::row_vectors>([&](auto index) { load_words(index, at, column_words.row_vector[index]); });
    static_for<Epilogue::head_vectors>(
        [&](auto index) { load_words(Epilogue::row_vectors + index, at, column_words.head_vector[index]); });
  }
  __device__ __forceinline__ void load_words(int vector, int at, Word (&word)[groups][2]) const {
#pragma unroll
    for (int j = 0; j < groups; ++j)
      ptx::load_pair(word_address(vector, at + 8 * j + 2 * (lane & 3)), word[j][0].f, word[j][1].f);
  }

  /// The column in an array over heads of column `at` of a half of the tile. An array as wide as half a head has one
  /// word for two interleaved columns.
  template <int half, int halves>
  __device__ __forceinline__ static int column_of_head(int at) {
    constexpr int columns = Layout::head / 2;
    return half * columns + at % (columns * Layout::entry_values) / words_shared<halves>;
  }
  template <int halves>
  static constexpr int words_shared = halves == 1 ? Layout::entry_values : 1;

  /// A block's words of rope tables for the subtile that begins `at` columns after the first of a head: the kept ones,
  /// or words loaded into `here`.
  __device__ __forceinline__ const RopeTables& rope_tables(const Tile& tile, int at, int block,
                                                           RopeTables& here) const {
    if constexpr (Config::keeps_tables) return kept_tables[block][at / Layout::subtile_n % head_subtiles];
    load_rope_tables(tile, at, block, here);
    return here;
  }
  /// Loads words of rope tables, whose rows are those of the tile, and whose columns are those of half a head. The
  /// heads of a tile read the same words, which the first head brings into L1.
  __device__ __forceinline__ void load_rope_tables(const Tile& tile, int at, int block, RopeTables& table) const {
    static_for<Epilogue::rope_tables>([&](auto index) {
      constexpr VectorAccess access = Epilogue::rope_table[index];
      constexpr int width = access.halves * (Layout::head / 2);
      constexpr int shared = words_shared<access.halves>;
      const int pair = (Epilogue::head_values > 0 ? hidden(lane) : lane) & 3;  // so that words are not kept for heads
      const int first = column_of_head<access.half, access.halves>(at + 2 * pair);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int product_row = min(Layout::row(tile, warp, lane, block, r), params.m - 1);
        const int rows = access.period > 0 ? access.period : params.m;
        const long long row = (access.batched ? static_cast<long long>(tile.batch) * rows : 0) +
                              (access.period > 0 ? product_row % rows : product_row);
#pragma unroll
        for (int j = 0; j < groups; ++j)
          load_adjacent<access.dtype, 2 / shared>(params.pointer[access.pointer], row * width + first + 8 * j / shared,
                                                  table[index][j][r]);
      }
    });
  }

  /// Tile operands of a box: `wait_tiles`, then `load_tiles` for each subtile, then `release_tiles`.
  __device__ __forceinline__ void wait_tiles() const {
    if constexpr (Epilogue::tile_loads > 0) {
      ring.wait_full(loaded);
    }
  }
  __device__ __forceinline__ void load_tiles(int subtile, Subtile (&loads)[at_least_one(Epilogue::tile_loads)]) const {
    const ptx::uint32 slot = base + Layout::load_offset + loaded.slot * Layout::load_slot_bytes;
    static_for<Epilogue::tile_loads>([&](auto index) {
      using Operand = Box<Epilogue::tile_load[index].dtype, Layout::box_n>;
      Operand::load(slot + 64 * Layout::load_row_bytes(index) + 16 * warp * Operand::row_bytes, lane,
                    subtile * Layout::subtile_n, loads[index]);
    });
  }
  /// Releases the box's slot to the prefetch warp. `is_fenced`: since its last load the warp has passed
  /// fence_async_proxy and __syncwarp.
  template <bool is_fenced>
  __device__ __forceinline__ void release_tiles() {
    if constexpr (Epilogue::tile_loads > 0) {
      // The copy engine writes the slot's next tile, in another proxy than these threads' reads, and an mbarrier alone
      // does not order the two. Without the fence tiles were overwritten before they had been read, in 10 of 300
      // launches at 4096 x 4096 x 256, and in none at smaller sizes.
      if constexpr (!is_fenced) {
        ptx::fence_async_proxy();
        __syncwarp();
      }
      if (lane == 0) ptx::mbarrier_arrive(ring.empty(loaded.slot));
      loaded.advance();
    }
  }
};

}  // namespace coda
