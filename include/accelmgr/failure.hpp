// How a process failed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace accelmgr {

/// The failure of one process: of a session, as the supervisor or the host found it, or of a launch, as the
/// process itself or the fork server reported it. A field that is not known is empty, 0 or -1.
struct Failure {
  double time_s = 0;  ///< Since 1970, UTC.
  int rank = -1;      ///< -1: the fork server, the manager, or an agent of `accelmgr spawn`.
  int pid = 0;
  int exit_code = 0;               ///< 0 when a signal killed it.
  int signal = 0;                  ///< 0 when it exited.
  std::string exit{};              ///< How it ended, in words: "killed by signal 9 (KILL)", "exit code 17".
  std::string phase{};             ///< What it was doing; in a launch "setup", "function" or "start".
  std::string type{};              ///< Name of the exception's type.
  std::string what{};              ///< Its exception, or why it was killed.
  std::string trace{};             ///< Nested exceptions, outermost first; for Python, the traceback.
  std::vector<std::string> log{};  ///< Last lines of its log (session) or of its standard error (launch).

  // Only for a session.
  std::uint64_t step = 0;     ///< The step in progress, counted from 1.
  std::uint64_t attempt = 0;  ///< The last attempt that the process took part in.

  // Only for a launch over several nodes.
  int local_rank = -1;
  int node_rank = 0;
  std::string hostname{};
  std::string log_folder{};  ///< Where its output is.

  bool operator==(const Failure&) const = default;
};

}  // namespace accelmgr
