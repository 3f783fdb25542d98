// What host and manager say to each other on their socket. Everything hot goes through the session instead.
//
//   host -> manager    configuration (YAML), once;  then "stop", or the end of the socket
//   manager -> host    one Started or Failed
#pragma once

#include <sys/types.h>

#include <exception>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::protocol {

/// The session is ready and all runners wait for the first trigger.
struct Started {
  pid_t launcher_pid = 0;
  base::UniqueFd launcher_pidfd;
  std::vector<base::UniqueFd> runner_pidfds;  ///< By rank.
  std::vector<base::UniqueFd> session;        ///< As session::Session::fds() gives them.
};

/// It could not be started: the type of the exception, and what it said.
struct Failed {
  std::string type;
  std::string what;
  std::string key;    ///< ConfigError
  int rank = -1;      ///< RunnerError
  std::string phase;  ///< RunnerError
};

void send_configuration(int socket, const std::string& yaml);
/// Throws SessionError when the host is gone.
std::string receive_configuration(int socket, base::Deadline deadline);

void send_started(int socket, const std::vector<int>& session_fds, pid_t launcher_pid, int launcher_pidfd,
                  const std::vector<int>& runner_pidfds);
void send_failed(int socket, const std::exception& error);
/// Throws SessionError on the deadline and when the manager is gone.
std::variant<Started, Failed> receive_answer(int socket, base::Deadline deadline);
/// Throws the exception that `failed` tells of.
[[noreturn]] void raise(const Failed& failed);

void send_stop(int socket) noexcept;

}  // namespace accelmgr::protocol
