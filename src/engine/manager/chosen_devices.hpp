// How a manager process chooses the devices of its runners.
#pragma once

#include "accelmgr/config.hpp"
#include "engine/device/gpu_claims.hpp"

namespace accelmgr::manager {

struct ChosenDevices {
  Config config;
  device::GpuClaims claims;
};

/// Chooses the devices of the runners, if `config` leaves them open, logs them, and claims the GPUs. Call it
/// while this process has one thread. Blocks while a driver lists its GPUs. Throws ConfigError.
ChosenDevices choose_devices(const Config& config);

}  // namespace accelmgr::manager
