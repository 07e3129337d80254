#include "handler.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "compiler.h"

/// XLA hands attributes over sorted by name, as `kAttributes` has them, so one pass reads them. XLA's own decoding of a
/// struct searches for every name at every call, which took longer than all else that the handler does.
template <>
struct xla::ffi::AttrDecoding<coda::GemmCall> {
  using Type = coda::GemmCall;

  static std::optional<Type> Decode(XLA_FFI_AttrType, void* dictionary, DiagnosticEngine& diagnostic) {
    const auto& attributes = *static_cast<const XLA_FFI_Attrs*>(dictionary);
    int64_t next = 0;
    Type call{};
    const auto read = [&]<typename T>(const coda::Attribute<T>& attribute) {
      if (next == attributes.size ||
          std::string_view(attributes.names[next]->ptr, attributes.names[next]->len) != attribute.name) {
        diagnostic.Emit("there is no attribute ") << attribute.name;
        return false;
      }
      const std::optional<T> decoded =
          AttrDecoding<T>::Decode(attributes.types[next], attributes.attrs[next], diagnostic);
      if (decoded) call.*attribute.member = *decoded;
      ++next;
      if (decoded && next == 1 && call.abi != coda::kAbi) {  // its other attributes may be others
        diagnostic.Emit("the program was made by a coda_jax of another version (program ABI ")
            << call.abi << "); this one has program ABI " << coda::kAbi << ". Export it again.";
        return false;
      }
      return decoded.has_value();
    };
    if (!std::apply([&](const auto&... attribute) { return (read(attribute) && ...); }, coda::kAttributes)) {
      return std::nullopt;
    }
    if (next != attributes.size) return diagnostic.Emit("more attributes than a product has");
    return call;
  }
};

namespace coda {
namespace {

namespace ffi = xla::ffi;

constexpr char kSymbol[] = "coda_gemm";
constexpr size_t kMaxParameterBytes = 4096;  // what every driver accepts
constexpr int kMaxDevices = 64;

/// A compiled kernel and, once a device has initialised it, its handle. The driver's handle serves every device; memory
/// limit and loading are per device.
struct Kernel {
  std::shared_ptr<const Binary> binary;
  std::mutex loading;
  CUlibrary library = nullptr;
  std::atomic<CUkernel> kernel{nullptr};
  std::atomic<uint64_t> ready_devices{0};
};

/// Kernels by key, for the whole process; never destroyed, since executables may outlive any moment we could choose.
/// Handler state objects would tie kernels to executables, but their type registration keeps the CPU backend of
/// jaxlib 0.10.2 and 0.12 from starting.
class Registry {
 public:
  static Registry& Get() {
    static auto* registry = new Registry;
    return *registry;
  }

  Kernel& Insert(std::string_view key, std::shared_ptr<const Binary> binary) {
    std::unique_lock lock(mutex_);
    std::unique_ptr<Kernel>& kernel = kernels_[std::string(key)];
    if (kernel == nullptr) {
      kernel = std::make_unique<Kernel>();
      kernel->binary = std::move(binary);
    }
    return *kernel;
  }

  Kernel* Find(std::string_view key) const {
    std::shared_lock lock(mutex_);
    const auto it = kernels_.find(key);
    return it == kernels_.end() ? nullptr : it->second.get();
  }

