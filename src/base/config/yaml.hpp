// Reads a configuration in YAML: nested maps, dotted keys, or both.
#pragma once

#include <string>
#include <vector>

#include "base/config/option.hpp"

namespace accelmgr::config {

/// One value of a source, with the option that it sets.
struct Assignment {
  const Option* option;
  std::string key;  ///< The key of the option, or of an entry if it is a map.
  RawValue value;
  std::string where;   ///< How an error names the place: `run.yaml:7`.
  std::string source;  ///< How a listing names it: `file run.yaml:7`.
};

/// Returns the values in `text`, in its order. `name` is the name of the text in errors. Throws ConfigError
/// with name and line when the text is no YAML, a key is unknown or repeated, or a section stands in the
/// place of a value or the reverse.
std::vector<Assignment> parse_yaml(const std::string& text, const std::string& name);

/// Reads a list of texts, "[a, 'b,c']". `subject` is what errors name, the key included. Throws ConfigError
/// if the text is anything else.
RawValue parse_list(const std::string& text, const std::string& subject, const std::string& key);

/// As parse_yaml(), of a file. Throws ConfigError also if the file cannot be read.
std::vector<Assignment> read_yaml(const std::string& file);

}  // namespace accelmgr::config
