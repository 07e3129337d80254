// Writes a generated Epilogue's results to memory: tiles by TMA, warp by warp; for reductions a partial result of each
// tile, or of each cooperating consumer's rows of it.
#pragma once

#include "claims.cuh"
#include "epilogue_layout_sm90.cuh"
#include "pipeline.cuh"
#include "reductions_sm90.cuh"

namespace coda {

/// The results of one consumer thread. The kernel calls `finish` before it ends.
template <class Config, class Epilogue, class Params>
struct EpilogueResults {
  using Layout = EpilogueLayout<Config, Epilogue>;
  using Subtile = Fragment<Layout::subtile_n>;
  static constexpr int groups = Subtile::groups;

  const Params& params;
  const ptx::uint32 base;  // this warpgroup's shared memory
  const int consumer, warp, lane;
  const int n;  // columns of a half of N, if a tile has columns of both; else N
  int store_slot = 0;

  __device__ __forceinline__ EpilogueResults(const Params& params, ptx::uint32 base, int consumer, int warp, int lane)
      : params(params), base(base), consumer(consumer), warp(warp), lane(lane), n(params.n / Layout::n_halves) {}

  /// Waits, before the kernel ends, until the copy engine has read all boxes that this thread asked it to store.
  __device__ __forceinline__ static void finish() { ptx::tma_store_wait_read<0>(); }

  /// The access of a store of `variant` in the tile's section.
  template <int variant, int store>
  __device__ __forceinline__ static TileAccess store_access(const Tile& tile) {
    constexpr TileAccess first_access = Epilogue::tile_store[first_section_of<Epilogue>(variant)][store];
    TileAccess access = first_access;
    if constexpr (Epilogue::sections > 1) {
      static_for<Epilogue::sections>([&](auto index) {
        constexpr int section = index;
        if constexpr (Epilogue::section[section].variant == variant) {
          constexpr TileAccess section_access = Epilogue::tile_store[section][store];
          if (tile.section == section) access = section_access;
        }
      });
    }
    return access;
  }

