// XLA's custom calls of cutlass_product.cu; apart from it, since nvcc and CUTLASS's pragmas refuse some of XLA's
// headers.

#include "cutlass_product.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Matrix = ffi::Buffer<ffi::BF16, 2>;

template <CutlassProduct* product>
ffi::Error Run(cudaStream_t stream, Matrix a, Matrix b, ffi::Result<Matrix> d) {
  const int m = static_cast<int>(d->dimensions()[0]), n = static_cast<int>(d->dimensions()[1]);
  const int k = static_cast<int>(a.dimensions()[TRANSPOSE_A ? 0 : 1]);
  const char* error = product(stream, a.untyped_data(), b.untyped_data(), d->untyped_data(), m, n, k);
  return error == nullptr ? ffi::Error::Success() : ffi::Error::Internal(error);
}

auto Binding() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Arg<Matrix>().Arg<Matrix>().Ret<Matrix>();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(cutlass_pingpong_128x128, Run<Pingpong128x128>, Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(cutlass_cooperative_128x128, Run<Cooperative128x128>, Binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(cutlass_cooperative_128x256, Run<Cooperative128x256>, Binding());
