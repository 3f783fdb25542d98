// Logging of all processes through spdlog, to standard error: time, level, process name, step; the last lines
// also to memory that others read after this process has died. Synchronous: our processes fork.
#pragma once

#include <spdlog/spdlog.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string>

namespace accelmgr::base {

/// Names this process in every line that follows ("host", "manager", "rank 1"). Level from ACCELMGR_LOG_LEVEL
/// (spdlog's names; default `warning`). Call it once per process, before threads start; throws ConfigError on
/// an unknown level.
void start_logging(const std::string& process);

/// Besides standard error, every line of level info and above that follows goes into the ring `text`,
/// whatever standard error shows; base/log_tail.hpp says how, and reads it. Both must outlive this process,
/// or drop_log_tail(). Before or after start_logging(), while no other thread logs. A second call replaces
/// the first; a child made by fork() writes where its parent does, and must call one of the two.
void keep_log_tail(std::span<char> text, std::atomic<std::uint64_t>& written);
void drop_log_tail();

/// The step that following lines of this process carry: the one under way, counted from 1.
void set_log_step(std::uint64_t step) noexcept;
/// 0 before the first.
std::uint64_t log_step() noexcept;

/// The logger of accelmgr; usable before start_logging().
spdlog::logger& log();

}  // namespace accelmgr::base
