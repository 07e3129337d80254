#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "handler.h"

namespace coda {
namespace {

constexpr int64_t kKBlockBytes = 128;  // of a stage's rows

}  // namespace

Geometry DescribeGeometry(const GemmCall& call, const Buffer& a, const Buffer& b, const Buffer& result,
                          int multiprocessors) {
  if (a.dims.size() < 2 || a.dims.size() > 3 || b.dims.size() < 2 || b.dims.size() > 3) {
    throw std::invalid_argument("a and b need rank 2 or 3");
  }
  const auto a_dims = a.dims.last(2), b_dims = b.dims.last(2);
  const int64_t m = a_dims[call.transpose_a ? 1 : 0], k = a_dims[call.transpose_a ? 0 : 1];
  const int64_t n = b_dims[call.transpose_b ? 0 : 1], b_k = b_dims[call.transpose_b ? 1 : 0];
  // All results have the batch when any operand has it, be it only the epilogue's; unless rows of a are in groups, each
  // of which is multiplied by a matrix of b.
  const bool has_groups = result.dims.size() == 2 && a.dims.size() == 2 && b.dims.size() == 3;
  const int64_t batch = has_groups ? b.dims[0] : result.dims.size() == 3 ? result.dims[0] : 1;
  if (k != b_k) throw std::invalid_argument("k is " + std::to_string(k) + " in a and " + std::to_string(b_k) + " in b");
  for (const Buffer* factor : {&a, &b}) {
    if (factor->dims.size() == 3 && factor->dims[0] != batch) throw std::invalid_argument("batch sizes differ");
  }
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (m > kMax || n > kMax || k > kMax || batch > kMax) throw std::invalid_argument("a size exceeds 2^31 - 1");
  if (call.tile_m < 1 || call.tile_n < 1 || call.halves < 1 || call.cluster_m < 1 || call.tile_n % call.halves != 0 ||
      n % call.halves != 0 || call.yield_k_blocks < 0) {
    throw std::invalid_argument("tile " + std::to_string(call.tile_m) + "x" + std::to_string(call.tile_n) + ", " +
                                std::to_string(call.halves) + " halves, cluster " + std::to_string(call.cluster_m) +
                                ", yields after " + std::to_string(call.yield_k_blocks) + " k blocks");
  }

  const auto ceil_div = [](int64_t x, int64_t y) { return (x + y - 1) / y; };
  Geometry geometry{};
  geometry.m = static_cast<int32_t>(m);
  geometry.n = static_cast<int32_t>(n);
  geometry.k = static_cast<int32_t>(k);
  geometry.batch = static_cast<int32_t>(batch);
  // Of groups at most: each may end within a cluster's tiles, and so may the rows of none before and behind them.
  const int64_t clusters_m = ceil_div(ceil_div(m, call.tile_m), call.cluster_m);
  const int64_t of_rows = m == 0 ? 0 : has_groups ? clusters_m + batch + 1 : batch * clusters_m;
  geometry.clusters = of_rows * ceil_div(n / call.halves, call.tile_n / call.halves);
  const int64_t resident = std::max(1, multiprocessors / call.cluster_m);
  // With split-K, which has flags and does not yield, even few tiles may be work for all, and each cluster counts on
  // the others being there.
  int64_t working = resident;
  if (call.flags < 0 || call.yield_k_blocks > 0 || geometry.clusters == 0) {
    const int64_t k_blocks_each = geometry.clusters * ceil_div(k * ElementBytes(a), kKBlockBytes) / resident;
    const int64_t rounds = call.yield_k_blocks > 0 ? std::max<int64_t>(1, k_blocks_each / call.yield_k_blocks) : 1;
    working = std::min(geometry.clusters, resident * rounds);
  }
  geometry.blocks = static_cast<uint32_t>(call.cluster_m * working);
  return geometry;
}

}  // namespace coda
