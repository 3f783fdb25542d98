// Faults from the configuration, in builds with tests. Other builds have none.
#pragma once

#include <cstdint>

#include "accelmgr/config.hpp"
#include "base/fault_point.hpp"

namespace accelmgr::config {

/// Arms the fault points of a new process; see base::arm_faults(). `rank` is -1 in the manager.
inline void arm_faults([[maybe_unused]] const Config& config, [[maybe_unused]] int rank,
                       [[maybe_unused]] std::uint32_t generation) {
#ifdef ACCELMGR_FAULTS
  base::arm_faults(config.faults, rank, generation);
#endif
}

}  // namespace accelmgr::config
