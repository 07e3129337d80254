#include "launch.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace coda {
namespace {

constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

/// How many items of `each` numbers an attribute has. Throws std::invalid_argument where it has a part of one.
size_t Count(const char* name, xla::ffi::Span<const int32_t> numbers, size_t each) {
  if (numbers.size() % each != 0) {
    throw std::invalid_argument("the attribute " + std::string(name) + " has " + std::to_string(numbers.size()) +
                                " numbers, not a multiple of " + std::to_string(each));
  }
  return numbers.size() / each;
}

std::string Named(int32_t index, const Buffer& buffer) {
  return "buffer " + std::to_string(index) + " " + buffer.ToString();
}

int64_t Dimension(const Buffers& buffers, int32_t index, int32_t axis) {
  const Buffer buffer = buffers[index];
  if (axis < 0 || axis >= static_cast<int64_t>(buffer.dims.size())) {
    throw std::invalid_argument(Named(index, buffer) + " has no axis " + std::to_string(axis));
  }
  return buffer.dims[axis];
}

uint32_t CountBlocks(const LaunchCall& call, const Buffers& buffers) {
  const size_t count = Count("grid", call.grid, 3);
  int64_t blocks = 1;
  bool too_many = false;
  for (size_t i = 0; i < count; ++i) {
    const int32_t* const factor = call.grid.begin() + 3 * i;
    const int64_t dim = Dimension(buffers, factor[0], factor[1]), divisor = factor[2];
    if (divisor < 1) throw std::invalid_argument("a divisor of the grid is " + std::to_string(divisor));
    const int64_t along = dim / divisor + (dim % divisor != 0);
    if (along == 0) return 0;  // whatever the other factors are
    too_many = too_many || blocks > kMax / along;
    if (!too_many) blocks *= along;
  }
  if (too_many) throw std::invalid_argument("the grid has more than 2^31 - 1 blocks");
  return static_cast<uint32_t>(blocks);
}

}  // namespace

void Launch(CUstream stream, const LaunchCall& call, const Buffers& buffers, const Kernels& kernels) {
  const size_t map_count = Count("maps", call.maps, 3), size_count = Count("sizes", call.sizes, 2);
  if (call.overlaps && call.zeroed.size() > 0) {
    throw std::invalid_argument("a kernel whose buffers are zeroed before cannot overlap what is before");
  }
  const Driver& driver = Driver::Get();
  uint32_t blocks = CountBlocks(call, buffers);
  for (const int32_t index : call.zeroed) ZeroAsync(driver, index, buffers[index], stream);
  if (blocks == 0) return;
  if (call.resident > 0) blocks = std::min<int64_t>(blocks, int64_t{call.resident} * Multiprocessors(driver));

  Parameters parameters(map_count, call.pointers.size(), size_count + call.words.size());
  for (size_t i = 0; i < map_count; ++i) {
    const int32_t* const map = call.maps.begin() + 3 * i;
    const MapRequest request = MapRequest::OfHeads(map[0], map[1], map[2]);
    const Buffer buffer = buffers[request.buffer];
    CUtensorMap* const encoded = parameters.AppendMap();
    if (std::ranges::count(buffer.dims, 0) > 0) {
      *encoded = {};  // the kernel reads nothing of it, and the driver has no map of nothing
    } else {
      EncodeMap(driver, request, buffer, encoded);
    }
  }
  for (const int32_t index : call.pointers) parameters.Append<void*>(index == -1 ? nullptr : buffers[index].data);
  for (size_t i = 0; i < size_count; ++i) {
    const int32_t index = call.sizes[2 * i], axis = call.sizes[2 * i + 1];
    const int64_t size = Dimension(buffers, index, axis);
    if (size > kMax) {
      throw std::invalid_argument(Named(index, buffers[index]) + ": its axis " + std::to_string(axis) +
                                  " exceeds 2^31 - 1");
    }
    parameters.Append(static_cast<int32_t>(size));
  }
  for (const int32_t word : call.words) parameters.Append(word);
  kernels.Launch(driver, stream, call, {.blocks = blocks, .overlaps = call.overlaps}, parameters);
}

}  // namespace coda
