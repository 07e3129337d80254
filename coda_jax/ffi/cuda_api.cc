#include "cuda_api.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace coda {
namespace {

template <typename Function>
void Resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver lacks ") + name +
                             ": coda_jax kernels need a driver for CUDA 12.4 or newer");
  }
}

Driver Open() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
  Driver driver;
#define CODA_RESOLVE(name) Resolve(library, #name, driver.name)
  CODA_RESOLVE(cuGetErrorName);
  CODA_RESOLVE(cuGetErrorString);
  CODA_RESOLVE(cuCtxGetDevice);
  CODA_RESOLVE(cuDeviceGetAttribute);
  CODA_RESOLVE(cuLibraryLoadData);
  CODA_RESOLVE(cuLibraryGetKernel);
  CODA_RESOLVE(cuKernelGetFunction);
  CODA_RESOLVE(cuKernelSetAttribute);
  CODA_RESOLVE(cuTensorMapEncodeTiled);
  CODA_RESOLVE(cuMemsetD32Async);
  CODA_RESOLVE(cuLaunchKernelEx);
#undef CODA_RESOLVE
  return driver;
}

}  // namespace

const Driver& Driver::Get() {
  static const Driver driver = Open();  // an exception leaves it unset: the next call tries again
  return driver;
}

void Driver::Throw(CUresult result, const char* what) const {
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  throw std::runtime_error(std::string(what) + ": " + (name ? name : "error " + std::to_string(result)) + " (" +
                           (text ? text : "unknown") + ")");
}

}  // namespace coda
