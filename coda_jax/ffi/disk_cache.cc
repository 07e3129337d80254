#include "disk_cache.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "sha256.h"

namespace coda {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kMagic = "codajax2";
constexpr size_t kMagicOfAnyVersion = 7;
constexpr std::string_view kSuffix = ".kernel";
constexpr std::string_view kTemporary = ".temporary";
constexpr size_t kRandomDigits = 16;
// Longer than any compilation: an older temporary file was left by a process that was killed.
constexpr auto kAbandoned = std::chrono::hours(1);

struct Header {
  char magic[8];
  char checksum[64];  // of the entry's name and of everything behind this field
  uint64_t cubin_bytes;
  uint64_t log_bytes;
  double seconds;
};
constexpr size_t kChecked = offsetof(Header, cubin_bytes);
static_assert(sizeof(Header) == 96 && kMagic.size() == sizeof(Header::magic));

std::string Checksum(std::string_view name, std::string_view bytes) {
  return Digest({name, bytes.substr(kChecked)});
}

[[noreturn]] void Fail(int error, const fs::path& path) {
  throw std::system_error(error, std::generic_category(), path.string());
}

/// Open for reading, without following a link and without waiting for a pipe's other end.
struct File {
  const int descriptor;

  explicit File(const fs::path& path)
      : descriptor(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC)) {}
  File(const File&) = delete;
  ~File() {
    if (descriptor >= 0) close(descriptor);
  }
};

/// Calls `transfer`, read or write, until all `size` bytes went through. False with errno set, or at the file's end.
template <typename Transfer, typename Data>
bool TransferAll(Transfer transfer, int file, Data* data, size_t size) {
  while (size > 0) {
    errno = EIO;  // of a transfer of nothing, which sets none
    const ssize_t done = transfer(file, data, size);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    data += done;
    size -= done;
  }
  return true;
}

/// Why code must not be read from this file; null: it may.
const char* Distrust(const struct stat& file) {
  if (!S_ISREG(file.st_mode)) return "it is no regular file";
  if (file.st_uid != geteuid() && file.st_uid != 0) return "it belongs to another user";
  if (file.st_mode & (S_IWGRP | S_IWOTH)) return "others may write it";
  return nullptr;
}

/// Entries and temporary files by name: <64 hexadecimal digits>-nvrtc<version>, then .kernel, or 16 random hexadecimal
/// digits and .temporary. Older versions had there the process and a number.
bool EndsAsOurs(const std::string& name, std::string_view suffix) {
  char key[65];
  unsigned part;
  int used = 0;
  if (std::sscanf(name.c_str(), "%64[0-9a-f]-nvrtc%u.%u%n", key, &part, &part, &used) != 3 || std::strlen(key) != 64) {
    return false;
  }
  if (suffix == kSuffix) return name.substr(used) == suffix;
  int more = 0;
  if (std::sscanf(name.c_str() + used, ".%16[0-9a-f]%n", key, &more) == 1 && std::strlen(key) == kRandomDigits &&
      name.substr(used + more) == suffix) {
    return true;
  }
  return std::sscanf(name.c_str() + used, ".%u.%u%n", &part, &part, &more) == 2 && name.substr(used + more) == suffix;
}

/// Removes the file if it begins as an entry of any version does, be it cut short. Whether it was removed.
bool RemoveOurs(const fs::path& path) {
  char magic[kMagicOfAnyVersion];
  const File file(path);
  const ssize_t bytes = file.descriptor < 0 ? -1 : read(file.descriptor, magic, sizeof(magic));
  return bytes >= 0 && std::memcmp(magic, kMagic.data(), bytes) == 0 && unlink(path.c_str()) == 0;
}

/// A new file in the entry's folder, open for writing: its descriptor and its path. Processes of several containers,
/// whose numbers are the same, and of several hosts write there; what a killed one left may be there for an hour.
std::pair<int, fs::path> CreateTemporary(const fs::path& entry) {
  for (int tries_left = 100;; --tries_left) {
    uint64_t random;
    if (getrandom(&random, sizeof(random), 0) != sizeof(random)) Fail(errno, entry);
    char digits[kRandomDigits + 1];
    std::snprintf(digits, sizeof(digits), "%016" PRIx64, random);
    fs::path path = entry;
    (path += ".") += digits;
    path += kTemporary;
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file >= 0) return {file, path};
    if (errno != EEXIST || tries_left == 0) Fail(errno, path);
  }
}

}  // namespace

DiskCache::DiskCache(fs::path directory, uint64_t limit_bytes)
    : directory_(std::move(directory)), limit_bytes_(limit_bytes) {}

