// Options from texts and from the configuration.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "accelmgr/config.hpp"
#include "accelmgr/launch.hpp"
#include "launch/host_port.hpp"

namespace accelmgr::launch {

/// options_from() of launch.hpp, with the environment that `use_paddlecloud` reads as an argument.
Options options_from(const std::map<std::string, std::string>& texts,
                     const std::map<std::string, std::string>& environment);

/// Where the hosts meet; nullopt: launch.rendezvous is empty. On one host its port may be 0, for any. Throws
/// ConfigError for what is no HOST:PORT.
std::optional<HostPort> rendezvous_of(const LaunchConfig& launch);

/// The launch part of a configuration. Throws ConfigError as rendezvous_of() does.
Options options_of(const Config& config);

}  // namespace accelmgr::launch
