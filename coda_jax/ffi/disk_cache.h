// Compiled kernels on disk. Any number of processes may use one directory at once, and any of them may be killed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace coda {

/// A compiled kernel: the image, the compiler's log, the seconds it took, and whether it was read from disk.
struct Binary {
  std::string cubin;
  std::string log;
  double seconds = 0;
  bool cached = false;
};

/// One file an entry: checksum, sizes, cubin, log. Written to a temporary file and renamed, so that a reader sees a
/// whole entry or none; verified when read, so that a damaged one is a miss. A directory that cannot be written is no
/// error.
class DiskCache {
 public:
  /// `directory` empty: no cache. Beyond `limit_bytes` the entries that were not used for longest are removed.
  DiskCache(std::filesystem::path directory, uint64_t limit_bytes);

  std::shared_ptr<const Binary> Load(const std::string& name) const;
  void Store(const std::string& name, const Binary& binary) const;

 private:
  void Evict() const;

  std::filesystem::path directory_;
  uint64_t limit_bytes_;
};

}  // namespace coda
