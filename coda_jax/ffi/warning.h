// Warnings on stderr.
#pragma once

#include <atomic>
#include <cstdarg>
#include <cstdio>

namespace coda {

/// One line on stderr, the first time it is called. CODA_JAX_QUIET does not silence it. Allocates nothing.
class WarnOnce {
 public:
  __attribute__((format(printf, 2, 3))) void operator()(const char* format, ...) noexcept {
    if (said_.exchange(true)) return;
    char line[1024];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line, sizeof(line), format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "coda_jax: %s\n", line);
  }

 private:
  std::atomic<bool> said_{false};
};

}  // namespace coda
