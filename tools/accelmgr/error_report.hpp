// How a failed step is reported: a text for people, and a file (report_file.hpp) for programs, beside the log
// of the run.
#pragma once

#include <filesystem>
#include <string>

#include "accelmgr/step_result.hpp"

namespace accelmgr::program {

/// Lines without a last end of line: a headline ("step 17 failed: runner_lost: ..."), then for each cause,
/// first cause first, when (UTC), who, where and how it ended, with its exception unless the headline has it,
/// and its last log lines, indented.
std::string failure_text(const StepResult& failure);

/// What the file holds: an object of status, step (the failed one, counted from 1), attempt, error, time
/// (`time_s`, since 1970) and causes, first cause first. Times are UTC, ISO 8601 with milliseconds; a rank of
/// -1 is the manager or the launcher.
std::string error_json(const StepResult& failure, double time_s);

/// As write_report().
void write_error_report(const std::filesystem::path& folder, const StepResult& failure) noexcept;

/// As remove_report().
void remove_error_report(const std::filesystem::path& folder) noexcept;

}  // namespace accelmgr::program
