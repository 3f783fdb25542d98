// The table of all options, from which sources, printing, validation and documentation follow.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/config/option.hpp"

namespace accelmgr::config {

/// All options, in the order in which they are printed.
std::span<const Option> options();

/// The option that `key` sets: the option with that key, or the map that has `key` as an entry
/// (`model.options.NAME`). Null if there is none.
const Option* find_option(std::string_view key);

/// Whether `key` is a section: a prefix of options (`optimizer`), or a map with free names.
bool is_section(std::string_view key);

/// Names of the options and sections directly in `section` ("" is the top), without the prefix.
std::vector<std::string> names_in(std::string_view section);

/// The key that an unknown one probably stands for: one in the same section, one of the same name in another
/// section, or the nearest of all. Empty if none is near.
std::string meant_key(const std::string& key);

/// Error text: "unknown key 'x'; did you mean 'y'?", or the list of the keys in that section.
std::string unknown_key(const std::string& key);

}  // namespace accelmgr::config
