// What a cluster works on next. Persistent: cluster c takes tiles c, c + clusters, c + 2 clusters, ...; with split-K it
// may begin with a part of one of the tiles that would be left over.
#pragma once

#include "elementwise.cuh"
#include "static_for.cuh"

namespace coda {

/// Position of one CTA's tile, or of a consumer's rows of it, in elements (row, column within a split; `column_end`
/// bounds what it may write) and in its own size (for the partial reductions), and the Epilogue's section it lies in.
struct Tile {
  int row, column, batch;
  int index_m, index_n;
  int section, column_end;
};

/// A tile's products, or a part of them: `blocks` k blocks from `first_block` on. Who has the first block has the tile:
/// it adds what others made of the rest, and runs the epilogue.
struct Work {
  Tile tile;
  int first_block, blocks;

  __device__ __forceinline__ bool has_tile() const { return first_block == 0; }
};

/// CTAs `first`, `first` + `stride`, ..., `count` of them.
struct Others {
  int first, stride, count;
};

/// Tiles of `columns` columns; every section of the Epilogue starts a new one.
template <int columns, class Epilogue>
__device__ __forceinline__ int tiles_along_n(int n) {
  int tiles = 0;
  static_for<Epilogue::sections>([&](auto index) {
    constexpr Section section = Epilogue::section[decltype(index)::value];
    tiles += ((section.end ? section.end : n) - section.first + columns - 1) / columns;
  });
  return tiles;
}

/// Tiles of a (batch, m, n) output; a cluster covers `cluster_m` tiles that follow each other along m. Rasterised in
/// bands of clusters along m, so that what runs at one time is roughly square, and as many as leave a band's rows of a
/// in L2: with bands of 8 where two fit, a product with k = 24576 took 40 % longer.
///
/// Split-K: tiles left over by whole waves, if at most half as many as clusters, are each split along k into
/// clusters / left_over parts, 8 at most, of 4 k blocks at least. The parts come first, one a cluster at most, and the
/// first part of a tile has the highest cluster: whoever waits, waits for blocks that start earlier and wait for
/// nobody. All walk along k at one pace and find in L2 what others have read. (Stream-K, whose parts begin anywhere in
/// k, took 335 us where whole tiles take 185: 2048 x 2048 x 16384.)
template <int tile_m, int columns, int cluster_m, bool split_k, class Epilogue>
struct Scheduler {
  static constexpr int max_band = 8, panel_bytes = 24 << 20;
  static constexpr int max_parts = 8, min_blocks = 4;  // of a split tile; of a part
  const int n;                                         // within a split
  const int k_blocks;
  int tiles_n, clusters_m, band;
  int count;                       // of this cluster's pieces of work
  int split_tiles = 0, parts = 1;  // split-K: how many tiles are split, and each into how many parts

  __device__ __forceinline__ Scheduler(int m, int n, int k, int k_blocks, int batch) : n(n), k_blocks(k_blocks) {
    band = max(2, min(max_band, panel_bytes / (tile_m * cluster_m * 2) / k));
    tiles_n = tiles_along_n<columns, Epilogue>(n);
    clusters_m = ((m + tile_m - 1) / tile_m + cluster_m - 1) / cluster_m;
    const int total = clusters_m * tiles_n * batch;
    if constexpr (split_k) {
      const int left_over = total % clusters();
      if (left_over > 0) parts = min(min(clusters() / left_over, max_parts), k_blocks / min_blocks);
      if (parts > 1) split_tiles = left_over;
    }
    count = has_part() + (total - split_tiles - cluster() + clusters() - 1) / clusters();
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

  /// For the CTA with a tile's first part: those with the others, the second part first.
  __device__ __forceinline__ Others others() const {
    const int stride = split_tiles * cluster_m;
    return {static_cast<int>(blockIdx.x) - stride, -stride, parts - 1};
  }

 private:
  __device__ __forceinline__ int has_part() const { return split_k && cluster() < split_tiles * parts; }

  __device__ __forceinline__ Tile tile(int index, int rank) const {
    const int per_batch = clusters_m * tiles_n;
    const int batch = index / per_batch;
    const int in_batch = index - batch * per_batch;
    const int band_index = in_batch / (band * tiles_n);
    const int in_band = in_batch - band_index * band * tiles_n;
    const int band_rows = min(band, clusters_m - band_index * band);
    const int index_n = in_band / band_rows;
    const int index_m = (band_index * band + in_band - index_n * band_rows) * cluster_m + rank;
    Tile tile{index_m * tile_m, index_n * columns, batch, index_m, index_n, 0, n};
    if constexpr (Epilogue::sections > 1) {
      int before = 0;
      static_for<Epilogue::sections>([&](auto index) {
        constexpr Section section = Epilogue::section[decltype(index)::value];
        if (index_n >= before) {
          tile.column = section.first + (index_n - before) * columns;
          tile.section = decltype(index)::value;
          tile.column_end = section.end;
        }
        before += (section.end - section.first + columns - 1) / columns;
      });
    }
    return tile;
  }
};

}  // namespace coda
