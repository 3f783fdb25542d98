// What the fuzz targets have in common. Each reads an input that libFuzzer makes from those of its corpus,
// and must take it or refuse it by name: any other exception, as that of an expect() that does not hold, a
// crash or a leak is a finding. inputs_test.cpp runs them without libFuzzer.
#pragma once

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/log.hpp"

namespace accelmgr::fuzz {

/// What no target catches ends the process, and the fuzzer keeps the input.
inline void expect(bool holds, const char* what, std::string_view shown = {}) {
  if (!holds) throw std::logic_error(fmt::format("not so: {}: {}", what, shown));
}

/// How many inputs have been refused.
inline int refused = 0;

inline std::string_view text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

/// Takes the part of `text` up to `end` off it, and `end` too.
inline std::string_view take_until(std::string_view& text, char end) {
  const auto part = text.substr(0, text.find(end));
  text.remove_prefix(part.size() < text.size() ? part.size() + 1 : part.size());
  return part;
}

/// Refusals are not written to the log: it would be most of the work.
inline const bool is_silent = [] {
  base::log().spdlog().set_level(spdlog::level::off);
  return true;
}();

}  // namespace accelmgr::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
