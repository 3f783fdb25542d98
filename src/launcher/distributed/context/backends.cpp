#include "launcher/distributed/context/backends.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "accelmgr/errors.hpp"
#include "base/did_you_mean.hpp"
#include "launcher/launch/plan/resolution.hpp"

namespace accelmgr::distributed {
namespace {

std::string unavailable_because(const std::string& backend) {
  if (backend == nccl_backend && visible_gpus() == 0)
    return "it is for GPUs, and this process sees none (use shm on one node, gloo over several)";
  return "";
}

}  // namespace

int visible_gpus() {
  return static_cast<int>(launch::visible_devices(launch::device_kind("gpu"), launch::this_node()).size());
}

std::vector<std::string> available_backends() {
  std::vector<std::string> available;
  for (const auto* backend : {"shm", "gloo", nccl_backend})
    if (unavailable_because(backend).empty()) available.emplace_back(backend);
  return available;
}

void check_backend(const std::string& backend) {
  const auto available = available_backends();
  if (backend == auto_backend || std::find(available.begin(), available.end(), backend) != available.end())
    return;
  const auto why = unavailable_because(backend);
  throw ConfigError(why.empty()
                        ? fmt::format("unknown backend '{}'{}; available are: {}", backend,
                                      base::did_you_mean(backend, available), fmt::join(available, ", "))
                        : fmt::format("backend '{}' cannot be used: {}; available are: {}", backend, why,
                                      fmt::join(available, ", ")),
                    "launch.backend");
}

}  // namespace accelmgr::distributed