  /// Tile results of a box, of each warp's own 16 rows, so that warps need no barrier: `wait_slot`, then `put_tiles`
  /// for each subtile, then `send_tiles`.
  template <int variant>
  __device__ __forceinline__ void wait_slot() const {
    if constexpr (Epilogue::tile_stores(variant) > 0) {
      if (lane == 0) ptx::tma_store_wait_read<Layout::store_slots - 1>();
      __syncwarp();
    }
  }
  template <int variant>
  __device__ __forceinline__ void put_tiles(
      int subtile, const Subtile (&stores)[at_least_one(Epilogue::tile_values(variant))]) const {
    static_for<Epilogue::tile_stores(variant)>([&](auto index) {
      constexpr TileAccess access = Epilogue::tile_store[first_section_of<Epilogue>(variant)][index];
      if constexpr (bytes_of(access.dtype) == 1) {
        Box<access.dtype, Layout::box_n>::template store_bytes<access.contraction_order, access.saturates>(
            slot_address() + 16 * Layout::store_row_bytes(variant, index), lane, subtile * Layout::subtile_n,
            stores[index]);
      } else {
        Box<access.dtype, Layout::box_n>::store(slot_address() + 16 * Layout::store_row_bytes(variant, index), lane,
                                                subtile * Layout::subtile_n, stores[index]);
      }
    });
  }
  template <int variant>
  __device__ __forceinline__ void send_tiles(const Tile& tile, int box, int block) {
    if constexpr (Epilogue::tile_stores(variant) > 0) {
      ptx::fence_async_proxy();
      __syncwarp();
      const int rows = rows_in_groups ? row_end(tile) - (tile.row + 64 * block + 16 * warp) : 16;
      if (rows < 16) {
        store_rows<variant>(tile, box, block, rows);
      } else if (lane == 0) {
        static_for<Epilogue::tile_stores(variant)>([&](auto index) {
          const TileAccess access = store_access<variant, index>(tile);
          ptx::tma_store(params.map[access.map], slot_address() + 16 * Layout::store_row_bytes(variant, index),
                         tile.column - access.first + Layout::memory_column(access.half, box * Layout::box_n),
                         Layout::head > 0 ? 0 : access.half, tile.row + 64 * block + 16 * warp, batch_of(tile));
        });
        ptx::tma_store_commit();
      }
      store_slot = store_slot + 1 == Layout::store_slots ? 0 : store_slot + 1;
    }
  }
  /// Whether a store's rows begin at multiples of 16 bytes in every section of its variant. The array's rows do, but a
  /// section may begin at any column of the array.
  template <int variant, int store>
  static constexpr bool rows_are_aligned() {
    for (int section = 0; section < Epilogue::sections; ++section) {
      if (Epilogue::section[section].variant != variant) continue;
      const TileAccess access = Epilogue::tile_store[section][store];
      if ((Epilogue::section[section].first - access.first) * bytes_of(access.dtype) % 16 != 0) return false;
    }
    return true;
  }
  /// Stores the first rows of a box, those of the tile's group: the copy engine would store the others too. For the box
  /// it gets an empty group of stores, as the number of pending groups says which slots are free.
  template <int variant>
  __device__ __forceinline__ void store_rows(const Tile& tile, int box, int block, int rows) const {
    static_for<Epilogue::tile_stores(variant)>([&](auto index) {
      const TileAccess access = store_access<variant, index>(tile);
      using Result = Box<Epilogue::tile_store[first_section_of<Epilogue>(variant)][index].dtype, Layout::box_n>;
      constexpr int row_bytes = Result::row_bytes, element_bytes = row_bytes / Layout::box_n;
      constexpr int unit = rows_are_aligned<variant, index>() ? 16 : element_bytes,
                    units = row_bytes / unit;  // at a time
      const int width = access.columns > 0 ? access.columns : (Layout::head > 0 ? 1 : access.halves) * n;
      const int column = tile.column + Layout::memory_column(access.half, box * Layout::box_n);
      const ptx::uint32 from = slot_address() + 16 * Layout::store_row_bytes(variant, index);
#pragma unroll 1
      for (int i = lane; i < rows * units; i += 32) {
        const int row = i / units, byte = i % units * unit, at = column + byte / element_bytes;
        if (at >= tile.column_end) continue;
        const long long element = static_cast<long long>(tile.row + 64 * block + 16 * warp + row) * width +
                                  (Layout::head > 0 ? 0 : access.half * n) + at - access.first;
        char* const to = static_cast<char*>(params.pointer[access.pointer]) + element * element_bytes;
        const ptx::uint32 value = from + Result::offset(row, byte / 16) + byte % 16;
        if constexpr (unit == 16) {
          *reinterpret_cast<int4*>(to) = ptx::load_16_bytes(value);
        } else if constexpr (unit == 4) {
          *reinterpret_cast<int*>(to) = ptx::load_word(value);
        } else {
          const ptx::uint32 pair = ptx::load_word(value & ~3u);
          *reinterpret_cast<ptx::uint16*>(to) = static_cast<ptx::uint16>(pair >> 8 * (value & 2));
        }
      }
    });
    if (lane == 0) ptx::tma_store_commit();
  }

  /// Stores zeros in the place of a tile's results.
  template <int variant>
  __device__ __forceinline__ void store_zeros(const Tile& tile) {
    const Subtile zeros[at_least_one(Epilogue::tile_values(variant))] = {};
#pragma unroll 1
    for (int box = 0; box < Layout::boxes; ++box)
#pragma unroll 1
      for (int block = 0; block < Layout::blocks; ++block) {
        wait_slot<variant>();
#pragma unroll
        for (int subtile = 0; subtile < Layout::subtiles; ++subtile) put_tiles<variant>(subtile, zeros);
        send_tiles<variant>(tile, box, block);
      }
  }

  static constexpr bool rows_in_groups = Config::ragged == Ragged::m;
  __device__ __forceinline__ int row_end(const Tile& tile) const {
    if constexpr (rows_in_groups) return static_cast<const RowGroupTile&>(tile).row_end;
    return params.m;
  }
  /// The batch index of results and their partials. Rows in groups have no batch: `tile.batch` is the group.
  __device__ __forceinline__ static int batch_of(const Tile& tile) { return rows_in_groups ? 0 : tile.batch; }

  __device__ __forceinline__ ptx::uint32 slot_address() const {
    return base + Layout::store_offset + (warp * Layout::store_slots + store_slot) * Layout::store_slot_bytes;
  }

