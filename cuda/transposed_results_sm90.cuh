// A generated Epilogue's transposed results, (N, M): a box of the tile by TMA, for all rows of one consumer. Those of a
// symmetric product are its results at the tile's place above the diagonal.
//
// A thread has rows r = 0, 1 (8 apart) and pairs of columns. Transposing matrix instructions make a 16-byte row of each
// column. With 16-bit results a matrix has 8 rows of the product; with 8-bit results 16, in contraction order, in which
// the two rows of a thread are adjacent. The warps fill a row of 128 bytes together, so there is a barrier before the
// box is sent.
#pragma once

#include "epilogue_layout_sm90.cuh"
#include "pipeline.cuh"

namespace coda {

/// The slot in which the next box's transposed results are collected.
template <bool is_there>
struct TransposedSlot {
  int transposed_slot = 0;
};
template <>
struct TransposedSlot<false> {};

template <class Config, class Epilogue, class Params>
struct TransposedResults {
  using Layout = EpilogueLayout<Config, Epilogue>;
  using Subtile = Fragment<Layout::subtile_n>;

  const Params& params;
  const ptx::uint32 base;  // this warpgroup's shared memory
  const int consumer, warp, lane;
  int& slot;

  /// Whether this thread sends boxes: one that sends no untransposed results, as it would wait for these too.
  __device__ __forceinline__ bool is_sender() const { return warp == consumer_warps - 1 && lane == 31; }

  /// Waits before the first `put` of a box: with one slot, the previous box must have been read. With more, `send` has
  /// waited.
  __device__ __forceinline__ void wait_slot() const {
    if constexpr (Layout::transposed_slots == 1) {
      if (is_sender()) ptx::tma_store_wait_read<0>();
      sync();
    }
  }

  /// Puts a subtile of a block of 64 rows.
  template <int size>
  __device__ __forceinline__ void put(int block, int subtile, const Subtile (&values)[size]) const {
    static_for<Epilogue::transposed_stores>([&](auto index) {
      constexpr TransposedAccess access = Epilogue::transposed_store[index];
      using Turned = Box<access.dtype, Layout::transposed_rows(access.dtype)>;
      constexpr int blocks_per_box = Layout::transposed_rows(access.dtype) / 64;
      const ptx::uint32 box = slot_address(index) + block / blocks_per_box * box_bytes<access.dtype>() +
                              subtile * Layout::subtile_n * Turned::row_bytes;
      const int chunk = (64 * (block % blocks_per_box) + 16 * warp) * bytes_of(access.dtype) / 16;
      if constexpr (bytes_of(access.dtype) == 1) {
        put_bytes<access, Turned>(box, chunk, values[access.value]);
      } else {
        put_words<access, Turned>(box, chunk, values[access.value]);
      }
    });
  }

  /// Sends the box after the last `put`, and with several slots waits until the next slot has been read.
  __device__ __forceinline__ void send(const Tile& tile, int box) const {
    constexpr int pending = Layout::transposed_slots > 2 ? Layout::transposed_slots - 2 : 0;
    ptx::fence_async_proxy();
    if constexpr (Layout::transposed_slots > 1)
      if (is_sender()) ptx::tma_store_wait_read<pending>();
    sync();
    if (is_sender()) {
      if (is_sent(tile)) {
        static_for<Epilogue::transposed_stores>([&](auto index) {
          constexpr TransposedAccess access = Epilogue::transposed_store[index];
          constexpr int rows = Layout::transposed_rows(access.dtype);
#pragma unroll
          for (int i = 0; i < Config::consumer_m / rows; ++i)
            ptx::tma_store(params.map[access.map], slot_address(index) + i * box_bytes<access.dtype>(),
                           tile.row + i * rows, access.half, tile.column + box * Layout::box_n, tile.batch);
        });
      }
      ptx::tma_store_commit();  // also of nothing, as `send` and `wait_slot` count the boxes that may still be read
    }
    slot = slot + 1 == Layout::transposed_slots ? 0 : slot + 1;
  }

