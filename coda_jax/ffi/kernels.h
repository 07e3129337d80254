// The kernels of a custom call: compiled, loaded on each device, launched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "compiler.h"
#include "cuda_api.h"
#include "tensor_map.h"

namespace coda {

inline constexpr int kMaxDevices = 64;

/// The attributes that every custom call has.
struct Program {
  int32_t abi;
  std::string_view headers;  // hash of the headers that the program was generated for
  std::string_view name;     // for messages
  std::string_view key;      // see Compiler::Key
  std::string_view arch;
  std::string_view source;
  int32_t threads, smem_bytes;  // of a block
};

/// A kernel's one parameter: tensor maps, then pointers, then numbers of 32 bits, each appended in turn.
class Parameters {
 public:
  /// Throws std::invalid_argument where they are more than the kernel's parameter space holds.
  Parameters(size_t maps, size_t pointers, size_t numbers);
  Parameters(const Parameters&) = delete;

  CUtensorMap* AppendMap() {
    auto* const map = new (next_) CUtensorMap;
    next_ += sizeof(CUtensorMap);
    return map;
  }

  template <typename T>
  void Append(const T& value) {
    std::memcpy(next_, &value, sizeof(value));
    next_ += sizeof(value);
  }

  void* data() { return bytes_; }

 private:
  static constexpr size_t kMaxBytes = 4096;  // what every driver accepts
  alignas(CUtensorMap) std::byte bytes_[kMaxBytes];
  std::byte* next_ = bytes_;
};

/// How a kernel is launched, beside what its program says.
struct Grid {
  uint32_t blocks;
  int32_t cluster = 0;    // blocks each; 0: no clusters
  bool overlaps = false;  // it may begin while the stream's last one ends, for whose results it waits itself
};

/// The current device. Throws std::runtime_error where its number is kMaxDevices or more.
CUdevice CurrentDevice(const Driver& driver);
int DeviceAttribute(const Driver& driver, int attribute, CUdevice device);
/// Of the current device.
int Multiprocessors(const Driver& driver);

/// Sets buffer number `index` to 0 on the stream, before whatever is launched there next. Throws std::invalid_argument
/// where it is no multiple of 4 bytes.
void ZeroAsync(const Driver& driver, int32_t index, const Buffer& buffer, CUstream stream);

/// The kernels of one custom call by key, for the whole process; never destroyed, since executables may outlive any
/// moment we could choose. Handler state objects would tie kernels to executables, but their type registration keeps
/// the CPU backend of jaxlib 0.10.2 and 0.12 from starting.
class Kernels {
 public:
  /// `symbol`: what they are called in their sources.
  explicit Kernels(const char* symbol) : symbol_(symbol) {}

  /// Compiles the program's kernel, or takes it from a cache; joins the job that the lowering queued.
  void Prepare(const Program& program) { Get(program); }

  /// Makes it ready on the current device: quick when there is nothing to do.
  void Load(const Program& program);

  /// Throws std::logic_error unless it was loaded before.
  void Launch(const Driver& driver, CUstream stream, const Program& program, const Grid& grid,
              Parameters& parameters) const;

 private:
  /// A compiled kernel and, once a device has initialised it, its handle. The driver's handle serves every device;
  /// memory limit and loading are per device.
  struct Kernel {
    std::shared_ptr<const Binary> binary;
    std::mutex loading;
    CUlibrary library = nullptr;
    std::atomic<CUkernel> kernel{nullptr};
    std::atomic<uint64_t> ready_devices{0};
  };

  Kernel& Get(const Program& program);
  Kernel& Insert(std::string_view key, std::shared_ptr<const Binary> binary);
  Kernel* Find(std::string_view key) const;
  void LoadOn(const Driver& driver, CUdevice device, const Program& program, Kernel& kernel) const;

  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  const char* const symbol_;
  mutable std::shared_mutex mutex_;
  std::unordered_map<std::string, std::unique_ptr<Kernel>, Hash, std::equal_to<>> kernels_;
};

}  // namespace coda
