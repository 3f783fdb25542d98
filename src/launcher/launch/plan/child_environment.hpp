// The environment of a launched process.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "launcher/launch/plan/launch_spec.hpp"
#include "launcher/launch/plan/node_info.hpp"

namespace accelmgr::launch {

/// The complete environment of a child. It starts from node_info.environment, drops what would mislead the
/// child (proxies, variables of an outer launcher), adds the variables that identify the child, and last the
/// variables of the options.
std::map<std::string, std::string> child_environment(const LaunchSpec& spec, int local_index,
                                                     const NodeInfo& node_info);

/// The names that child_environment() sets or removes, except visibility variables and OMP_NUM_THREADS. A
/// child never inherits these from its launcher.
const std::vector<std::string>& launch_variables();

}  // namespace accelmgr::launch
