// Tensor maps (TMA descriptors) of row-major buffers.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "cuda_api.h"
#include "xla/ffi/api/ffi.h"

namespace coda {

/// An operand or result of the call: row-major [batch,] rows, columns for those that have a tensor map; or [batch,
/// rows, heads, columns] for those that have a map of heads.
struct Buffer {
  xla::ffi::DataType dtype = xla::ffi::DataType::INVALID;
  std::span<const int64_t> dims;
  void* data = nullptr;

  std::string ToString() const;  // "bf16[128,256]"
};

int64_t ElementBytes(const Buffer& buffer);

/// One map of a product's attribute `maps`, six int32 a map. `halves` 2 makes the halves of the columns (or of the
/// rows, where split_rows is 1) an axis of their own, so that a box in one half is clipped at the half's end.
struct MapRequest {
  int32_t buffer, halves, split_rows, box_columns, box_rows, swizzle_bytes;

  /// In place of `halves`: the buffer has heads, which are that axis.
  static constexpr int32_t kHeads = 0;

  /// A map of a buffer with heads. Its boxes have a row of 128 bytes, swizzled, of one head at a time.
  static MapRequest OfHeads(int32_t buffer, int32_t box_columns, int32_t box_rows) {
    return {buffer, kHeads, 0, box_columns, box_rows, 128};
  }
};

/// Arguments of cuTensorMapEncodeTiled, innermost dimension first: columns, halves or heads, rows, batch.
struct MapLayout {
  TensorMapType type;
  uint64_t dims[4];
  uint64_t strides_bytes[3];
  uint32_t box[4];
  TensorMapSwizzle swizzle;
};

/// Throws std::invalid_argument naming the buffer where TMA cannot address it.
MapLayout DescribeMap(const MapRequest& request, const Buffer& buffer);

/// The map of `buffer` at its address, from this thread's cache of maps where it is there: a map is a function of the
/// buffer's address, shape and dtype and of the request. Throws std::runtime_error naming the buffer where the driver
/// refuses the map.
void EncodeMap(const Driver& driver, const MapRequest& request, const Buffer& buffer, CUtensorMap* map);

}  // namespace coda
