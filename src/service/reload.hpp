// The configuration of a service that is read again while it runs (SIGHUP).
#pragma once

#include <string>
#include <vector>

#include "accelmgr/config.hpp"

namespace accelmgr::service {

/// How a configuration differs from the one before: "runners.hang_timeout 60 -> 30".
struct Reload {
  std::vector<std::string> changed;  ///< What can change while a service runs.
  std::vector<std::string> kept;     ///< What only the next start reads.
};

Reload differences_of(const Config& before, const Config& next);
/// Copies to `config` what can change while a service runs, but for `nprocs`, which is a resize.
void take_over(Config& config, const Config& next);

}  // namespace accelmgr::service
