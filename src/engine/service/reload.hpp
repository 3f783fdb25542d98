// The configuration of a service that is read again while it runs (SIGHUP).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "base/config/loader.hpp"

namespace accelmgr::service {

/// Throws ConfigError as load_config() does, and for a FIFO: nobody may write to it any more.
Config read_again(const std::string& file, std::span<const config::Setting> settings);

/// How a configuration differs from the one before: "runners.hang_timeout 60 -> 30".
struct Reload {
  std::vector<std::string> changed;  ///< What can change while a service runs.
  std::vector<std::string> kept;     ///< What only the next start reads.
};

Reload differences_of(const Config& before, const Config& next);
/// Copies to `config` what can change while a service runs, but for `nprocs`, which is a resize.
void take_over(Config& config, const Config& next);

}  // namespace accelmgr::service