std::shared_ptr<const Binary> DiskCache::Load(const std::string& name) const noexcept {
  if (directory_.empty()) return nullptr;
  try {
    return Read(name);
  } catch (...) {
    return nullptr;
  }
}

void DiskCache::Store(const std::string& name, const Binary& binary) const noexcept {
  if (directory_.empty()) return;
  try {
    try {
      Write(name, binary);
    } catch (const std::system_error&) {
      if (!Evict()) throw;  // else there may be room now
      Write(name, binary);
    }
    Evict();
  } catch (const std::exception& error) {
    not_kept_("compiled kernels are not kept (CODA_JAX_CACHE_DIR): %s", error.what());
  }
}

std::shared_ptr<const Binary> DiskCache::Read(const std::string& name) const {
  fs::path path = directory_ / name;
  path += kSuffix;
  const File file(path);
  struct stat status{};
  const char* distrust = nullptr;
  if (file.descriptor >= 0) {
    if (fstat(file.descriptor, &status) != 0) return nullptr;
    distrust = Distrust(status);
  } else if (errno == ELOOP) {
    distrust = "it is a link";
  } else {
    return nullptr;
  }
  if (distrust != nullptr) {
    not_used_("%s is not used, its kernel compiles again: %s", path.c_str(), distrust);
    return nullptr;
  }

  const auto size = static_cast<uint64_t>(status.st_size);
  if (size < sizeof(Header) || size > limit_bytes_) return nullptr;
  std::string bytes(size, '\0');
  if (!TransferAll(read, file.descriptor, bytes.data(), size)) return nullptr;
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const uint64_t payload_bytes = size - sizeof(header);
  if (std::string_view(header.magic, sizeof(header.magic)) != kMagic || header.cubin_bytes > payload_bytes ||
      header.log_bytes != payload_bytes - header.cubin_bytes ||
      std::string_view(header.checksum, sizeof(header.checksum)) != Checksum(name, bytes)) {
    return nullptr;
  }
  futimens(file.descriptor, nullptr);  // eviction goes by last use
  auto binary = std::make_shared<Binary>();
  binary->cubin = bytes.substr(sizeof(header), header.cubin_bytes);
  binary->log = bytes.substr(sizeof(header) + header.cubin_bytes);
  binary->seconds = header.seconds;
  binary->cached = true;
  return binary;
}

void DiskCache::Write(const std::string& name, const Binary& binary) const {
  fs::create_directories(directory_.parent_path());
  if (mkdir(directory_.c_str(), 0700) != 0 && errno != EEXIST) Fail(errno, directory_);

  Header header{};
  kMagic.copy(header.magic, sizeof(header.magic));
  header.cubin_bytes = binary.cubin.size();
  header.log_bytes = binary.log.size();
  header.seconds = binary.seconds;
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes += binary.cubin;
  bytes += binary.log;
  Checksum(name, bytes).copy(bytes.data() + offsetof(Header, checksum), sizeof(header.checksum));

  fs::path path = directory_ / name;
  const auto [file, temporary] = CreateTemporary(path);
  path += kSuffix;
  int error = TransferAll(write, file, bytes.data(), bytes.size()) ? 0 : errno;
  if (close(file) != 0 && error == 0) error = errno;  // a network's file system may say only now that it is full
  if (error == 0 && rename(temporary.c_str(), path.c_str()) != 0) error = errno;
  if (error == 0) return;
  unlink(temporary.c_str());
  Fail(error, path);
}

bool DiskCache::Evict() const {
  struct Entry {
    fs::file_time_type used;
    uint64_t bytes;
    fs::path path;
  };
  std::vector<Entry> entries;
  uint64_t total_bytes = 0;
  bool removed = false;
  const auto now = fs::file_time_type::clock::now();
  std::error_code error;
  // Other processes remove files meanwhile: whatever cannot be looked at is skipped.
  for (fs::directory_iterator it(directory_, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    const bool temporary = EndsAsOurs(name, kTemporary);
    if (!temporary && !EndsAsOurs(name, kSuffix)) continue;
    std::error_code gone;
    Entry entry{fs::last_write_time(it->path(), gone), 0, it->path()};
    if (!gone) entry.bytes = fs::file_size(it->path(), gone);  // fails for what is no file
    if (gone) continue;
    if (temporary) {
      if (now - entry.used > kAbandoned) removed |= RemoveOurs(entry.path);
    } else {
      total_bytes += entry.bytes;
      entries.push_back(std::move(entry));
    }
  }
  if (total_bytes <= limit_bytes_) return removed;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (const Entry& entry : entries) {
    if (total_bytes <= limit_bytes_) break;
    removed |= RemoveOurs(entry.path);
    total_bytes -= entry.bytes;
  }
  return removed;
}

}  // namespace coda
