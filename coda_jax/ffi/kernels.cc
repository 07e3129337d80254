#include "kernels.h"

#include <stdexcept>

namespace coda {

Parameters::Parameters(size_t maps, size_t pointers, size_t numbers) {
  if (maps * sizeof(CUtensorMap) + pointers * sizeof(void*) + numbers * sizeof(int32_t) > kMaxBytes) {
    throw std::invalid_argument(std::to_string(maps) + " tensor maps, " + std::to_string(pointers) + " pointers and " +
                                std::to_string(numbers) + " numbers exceed the kernel's parameter space of " +
                                std::to_string(kMaxBytes) + " bytes");
  }
}

CUdevice CurrentDevice(const Driver& driver) {
  CUdevice device = 0;
  driver.Check(driver.cuCtxGetDevice(&device), "cuCtxGetDevice");
  if (device >= kMaxDevices) throw std::runtime_error("device ordinal " + std::to_string(device) + " is not supported");
  return device;
}

int DeviceAttribute(const Driver& driver, int attribute, CUdevice device) {
  int value = 0;
  driver.Check(driver.cuDeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

int Multiprocessors(const Driver& driver) {
  static std::atomic<int> counts[kMaxDevices];
  const CUdevice device = CurrentDevice(driver);
  int count = counts[device].load(std::memory_order_relaxed);
  if (count == 0) {
    count = DeviceAttribute(driver, kDeviceAttributeMultiprocessorCount, device);
    counts[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

void ZeroAsync(const Driver& driver, int32_t index, const Buffer& buffer, CUstream stream) {
  int64_t bytes = ElementBytes(buffer);
  for (const int64_t dim : buffer.dims) bytes *= dim;
  if (bytes % 4 != 0) {
    throw std::invalid_argument("buffer " + std::to_string(index) + " " + buffer.ToString() +
                                ", which is zeroed, has " + std::to_string(bytes) + " bytes, not a multiple of 4");
  }
  if (bytes == 0) return;
  driver.Check(driver.cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(buffer.data), 0, bytes / 4, stream),
               "cuMemsetD32Async");
}

void Kernels::Load(const Program& program) {
  const Driver& driver = Driver::Get();
  const CUdevice device = CurrentDevice(driver);
  // XLA does not instantiate what it deserializes from its compilation cache: the kernel may be unknown here.
  Kernel& kernel = Get(program);
  const uint64_t bit = uint64_t{1} << device;
  if (kernel.ready_devices.load(std::memory_order_acquire) & bit) return;
  std::lock_guard lock(kernel.loading);
  if (kernel.ready_devices.load(std::memory_order_relaxed) & bit) return;
  LoadOn(driver, device, program, kernel);
  kernel.ready_devices.fetch_or(bit, std::memory_order_release);
}

void Kernels::LoadOn(const Driver& driver, CUdevice device, const Program& program, Kernel& kernel) const {
  const int major = DeviceAttribute(driver, kDeviceAttributeComputeCapabilityMajor, device);
  const int minor = DeviceAttribute(driver, kDeviceAttributeComputeCapabilityMinor, device);
  const std::string capability = "sm_" + std::to_string(major) + std::to_string(minor);
  if (program.arch.substr(0, capability.size()) != capability) {
    throw std::runtime_error("the program was lowered for " + std::string(program.arch) + ", the device is " +
                             capability + "; lower it with implementation=\"xla\"");
  }
  if (kernel.kernel == nullptr) {
    driver.Check(driver.cuLibraryLoadData(&kernel.library, kernel.binary->cubin.data(), nullptr, nullptr, 0, nullptr,
                                          nullptr, 0),
                 "cuLibraryLoadData");
    CUkernel handle = nullptr;
    driver.Check(driver.cuLibraryGetKernel(&handle, kernel.library, symbol_), "cuLibraryGetKernel");
    kernel.kernel = handle;
  }
  driver.Check(
      driver.cuKernelSetAttribute(kFunctionAttributeMaxDynamicSharedBytes, program.smem_bytes, kernel.kernel, device),
      ("shared memory of " + std::to_string(program.smem_bytes) + " bytes").c_str());
  CUfunction loaded = nullptr;  // loads the code on this device now: under a graph capture it could not be
  driver.Check(driver.cuKernelGetFunction(&loaded, kernel.kernel), "cuKernelGetFunction");
}

void Kernels::Launch(const Driver& driver, CUstream stream, const Program& program, const Grid& grid,
                     Parameters& parameters) const {
  CUlaunchAttribute attributes[2]{};
  CUlaunchConfig config{};
  config.grid_x = grid.blocks;
  config.grid_y = config.grid_z = 1;
  config.block_x = program.threads;
  config.block_y = config.block_z = 1;
  config.shared_bytes = program.smem_bytes;
  config.stream = stream;
  config.attributes = attributes;
  if (grid.cluster > 0) {
    CUlaunchAttribute& attribute = attributes[config.attribute_count++];
    attribute.id = kLaunchAttributeClusterDimension;
    attribute.value.cluster_dim = {static_cast<unsigned>(grid.cluster), 1, 1};
  }
  if (grid.overlaps) {
    CUlaunchAttribute& attribute = attributes[config.attribute_count++];
    attribute.id = kLaunchAttributeProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization_allowed = 1;
  }
  const Kernel* kernel = Find(program.key);
  if (kernel == nullptr) throw std::logic_error("the program was not initialized in this process");
  void* arguments[] = {parameters.data()};
  // The driver takes a CUkernel in a CUfunction's place and finds the current device's code.
  driver.Check(
      driver.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel->kernel.load()), arguments, nullptr),
      "cuLaunchKernelEx");
}

Kernels::Kernel& Kernels::Get(const Program& program) {
  if (Kernel* kernel = Find(program.key)) return *kernel;
  const std::shared_ptr<Compiler> compiler = Compiler::Get();
  const std::string& headers = compiler->settings().headers_hash;
  if (program.headers != headers) {
    throw std::invalid_argument("the program was made by a coda_jax of another version (kernel headers " +
                                std::string(program.headers) + "); this one has kernel headers " + headers +
                                ". Export it again.");
  }
  // Under a key that is not its own a kernel would be taken for another program's, here and on disk.
  if (program.key != compiler->Key(program.source, program.arch)) {
    throw std::invalid_argument("the program's key " + std::string(program.key) + " is not that of its source");
  }
  const Compiler::Job job =
      compiler->Submit(std::string(program.name), std::string(program.source), std::string(program.arch));
  return Insert(program.key, job.get());
}

Kernels::Kernel& Kernels::Insert(std::string_view key, std::shared_ptr<const Binary> binary) {
  std::unique_lock lock(mutex_);
  std::unique_ptr<Kernel>& kernel = kernels_[std::string(key)];
  if (kernel == nullptr) {
    kernel = std::make_unique<Kernel>();
    kernel->binary = std::move(binary);
  }
  return *kernel;
}

Kernels::Kernel* Kernels::Find(std::string_view key) const {
  std::shared_lock lock(mutex_);
  const auto it = kernels_.find(key);
  return it == kernels_.end() ? nullptr : it->second.get();
}

}  // namespace coda
