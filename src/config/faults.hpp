// Faults of the configuration, in builds with tests; nothing in others.
#pragma once

#include <cstdint>

#include "accelmgr/config.hpp"
#include "base/fault_point.hpp"

namespace accelmgr::config {

/// In a process that begins: what is to be broken in it. `rank` -1: the manager. Throws ConfigError.
inline void arm_faults([[maybe_unused]] const Config& config, [[maybe_unused]] int rank,
                       [[maybe_unused]] std::uint32_t generation) {
#ifdef ACCELMGR_FAULTS
  base::arm_faults(config.faults, rank, generation);
#endif
}

}  // namespace accelmgr::config
