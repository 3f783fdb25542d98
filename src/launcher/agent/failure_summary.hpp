// Reports the failure of a launched program: a summary on standard error for people, and a file
// (report_file.hpp) for programs.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "accelmgr/failure.hpp"

namespace accelmgr::agent {

/// For the agents of the nodes, which exchange failures.
nlohmann::json to_json(const Failure& failure);
/// Throws nlohmann::json's exceptions if `json` is not a failure.
Failure failure_from(const nlohmann::json& json);

/// The exit code, or 128 plus the number of the signal as shells do, or 1 if there is neither.
int exit_code_of(const Failure& failure) noexcept;
/// Sets `what` and `trace` from the content of an error file (TORCHELASTIC_ERROR_FILE). torch's @record
/// writes {"message": {"message": ..., "extraInfo": {"py_callstack": ...}}} or {"message": "..."}. Any other
/// text becomes `what`.
void take_error_file(std::string_view content, Failure& failure);

struct FailureSummary {
  Failure first;                    ///< The earliest failure.
  std::vector<Failure> later = {};  ///< Processes that failed by themselves later.
  int ended = 0;                    ///< Processes that the agents ended because of the first failure.
  int attempt = 0;                  ///< Counted from 0.
  int max_restarts = 0;
  std::string report = {};  ///< Path of the file; empty: it could not be written.
};

/// Lines, the last without a line end.
std::string summary_text(const FailureSummary& summary);

/// An object with status ("failed"), exit_code, time, attempt, max_restarts, ended, first and later. Times
/// are UTC, ISO 8601 with milliseconds.
std::string summary_json(const FailureSummary& summary);

}  // namespace accelmgr::agent
