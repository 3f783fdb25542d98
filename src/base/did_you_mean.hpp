// The known name nearest to a mistyped one, for error messages.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace accelmgr::base {

/// The name in `known` with the least edit distance; empty if none is near enough.
std::string nearest(std::string_view name, std::span<const std::string> known);

/// "; did you mean 'meant'?", or "" if `meant` is empty.
std::string did_you_mean(std::string_view meant);
/// The same for nearest(name, known).
std::string did_you_mean(std::string_view name, std::span<const std::string> known);

}  // namespace accelmgr::base
