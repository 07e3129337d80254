// The order in which clusters compute the tiles of grouped products, whose groups' sizes only the device knows.
// Rows of the factors are sorted by group; group g has rows offsets[g] .. offsets[g + 1].
//
//   Ragged::m   a (m, k), b (groups, k, n), out (m, n). Each group's rows have their own tiles: the last one also
//               multiplies rows of the next group, but stores only its own. Rows in no group have tiles without k
//               blocks, which store zeros. A cluster of two computes two tiles of a group that are adjacent along m and
//               share b's; in an odd last row of tiles two adjacent along n, each of which loads its own tile of b.
//   Ragged::k   a (k, m), b (k, n), out (groups, m, n). A batch of products, each over its own rows of k. The mainloop
//               zeroes the rows after a product's end in its last k block.
//
// Whatever the offsets are, no tile is outside the arrays.
#pragma once

#include "ptx_sm90.cuh"
#include "scheduler.cuh"

namespace coda {

/// The number of clusters' tiles of so many rows of tiles: `pairs` of rows, and an odd last row.
template <int tile_m, int cluster_m>
struct RowsOfTiles {
  int pairs;  // of rows, or single rows if clusters have one tile
  bool is_odd;

  __device__ __forceinline__ explicit RowsOfTiles(int rows) {
    const int tiles = (rows + tile_m - 1) / tile_m;
    pairs = tiles / cluster_m;
    is_odd = tiles % cluster_m != 0;
  }
  __device__ __forceinline__ int clusters(int tiles_n) const {
    return pairs * tiles_n + (is_odd ? (tiles_n + cluster_m - 1) / cluster_m : 0);
  }
};

/// The groups in shared memory: the row at which each begins, and for Ragged::m each segment's first cluster of tiles.
/// Segments are the groups, the rows after the last one, and those before the first. One warp makes the table, in three
/// steps between which it synchronises; each lane has a run of segments.
template <int groups_, class Rows>
struct GroupTable {
  static constexpr int groups = groups_, segments = groups + 2, lanes = 32;
  static constexpr int per_lane = (segments + lanes - 1) / lanes;
  static constexpr int bytes = (4 * (groups + 1 + segments + 1 + lanes) + 15) / 16 * 16;
  ptx::uint32 address;

  __device__ __forceinline__ int row(int group) const { return ptx::load_word(address + 4 * group); }
  /// The number of a segment's first cluster of tiles; for `segments` the number of all.
  __device__ __forceinline__ int first_cluster(int segment) const { return ptx::load_word(cluster_address(segment)); }

  /// 1. Reads the rows where groups begin, clipped to `rows`.
  __device__ __forceinline__ void read_rows(const int* offsets, int rows, int lane) const {
    for (int group = lane; group <= groups; group += lanes)
      ptx::store_word(address + 4 * group, min(max(offsets[group], 0), rows));
  }
  /// 2. Counts the clusters of tiles of the lane's segments.
  __device__ __forceinline__ void count_clusters(int rows, int tiles_n, int lane) const {
    int total = 0;
    for (int i = 0; i < per_lane; ++i) total += clusters(lane * per_lane + i, rows, tiles_n);
    ptx::store_word(lane_address(lane), total);
  }
  /// 3. Writes the first cluster of each segment.
  __device__ __forceinline__ void number_clusters(int rows, int tiles_n, int lane) const {
    int next = 0;
    for (int other = 0; other < lane; ++other) next += ptx::load_word(lane_address(other));
    for (int i = 0; i < per_lane; ++i) {
      const int segment = lane * per_lane + i;
      if (segment <= segments) ptx::store_word(cluster_address(segment), next);
      next += clusters(segment, rows, tiles_n);
    }
    if (lane == lanes - 1 && lanes * per_lane == segments) ptx::store_word(cluster_address(segments), next);
  }

  /// First row of a segment, and the row after its last one, in an array of so many rows.
  __device__ __forceinline__ int begin(int segment) const { return segment <= groups ? row(segment) : 0; }
  __device__ __forceinline__ int end(int segment, int rows) const {
    return segment < groups ? row(segment + 1) : segment == groups ? rows : row(0);
  }
  /// The number of rows of a segment.
  __device__ __forceinline__ int size(int segment, int rows) const {
    return max(end(segment, rows) - begin(segment), 0);
  }
  /// The segment of this cluster of tiles: the last that does not begin after it, as an empty segment begins where the
  /// next one does.
  __device__ __forceinline__ int segment_of(int cluster) const {
    int found = 0;
#pragma unroll
    for (int step = 1 << 10; step > 0; step /= 2)
      if (step < segments && found + step < segments && first_cluster(found + step) <= cluster) found += step;
    return found;
  }

