// Reports the failure of a launched program: a summary on standard error for people, and a file
// (report_file.hpp) for programs.
#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::program {

/// A failed process. The agents of the hosts exchange these.
struct RankFailure {
  int rank = -1;  ///< In the world; -1: an error of an agent, not of a process of the program.
  int local_rank = -1;
  int node_rank = 0;
  std::string host = {};
  pid_t pid = 0;
  double time_s = 0;                         ///< Seconds since 1970.
  int exit_code = 0;                         ///< 0 if a signal killed it.
  int signal = 0;                            ///< 0 if it exited.
  std::string what = {};                     ///< The message of its error file; may be empty.
  std::string trace = {};                    ///< The stack of its error file; may be empty.
  std::vector<std::string> last_lines = {};  ///< Of its standard error.
  std::string log = {};                      ///< The folder of its output; may be empty.

  bool operator==(const RankFailure&) const = default;
};
nlohmann::json to_json(const RankFailure& failure);
/// Throws nlohmann::json's exceptions if `json` is not a failure.
RankFailure failure_from(const nlohmann::json& json);

/// The exit code, or 128 plus the number of the signal as shells do, or 1 if there is neither.
int exit_code_of(const RankFailure& failure) noexcept;
/// "killed by signal 9 (KILL)", "exit code 3".
std::string how_it_ended(const RankFailure& failure);

/// Sets `what` and `trace` from the content of an error file (TORCHELASTIC_ERROR_FILE). torch's @record
/// writes {"message": {"message": ..., "extraInfo": {"py_callstack": ...}}} or {"message": "..."}. Any other
/// text becomes `what`.
void take_error_file(std::string_view content, RankFailure& failure);

struct FailureSummary {
  RankFailure first;                    ///< The earliest failure.
  std::vector<RankFailure> later = {};  ///< Processes that failed by themselves later.
  int ended = 0;                        ///< Processes that the agents ended because of the first failure.
  int attempt = 0;                      ///< Counted from 0.
  int max_restarts = 0;
  std::string report = {};  ///< Path of the file; empty: it could not be written.
};

/// Lines, the last without a line end.
std::string summary_text(const FailureSummary& summary);

/// An object with status ("failed"), exit_code, time, attempt, max_restarts, ended, first and later. Times
/// are UTC, ISO 8601 with milliseconds.
std::string summary_json(const FailureSummary& summary);

}  // namespace accelmgr::program
