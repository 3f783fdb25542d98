// Names of enumerators, which are numbered from 0.
#pragma once

#include <cstddef>

namespace accelmgr::base {

/// The name of `value`. `last` is the last enumerator; the compiler checks that each one has a name. "?" for
/// a number beyond `last`, as memory of another process may hold.
template <auto last, std::size_t count>
constexpr const char* enum_name(const char* const (&names)[count], decltype(last) value) noexcept {
  static_assert(count == static_cast<std::size_t>(last) + 1);
  const auto place = static_cast<std::size_t>(value);
  return place < count ? names[place] : "?";
}

}  // namespace accelmgr::base
