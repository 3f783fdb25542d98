// Options from texts and from the configuration.
#pragma once

#include <map>
#include <string>

#include "accelmgr/config.hpp"
#include "accelmgr/launch.hpp"

namespace accelmgr::launch {

/// options_from() of launch.hpp, with the environment that `use_paddlecloud` reads as an argument.
Options options_from(const std::map<std::string, std::string>& texts,
                     const std::map<std::string, std::string>& environment);

/// The launch part of a configuration. Throws ConfigError for a rendezvous that is no HOST:PORT.
Options options_of(const Config& config);

}  // namespace accelmgr::launch
