// The memory in which the ranks of a launch on one host meet (collective/shm).
#pragma once

#include <string>

#include "base/unique_fd.hpp"
#include "launch/plan.hpp"

namespace accelmgr::launch {

/// None when the plan's ranks do not meet in one: on GPUs, alone. Throws SessionError when there is too
/// little memory.
base::UniqueFd make_world_memory(const Plan& plan);

/// By which other processes open a descriptor of this one, as long as it is open here.
std::string path_of(const base::UniqueFd& fd);

}  // namespace accelmgr::launch
