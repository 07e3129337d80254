// Python bindings. coda_jax/ffi/__init__.py is the only caller.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "compiler.h"
#include "handler.h"
#include "launch.h"
#include "sha256.h"
#include "target.h"

namespace nb = nanobind;

namespace coda {
namespace {

using Strings = std::vector<std::string>;
using StringPairs = std::vector<std::pair<std::string, std::string>>;

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

template <typename Call>
nb::dict Handlers() {
  const auto capsule = [](XLA_FFI_Handler* handler) { return nb::capsule(reinterpret_cast<void*>(handler)); };
  nb::dict stages;
  stages["instantiate"] = capsule(Target<Call>::Instantiate);
  stages["initialize"] = capsule(Target<Call>::Initialize);
  stages["execute"] = capsule(Target<Call>::Execute);
  return stages;
}

template <typename... T>
nb::tuple Names(const std::tuple<T...>& attributes) {
  return std::apply([](const auto&... attribute) { return nb::make_tuple(std::string(attribute.name)...); },
                    attributes);
}

nb::dict HandlersByTarget() {
  nb::dict handlers;
  handlers[GemmCall::kTarget] = Handlers<GemmCall>();
  handlers[LaunchCall::kTarget] = Handlers<LaunchCall>();
  return handlers;
}

nb::dict AttributesByTarget() {
  nb::dict attributes;
  attributes[GemmCall::kTarget] = Names(kGemmAttributes);
  attributes[LaunchCall::kTarget] = Names(kLaunchAttributes);
  return attributes;
}

}  // namespace

NB_MODULE(_ffi, module) {
  module.attr("ABI") = kAbi;
  module.attr("ATTRIBUTES") = AttributesByTarget();
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
  module.def("handlers", HandlersByTarget);
}

}  // namespace coda
