// How the failure of a launched program is reported: one summary for people, on standard error, and a file
// (report_file.hpp) for programs.
#pragma once

#include <sys/types.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::program {

/// One process that failed, as the agents of all hosts tell each other.
struct RankFailure {
  int rank = -1;  ///< In the world; -1: no process of the program's, but what the agents themselves met.
  int local_rank = -1;
  int node_rank = 0;
  std::string host = {};
  pid_t pid = 0;
  double time_s = 0;                         ///< Since 1970.
  int exit_code = 0;                         ///< 0 when a signal killed it.
  int signal = 0;                            ///< 0 when it exited.
  std::string what = {};                     ///< What it wrote into its error file; empty: nothing.
  std::string trace = {};                    ///< From there too.
  std::vector<std::string> last_lines = {};  ///< Of its standard error.
  std::string log = {};                      ///< The folder of its output; empty: there is none.

  bool operator==(const RankFailure&) const = default;
};
nlohmann::json to_json(const RankFailure& failure);
/// Throws what nlohmann::json throws for text that is no such thing.
RankFailure failure_from(const nlohmann::json& json);

/// As shells say it: the exit code, 128 and the number of the signal, 1 where there is neither.
int exit_code_of(const RankFailure& failure) noexcept;
/// "killed by signal 9 (KILL)", "exit code 3".
std::string how_it_ended(const RankFailure& failure);

/// Fills in `what` and `trace` from the content of an error file (TORCHELASTIC_ERROR_FILE), as torch's
/// @record writes it: {"message": {"message": ..., "extraInfo": {"py_callstack": ...}}}, or {"message": "..."
/// }. Any other text is `what` itself.
void take_error_file(std::string_view content, RankFailure& failure);

struct FailureSummary {
  RankFailure first;                    ///< In time.
  std::vector<RankFailure> later = {};  ///< Of themselves, not because they were ended.
  int ended = 0;                        ///< Processes that were ended because of it.
  int attempt = 0;                      ///< From 0.
  int max_restarts = 0;
  std::string report = {};  ///< Where the file is; empty: it could not be written.
};

/// Lines without a last end of line.
std::string summary_text(const FailureSummary& summary);

/// An object of status ("failed"), exit_code, time, attempt, max_restarts, ended, first and later. Times are
/// UTC, ISO 8601 with milliseconds.
std::string summary_json(const FailureSummary& summary);

}  // namespace accelmgr::program
