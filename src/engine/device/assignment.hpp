// Which rank computes on which device. A manager that makes a session decides it once; its runners, their
// replacements, and a manager that takes the session over keep to it.
#pragma once

#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "engine/device/machine.hpp"

namespace accelmgr::device {

struct Assignment {
  /// `runners.device` is cpu, cuda or xla, nprocs a number. With cuda, `runners.devices` has a UUID or "cpu"
  /// for each rank up to the largest that a resize can ask for; otherwise it is empty.
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

/// The configuration of one rank of an assigned one: `runners.device` is cpu, cuda or xla, what that rank
/// computes on. A rank on a GPU has the master's parameters mapped to be written, so that its driver can
/// register them.
Config config_of_rank(const Config& assigned, int rank);

/// Why the gradients of that rank go through the session, and not over NCCL; empty if its GPU can be in a
/// team: at least two ranks have a whole GPU of their own, and this is one of them. Depends on its arguments
/// alone.
std::string why_in_no_team(const Config& assigned, int rank);

/// Leaves the GPU of that rank visible, or none to a rank that computes on the CPU beside others with GPUs,
/// by the environment of this process. Call it while the process has one thread, before anything starts CUDA.
/// Does nothing unless `runners.devices` of `assigned` has entries.
void show_device_of_rank(const Config& assigned, int rank);

}  // namespace accelmgr::device
