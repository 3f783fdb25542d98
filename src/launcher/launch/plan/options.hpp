// Makes launch options from texts and from the configuration.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "accelmgr/config.hpp"
#include "accelmgr/launch.hpp"
#include "base/ipc/host_port.hpp"

namespace accelmgr::launch {

/// The address where the nodes meet; nullopt if launch.rendezvous is empty. On one node the port may be 0,
/// for any free port. Throws ConfigError unless it is HOST:PORT.
std::optional<ipc::HostPort> rendezvous_of(const LaunchConfig& launch);

/// Options from the launch section of a configuration. Throws as rendezvous_of().
Options options_of(const Config& config);

}  // namespace accelmgr::launch
