// SHA-256, FIPS 180-4: names of kernels and checksums of cache entries.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace coda {

/// SHA-256 of the parts, each behind its length (eight bytes, little-endian), as 64 hexadecimal digits.
std::string Digest(std::span<const std::string_view> parts);

inline std::string Digest(std::initializer_list<std::string_view> parts) {
  return Digest(std::span(parts.begin(), parts.size()));
}

}  // namespace coda
