#include "manager/beginning.hpp"

#include <unistd.h>

#include <algorithm>

#include "base/clock.hpp"
#include "base/log.hpp"
#include "base/timing.hpp"
#include "device/assignment.hpp"
#include "ipc/process.hpp"

namespace accelmgr::manager {

Config choose_devices(const Config& config) {
  if (!device::leaves_devices_open(config)) return config;
  const device::DriverQuestion question{.timeout_s = std::min(timing::driver_answer_s, config.start_timeout)};
  const auto assignment = device::assign_devices(config, device::this_machine(question));
  if (!assignment.why_cpu.empty())
    base::log().warn(
        "runners.device is auto, and the runners compute on the CPU, because no GPU can be used: {}",
        assignment.why_cpu);
  for (std::size_t rank = 0; rank < assignment.ranks.size(); ++rank)
    base::log().info("rank {} computes on {}", rank, assignment.ranks[rank]);
  return assignment.config;
}

void leave(int code) {
  if (getpgrp() == getpid())
    ipc::end_group_members(getpid(), base::Deadline::in_seconds(timing::group_end_s));
  _exit(code);
}

}  // namespace accelmgr::manager
