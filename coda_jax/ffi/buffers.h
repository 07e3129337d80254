// The buffers of a custom call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "tensor_map.h"
#include "xla/ffi/api/ffi.h"

namespace coda {

/// The call's buffers, operands first, read off XLA's call frame when asked for.
class Buffers {
 public:
  Buffers(xla::ffi::RemainingArgs args, xla::ffi::RemainingRets rets) : args_(args), rets_(rets) {}

  size_t operands() const { return args_.size(); }
  size_t size() const { return args_.size() + rets_.size(); }

  /// Throws std::invalid_argument for an index that no buffer has.
  Buffer operator[](int64_t index) const {
    using xla::ffi::AnyBuffer;
    if (index < 0 || index >= static_cast<int64_t>(size())) {
      throw std::invalid_argument("there is no buffer " + std::to_string(index));
    }
    const size_t i = index;
    const AnyBuffer buffer =
        i < operands() ? args_.get<AnyBuffer>(i).value() : *rets_.get<AnyBuffer>(i - operands()).value();
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
  xla::ffi::RemainingArgs args_;
  xla::ffi::RemainingRets rets_;
};

}  // namespace coda
