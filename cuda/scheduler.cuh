// Which output tile a cluster works on next. Persistent: cluster c takes tiles c, c + clusters, c + 2 clusters, ...
#pragma once

#include "elementwise.cuh"
#include "ptx_sm90.cuh"
#include "static_for.cuh"

namespace coda {

/// Position of one CTA's tile, in elements (row, column within a split; `column_end` bounds what it may write) and in
/// tiles (for the partial reductions), and the Epilogue's section it lies in.
struct Tile {
  int row, column, batch;
  int index_m, index_n;
  int section, column_end;
};

/// Tiles of a (batch, m, n) output; a cluster covers `cluster_m` tiles that follow each other along m. Rasterised in
/// bands of clusters along m, so that what runs at one time is roughly square, and as many as leave a band's rows of a
/// in L2: with bands of 8 where two fit, a product with k = 24576 took 40 % longer.
/// Along n, every section of the Epilogue starts a new tile.
template <int tile_m, int columns, int cluster_m, class Epilogue>
struct Scheduler {
  static constexpr int max_band = 8, panel_bytes = 24 << 20;
  const int n;  // within a split
  int tiles_m, tiles_n, clusters_m, total, band;

  __device__ __forceinline__ Scheduler(int m, int n, int k, int batch) : n(n) {
    band = max(2, min(max_band, panel_bytes / (tile_m * cluster_m * 2) / k));
    tiles_m = (m + tile_m - 1) / tile_m;
    tiles_n = tiles_along_n(n);
    clusters_m = (tiles_m + cluster_m - 1) / cluster_m;
    total = clusters_m * tiles_n * batch;
  }

  __device__ __forceinline__ static int tiles_along_n(int n) {
    int tiles = 0;
    static_for<Epilogue::sections>([&](auto index) {
      constexpr Section section = Epilogue::section[decltype(index)::value];
      tiles += ((section.end ? section.end : n) - section.first + columns - 1) / columns;
    });
    return tiles;
  }

  __device__ __forceinline__ static int first() { return blockIdx.x / cluster_m; }
  __device__ __forceinline__ static int stride() { return gridDim.x / cluster_m; }

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
