#include "distributed/gpus.hpp"

#include <utility>

#include "launch/plan.hpp"

namespace accelmgr::distributed {

int visible_gpus() {
  auto machine = launch::this_machine();
  if (machine.gpus == 0) return 0;
  // Of the environment, what says which are visible: this process's own launch does not matter here.
  constexpr const char* visible = "CUDA_VISIBLE_DEVICES";
  std::map<std::string, std::string> environment;
  if (const auto found = machine.environment.find(visible); found != machine.environment.end())
    environment.insert(*found);
  machine.environment = std::move(environment);
  const auto plan = launch::resolve({}, machine);
  return plan.device == "gpu" ? plan.nprocs : 0;
}

}  // namespace accelmgr::distributed
