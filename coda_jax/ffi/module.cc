// Python bindings. coda_jax/ffi/__init__.py is the only caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "compiler.h"
#include "handler.h"
#include "sha256.h"
#include "tensor_map.h"

namespace nb = nanobind;

namespace coda {
namespace {

using Strings = std::vector<std::string>;
using StringPairs = std::vector<std::pair<std::string, std::string>>;
using Dims = std::vector<int64_t>;

void Configure(StringPairs headers, std::string headers_hash, Strings options, StringPairs libraries,
               std::string cache_directory, uint64_t cache_limit_bytes, std::string dump_directory, bool quiet) {
  Compiler::Configure({.headers = std::move(headers),
                       .headers_hash = std::move(headers_hash),
                       .options = std::move(options),
                       .libraries = std::move(libraries),
                       .cache_directory = std::move(cache_directory),
                       .cache_limit_bytes = cache_limit_bytes,
                       .dump_directory = std::move(dump_directory),
                       .quiet = quiet});
}

std::string KernelKey(const std::string& source, const std::string& arch) {
  return Compiler::Get()->Key(source, arch);
}

std::string DigestOf(const Strings& parts) {
  return Digest(std::vector<std::string_view>(parts.begin(), parts.end()));
}

void Submit(std::string name, std::string source, std::string arch) {
  Compiler::Get()->Submit(std::move(name), std::move(source), std::move(arch));
}

nb::tuple Compile(std::string name, std::string source, std::string arch) {
  std::shared_ptr<const Binary> binary;
  {
    nb::gil_scoped_release release;
    binary = Compiler::Get()->Submit(std::move(name), std::move(source), std::move(arch)).get();
  }
  return nb::make_tuple(nb::bytes(binary->cubin.data(), binary->cubin.size()), binary->log, binary->seconds,
                        binary->cached);
}

nb::dict Handlers() {
  const auto capsule = [](XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); };
  nb::dict handlers;
  handlers["instantiate"] = capsule(Instantiate);
  handlers["initialize"] = capsule(Initialize);
  handlers["execute"] = capsule(Execute);
  return handlers;
}

xla::ffi::DataType ParseType(const std::string& dtype) {
  if (dtype == "bfloat16") return xla::ffi::DataType::BF16;
  if (dtype == "float16") return xla::ffi::DataType::F16;
  if (dtype == "float32") return xla::ffi::DataType::F32;
  if (dtype == "int32") return xla::ffi::DataType::S32;
  throw std::invalid_argument("dtype " + dtype);
}

nb::dict DescribeMapForTest(std::array<int32_t, 6> map, const std::string& dtype, const Dims& dims) {
  const Buffer buffer{ParseType(dtype), dims, nullptr};
  const MapLayout layout = DescribeMap({map[0], map[1], map[2], map[3], map[4], map[5]}, buffer);
  nb::dict result;
  result["type"] = static_cast<int>(layout.type);
  result["dims"] = nb::cast(std::to_array(layout.dims));
  result["strides_bytes"] = nb::cast(std::to_array(layout.strides_bytes));
  result["box"] = nb::cast(std::to_array(layout.box));
  result["swizzle"] = static_cast<int>(layout.swizzle);
  return result;
}

nb::dict DescribeGeometryForTest(const Dims& a, const Dims& b, const Dims& result_dims, bool transpose_a,
                                 bool transpose_b, int tile_m, int tile_n, int ways, int cluster_m, int multiprocessors,
                                 int flags) {
  GemmCall call{};
  call.transpose_a = transpose_a;
  call.transpose_b = transpose_b;
  call.tile_m = tile_m;
  call.tile_n = tile_n;
  call.ways = ways;
  call.cluster_m = cluster_m;
  call.flags = flags;
  const Geometry geometry = DescribeGeometry(call, {.dims = a}, {.dims = b}, {.dims = result_dims}, multiprocessors);
  nb::dict result;
  result["m"] = geometry.m;
  result["n"] = geometry.n;
  result["k"] = geometry.k;
  result["batch"] = geometry.batch;
  result["clusters"] = geometry.clusters;
  result["blocks"] = geometry.blocks;
  return result;
}

}  // namespace

NB_MODULE(_ffi, module) {
  module.attr("ABI") = kAbi;
  module.def("configure", Configure, nb::kw_only(), nb::arg("headers"), nb::arg("headers_hash"), nb::arg("options"),
             nb::arg("libraries"), nb::arg("cache_directory"), nb::arg("cache_limit_bytes"), nb::arg("dump_directory"),
             nb::arg("quiet"), nb::call_guard<nb::gil_scoped_release>());
  module.def("digest", DigestOf, nb::arg("parts"));
  module.def("kernel_key", KernelKey, nb::arg("source"), nb::arg("arch"));
  module.def("submit", Submit, nb::arg("name"), nb::arg("source"), nb::arg("arch"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def("compile", Compile, nb::arg("name"), nb::arg("source"), nb::arg("arch"));
  module.def(
      "unavailable_reason", [] { return Compiler::Get()->UnavailableReason(); },
      nb::call_guard<nb::gil_scoped_release>());
  module.def("shutdown", [] { Compiler::Get()->Shutdown(); }, nb::call_guard<nb::gil_scoped_release>());
  module.def("handlers", Handlers);
  module.def("describe_map", DescribeMapForTest, nb::arg("map"), nb::arg("dtype"), nb::arg("dims"));
  module.def("describe_geometry", DescribeGeometryForTest, nb::kw_only(), nb::arg("a"), nb::arg("b"), nb::arg("result"),
             nb::arg("transpose_a"), nb::arg("transpose_b"), nb::arg("tile_m"), nb::arg("tile_n"), nb::arg("ways"),
             nb::arg("cluster_m"), nb::arg("multiprocessors"), nb::arg("flags"));
}

}  // namespace coda
