#include "handler.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace coda {
void Launch(CUstream stream, const GemmCall& call, const Buffers& buffers, const Kernels& kernels) {
  if (buffers.operands() < 2 || buffers.size() == buffers.operands()) {
    throw std::invalid_argument(std::to_string(buffers.operands()) + " operands, " +
                                std::to_string(buffers.size() - buffers.operands()) + " results");
  }
  const Driver& driver = Driver::Get();
  int multiprocessors = Multiprocessors(driver);
  Buffer flags;  // of split-K or claimed tiles, a row for each block that may run
  if (call.flags >= 0) {
    flags = buffers[call.flags];
    if (flags.dtype != xla::ffi::DataType::S32 || flags.dims.size() != 2 || flags.dims[0] < call.cluster_m ||
        flags.dims[1] != 4) {
      throw std::invalid_argument("the flags are " + flags.ToString());
    }
    multiprocessors = std::min<int64_t>(multiprocessors, flags.dims[0]);
  }
  const Geometry geometry =
      DescribeGeometry(call, buffers[0], buffers[1], buffers[buffers.operands()], multiprocessors);
  if (geometry.blocks == 0) return;

  const int32_t sizes[] = {geometry.m, geometry.n, geometry.k, geometry.batch};
  const size_t map_count = call.maps.size() / 6;
  const size_t pointer_count = std::max<size_t>(1, call.pointers.size());  // the kernel's array has at least one slot
  Parameters parameters(map_count, pointer_count, std::size(sizes));
  for (size_t i = 0; i < map_count; ++i) {
    MapRequest request;
    std::memcpy(&request, call.maps.begin() + 6 * i, sizeof(request));
    EncodeMap(driver, request, buffers[request.buffer], parameters.AppendMap());
  }
  for (size_t i = 0; i < pointer_count; ++i) {
    parameters.Append<void*>(i < call.pointers.size() ? buffers[call.pointers[i]].data : nullptr);
  }
  parameters.Append(sizes);
  if (call.flags >= 0) ZeroAsync(driver, call.flags, flags, stream);
  const bool overlaps = call.flags < 0;  // not after a memset
  kernels.Launch(driver, stream, call, {geometry.blocks, call.cluster_m, overlaps}, parameters);
}

}  // namespace coda
