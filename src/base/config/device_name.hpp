// The names of the kinds of devices.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "accelmgr/config.hpp"

namespace accelmgr::config {

/// The entry in `runners.devices` of a rank without a GPU.
inline const std::string on_cpu = "cpu";

/// In the order of the enumerators.
inline constexpr std::array<std::string_view, 5> device_names = {"auto", "cpu", "cuda", "xla", "accelerator"};

constexpr std::string_view name_of(Device device) noexcept {
  return device_names.at(static_cast<std::size_t>(device));
}

}  // namespace accelmgr::config
