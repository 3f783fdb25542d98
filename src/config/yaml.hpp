// The configuration as YAML: nested maps or dotted keys, both at once if one likes.
#pragma once

#include <string>
#include <vector>

#include "config/option.hpp"

namespace accelmgr::config {

/// One value of a source, its key resolved.
struct Assignment {
  const Option* option;
  std::string key;  ///< The option's, or below it when it is a map.
  RawValue value;
  std::string where;   ///< How an error names the place: `run.yaml:7`.
  std::string source;  ///< How a listing names it: `file run.yaml:7`.
};

/// The values in `text`, in its order; `name` is what errors call it. Throws ConfigError (text that is no
/// YAML, unknown or repeated keys, a section where a value belongs and the reverse) with name and line.
std::vector<Assignment> parse_yaml(const std::string& text, const std::string& name);

/// As parse_yaml(), from a file. Throws ConfigError if it cannot be read.
std::vector<Assignment> read_yaml(const std::string& file);

}  // namespace accelmgr::config