 private:
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  mutable std::shared_mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<Kernel>, Hash, std::equal_to<>> kernels_;
};

int DeviceAttribute(const Driver& driver, int attribute, CUdevice device) {
  int value = 0;
  driver.Check(driver.cuDeviceGetAttribute(&value, attribute, device), "cuDeviceGetAttribute");
  return value;
}

CUdevice CurrentDevice(const Driver& driver) {
  CUdevice device = 0;
  driver.Check(driver.cuCtxGetDevice(&device), "cuCtxGetDevice");
  if (device >= kMaxDevices) throw std::runtime_error("device ordinal " + std::to_string(device) + " is not supported");
  return device;
}

int Multiprocessors(const Driver& driver, CUdevice device) {
  static std::atomic<int> counts[kMaxDevices];
  int count = counts[device].load(std::memory_order_relaxed);
  if (count == 0) {
    count = DeviceAttribute(driver, kDeviceAttributeMultiprocessorCount, device);
    counts[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

void Load(const Driver& driver, const GemmCall& call, CUdevice device, Kernel& kernel) {
  const int major = DeviceAttribute(driver, kDeviceAttributeComputeCapabilityMajor, device);
  const int minor = DeviceAttribute(driver, kDeviceAttributeComputeCapabilityMinor, device);
  const std::string capability = "sm_" + std::to_string(major) + std::to_string(minor);
  if (call.arch.substr(0, capability.size()) != capability) {
    throw std::runtime_error("the program was lowered for " + std::string(call.arch) + ", the device is " + capability +
                             "; lower it with implementation=\"xla\"");
  }
  if (kernel.kernel == nullptr) {
    driver.Check(driver.cuLibraryLoadData(&kernel.library, kernel.binary->cubin.data(), nullptr, nullptr, 0, nullptr,
                                          nullptr, 0),
                 "cuLibraryLoadData");
    CUkernel handle = nullptr;
    driver.Check(driver.cuLibraryGetKernel(&handle, kernel.library, kSymbol), "cuLibraryGetKernel");
    kernel.kernel = handle;
  }
  driver.Check(
      driver.cuKernelSetAttribute(kFunctionAttributeMaxDynamicSharedBytes, call.smem_bytes, kernel.kernel, device),
      ("shared memory of " + std::to_string(call.smem_bytes) + " bytes").c_str());
  CUfunction loaded = nullptr;  // loads the code on this device now: under a graph capture it could not be
  driver.Check(driver.cuKernelGetFunction(&loaded, kernel.kernel), "cuKernelGetFunction");
}

/// The call's buffers, operands first, read off XLA's call frame when asked for.
class Buffers {
 public:
  Buffers(ffi::RemainingArgs args, ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  size_t operands() const { return args_.size(); }
  size_t size() const { return args_.size() + rets_.size(); }

  Buffer operator[](int64_t index) const {
    if (index < 0 || index >= static_cast<int64_t>(size())) {
      throw std::invalid_argument("there is no buffer " + std::to_string(index));
    }
    const size_t i = index;
    const ffi::AnyBuffer buffer =
        i < operands() ? args_.get<ffi::AnyBuffer>(i).value() : *rets_.get<ffi::AnyBuffer>(i - operands()).value();
    return {buffer.element_type(), {buffer.dimensions().begin(), buffer.dimensions().size()}, buffer.untyped_data()};
  }

  std::string ToString() const {
    std::string text = " (";
    for (size_t i = 0; i < size(); ++i) {
      text += i == 0 ? "" : i == operands() ? " -> " : ", ";
      text += (*this)[i].ToString();
    }
    return text + ")";
  }

 private:
  ffi::RemainingArgs args_;
  ffi::RemainingRets rets_;
};

void Launch(CUstream stream, const GemmCall& call, const Buffers& buffers) {
  if (buffers.operands() < 2 || buffers.size() == buffers.operands()) {
    throw std::invalid_argument(std::to_string(buffers.operands()) + " operands, " +
                                std::to_string(buffers.size() - buffers.operands()) + " results");
  }
  const Driver& driver = Driver::Get();
  const CUdevice device = CurrentDevice(driver);
  int multiprocessors = Multiprocessors(driver, device);
  Buffer flags;  // of split-K or claimed tiles, a row for each block that may run
  if (call.flags >= 0) {
    flags = buffers[call.flags];
    if (flags.dtype != ffi::DataType::S32 || flags.dims.size() != 2 || flags.dims[0] < call.cluster_m ||
        flags.dims[1] != 4) {
      throw std::invalid_argument("the flags are " + flags.ToString());
    }
    multiprocessors = std::min<int64_t>(multiprocessors, flags.dims[0]);
  }
  const Geometry geometry =
      DescribeGeometry(call, buffers[0], buffers[1], buffers[buffers.operands()], multiprocessors);
  if (geometry.blocks == 0) return;

  // The kernel's one parameter: tensor maps, pointers (at least one slot), m, n, k, batch.
  alignas(CUtensorMap) std::byte parameters[kMaxParameterBytes];
  const size_t map_count = call.maps.size() / 6;
  const size_t pointer_count = std::max<size_t>(1, call.pointers.size());
  if (map_count * sizeof(CUtensorMap) + pointer_count * sizeof(void*) + 4 * sizeof(int32_t) > kMaxParameterBytes) {
    throw std::invalid_argument(std::to_string(map_count) + " tensor maps and " + std::to_string(pointer_count) +
                                " pointers exceed the kernel's parameter space");
  }
  std::byte* next = parameters;
  for (size_t i = 0; i < map_count; ++i, next += sizeof(CUtensorMap)) {
    MapRequest request;
    std::memcpy(&request, call.maps.begin() + 6 * i, sizeof(request));
    EncodeMap(driver, request, buffers[request.buffer], new (next) CUtensorMap);
  }
  for (size_t i = 0; i < pointer_count; ++i, next += sizeof(void*)) {
    void* const data = i < call.pointers.size() ? buffers[call.pointers[i]].data : nullptr;
    std::memcpy(next, &data, sizeof(data));
  }
  const int32_t sizes[4] = {geometry.m, geometry.n, geometry.k, geometry.batch};
  std::memcpy(next, sizes, sizeof(sizes));

  CUlaunchAttribute attributes[2]{};
  attributes[0].id = kLaunchAttributeClusterDimension;
  attributes[0].value.cluster_dim = {static_cast<unsigned>(call.cluster_m), 1, 1};
  // The kernel may begin while the stream's last one ends, for whose results it waits itself.
  attributes[1].id = kLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].value.programmatic_stream_serialization_allowed = 1;
  CUlaunchConfig config{};
  config.grid_x = geometry.blocks;
  config.grid_y = config.grid_z = 1;
  config.block_x = call.threads;
  config.block_y = config.block_z = 1;
  config.shared_bytes = call.smem_bytes;
  config.stream = stream;
  config.attributes = attributes;
  config.attribute_count = call.flags < 0 ? 2 : 1;  // not after a memset
  if (call.flags >= 0) {
    const size_t words = flags.dims[0] * flags.dims[1];
    driver.Check(driver.cuMemsetD32Async(reinterpret_cast<CUdeviceptr>(flags.data), 0, words, stream),
                 "cuMemsetD32Async");
  }
  const Kernel* kernel = Registry::Get().Find(call.key);
  if (kernel == nullptr) throw std::logic_error("the program was not initialized in this process");
  void* arguments[] = {parameters};
  // The driver takes a CUkernel in a CUfunction's place and finds the current device's code.
  driver.Check(
      driver.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel->kernel.load()), arguments, nullptr),
      "cuLaunchKernelEx");
}

/// The program's kernel, compiled or taken from a cache; joins the job that the lowering queued.
Kernel& Prepare(const GemmCall& call) {
  if (Kernel* kernel = Registry::Get().Find(call.key)) return *kernel;
  const std::shared_ptr<Compiler> compiler = Compiler::Get();
  const std::string& headers = compiler->settings().headers_hash;
  if (call.headers != headers) {
    throw std::invalid_argument("the program was made by a coda_jax of another version (kernel headers " +
                                std::string(call.headers) + "); this one has kernel headers " + headers +
                                ". Export it again.");
  }
  // Under a key that is not its own a kernel would be taken for another program's, here and on disk.
  if (call.key != compiler->Key(call.source, call.arch)) {
    throw std::invalid_argument("the program's key " + std::string(call.key) + " is not that of its source");
  }
  const Compiler::Job job = compiler->Submit(std::string(call.name), std::string(call.source), std::string(call.arch));
  return Registry::Get().Insert(call.key, job.get());
}

/// Runs `body`; what it throws becomes an error with the operator's name and `shapes()`.
template <typename Body, typename Shapes>
ffi::Error Guard(const GemmCall& call, Shapes&& shapes, Body&& body) {
  const auto message = [&](const std::exception& error) {
    return "coda_jax: " + std::string(call.name) + shapes() + ": " + error.what();
  };
  try {
    body();
    return ffi::Error::Success();
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(message(error));
  } catch (const std::exception& error) {
    return ffi::Error::Internal(message(error));
  }
}

std::string NoShapes() {
  return "";
}

ffi::Error InstantiateGemm(const GemmCall& call) {
  return Guard(call, NoShapes, [&] { Prepare(call); });
}

ffi::Error InitializeGemm(const GemmCall& call) {  // before every execution: quick when there is nothing to do
  return Guard(call, NoShapes, [&] {
    const Driver& driver = Driver::Get();
    const CUdevice device = CurrentDevice(driver);
    // XLA does not instantiate what it deserializes from its compilation cache: the kernel may be unknown here.
    Kernel& kernel = Prepare(call);
    const uint64_t bit = uint64_t{1} << device;
    if (kernel.ready_devices.load(std::memory_order_acquire) & bit) return;
    std::lock_guard lock(kernel.loading);
    if (kernel.ready_devices.load(std::memory_order_relaxed) & bit) return;
    Load(driver, call, device, kernel);
    kernel.ready_devices.fetch_or(bit, std::memory_order_release);
  });
}

ffi::Error ExecuteGemm(void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, const GemmCall& call) {
  const Buffers buffers(args, rets);
  const auto shapes = [&] { return buffers.ToString(); };
  return Guard(call, shapes, [&] { Launch(static_cast<CUstream>(stream), call, buffers); });
}

}  // namespace

XLA_FFI_Error* Instantiate(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::BindInstantiate().Attrs<GemmCall>().To(InstantiateGemm).release();
  return handler->Call(frame);
}

XLA_FFI_Error* Initialize(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::BindInitialize().Attrs<GemmCall>().To(InitializeGemm).release();
  return handler->Call(frame);
}

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  // One launch of a fixed kernel with its parameters by value, after a memset of fixed size where it has flags: may be
  // recorded into a CUDA graph.
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<void*>>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs<GemmCall>()
                             .To(ExecuteGemm, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

}  // namespace coda