 private:
  __device__ __forceinline__ ptx::uint32 cluster_address(int segment) const {
    return address + 4 * (groups + 1 + segment);
  }
  __device__ __forceinline__ ptx::uint32 lane_address(int lane) const {
    return address + 4 * (groups + 1 + segments + 1 + lane);
  }
  __device__ __forceinline__ int clusters(int segment, int rows, int tiles_n) const {
    return segment < segments ? Rows(size(segment, rows)).clusters(tiles_n) : 0;
  }
};

/// Ragged::m: the tiles of one segment after the other, in the bands of `Scheduler`.
template <class Config, int columns, class Epilogue>
struct RowGroupScheduler {
  using Work = WorkOn<RowGroupTile>;
  using Bands = Scheduler<Config::input, Config::tile_m, columns, Config::cluster_m, false, Epilogue>;
  using Rows = RowsOfTiles<Config::tile_m, Config::cluster_m>;
  using Table = GroupTable<Config::groups, Rows>;
  const int m, n, k_blocks;
  const int band, tiles_n;  // rows of clusters; tiles
  Table table;
  int count;  // of this cluster's pieces of work

  __device__ __forceinline__ RowGroupScheduler(int m, int n, int k, int k_blocks, int)
      : m(m),
        n(n),
        k_blocks(k_blocks),
        band(Bands(m, n, k, k_blocks, 1).band.value),
        tiles_n(tiles_along_n<columns, Epilogue>(n)) {}

  /// Reads the groups into a table at `address`. All threads of the CTA call it, before all else.
  __device__ __forceinline__ void read_groups(const int* offsets, ptx::uint32 address) {
    table = {address};
    if (threadIdx.x < Table::lanes) {
      const int lane = threadIdx.x;
      table.read_rows(offsets, m, lane);
      __syncwarp();
      table.count_clusters(m, tiles_n, lane);
      __syncwarp();
      table.number_clusters(m, tiles_n, lane);
    }
    __syncthreads();
    count = Divisor(Bands::clusters()).quotient(total(0) - Bands::cluster() + Bands::clusters() - 1);
  }

  __device__ __forceinline__ static int cluster() { return Bands::cluster(); }
  __device__ __forceinline__ static int clusters() { return Bands::clusters(); }
  __device__ __forceinline__ int total(int) const { return table.first_cluster(Table::segments); }
  __device__ __forceinline__ Work work(int i, int rank) const { return claimed(i * clusters() + cluster(), rank); }

  /// The k blocks of the tile with this number: 0 if its rows are in no group.
  __device__ __forceinline__ int blocks_of(int index) const {
    return index < table.first_cluster(Config::groups) ? k_blocks : 0;
  }

  __device__ __forceinline__ Work claimed(int index, int rank) const {
    const int segment = table.segment_of(index), in_segment = index - table.first_cluster(segment);
    const int pairs = Rows(table.size(segment, m)).pairs, in_odd_row = in_segment - pairs * tiles_n;
    int index_m, index_n;
    if (in_odd_row >= 0) {
      index_m = pairs * Config::cluster_m;
      index_n = in_odd_row * Config::cluster_m + rank;
    } else {
      const int first_row = Divisor(band * tiles_n).quotient(in_segment) * band, rows = min(band, pairs - first_row);
      const int in_band = in_segment - first_row * tiles_n;
      index_n = Divisor(rows).quotient(in_band);
      index_m = (first_row + in_band - index_n * rows) * Config::cluster_m + rank;
    }
    const int row = table.begin(segment) + index_m * Config::tile_m;
    const int row_end = index_n < tiles_n ? table.end(segment, m) : row;  // no rows after an odd number of tiles
    RowGroupTile tile{{row, index_n * columns, segment, index_m, index_n, 0, n}, row_end, in_odd_row >= 0};
    Bands::place_in_section(tile, index_n);
    return {tile, 0, segment < Config::groups ? k_blocks : 0};
  }
};

/// Ragged::k: the tiles of a batch, with the k blocks of its group. An empty group has one k block, all of it after the
/// group's end.
template <class Config, int columns, class Epilogue>
struct KGroupScheduler : Scheduler<Config::input, Config::tile_m, columns, Config::cluster_m, false, Epilogue> {
  using Batch = Scheduler<Config::input, Config::tile_m, columns, Config::cluster_m, false, Epilogue>;
  using Work = WorkOn<KGroupTile>;
  using Table = GroupTable<Config::groups, RowsOfTiles<1, 1>>;
  const int k;
  Table table;

  __device__ __forceinline__ KGroupScheduler(int m, int n, int k, int k_blocks, int batch)
      : Batch(m, n, k / batch + 1, k_blocks, batch), k(k) {}

  /// Reads the groups into a table at `address`. All threads of the CTA call it, before all else.
  __device__ __forceinline__ void read_groups(const int* offsets, ptx::uint32 address) {
    table = {address};
    if (threadIdx.x < Table::lanes) table.read_rows(offsets, k, threadIdx.x);
    __syncthreads();
  }

  __device__ __forceinline__ Work work(int i, int rank) const { return group_work(Batch::work(i, rank).tile); }
  __device__ __forceinline__ Work claimed(int index, int rank) const {
    return group_work(Batch::claimed(index, rank).tile);
  }

 private:
  __device__ __forceinline__ Work group_work(const Tile& tile) const {
    const int first_k = table.row(tile.batch), k_end = max(first_k, table.row(tile.batch + 1));
    return {{tile, first_k, k_end}, 0, max(1, (k_end - first_k + Config::tile_k - 1) / Config::tile_k)};
  }
};

}  // namespace coda
