// The order in which clusters compute tiles. Persistent: cluster c computes tiles c, c + clusters, c + 2 clusters, ...;
// with split-K it may begin with a k slice of one of the tiles of the last wave. Or each claims the next tile
// (claims.cuh), in the same order.
#pragma once

#include "epilogue_abi.cuh"
#include "static_for.cuh"

namespace coda {

/// Division by a constant of the launch, as a multiplication by its reciprocal and a correction by one. `reciprocal` is
/// 2^32 / value or up to 2 less. A tile's position needs three quotients. The compiler's divisions would take 400
/// cycles, which nothing hides where consumers are cooperative.
struct Divisor {
  int value;
  unsigned reciprocal;

  Divisor() = default;
  __device__ __forceinline__ explicit Divisor(int value) : value(value) {
    // 2^32 / value, less 2^-20 of it, which is more than the errors of the division and of its two roundings. A Newton
    // step squares that relative error, and stays below.
    const unsigned first = static_cast<unsigned>(__fdividef(4294963200.f, static_cast<float>(value)));
    reciprocal = first + __umulhi(first, 0u - first * value);
  }

  /// dividend / value, for a dividend of at least 0.
  __device__ __forceinline__ int quotient(int dividend) const {
    const int quotient = __umulhi(dividend, reciprocal);
    return quotient + (dividend - quotient * value >= value);
  }
};

/// Position of one CTA's tile, or of a cooperating consumer's rows of it, in elements (row, column within a half of N;
/// `column_end` bounds the columns that it may write) and in tiles (for the partial reductions), and its section of the
/// Epilogue.
struct Tile {
  int row, column, batch;
  int index_m, index_n;
  int section, column_end;
};

/// A tile of rows in groups: `row_end` bounds the rows that it may write. If it `is_apart`, the cluster's tiles do not
/// share b's, and each CTA loads its own.
struct RowGroupTile : Tile {
  int row_end;
  bool is_apart;
};

/// A tile of a product whose group has the rows of k from `first_k` on, before `k_end`.
struct KGroupTile : Tile {
  int first_k, k_end;
};

/// A tile's k blocks, or a k slice of it: `blocks` from `first_block` on. The CTA with the first block owns the tile:
/// it adds the other CTAs' sums and runs the epilogue. `Tile_` is the scheduler's, as tiles of groups have more
/// members.
template <class Tile_>
struct WorkOn {
  Tile_ tile;
  int first_block, blocks;

  __device__ __forceinline__ bool has_tile() const { return first_block == 0; }
};

/// CTAs `first`, `first` + `stride`, ..., `count` of them.
struct Others {
  int first, stride, count;
};

/// The tiles of a symmetric result that are computed, in squares of whole clusters of tiles: those below the diagonal,
/// which are stored at their transposed places too, and those on it.
///
/// A row of the `squares` with many such squares and one with few are one row of a rectangle, so that tiles are
/// numbered in bands as those of any other product.
template <int rows, int columns>  // of a cluster's tiles
struct Triangle {
  CODA_CONSTEXPR static int least_common_multiple(int a, int b) {
    int multiple = a;
    while (multiple % b != 0) multiple += a;
    return multiple;
  }
  static constexpr int side = least_common_multiple(rows, columns);
  static constexpr int clusters_m = side / rows, tiles_n = side / columns;  // of a square

  /// The rectangle, in clusters of tiles along m and in tiles along n.
  __device__ __forceinline__ static int rectangle_clusters_m(int n) { return (squares(n) + 1) / 2 * clusters_m; }
  __device__ __forceinline__ static int rectangle_tiles_n(int n) { return (squares(n) | 1) * tiles_n; }

  /// From a place in the rectangle to one in the result. Row i of the rectangle has the squares of the i-th row from
  /// the last, then those of the i-th row from the first; the first row has nothing more if their number is odd.
  __device__ __forceinline__ static void unfold(int n, int& cluster_m, int& tile_n) {
    const int row = cluster_m / clusters_m, column = tile_n / tiles_n, length = squares(n) - row;
    const bool is_longer = column < length;
    cluster_m += ((is_longer ? length - 1 : row - squares(n) % 2) - row) * clusters_m;
    tile_n -= (is_longer ? 0 : length) * tiles_n;
  }

  __device__ __forceinline__ static bool is_on_diagonal(const Tile& tile) {
    return tile.row / side == tile.column / side;
  }

