// NVRTC behind a pool of threads and a cache: source in, cubin out.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda_api.h"
#include "disk_cache.h"
#include "warning.h"

namespace coda {

/// The version of the contract between generated programs, call attributes and this module. A change in the meaning of
/// an attribute or in the kernel's parameter block raises it; a program of another version is refused.
inline constexpr int kAbi = 3;

struct CompilerSettings {
  std::vector<std::pair<std::string, std::string>> headers;    // include name, text
  std::string headers_hash;                                    // what a program's attribute must equal
  std::vector<std::string> options;                            // without the architecture, part of every key
  std::vector<std::pair<std::string, std::string>> libraries;  // candidates: NVRTC's builtins (or none), NVRTC
  std::string cache_directory;                                 // empty: none
  uint64_t cache_limit_bytes = 0;
  std::string dump_directory;  // empty: none; else kernels have line information
  bool quiet = false;
};

/// One job a key, whoever asks and however often. Thread-safe.
class Compiler {
 public:
  using Job = std::shared_future<std::shared_ptr<const Binary>>;

  explicit Compiler(CompilerSettings settings);
  ~Compiler();  // shuts down

  const CompilerSettings& settings() const { return settings_; }

  /// Names a compiled kernel in every cache, and in a program: a digest of all that goes into it but NVRTC's version.
  /// The attribute `key` of a program is compared with it before anything is kept under it.
  std::string Key(std::string_view source, std::string_view arch) const;

  /// Queues the job unless there is one that has not failed. Where no thread can be had for it, it is done on return.
  /// Its future throws std::runtime_error with the operator's name and NVRTC's log.
  Job Submit(std::string name, std::string source, std::string arch);

  /// Drops what is queued, waits for what runs. From here on Submit compiles on the caller's thread.
  void Shutdown();

  /// The process's compiler, std::logic_error before Configure.
  static std::shared_ptr<Compiler> Get();
  static void Configure(CompilerSettings settings);

  /// Empty when NVRTC can be loaded, else why not and what was tried.
  std::string UnavailableReason() const;

 private:
  struct Request {
    std::string key, name, source, arch;
  };

  std::shared_ptr<const Binary> Compile(const Request& request) const;
  Binary RunNvrtc(const Nvrtc& nvrtc, const Request& request) const;
  void Announce(const Request& request) const;
  void Dump(const Request& request, const Binary& binary) const;
  bool HasThreadForOneMore();
  void Work();

  const CompilerSettings settings_;
  const DiskCache cache_;
  mutable WarnOnce not_dumped_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::packaged_task<std::shared_ptr<const Binary>()>> queue_;
  std::unordered_map<std::string, Job> jobs_;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;
  bool stopped_ = false;
};

}  // namespace coda
