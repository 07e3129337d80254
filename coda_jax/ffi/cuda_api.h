// The parts of the CUDA driver API and of NVRTC that this module calls, declared by hand: building needs no CUDA, and
// both libraries are opened at run time. Names, values and layouts are those of cuda.h and nvrtc.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace coda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUlibrary = struct CUlibraryObject*;
using CUkernel = struct CUkernelObject*;
using CUfunction = struct CUfunctionObject*;
using CUstream = struct CUstreamObject*;

inline constexpr CUresult kCudaSuccess = 0;

inline constexpr int kFunctionAttributeMaxDynamicSharedBytes = 8;
inline constexpr int kDeviceAttributeMultiprocessorCount = 16;
inline constexpr int kDeviceAttributeComputeCapabilityMajor = 75;
inline constexpr int kDeviceAttributeComputeCapabilityMinor = 76;

enum class TensorMapType : int { kUint8 = 0, kF16 = 6, kF32 = 7, kBF16 = 9 };
enum class TensorMapSwizzle : int { kNone = 0, k32B = 1, k64B = 2, k128B = 3 };
inline constexpr int kTensorMapInterleaveNone = 0;
inline constexpr int kTensorMapL2Promotion128B = 2;
inline constexpr int kTensorMapL2Promotion256B = 3;
inline constexpr int kTensorMapOutOfBoundsZeros = 0;

struct alignas(128) CUtensorMap {  // 64 in CUDA 12's header, 128 in CUDA 13's
  uint64_t opaque[16];
};
static_assert(sizeof(CUtensorMap) == 128);

inline constexpr int kLaunchAttributeClusterDimension = 4;
inline constexpr int kLaunchAttributeProgrammaticStreamSerialization = 6;

struct CUlaunchAttribute {
  int id;
  char pad[4];
  union {
    char pad[64];
    struct {
      unsigned x, y, z;
    } cluster_dim;
    int programmatic_stream_serialization_allowed;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72 && offsetof(CUlaunchAttribute, value) == 8);

struct CUlaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(CUlaunchConfig) == 56 && offsetof(CUlaunchConfig, stream) == 32);

/// libcuda, opened by the first call of Driver::Get.
struct Driver {
  CUresult (*cuGetErrorName)(CUresult, const char**);
  CUresult (*cuGetErrorString)(CUresult, const char**);
  CUresult (*cuCtxGetDevice)(CUdevice*);
  CUresult (*cuDeviceGetAttribute)(int*, int attribute, CUdevice);
  CUresult (*cuLibraryLoadData)(CUlibrary*, const void* image, int* jit_options, void** jit_values, unsigned jit_count,
                                int* options, void** values, unsigned count);
  CUresult (*cuLibraryGetKernel)(CUkernel*, CUlibrary, const char* name);
  CUresult (*cuKernelGetFunction)(CUfunction*, CUkernel);
  CUresult (*cuKernelSetAttribute)(int attribute, int value, CUkernel, CUdevice);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap*, int type, uint32_t rank, void* address, const uint64_t* dims,
                                     const uint64_t* strides_bytes, const uint32_t* box,
                                     const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,
                                     int out_of_bounds_fill);
  CUresult (*cuMemsetD32Async)(CUdeviceptr, unsigned value, size_t count, CUstream);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig*, CUfunction, void** parameters, void** extra);

  /// Throws std::runtime_error when there is no driver.
  static const Driver& Get();

  /// Throws std::runtime_error "<what>: <name of the error> (<its text>)" unless `result` is success.
  void Check(CUresult result, const char* what) const {
    if (result != kCudaSuccess) [[unlikely]]
      Throw(result, what);
  }

 private:
  [[noreturn]] void Throw(CUresult result, const char* what) const;
};

using nvrtcResult = int;
using nvrtcProgram = struct nvrtcProgramObject*;

struct Nvrtc {
  int major = 0, minor = 0;  // its version
  nvrtcResult (*nvrtcVersion)(int* major, int* minor);
  const char* (*nvrtcGetErrorString)(nvrtcResult);
  nvrtcResult (*nvrtcCreateProgram)(nvrtcProgram*, const char* source, const char* name, int header_count,
                                    const char* const* headers, const char* const* include_names);
  nvrtcResult (*nvrtcDestroyProgram)(nvrtcProgram*);
  nvrtcResult (*nvrtcCompileProgram)(nvrtcProgram, int option_count, const char* const* options);
  nvrtcResult (*nvrtcGetProgramLogSize)(nvrtcProgram, size_t*);
  nvrtcResult (*nvrtcGetProgramLog)(nvrtcProgram, char*);
  nvrtcResult (*nvrtcGetCUBINSize)(nvrtcProgram, size_t*);
  nvrtcResult (*nvrtcGetCUBIN)(nvrtcProgram, char*);
};

}  // namespace coda