 private:
  /// Whether a tile's transposed results are stored. Of a symmetric product both places on the diagonal are computed.
  __device__ __forceinline__ static bool is_sent(const Tile& tile) {
    if constexpr (Epilogue::symmetric)
      return !Triangle<Config::tile_m * Config::cluster_m, Config::tile_n>::is_on_diagonal(tile);
    return true;
  }
  __device__ __forceinline__ void sync() const {
    ptx::named_barrier_sync(barrier_number(NamedBarrier::transposed, consumer), 32 * consumer_warps);
  }
  __device__ __forceinline__ ptx::uint32 slot_address(int store) const {
    return base + slot * Layout::transposed_slot_bytes + Layout::transposed_offset(store);
  }
  template <DType dtype>
  static constexpr int box_bytes() {
    return Layout::box_n * Layout::transposed_rows(dtype) * bytes_of(dtype);
  }

  /// 16 bits: a matrix is a group of 8 columns and 8 rows, half of a warp's chunks.
  template <TransposedAccess access, class Turned>
  __device__ __forceinline__ void put_words(ptx::uint32 box, int chunk, const Subtile& values) const {
    const ptx::uint32 to = box + Turned::offset(lane / 16 * 8 + lane % 8, chunk + lane / 8 % 2);
#pragma unroll
    for (int j = 0; j < Subtile::groups; j += 2) {
      ptx::uint32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&pair)[2] = values.value[j + i / 2][i % 2];
        words[i] = packed<access.dtype>(pair[0], pair[1]);
      }
      ptx::store_matrices_transposed(to + 8 * j * Turned::row_bytes, words);
    }
  }

  /// 8 bits: a matrix is a group of 8 columns and the 16 rows of a warp.
  template <TransposedAccess access, class Turned>
  __device__ __forceinline__ void put_bytes(ptx::uint32 box, int chunk, const Subtile& values) const {
    constexpr int matrices = Subtile::groups % 4 == 0 ? 4 : 2;
    const ptx::uint32 to = box + Turned::offset(lane, chunk);
#pragma unroll
    for (int j = 0; j < Subtile::groups; j += matrices) {
      ptx::uint32 words[matrices];
#pragma unroll
      for (int i = 0; i < matrices; ++i) {
        words[i] = word_of_rows<access>(values, j + i);
        if constexpr (!access.contraction_order) words[i] = in_order_of_rows(words[i]);
      }
      ptx::store_matrices_transposed(to + 8 * j * Turned::row_bytes, words);
    }
  }

  /// A word of rows 0 and 8 of a group's first column, which are neighbours in contraction order, then of its second
  /// column. If the same values are also stored untransposed, both words come from the same conversions.
  template <TransposedAccess access>
  __device__ __forceinline__ static ptx::uint32 word_of_rows(const Subtile& values, int j) {
    constexpr TileAccess straight = straight_of<access>();
    if constexpr (straight.is_none()) {
      const auto& [upper, lower] = values.value[j];
      return packed_bytes<access.dtype, access.saturates>(upper[0], lower[0], upper[1], lower[1]);
    } else if constexpr (straight.contraction_order) {
      const int even = j / 2 * 2;
      const ptx::uint32 upper = word_in_order<access.dtype, access.saturates>(values, even, 0);
      const ptx::uint32 lower = word_in_order<access.dtype, access.saturates>(values, even, 1);
      return __byte_perm(upper, lower, j % 2 ? 0x7351 : 0x6240);
    } else {
      const auto& [upper, lower] = values.value[j];
      return __byte_perm(packed_bytes<access.dtype, access.saturates>(upper[0], upper[1]),
                         packed_bytes<access.dtype, access.saturates>(lower[0], lower[1]), 0x5140);
    }
  }
  template <TransposedAccess access>
  static constexpr TileAccess straight_of() {
    if (access.value >= Epilogue::tile_stores(0)) return {};
    const TileAccess straight = Epilogue::tile_store[0][access.value];
    return straight.dtype == access.dtype && straight.saturates == access.saturates ? straight : TileAccess{};
  }

  /// From rows 0 and 8, 1 and 9, ... of a warp's threads to rows 0 and 1, 2 and 3, ...
  __device__ __forceinline__ ptx::uint32 in_order_of_rows(ptx::uint32 word) const {
    const int from = 8 * (lane / 4) % 32 + lane % 4;
    const ptx::uint32 first = __shfl_sync(0xFFFFFFFFu, word, from), second = __shfl_sync(0xFFFFFFFFu, word, from + 4);
    return __byte_perm(first, second, lane < 16 ? 0x6240 : 0x7351);
  }
};

}  // namespace coda
