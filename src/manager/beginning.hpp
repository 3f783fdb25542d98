// Parts of the beginning and the end of a manager process that all kinds of managers share.
#pragma once

#include "accelmgr/config.hpp"
#include "device/gpu_claims.hpp"

namespace accelmgr::manager {

struct ChosenDevices {
  Config config;
  device::GpuClaims claims;
};

/// Chooses the devices of the runners, if `config` leaves them open, logs them, and claims the GPUs. Call it
/// while this process has one thread. Blocks while a driver lists its GPUs. Throws ConfigError.
ChosenDevices choose_devices(const Config& config);

/// Ends the processes that user code has forked here, then this process. Does not unwind: other threads may
/// use what is on any stack.
[[noreturn]] void leave(int code);

}  // namespace accelmgr::manager
