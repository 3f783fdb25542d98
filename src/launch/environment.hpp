// The environment of a launched process.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "launch/machine.hpp"
#include "launch/plan.hpp"

namespace accelmgr::launch {

/// All of it: that of this process without what would mislead a child (proxies, what a launcher above this
/// process told it), with what says who the child is; at last what the options add.
std::map<std::string, std::string> child_environment(const Plan& plan, int local_index,
                                                     const Machine& machine);

/// The names that child_environment() sets or removes, but for the visibility variables and OMP_NUM_THREADS.
/// Those of them that are not set are not inherited.
const std::vector<std::string>& launch_variables();

}  // namespace accelmgr::launch
