// The table of all options, from which sources, printing, validation and documentation follow, and searches
// in it.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/option.hpp"

namespace accelmgr::config {

/// In the order in which they are printed.
std::span<const Option> options();

/// The option that `key` sets: the one of that name, or the map whose entry it is (`model.options.NAME`).
/// Else null.
const Option* find_option(std::string_view key);

/// Whether `key` is a section: a part in front of options, or a map of free names.
bool is_section(std::string_view key);

/// Names of the options and sections directly in `section` ("" is the top), without its prefix.
std::vector<std::string> names_in(std::string_view section);

/// The key that was meant by an unknown one; empty when none is near: one of the same section, one of the
/// same name in another section, or the nearest of all.
std::string meant_key(const std::string& key);

/// "unknown key 'x'; did you mean 'y'?", or which keys there are in that section.
std::string unknown_key(const std::string& key);

}  // namespace accelmgr::config
