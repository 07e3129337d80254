// The shared memory of a kernel, and its scheduler.
#pragma once

#include "claims.cuh"
#include "epilogue_layout_sm90.cuh"
#include "grouped_scheduler.cuh"
#include "pipeline.cuh"

namespace coda {

/// Shared memory: operand stages, the consumers' epilogue memory, barriers, and claims or the table of groups.
template <class Config, class Epilogue>
struct SharedLayout {
  static constexpr int a_bytes = Config::tile_m * factor_row_bytes;
  static constexpr int b_bytes = Config::tile_n * factor_row_bytes;
  static constexpr int stage_bytes = a_bytes + b_bytes;
  static constexpr int a_rows = Config::transpose_a ? Config::tile_m : Config::loaded_rows;
  static constexpr int loaded_bytes = a_rows * factor_row_bytes + b_bytes;  // of a stage
  static constexpr int epilogue_offset = Config::stages * stage_bytes;
  static constexpr int stage_ring_offset = epilogue_offset + consumers * EpilogueLayout<Config, Epilogue>::bytes;
  static constexpr int load_ring_offset = stage_ring_offset + Ring<Config::stages>::bytes;
  static constexpr int claims_offset =
      load_ring_offset + consumers * Ring<EpilogueLayout<Config, Epilogue>::load_slots>::bytes;
  static constexpr int groups_offset = claims_offset + (Config::claims ? Claims<Config::cluster_m>::bytes : 0);
  static constexpr bool is_grouped = Config::ragged != Ragged::none;
  static constexpr int bytes = groups_offset + (is_grouped ? GroupTable<Config::groups, RowsOfTiles<1, 1>>::bytes : 0);
};

/// The scheduler of a kernel, by the dimension that groups divide; `columns` of a tile, within a half.
template <class Config, int columns, class Epilogue, Ragged ragged>
struct SchedulerOf {
  using Type = Scheduler<Config::input, Config::tile_m, columns, Config::cluster_m, Config::split_k, Epilogue>;
};
template <class Config, int columns, class Epilogue>
struct SchedulerOf<Config, columns, Epilogue, Ragged::m> {
  using Type = RowGroupScheduler<Config, columns, Epilogue>;
};
template <class Config, int columns, class Epilogue>
struct SchedulerOf<Config, columns, Epilogue, Ragged::k> {
  using Type = KGroupScheduler<Config, columns, Epilogue>;
};

}  // namespace coda
