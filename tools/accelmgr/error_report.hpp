// Reports a failed step: a text for people, and a file (launcher/agent/report_file.hpp) beside the log for
// programs.
#pragma once

#include <filesystem>
#include <string>

#include "accelmgr/step_result.hpp"

namespace accelmgr::program {

/// Lines, the last without a line end. A headline comes first ("step 17 failed: runner_lost: ..."). Then for
/// each cause, the first cause first: the time (UTC), the process, where and how it ended, its exception
/// unless the headline has it, and its last log lines, indented.
std::string failure_text(const StepResult& failure);

/// The content of the file: an object with status, step (the failed one, counted from 1), attempt, error,
/// time (`time_s`, seconds since 1970) and causes, the first cause first. Times are UTC, ISO 8601 with
/// milliseconds. Rank -1 is the manager or the fork server.
std::string error_json(const StepResult& failure, double time_s);

/// As write_report().
void write_error_report(const std::filesystem::path& folder, const StepResult& failure) noexcept;

/// As remove_report().
void remove_error_report(const std::filesystem::path& folder) noexcept;

}  // namespace accelmgr::program
