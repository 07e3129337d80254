#include "disk_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <system_error>
#include <vector>

namespace coda {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'c', 'o', 'd', 'a', 'j', 'a', 'x', '1'};
constexpr char kSuffix[] = ".kernel";
constexpr char kTemporary[] = ".temporary";
// Longer than any compilation: an older temporary file was left by a process that was killed.
constexpr auto kAbandoned = std::chrono::hours(1);

struct Header {
  char magic[8];
  uint64_t checksum;  // of everything behind this field
  uint64_t cubin_bytes;
  uint64_t log_bytes;
  double seconds;
};
constexpr size_t kChecked = offsetof(Header, cubin_bytes);

uint64_t Checksum(const char* data, size_t size) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<unsigned char>(data[i])) * 0x100000001b3u;
  return hash;
}

bool WriteAll(int file, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t written = write(file, data, size);
    if (written <= 0) return false;
    data += written;
    size -= written;
  }
  return true;
}

}  // namespace

DiskCache::DiskCache(fs::path directory, uint64_t limit_bytes)
    : directory_(std::move(directory)), limit_bytes_(limit_bytes) {}

std::shared_ptr<const Binary> DiskCache::Load(const std::string& name) const {
  if (directory_.empty()) return nullptr;
  const fs::path path = directory_ / (name + kSuffix);
  std::ifstream file(path, std::ios::binary);
  if (!file) return nullptr;
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  Header header;
  if (bytes.size() < sizeof(header)) return nullptr;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const uint64_t payload_bytes = bytes.size() - sizeof(header);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.cubin_bytes > payload_bytes ||
      header.log_bytes != payload_bytes - header.cubin_bytes ||
      header.checksum != Checksum(bytes.data() + kChecked, bytes.size() - kChecked)) {
    return nullptr;
  }
  std::error_code ignored;
  fs::last_write_time(path, fs::file_time_type::clock::now(), ignored);  // eviction goes by last use
  auto binary = std::make_shared<Binary>();
  binary->cubin = bytes.substr(sizeof(header), header.cubin_bytes);
  binary->log = bytes.substr(sizeof(header) + header.cubin_bytes);
  binary->seconds = header.seconds;
  binary->cached = true;
  return binary;
}

void DiskCache::Store(const std::string& name, const Binary& binary) const {
  if (directory_.empty()) return;
  std::error_code error;
  fs::create_directories(directory_, error);
  if (error) return;

  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.cubin_bytes = binary.cubin.size();
  header.log_bytes = binary.log.size();
  header.seconds = binary.seconds;
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof(header));
  bytes += binary.cubin;
  bytes += binary.log;
  header.checksum = Checksum(bytes.data() + kChecked, bytes.size() - kChecked);
  std::memcpy(bytes.data(), &header, sizeof(header));

  static std::atomic<unsigned> sequence{0};
  const fs::path temporary =
      directory_ / (name + "." + std::to_string(getpid()) + "." + std::to_string(sequence++) + kTemporary);
  const int file = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return;
  const bool written = WriteAll(file, bytes.data(), bytes.size());
  if (close(file) == 0 && written) {
    fs::rename(temporary, directory_ / (name + kSuffix), error);
    if (!error) return Evict();
  }
  fs::remove(temporary, error);
}

void DiskCache::Evict() const {
  struct Entry {
    fs::file_time_type used;
    uint64_t bytes;
    fs::path path;
  };
  std::vector<Entry> entries;
  uint64_t total_bytes = 0;
  const auto now = fs::file_time_type::clock::now();
  std::error_code error;
  // Other processes remove files meanwhile: whatever cannot be looked at is skipped.
  for (fs::directory_iterator it(directory_, error), end; !error && it != end; it.increment(error)) {
    const fs::path& path = it->path();
    std::error_code gone;
    Entry entry{fs::last_write_time(path, gone), 0, path};
    if (!gone) entry.bytes = fs::file_size(path, gone);
    if (gone) continue;
    if (path.extension() == kTemporary) {
      if (now - entry.used > kAbandoned) fs::remove(path, gone);
    } else if (path.extension() == kSuffix) {
      total_bytes += entry.bytes;
      entries.push_back(std::move(entry));
    }
  }
  if (total_bytes <= limit_bytes_) return;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.used < b.used; });
  for (const Entry& entry : entries) {
    if (total_bytes <= limit_bytes_) return;
    fs::remove(entry.path, error);
    total_bytes -= entry.bytes;
  }
}

}  // namespace coda
