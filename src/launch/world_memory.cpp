#include "launch/world_memory.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include "collective/shm/factory.hpp"

namespace accelmgr::launch {

base::UniqueFd make_world_memory(const Plan& plan) {
  const bool meet = plan.backend == "shm" || (plan.backend == "gloo" && plan.nprocs > 1);
  return meet ? collective::shm::create_world(plan.nprocs) : base::UniqueFd();
}

std::string path_of(const base::UniqueFd& fd) { return fmt::format("/proc/{}/fd/{}", getpid(), fd.get()); }

}  // namespace accelmgr::launch
