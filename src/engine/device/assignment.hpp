// Which rank computes on which device. A manager that makes a session decides it once; its runners, their
// replacements, and a manager that takes the session over keep to it.
#pragma once

#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "engine/device/gpu_list.hpp"

namespace accelmgr::device {

struct Assignment {
  /// `runners.device` is cpu, cuda, xla or accelerator, nprocs a number. With cuda, `runners.devices` has a
  /// UUID or "cpu" for each rank up to the largest that a resize can ask for; otherwise it is empty.
  Config config;
  std::vector<std::string> ranks;  ///< The device of each of nprocs ranks, in words.
  std::string why_cpu;  ///< Not empty: `runners.device` is auto, but there is no device, for this reason.
};

/// Whether the devices of `config` depend on the machine: assign_devices() has something to do.
bool leaves_devices_open(const Config& config);

/// Chooses the devices of all ranks. Depends on its arguments alone. Throws ConfigError when a device that is
/// named is not there, when there are fewer devices than ranks that may not share them, and as
/// config::validate().
Assignment assign_devices(const Config& config, const Machine& machine);

/// Why the gradients of `rank` go through the session, and not over NCCL; empty if its GPU can be in a team:
/// at least two ranks have a whole GPU of their own, and this is one of them. Depends on its arguments alone.
std::string why_in_no_team(const Config& assigned, int rank);

}  // namespace accelmgr::device
