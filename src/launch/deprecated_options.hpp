// Options that paddle's spawn once took: each is told in terms of what took its place.
#pragma once

#include <map>
#include <string>

namespace accelmgr::launch {

/// `texts` with the present options in place of the deprecated ones, each of which is logged as a warning. A
/// present option that is there too counts more. Throws ConfigError for values that cannot be.
std::map<std::string, std::string> without_deprecated(std::map<std::string, std::string> texts,
                                                      const std::map<std::string, std::string>& environment);

}  // namespace accelmgr::launch
