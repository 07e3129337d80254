#include "compiler.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "sha256.h"

namespace coda {
namespace {

namespace fs = std::filesystem;

constexpr char kLineInformation[] = "--generate-line-info";

template <typename Function>
bool Resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

std::string Version(const Nvrtc& nvrtc) {
  return std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor);
}

/// Opens the first candidate that works. NVRTC opens its builtins by bare name, which fails for a library outside the
/// loader's path unless they are in the process already: so they go first.
Nvrtc OpenNvrtc(const std::vector<std::pair<std::string, std::string>>& candidates) {
  std::string tried;
  for (const auto& [builtins, path] : candidates) {
    if (!builtins.empty() && dlopen(builtins.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      tried += std::string("\n  ") + dlerror();
      continue;
    }
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      tried += std::string("\n  ") + dlerror();
      continue;
    }
    Nvrtc nvrtc;
#define CODA_RESOLVE(name) Resolve(library, #name, nvrtc.name)
    if (CODA_RESOLVE(nvrtcVersion) && CODA_RESOLVE(nvrtcGetErrorString) && CODA_RESOLVE(nvrtcCreateProgram) &&
        CODA_RESOLVE(nvrtcDestroyProgram) && CODA_RESOLVE(nvrtcCompileProgram) &&
        CODA_RESOLVE(nvrtcGetProgramLogSize) && CODA_RESOLVE(nvrtcGetProgramLog) && CODA_RESOLVE(nvrtcGetCUBINSize) &&
        CODA_RESOLVE(nvrtcGetCUBIN)) {
#undef CODA_RESOLVE
      nvrtc.nvrtcVersion(&nvrtc.major, &nvrtc.minor);
      if (std::pair(nvrtc.major, nvrtc.minor) >= std::pair(12, 4)) return nvrtc;
      tried += "\n  " + path + ": version " + Version(nvrtc) + ", 12.4 is needed";
      continue;
    }
    tried += "\n  " + path + ": not NVRTC";
  }
  throw std::runtime_error("NVRTC was not found (pip install nvidia-cuda-nvrtc, or set CUDA_HOME). Tried:" + tried);
}

// The process's compiler is never destroyed by static destruction: Python's atexit shuts it down.
std::mutex& GlobalMutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::shared_ptr<Compiler>& GlobalCompiler() {
  static auto* compiler = new std::shared_ptr<Compiler>;
  return *compiler;
}

// Guarded by GlobalMutex, which a process that forks holds.
int nvrtc_uses = 0;
bool nvrtc_lost = false;  // this process was forked from one in which NVRTC was in use

/// While a thread opens NVRTC or is inside it. A process forked meanwhile has NVRTC's locks, and the loader's, as that
/// thread held them, and without the thread: there it throws std::runtime_error.
class NvrtcUse {
 public:
  NvrtcUse() {
    std::lock_guard lock(GlobalMutex());
    if (nvrtc_lost) {
      throw std::runtime_error(
          "this process was forked while another thread compiled a kernel, and NVRTC does not work in it; start it by "
          "the start method \"spawn\" (multiprocessing.get_context(\"spawn\"), DataLoader's multiprocessing_context)");
    }
    ++nvrtc_uses;
  }
  NvrtcUse(const NvrtcUse&) = delete;
  ~NvrtcUse() {
    std::lock_guard lock(GlobalMutex());
    --nvrtc_uses;
  }
};

const Nvrtc& GetNvrtc(const CompilerSettings& settings) {
  static std::mutex opening;
  static std::atomic<const Nvrtc*> nvrtc{nullptr};
  if (const Nvrtc* opened = nvrtc) return *opened;
  const NvrtcUse use;  // first: a forked child would wait for the mutex for ever
  std::lock_guard lock(opening);
  if (nvrtc == nullptr) nvrtc = new Nvrtc(OpenNvrtc(settings.libraries));
  return *nvrtc;
}

std::string ReadLog(const Nvrtc& nvrtc, nvrtcProgram program) {
  size_t bytes = 0;
  nvrtc.nvrtcGetProgramLogSize(program, &bytes);
  std::string log(bytes, '\0');
  if (bytes > 0) nvrtc.nvrtcGetProgramLog(program, log.data());
  while (!log.empty() && log.back() == '\0') log.pop_back();
  return log;
}

size_t AvailableCores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  return std::max(1u, std::thread::hardware_concurrency());
}

