#include "engine/manager/chosen_devices.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "engine/device/assignment.hpp"

namespace accelmgr::manager {

namespace {

/// Other managers may claim GPUs between the look at them and the claim.
std::pair<device::Assignment, device::GpuClaims> claim_devices(const Config& config) {
  const device::DriverQuestion question{.timeout_s = std::min(timing::driver_answer_s, config.start_timeout),
                                        .named = config.runners.devices};
  constexpr int tries = 10;
  for (int i = 0;; ++i) {
    auto assignment = device::assign_devices(config, device::this_machine(question));
    device::GpuClaims claims(assignment.config);
    if (claims.missed().empty()) return {std::move(assignment), std::move(claims)};
    if (i == tries)
      throw ConfigError(fmt::format("runners.device: another session has {} by now", claims.missed()),
                        "runners.device");
  }
}

}  // namespace

ChosenDevices choose_devices(const Config& config) {
  if (!device::leaves_devices_open(config)) return {config, device::GpuClaims(config)};
  auto [assignment, claims] = claim_devices(config);
  if (!assignment.why_cpu.empty())
    base::log().warn(
        "runners.device is auto, and the runners compute on the CPU, because no GPU can be used: {}",
        assignment.why_cpu);
  for (std::size_t rank = 0; rank < assignment.ranks.size(); ++rank)
    base::log().info("rank {} computes on {}", rank, assignment.ranks[rank]);
  return {std::move(assignment.config), std::move(claims)};
}

}  // namespace accelmgr::manager
