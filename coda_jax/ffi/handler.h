// The custom call of a product, "coda_gemm": attributes and buffers in, a cluster launch out.
#pragma once

#include <cstdint>
#include <tuple>

#include "attributes.h"
#include "buffers.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace coda {

/// The attributes of the custom call. Buffer indices count operands first, then results.
struct GemmCall : Program {
  static constexpr char kTarget[] = "coda_gemm", kSymbol[] = "coda_gemm";

  xla::ffi::Span<const int32_t> maps;      // MapRequest each
  xla::ffi::Span<const int32_t> pointers;  // buffer index each
  bool transpose_a, transpose_b;           // a is [k, m]; b is [n, k]
  int32_t tile_m, tile_n, halves, cluster_m;
  int32_t flags = -1;          // buffer index, of split-K or claimed tiles; or -1
  int32_t yield_k_blocks = 0;  // of 128 bytes, of a thread block's work before the next one has its place; 0: all
};

/// All of them, sorted by name. Python's list is `GemmCall` in __init__.py.
inline constexpr std::tuple kGemmAttributes{
    Attribute{"abi", &GemmCall::abi},
    Attribute{"arch", &GemmCall::arch},
    Attribute{"cluster_m", &GemmCall::cluster_m},
    Attribute{"flags", &GemmCall::flags},
    Attribute{"halves", &GemmCall::halves},
    Attribute{"headers", &GemmCall::headers},
    Attribute{"key", &GemmCall::key},
    Attribute{"maps", &GemmCall::maps},
    Attribute{"name", &GemmCall::name},
    Attribute{"pointers", &GemmCall::pointers},
    Attribute{"smem_bytes", &GemmCall::smem_bytes},
    Attribute{"source", &GemmCall::source},
    Attribute{"threads", &GemmCall::threads},
    Attribute{"tile_m", &GemmCall::tile_m},
    Attribute{"tile_n", &GemmCall::tile_n},
    Attribute{"transpose_a", &GemmCall::transpose_a},
    Attribute{"transpose_b", &GemmCall::transpose_b},
    Attribute{"yield_k_blocks", &GemmCall::yield_k_blocks},
};

/// The product's sizes, read off operands 0 and 1 and the first result, and the number of thread blocks.
struct Geometry {
  int32_t m, n, k, batch;
  int64_t clusters;  // with work
  uint32_t blocks;   // launched; 0: nothing to do
};

/// Throws std::invalid_argument for shapes that are no product.
Geometry DescribeGeometry(const GemmCall& call, const Buffer& a, const Buffer& b, const Buffer& result,
                          int multiprocessors);

/// Executes the call; see Target.
void Launch(CUstream stream, const GemmCall& call, const Buffers& buffers, const Kernels& kernels);

}  // namespace coda

template <>
struct xla::ffi::AttrDecoding<coda::GemmCall> : coda::SortedAttributes<coda::GemmCall, coda::kGemmAttributes> {};
