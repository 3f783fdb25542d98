// Logging of all processes through spdlog, to standard error: time, level, process name, step. Synchronous:
// our processes fork.
#pragma once

#include <spdlog/spdlog.h>

#include <cstdint>
#include <string>

namespace accelmgr::base {

/// Names this process in every line that follows ("host", "manager", "rank 1"). Level from ACCELMGR_LOG_LEVEL
/// (spdlog's names; default `warning`). Call it once per process, before threads start; throws ConfigError on
/// an unknown level.
void start_logging(const std::string& process);

/// The step that following lines of this process carry: the one under way, counted from 1.
void set_log_step(std::uint64_t step) noexcept;

/// The logger of accelmgr; usable before start_logging().
spdlog::logger& log();

}  // namespace accelmgr::base
