// What XLA calls: the stages of a custom call.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

#include "buffers.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace coda {

/// The stages of the custom call whose attributes are those of `Call`, a Program with more members. XLA's AttrDecoding
/// reads them. `Call::kTarget` is its name, `Call::kSymbol` that of its kernels, and
/// Launch(stream, call, buffers, kernels) executes it: launches of fixed kernels with their parameters by value, and
/// memsets of fixed size, which may be recorded into a CUDA graph.
template <typename Call>
class Target {
 public:
  static XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
    static auto* handler = xla::ffi::Ffi::BindInstantiate().template Attrs<Call>().To(OnInstantiate).release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {  // before every execution
    static auto* handler = xla::ffi::Ffi::BindInitialize().template Attrs<Call>().To(OnInitialize).release();
    return handler->Call(frame);
  }

  static XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
    static auto* handler = xla::ffi::Ffi::Bind()
                               .Ctx<xla::ffi::PlatformStream<void*>>()
                               .RemainingArgs()
                               .RemainingRets()
                               .template Attrs<Call>()
                               .To(OnExecute, {xla::ffi::Traits::kCmdBufferCompatible})
                               .release();
    return handler->Call(frame);
  }

 private:
  static Kernels& OfCall() {
    static auto* kernels = new Kernels(Call::kSymbol);
    return *kernels;
  }

  static xla::ffi::Error OnInstantiate(const Call& call) {
    return Guard(call, NoShapes, [&] { OfCall().Prepare(call); });
  }

  static xla::ffi::Error OnInitialize(const Call& call) {
    return Guard(call, NoShapes, [&] { OfCall().Load(call); });
  }

  static xla::ffi::Error OnExecute(void* stream, xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets,
                                   const Call& call) {
    const Buffers buffers(args, rets);
    const auto shapes = [&] { return buffers.ToString(); };
    return Guard(call, shapes, [&] { Launch(static_cast<CUstream>(stream), call, buffers, OfCall()); });
  }

  static std::string NoShapes() { return ""; }

  /// Runs `body`; what it throws becomes an error with the operator's name and `shapes()`.
  template <typename Body, typename Shapes>
  static xla::ffi::Error Guard(const Call& call, Shapes&& shapes, Body&& body) {
    const auto message = [&](const std::exception& error) {
      return "coda_jax: " + std::string(call.name) + shapes() + ": " + error.what();
    };
    try {
      body();
      return xla::ffi::Error::Success();
    } catch (const std::invalid_argument& error) {
      return xla::ffi::Error::InvalidArgument(message(error));
    } catch (const std::exception& error) {
      return xla::ffi::Error::Internal(message(error));
    }
  }
};

}  // namespace coda
