// Compiled kernels on disk. Any number of processes may use one directory at once, and any of them may be killed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "warning.h"

namespace coda {

/// A compiled kernel: the image, the compiler's log, the seconds it took, and whether it was read from disk.
struct Binary {
  std::string cubin;
  std::string log;
  double seconds = 0;
  bool cached = false;
};

/// One file an entry: checksum (which covers the entry's name), sizes, cubin, log. Written to a temporary file and
/// renamed, so that a reader sees a whole entry or none; verified when read, so that a damaged one is a miss. The
/// temporary file's name is random, and nobody else's: neither another container's nor what a killed process left.
///
/// An entry becomes code on the GPU. One that another user (root aside) owns or that others may write is a miss, and so
/// is a link. The directory's own mode is not asked: who may write it can remove an entry, but can neither write one
/// in this user's name nor put one in another's place, since the checksum covers the name.
///
/// Whatever fails is a miss or leaves the entry unkept, and the latter is said once.
class DiskCache {
 public:
  /// `directory` empty: no cache. Beyond `limit_bytes` the entries that were not used for longest are removed.
  DiskCache(std::filesystem::path directory, uint64_t limit_bytes);

  std::shared_ptr<const Binary> Load(const std::string& name) const noexcept;
  void Store(const std::string& name, const Binary& binary) const noexcept;

 private:
  std::shared_ptr<const Binary> Read(const std::string& name) const;
  void Write(const std::string& name, const Binary& binary) const;
  /// Removes what is beyond the limit, and temporary files that killed processes left. Whether there was any.
  bool Evict() const;

  const std::filesystem::path directory_;
  const uint64_t limit_bytes_;
  mutable WarnOnce not_kept_, not_used_;
};

}  // namespace coda
