// A custom call's attributes, read into a struct.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

#include "compiler.h"
#include "xla/ffi/api/ffi.h"

namespace coda {

/// A member of a call's struct, or of a base of it, by its name in the program.
template <typename Struct, typename T>
struct Attribute {
  std::string_view name;
  T Struct::* member;
};

/// What XLA's AttrDecoding<Call> derives from: one pass over the dictionary, since XLA hands attributes over sorted by
/// name, as the tuple `attributes` has them, the first one `abi`. XLA's own decoding of a struct searches for every
/// name at every call, which took longer than all else that a handler does.
template <typename Call, const auto& attributes>
struct SortedAttributes {
  using Type = Call;

  static std::optional<Call> Decode(XLA_FFI_AttrType, void* dictionary, xla::ffi::DiagnosticEngine& diagnostic) {
    const auto& given = *static_cast<const XLA_FFI_Attrs*>(dictionary);
    int64_t next = 0;
    Call call{};
    const auto read = [&]<typename Struct, typename T>(const Attribute<Struct, T>& attribute) {
      if (next == given.size || std::string_view(given.names[next]->ptr, given.names[next]->len) != attribute.name) {
        diagnostic.Emit("there is no attribute ") << attribute.name;
        return false;
      }
      const std::optional<T> decoded =
          xla::ffi::AttrDecoding<T>::Decode(given.types[next], given.attrs[next], diagnostic);
      if (decoded) call.*attribute.member = *decoded;
      ++next;
      if (decoded && next == 1 && call.abi != kAbi) {  // its other attributes may be others
        diagnostic.Emit("the program was made by a coda_jax of another version (program ABI ")
            << call.abi << "); this one has program ABI " << kAbi << ". Export it again.";
        return false;
      }
      return decoded.has_value();
    };
    if (!std::apply([&](const auto&... attribute) { return (read(attribute) && ...); }, attributes)) {
      return std::nullopt;
    }
    if (next != given.size) return diagnostic.Emit("more attributes than the call has");
    return call;
  }
};

}  // namespace coda
