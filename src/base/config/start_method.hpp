// The names of the start methods.
#pragma once

#include <array>
#include <cstddef>

#include "accelmgr/config.hpp"

namespace accelmgr::config {

/// In the order of the enumerators.
inline constexpr std::array start_methods = {"spawn", "fork", "forkserver"};

constexpr const char* name_of(StartMethod method) noexcept {
  return start_methods.at(static_cast<std::size_t>(method));
}

}  // namespace accelmgr::config