  __device__ __forceinline__ void write_rows(
      const Tile& tile, const RowTotal (&row_total)[at_least_one(Epilogue::row_reductions)][Layout::blocks][2]) const {
    static_for<Epilogue::row_reductions>([&](auto index) {
      constexpr ReductionAccess access = Epilogue::row_reduction[index];
      const int tiles_n = tiles_along_n<Config::tile_n / Layout::n_halves, Epilogue>(n);
      float* partial = static_cast<float*>(params.pointer[access.pointer]) +
                       (static_cast<long long>(batch_of(tile)) * tiles_n + tile.index_n) * params.m;
#pragma unroll
      for (int block = 0; block < Layout::blocks; ++block)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float total = row_total[index][block][r].template over_quad<access.op>();
          const int at = Layout::row(tile, warp, lane, block, r);
          if ((lane & 3) == 0 && at < row_end(tile)) partial[at] = total;
        }
    });
  }

  /// Writes, before the kernel ends, the warp's partial result of a reduction of all rows and columns. The array has a
  /// word for each warp that may run at one time. If fewer do, they write theirs repeatedly, so that none has to be
  /// zeroed.
  template <int count>
  __device__ __forceinline__ void write_whole(const float (&total)[count]) const {
    static_for<count>([&](auto index) {
      constexpr ReductionAccess access = Epilogue::whole_reduction[index];
      const float warp_total = combine_lanes<access.op, 31>(total[index]);
      const int warps = static_cast<int>(gridDim.x) * consumers * consumer_warps;
      const int first = (static_cast<int>(blockIdx.x) * consumers + consumer) * consumer_warps + warp;
#pragma unroll 1
      for (int at = first + lane * warps; at < Config::multiprocessors * consumers * consumer_warps; at += 32 * warps)
        static_cast<float*>(params.pointer[access.pointer])[at] = warp_total;
    });
  }

  /// Address of this warpgroup's column results: [reduction][warp][column].
  __device__ __forceinline__ float* columns_of(int reduction, int warp_number) const {
    extern __shared__ unsigned char shared[];
    return reinterpret_cast<float*>(shared + (base - ptx::shared_address(shared)) + Layout::column_offset) +
           (reduction * 4 + warp_number) * Layout::columns;
  }

  /// A box's column results over this thread's rows: value 2 j + c is that of column 8 j + 2 (lane % 4) + c.
  static constexpr int values = Layout::box_n / 4;
  using OfBox = float[at_least_one(Epilogue::column_reductions)][values];

  /// Combines a box's results over the warp's rows. Each of the eight lanes that share columns gets an eighth of them.
  __device__ __forceinline__ void share_columns(int box, OfBox& column_result) const {
    static_for<Epilogue::column_reductions>([&](auto index) {
      constexpr Op op = Epilogue::column_reduction[index].op;
      float (&total)[values] = column_result[index];
      const int first = combine_halving<op, values, 4>(lane, total);
#pragma unroll
      for (int i = 0; i < at_least_one(values / 8); ++i) {
        const int column = 8 * ((first + i) / 2) + 2 * (lane & 3) + (first + i) % 2;
        columns_of(index, warp)[box * Layout::box_n + column] = total[i];
      }
    });
  }

  __device__ __forceinline__ void write_columns(const Tile& tile) const {
    if constexpr (Epilogue::column_reductions > 0) {
      const int barrier = barrier_number(NamedBarrier::column_results, consumer);
      ptx::named_barrier_sync(barrier, 32 * consumer_warps);
      static_for<Epilogue::column_reductions>([&](auto index) {
        constexpr ReductionAccess access = Epilogue::column_reduction[index];
        const int width = Layout::head > 0 ? n : access.halves * n;
        const int partials = (params.m + Config::consumer_m - 1) / Config::consumer_m;
        float* partial = static_cast<float*>(params.pointer[access.pointer]) +
                         (static_cast<long long>(tile.batch) * partials + tile.index_m) * width +
                         (Layout::head > 0 ? 0 : access.half * n);
        for (int at = 32 * warp + lane; at < Layout::columns; at += 128) {
          const int column = tile.column + Layout::memory_column(access.half, at);
          if (column < tile.column_end && tile.row < params.m) {
            float total = columns_of(index, 0)[at];
#pragma unroll
            for (int other = 1; other < 4; ++other) total = combine<access.op>(total, columns_of(index, other)[at]);
            partial[column] = total;
          }
        }
      });
      ptx::named_barrier_sync(barrier, 32 * consumer_warps);
    }
  }
};

}  // namespace coda