 private:
  __device__ __forceinline__ static int squares(int n) { return (n + side - 1) / side; }
};

/// Tiles of `columns` columns; every section of the Epilogue starts a new one.
template <int columns, class Epilogue>
__device__ __forceinline__ int tiles_along_n(int n) {
  int tiles = 0;
  static_for<Epilogue::sections>([&](auto index) {
    constexpr Section section = Epilogue::section[index];
    tiles += ((section.end ? section.end : n) - section.first + columns - 1) / columns;
  });
  return tiles;
}

/// The order of the tiles of a (batch, m, n) output, of a symmetric one those of its `Triangle`. A cluster works on
/// `cluster_m` tiles, adjacent along m.
///
/// Bands: clusters of tiles are numbered in bands of up to `max_band` rows of clusters, down a band's column before the
/// next column, so that the tiles that run at one time are roughly a square and share their operands. A band has only
/// as many rows as L2 can hold of a (`panel_bytes`): 8 rows where two fit cost 40 % of a product with k = 24576.
///
/// Split-K: the tiles of the last wave, if they occupy at most half of the clusters, are each split along k into
/// clusters / left_over slices, called parts: at most `max_parts`, of at least `min_blocks` k blocks. The CTA with the
/// first slice of a tile waits for the others' sums. This cannot deadlock: slices are the first work of their clusters,
/// at most one each, and the first slice goes to the highest-numbered of a tile's clusters, so that it waits for CTAs
/// that started before it and wait for nobody. All slices advance along k at one pace, and find in L2 what others have
/// read. Stream-K, whose slices begin anywhere in k, does not: 335 us where unsplit tiles take 185 (2048 x 2048 x
/// 16384).
template <DType input, int tile_m, int columns, int cluster_m, bool split_k, class Epilogue>
struct Scheduler {
  using Work = WorkOn<Tile>;
  using Computed = Triangle<tile_m * cluster_m, columns>;
  static constexpr int max_band = 8, panel_bytes = 24 << 20;
  static constexpr int max_parts = 8, min_blocks = 4;  // k slices of a split tile; k blocks of a slice
  const int n;                                         // of a half, where a tile has columns of both
  const int k_blocks;
  int clusters_m;
  Divisor per_batch, per_band;     // clusters
  Divisor band;                    // clusters along m
  int count;                       // of this cluster's pieces of work
  int split_tiles = 0, parts = 1;  // split-K: how many tiles are split, and into how many k slices each

  __device__ __forceinline__ Scheduler(int m, int n, int k, int k_blocks, int batch) : n(n), k_blocks(k_blocks) {
    clusters_m = ((m + tile_m - 1) / tile_m + cluster_m - 1) / cluster_m;
    if constexpr (Epilogue::symmetric) clusters_m = Computed::rectangle_clusters_m(n);
    int rows = 2;
#pragma unroll
    for (int more = rows + 1; more <= max_band; ++more)
      rows += k <= panel_bytes / (tile_m * cluster_m * bytes_of(input)) / more;
    band = Divisor(min(rows, clusters_m));
    int tiles_n = tiles_along_n<columns, Epilogue>(n);
    if constexpr (Epilogue::symmetric) tiles_n = Computed::rectangle_tiles_n(n);
    per_band = Divisor(band.value * tiles_n);
    per_batch = Divisor(clusters_m * tiles_n);
    const int total = per_batch.value * batch;
    if constexpr (split_k) {
      const int left_over = total % clusters();
      if (left_over > 0) parts = min(min(clusters() / left_over, max_parts), k_blocks / min_blocks);
      if (parts > 1) split_tiles = left_over;
    }
    count = has_part() + Divisor(clusters()).quotient(total - split_tiles - cluster() + clusters() - 1);
  }

  __device__ __forceinline__ static int cluster() { return blockIdx.x / cluster_m; }
  __device__ __forceinline__ static int clusters() { return gridDim.x / cluster_m; }

  /// This cluster's i-th piece of work, for the CTA of this rank in it.
  __device__ __forceinline__ Work work(int i, int rank) const {
    if constexpr (split_k) {
      if (i < has_part()) {
        const int part = parts - 1 - cluster() / split_tiles;
        const int first = part * k_blocks / parts, end = (part + 1) * k_blocks / parts;
        return {tile(cluster() % split_tiles, rank), first, end - first};
      }
    }
    return {tile(split_tiles + (i - has_part()) * clusters() + cluster(), rank), 0, k_blocks};
  }

  /// An unsplit tile by its number, of `total`, which the cluster has claimed (claims.cuh).
  __device__ __forceinline__ Work claimed(int index, int rank) const { return {tile(index, rank), 0, k_blocks}; }
  __device__ __forceinline__ int total(int batch) const { return per_batch.value * batch; }

  /// The CTAs with a tile's other k slices, the second slice first, for the CTA with the first slice.
  __device__ __forceinline__ Others others() const {
    const int stride = split_tiles * cluster_m;
    return {static_cast<int>(blockIdx.x) - stride, -stride, parts - 1};
  }

 private:
  __device__ __forceinline__ int has_part() const { return split_k && cluster() < split_tiles * parts; }

  __device__ __forceinline__ Tile tile(int index, int rank) const {
    const int batch = per_batch.quotient(index);
    const int in_batch = index - batch * per_batch.value;
    const int band_index = per_band.quotient(in_batch);
    const int in_band = in_batch - band_index * per_band.value;
    const int first_row = band_index * band.value, rows = min(band.value, clusters_m - first_row);  // of clusters
    int index_n = rows == band.value ? band.quotient(in_band) : in_band / rows;
    int in_column = first_row + in_band - index_n * rows;
    if constexpr (Epilogue::symmetric) Computed::unfold(n, in_column, index_n);
    const int index_m = in_column * cluster_m + rank;
    Tile tile{index_m * tile_m, index_n * columns, batch, index_m, index_n, 0, n};
    place_in_section(tile, index_n);
    return tile;
  }

 public:
  /// Sets a tile's section, and its columns within that section.
  __device__ __forceinline__ static void place_in_section(Tile& tile, int index_n) {
    if constexpr (Epilogue::sections > 1) {
      int before = 0;
      static_for<Epilogue::sections>([&](auto index) {
        constexpr Section section = Epilogue::section[index];
        if (index_n >= before) {
          tile.column = section.first + (index_n - before) * columns;
          tile.section = index;
          tile.column_end = section.end;
        }
        before += (section.end - section.first + columns - 1) / columns;
      });
    }
  }
};

}  // namespace coda
