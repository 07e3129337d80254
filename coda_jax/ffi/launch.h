// The custom call of a kernel that is no product, "coda_launch": all of its launch is in the attributes.
#pragma once

#include <cstdint>
#include <tuple>

#include "attributes.h"
#include "buffers.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace coda {

/// The attributes of the custom call. Buffer indices count operands first, then results. The kernel's parameter is
/// maps, pointers, sizes, words.
struct LaunchCall : Program {
  static constexpr char kTarget[] = "coda_launch", kSymbol[] = "coda_attention";

  /// Three a factor of the number of blocks: buffer index, axis, divisor of the dimension, rounded up.
  xla::ffi::Span<const int32_t> grid;
  xla::ffi::Span<const int32_t> maps;  // three a map of [batch, rows, heads, columns]: buffer index, box columns, rows
  xla::ffi::Span<const int32_t> pointers;  // buffer index each, or -1 for a null pointer
  int32_t resident;                        // blocks of a multiprocessor, at most; 0: any number
  xla::ffi::Span<const int32_t> sizes;     // two a dimension: buffer index, axis
  xla::ffi::Span<const int32_t> words;     // as they are
  xla::ffi::Span<const int32_t> zeroed;    // buffer index each, set to 0 before
  bool overlaps;                           // see Grid; not where anything is zeroed
};

/// All of them, sorted by name. Python's list is `LaunchCall` in __init__.py.
inline constexpr std::tuple kLaunchAttributes{
    Attribute{"abi", &LaunchCall::abi},           Attribute{"arch", &LaunchCall::arch},
    Attribute{"grid", &LaunchCall::grid},         Attribute{"headers", &LaunchCall::headers},
    Attribute{"key", &LaunchCall::key},           Attribute{"maps", &LaunchCall::maps},
    Attribute{"name", &LaunchCall::name},         Attribute{"overlaps", &LaunchCall::overlaps},
    Attribute{"pointers", &LaunchCall::pointers}, Attribute{"resident", &LaunchCall::resident},
    Attribute{"sizes", &LaunchCall::sizes},       Attribute{"smem_bytes", &LaunchCall::smem_bytes},
    Attribute{"source", &LaunchCall::source},     Attribute{"threads", &LaunchCall::threads},
    Attribute{"words", &LaunchCall::words},       Attribute{"zeroed", &LaunchCall::zeroed},
};

/// Executes the call; see Target.
void Launch(CUstream stream, const LaunchCall& call, const Buffers& buffers, const Kernels& kernels);

}  // namespace coda

template <>
struct xla::ffi::AttrDecoding<coda::LaunchCall> : coda::SortedAttributes<coda::LaunchCall, coda::kLaunchAttributes> {};
