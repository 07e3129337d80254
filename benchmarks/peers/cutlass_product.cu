// Products of CUTLASS 3.x's CollectiveBuilder: d (M, N) = op(a) op(b), bfloat16 with float32 accumulation. Compiled
// once for each way a and b are stored: TRANSPOSE_A says that a is (K, M), TRANSPOSE_B that b is (N, K).

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "cutlass_product.h"

namespace {

using cute::_1, cute::_2, cute::_64, cute::_128, cute::_256;

using Element = cutlass::bfloat16_t;
using LayoutA = std::conditional_t<TRANSPOSE_A, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
using LayoutB = std::conditional_t<TRANSPOSE_B, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
using LayoutD = cutlass::layout::RowMajor;
constexpr int kAlignment = 16 / sizeof(Element);

template <class Tile, class Mainloop, class Epilogue>
const char* Run(cudaStream_t stream, const void* a, const void* b, void* d, int m, int n, int k) {
  using Cluster = cute::Shape<_2, _1, _1>;
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutD, kAlignment, Element, LayoutD,
      kAlignment, Epilogue>::CollectiveOp;
  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, kAlignment, Element, LayoutB, kAlignment,
      float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename CollectiveEpilogue::SharedStorage))>,
      Mainloop>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, CollectiveMainloop,
                                                      CollectiveEpilogue, cutlass::gemm::PersistentScheduler>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using cutlass::make_cute_packed_stride;

  static const auto hardware = cutlass::KernelHardwareInfo::make_kernel_hardware_info<Kernel>();
  const typename Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {m, n, k, 1},
      {static_cast<const Element*>(a), make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1}),
       static_cast<const Element*>(b), make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1})},
      {{1.0f, 0.0f},
       nullptr,
       typename Kernel::StrideC{},
       static_cast<Element*>(d),
       make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1})},
      hardware};
  if (Gemm::get_workspace_size(arguments) != 0) return "CUTLASS wants a workspace";
  Gemm gemm;
  cutlass::Status status = gemm.can_implement(arguments);
  if (status == cutlass::Status::kSuccess) status = gemm.initialize(arguments, nullptr, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
}

using cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using EpiloguePingpong = cutlass::epilogue::TmaWarpSpecialized;
using EpilogueCooperative = cutlass::epilogue::TmaWarpSpecializedCooperative;

}  // namespace

const char* Pingpong128x128(cudaStream_t stream, const void* a, const void* b, void* d, int m, int n, int k) {
  using Tile = cute::Shape<_128, _128, _64>;
  return Run<Tile, KernelTmaWarpSpecializedPingpong, EpiloguePingpong>(stream, a, b, d, m, n, k);
}

const char* Cooperative128x128(cudaStream_t stream, const void* a, const void* b, void* d, int m, int n, int k) {
  using Tile = cute::Shape<_128, _128, _64>;
  return Run<Tile, KernelTmaWarpSpecializedCooperative, EpilogueCooperative>(stream, a, b, d, m, n, k);
}

const char* Cooperative128x256(cudaStream_t stream, const void* a, const void* b, void* d, int m, int n, int k) {
  using Tile = cute::Shape<_128, _256, _64>;
  return Run<Tile, KernelTmaWarpSpecializedCooperative, EpilogueCooperative>(stream, a, b, d, m, n, k);
}
