#include "tensor_map.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>

namespace coda {
namespace {

using xla::ffi::DataType;

constexpr uint64_t kAlignmentBytes = 16;  // TMA's demand on addresses and strides

/// A dtype of the kernel's arrays. Only those with tensor maps can be factors, tiles and results.
struct ElementType {
  DataType dtype;
  const char* name;
  std::optional<TensorMapType> of_map;
};
constexpr ElementType kElementTypes[] = {
    {DataType::BF16, "bf16", TensorMapType::kBF16},
    {DataType::F16, "f16", TensorMapType::kF16},
    {DataType::F32, "f32", TensorMapType::kF32},
    {DataType::S32, "s32", std::nullopt},
    {DataType::PRED, "pred", std::nullopt},
    {DataType::F8E4M3FN, "f8e4m3fn", TensorMapType::kUint8},
    {DataType::F8E5M2, "f8e5m2", TensorMapType::kUint8},
};

const ElementType* Find(DataType dtype) {
  const auto* const type = std::ranges::find(kElementTypes, dtype, &ElementType::dtype);
  return type == std::end(kElementTypes) ? nullptr : type;
}

std::string WithMaps() {
  std::string names;
  for (const ElementType& type : kElementTypes) {
    if (type.of_map) names += (names.empty() ? "" : ", ") + std::string(type.name);
  }
  return names;
}

bool HasHeads(const MapRequest& request) {
  return request.halves == MapRequest::kHeads;
}

/// Whether it is of what is multiplied: a or b, the first buffers of a product, or heads; not an epilogue's tile.
bool IsFactor(const MapRequest& request) {
  return request.buffer < 2 || HasHeads(request);
}

std::string Prefix(const MapRequest& request, const Buffer& buffer) {
  return "buffer " + std::to_string(request.buffer) + " " + buffer.ToString() + ": ";
}

}  // namespace

int64_t ElementBytes(const Buffer& buffer) {
  return xla::ffi::ByteWidth(buffer.dtype);
}

std::string Buffer::ToString() const {
  const ElementType* const type = Find(dtype);
  std::string text = type ? type->name : "dtype" + std::to_string(static_cast<int>(dtype));
  text += "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i > 0) text += ",";
    text += std::to_string(dims[i]);
  }
  return text + "]";
}

MapLayout DescribeMap(const MapRequest& request, const Buffer& buffer) {
  const auto fail = [&](const std::string& why) { throw std::invalid_argument(Prefix(request, buffer) + why); };
  MapLayout layout{};
  const ElementType* const type = Find(buffer.dtype);
  if (type == nullptr || !type->of_map) fail("a tensor map needs one of " + WithMaps());
  layout.type = *type->of_map;
  const uint64_t element_bytes = ElementBytes(buffer);
  switch (request.swizzle_bytes) {
    case 0:
      layout.swizzle = TensorMapSwizzle::kNone;
      break;
    case 32:
      layout.swizzle = TensorMapSwizzle::k32B;
      break;
    case 64:
      layout.swizzle = TensorMapSwizzle::k64B;
      break;
    case 128:
      layout.swizzle = TensorMapSwizzle::k128B;
      break;
    default:
      fail("swizzle of " + std::to_string(request.swizzle_bytes) + " bytes");
  }
  const size_t rank = buffer.dims.size();
  const bool has_heads = HasHeads(request);  // side by side in a row, as the halves of its columns are
  if (has_heads && rank != 4) fail("a tensor map of heads needs rank 4");
  if (!has_heads && rank != 2 && rank != 3) fail("a tensor map needs rank 2 or 3");
  if (has_heads && request.box_columns * element_bytes != static_cast<uint64_t>(request.swizzle_bytes)) {
    fail("a row of a box has " + std::to_string(request.box_columns) + " columns, not " +
         std::to_string(request.swizzle_bytes) + " bytes");
  }
  const uint64_t batch = rank == 2 ? 1 : buffer.dims[0];
  const uint64_t rows = has_heads ? buffer.dims[1] : buffer.dims[rank - 2];
  const uint64_t columns = has_heads ? buffer.dims[2] * buffer.dims[3] : buffer.dims[rank - 1];
  const uint64_t halves = has_heads ? buffer.dims[2] : request.halves;
  const uint64_t split = request.split_rows ? rows : columns;
  if (request.halves < 0 || halves == 0 || split % halves != 0) {
    fail(std::to_string(split) + (request.split_rows ? " rows" : " columns") + " do not split into " +
         std::to_string(request.halves));
  }

  const uint64_t pitch = columns * element_bytes;
  layout.dims[0] = request.split_rows ? columns : columns / halves;
  layout.dims[1] = halves;
  layout.dims[2] = request.split_rows ? rows / halves : rows;
  layout.dims[3] = batch;
  layout.strides_bytes[0] = request.split_rows ? layout.dims[2] * pitch : layout.dims[0] * element_bytes;
  layout.strides_bytes[1] = pitch;
  layout.strides_bytes[2] = rows * pitch;
  for (int i = 0; i < 3; ++i) {
    uint64_t& stride = layout.strides_bytes[i];
    if (stride % kAlignmentBytes == 0) continue;
    if (layout.dims[i + 1] != 1) {
      fail((i == 0   ? has_heads ? "the distance of its heads" : "the distance of its halves"
            : i == 1 ? "its row pitch"
                     : "the size of a matrix") +
           std::string(", ") + std::to_string(stride) + " bytes, is not a multiple of " +
           std::to_string(kAlignmentBytes));
    }
    stride += kAlignmentBytes - stride % kAlignmentBytes;  // never stepped over; the driver checks it all the same
  }
  layout.box[0] = request.box_columns;
  layout.box[1] = 1;
  layout.box[2] = request.box_rows;
  layout.box[3] = 1;
  return layout;
}

