#include "distributed/gpus.hpp"

#include <utility>

#include "launch/launch_spec.hpp"

namespace accelmgr::distributed {

int visible_gpus() {
  auto host_info = launch::this_host();
  if (host_info.gpus == 0) return 0;
  // Only CUDA_VISIBLE_DEVICES: the variables of the launch that started this process do not matter here.
  constexpr const char* visible = "CUDA_VISIBLE_DEVICES";
  std::map<std::string, std::string> environment;
  if (const auto found = host_info.environment.find(visible); found != host_info.environment.end())
    environment.insert(*found);
  host_info.environment = std::move(environment);
  const auto spec = launch::resolve({}, host_info);
  return spec.device == "gpu" ? spec.nprocs : 0;
}

}  // namespace accelmgr::distributed