bool HasFailed(const Compiler::Job& job) {
  if (job.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return false;
  try {
    static_cast<void>(job.get());
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

// A forked child has none of the pool's threads: it starts a compiler of its own and leaves the parent's, whose lock
// some thread may have held, untouched. Finished kernels come back from the disk, NVRTC or not.
void HandleFork() {
  pthread_atfork([] { GlobalMutex().lock(); }, [] { GlobalMutex().unlock(); },
                 [] {
                   nvrtc_lost = nvrtc_lost || nvrtc_uses > 0;
                   nvrtc_uses = 0;
                   std::shared_ptr<Compiler>& compiler = GlobalCompiler();
                   if (compiler != nullptr) {
                     auto* parents = new std::shared_ptr<Compiler>(compiler);
                     compiler = std::make_shared<Compiler>((*parents)->settings());
                   }
                   GlobalMutex().unlock();
                 });
}

}  // namespace

Compiler::Compiler(CompilerSettings settings)
    : settings_(std::move(settings)), cache_(settings_.cache_directory, settings_.cache_limit_bytes) {}

Compiler::~Compiler() {
  Shutdown();
}

std::shared_ptr<Compiler> Compiler::Get() {
  std::lock_guard lock(GlobalMutex());
  if (GlobalCompiler() == nullptr) throw std::logic_error("coda_jax.ffi is not configured");
  return GlobalCompiler();
}

void Compiler::Configure(CompilerSettings settings) {
  static std::once_flag once;
  std::call_once(once, HandleFork);
  auto compiler = std::make_shared<Compiler>(std::move(settings));
  std::lock_guard lock(GlobalMutex());
  compiler.swap(GlobalCompiler());
}

std::string Compiler::UnavailableReason() const {
  try {
    const NvrtcUse use;
    GetNvrtc(settings_);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

std::string Compiler::Key(std::string_view source, std::string_view arch) const {
  const std::string abi = std::to_string(kAbi);
  std::vector<std::string_view> parts{abi, settings_.headers_hash};
  parts.insert(parts.end(), settings_.options.begin(), settings_.options.end());
  parts.insert(parts.end(), {arch, source});
  return Digest(parts);
}

Compiler::Job Compiler::Submit(std::string name, std::string source, std::string arch) {
  Request request{Key(source, arch), std::move(name), std::move(source), std::move(arch)};
  std::unique_lock lock(mutex_);
  if (const auto it = jobs_.find(request.key); it != jobs_.end()) {
    if (!HasFailed(it->second)) return it->second;
    jobs_.erase(it);  // what was missing, memory or a library, may be there now
  }
  std::string key = request.key;
  std::packaged_task<std::shared_ptr<const Binary>()> task(
      [this, request = std::move(request)] { return Compile(request); });
  Job job = task.get_future().share();
  jobs_.emplace(std::move(key), job);
  if (!HasThreadForOneMore()) {
    lock.unlock();
    task();
    return job;
  }
  queue_.push_back(std::move(task));
  wake_.notify_one();
  return job;
}

/// Where no thread can be started, under a limit on processes, those that run take the job.
bool Compiler::HasThreadForOneMore() {
  if (stopped_) return false;
  if (idle_ <= queue_.size() && threads_.size() < AvailableCores()) {
    try {
      threads_.emplace_back([this] { Work(); });
    } catch (const std::exception&) {
    }
  }
  return !threads_.empty();
}

void Compiler::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    wake_.wait(lock, [this] { return stopped_ || !queue_.empty(); });
    --idle_;
    if (stopped_) return;
    std::packaged_task<std::shared_ptr<const Binary>()> task = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
}

void Compiler::Shutdown() {
  std::vector<std::thread> threads;
  std::deque<std::packaged_task<std::shared_ptr<const Binary>()>> dropped;
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    threads.swap(threads_);
    dropped.swap(queue_);
  }
  wake_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

std::shared_ptr<const Binary> Compiler::Compile(const Request& request) const {
  const Nvrtc& nvrtc = GetNvrtc(settings_);
  const std::string image = settings_.dump_directory.empty() ? request.key : Digest({request.key, kLineInformation});
  const std::string entry = image + "-nvrtc" + Version(nvrtc);
  std::shared_ptr<const Binary> binary = cache_.Load(entry);
  if (binary == nullptr) {
    binary = std::make_shared<Binary>(RunNvrtc(nvrtc, request));
    cache_.Store(entry, *binary);
  }
  if (!settings_.dump_directory.empty()) Dump(request, *binary);
  return binary;
}

Binary Compiler::RunNvrtc(const Nvrtc& nvrtc, const Request& request) const {
  const NvrtcUse use;
  Announce(request);
  const auto start = std::chrono::steady_clock::now();
  std::vector<const char*> texts, names, options;
  for (const auto& [name, text] : settings_.headers) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  const std::string arch = "--gpu-architecture=" + request.arch;
  options.push_back(arch.c_str());
  for (const std::string& option : settings_.options) options.push_back(option.c_str());
  if (!settings_.dump_directory.empty()) options.push_back(kLineInformation);

  nvrtcProgram program = nullptr;
  nvrtcResult result = nvrtc.nvrtcCreateProgram(&program, request.source.c_str(), (request.name + ".cu").c_str(),
                                                static_cast<int>(names.size()), texts.data(), names.data());
  if (result != 0) throw std::runtime_error(request.name + ": NVRTC: " + nvrtc.nvrtcGetErrorString(result));
  result = nvrtc.nvrtcCompileProgram(program, static_cast<int>(options.size()), options.data());
  Binary binary;
  binary.log = ReadLog(nvrtc, program);
  size_t bytes = 0;
  if (result == 0) result = nvrtc.nvrtcGetCUBINSize(program, &bytes);
  if (result == 0) {
    binary.cubin.resize(bytes);
    result = nvrtc.nvrtcGetCUBIN(program, binary.cubin.data());
  }
  nvrtc.nvrtcDestroyProgram(&program);
  if (result != 0) {
    throw std::runtime_error(request.name + ": compilation for " + request.arch +
                             " failed: " + nvrtc.nvrtcGetErrorString(result) + "\n" + binary.log);
  }
  binary.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return binary;
}

void Compiler::Dump(const Request& request, const Binary& binary) const {
  std::string stem;
  for (const char c : request.name) stem += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  const fs::path path = fs::path(settings_.dump_directory) / (stem + "-" + request.key.substr(0, 12));
  std::error_code ignored;  // the files say it
  fs::create_directories(settings_.dump_directory, ignored);
  const auto write = [&](const char* suffix, const std::string& bytes) {
    return (std::ofstream(path.string() + suffix, std::ios::binary) << bytes << std::flush).good();
  };
  if (!write(".cu", request.source) || !write(".log", binary.log) || !write(".cubin", binary.cubin)) {
    not_dumped_("kernels are not written to CODA_JAX_DUMP_DIR: %s: %s", path.c_str(), std::strerror(errno));
  }
}

void Compiler::Announce(const Request& request) const {
  if (settings_.quiet) return;
  size_t queued = 0;
  {
    std::lock_guard lock(mutex_);
    queued = queue_.size();
  }
  const std::string more = queued > 0 ? " (" + std::to_string(queued) + " queued)" : "";
  std::fprintf(stderr, "coda_jax: compiling %s for %s%s\n", request.name.c_str(), request.arch.c_str(), more.c_str());
}

}  // namespace coda