namespace {

void Encode(const Driver& driver, const MapRequest& request, const Buffer& buffer, CUtensorMap* map) {
  const MapLayout layout = DescribeMap(request, buffer);
  if (reinterpret_cast<uintptr_t>(buffer.data) % kAlignmentBytes != 0) {
    throw std::invalid_argument(Prefix(request, buffer) + "its address is not a multiple of 16");
  }
  static constexpr uint32_t kElementStrides[4] = {1, 1, 1, 1};
  // Back through a gate z takes 1 to 3 % less of the whole kernel so, 5 to 8 % with factors of 8 bits (an H100).
  const int promotion = IsFactor(request) ? kTensorMapL2Promotion256B : kTensorMapL2Promotion128B;
  const CUresult result =
      driver.cuTensorMapEncodeTiled(map, static_cast<int>(layout.type), /*rank=*/4, buffer.data, layout.dims,
                                    layout.strides_bytes, layout.box, kElementStrides, kTensorMapInterleaveNone,
                                    static_cast<int>(layout.swizzle), promotion, kTensorMapOutOfBoundsZeros);
  if (result != kCudaSuccess) [[unlikely]] {
    driver.Check(result, (Prefix(request, buffer) + "cuTensorMapEncodeTiled, box " + std::to_string(layout.box[0]) +
                          "x" + std::to_string(layout.box[2]) + ", swizzle " + std::to_string(request.swizzle_bytes))
                             .c_str());
  }
}

/// All that an encoded map depends on. Without padding, for the hash.
struct MapKey {
  void* data;
  int64_t dims[4];
  int32_t dtype, rank;
  int32_t halves, split_rows, box_columns, box_rows, swizzle_bytes, is_factor;

  bool operator==(const MapKey&) const = default;

  size_t Hash() const {
    uint64_t hash = 0;
    for (const uint64_t word : std::bit_cast<std::array<uint64_t, sizeof(MapKey) / 8>>(*this)) {
      hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

struct CachedMap {
  MapKey key{};  // of rank 0: none
  std::array<uint64_t, sizeof(CUtensorMap) / 8> map{};
};

/// Sets of four: of the thousand maps of a training step of 16 layers, one in a hundred then finds its set full.
/// 768 KiB, of each thread that launches its own, since XLA launches for several devices at once.
struct MapCache {
  static constexpr size_t kSets = 1024, kWays = 4;
  CachedMap sets[kSets][kWays];
  size_t replaced = 0;

  static MapCache& Get() {
    thread_local const auto cache = std::make_unique<MapCache>();
    return *cache;
  }
};

}  // namespace

void EncodeMap(const Driver& driver, const MapRequest& request, const Buffer& buffer, CUtensorMap* map) {
  const size_t rank = buffer.dims.size();
  if (rank < 2 || rank > 4) return Encode(driver, request, buffer, map);
  const MapKey key{buffer.data,
                   {buffer.dims[0], buffer.dims[1], rank > 2 ? buffer.dims[2] : 0, rank > 3 ? buffer.dims[3] : 0},
                   static_cast<int32_t>(buffer.dtype),
                   static_cast<int32_t>(rank),
                   request.halves,
                   request.split_rows,
                   request.box_columns,
                   request.box_rows,
                   request.swizzle_bytes,
                   IsFactor(request)};
  MapCache& cache = MapCache::Get();
  auto& set = cache.sets[key.Hash() % MapCache::kSets];
  for (const CachedMap& cached : set) {
    if (cached.key == key) {
      std::memcpy(map, cached.map.data(), sizeof(*map));
      return;
    }
  }
  Encode(driver, request, buffer, map);
  CachedMap& entry = set[cache.replaced++ % MapCache::kWays];
  entry.key = key;
  std::memcpy(entry.map.data(), map, sizeof(*map));
}

}  // namespace coda
