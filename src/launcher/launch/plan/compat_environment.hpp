// What torch_xla and paddle tell a launched process by variables.
#pragma once

#include <map>
#include <string>

#include "launcher/launch/plan/launch_spec.hpp"

namespace accelmgr::launch {

/// Adds the ordinals, and with a worker form the workers, to the environment of a process.
void set_torch_xla(std::map<std::string, std::string>& child, const LaunchSpec& spec, int local_index);
/// Adds trainer and endpoints.
void set_paddle(std::map<std::string, std::string>& child, const LaunchSpec& spec, int local_index);

}  // namespace accelmgr::launch
