// What host and manager say to each other on their socket. Everything hot goes through the session instead.
//
//   host -> manager    configuration (YAML); Begin: a new session, or one to go on with
//   manager -> host    of a new session: Prepared
//   host -> manager    Prepared was taken note of
//   manager -> host    one Started; or Failed, in place of it or of Prepared
//   host -> manager    Requests, at any time; the last is Stop, or the end of the socket
//   manager -> host    Notices, at any time; the host reads them when it next has to do with its manager
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::protocol {

/// A runner is ready. It takes part once the host holds its pidfd.
struct Joined {
  int rank = -1;
  std::uint32_t generation = 0;
  pid_t pid = 0;
  base::UniqueFd pidfd;
};

/// There is a session that holds the initial parameters; where these came from, they are needed no more.
struct Prepared {
  std::vector<base::UniqueFd> session;  ///< As session::Session::fds() gives them.
};

/// All runners wait for the first trigger.
struct Started {
  base::UniqueFd launcher_pidfd;
  std::vector<Joined> runners;
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
/// Throws SessionError when the peer is gone.
std::string receive_configuration(int socket, base::Deadline deadline);

/// `session`: that of an earlier manager, or nothing for a new one.
void send_begin(int socket, const std::vector<int>& session);
std::vector<base::UniqueFd> receive_begin(int socket, base::Deadline deadline);

/// Blocks until the host has taken note of it. Throws SessionError on the deadline and when the host is gone.
void send_prepared(int socket, const std::vector<int>& session, base::Deadline deadline);
void take_note_of_prepared(int socket);
void send_started(int socket, const Started& started);
void send_failed(int socket, const std::exception& error);
/// Throws SessionError on the deadline and when the manager is gone.
std::variant<Prepared, Started, Failed> receive_answer(int socket, base::Deadline deadline);
/// Throws the exception that `failed` tells of.
[[noreturn]] void raise(const Failed& failed);

struct Stop {};
/// The ranks 0 to `ranks` - 1 are to be the team.
struct Resize {
  int ranks = 0;
};
/// Memory that holds the images of a checkpoint's files, and what else belongs to it as JSON.
struct Save {
  std::uint64_t step = 0;
  base::UniqueFd model, training, description;
  base::UniqueFd lock{};  ///< Keeps the directory locked while it is open, even when the host has ended.
  std::string missing{};  ///< Why there are no descriptors: the manager has no room for them.
};
using Request = std::variant<Stop, Resize, Save>;

/// Throws SystemError (EPIPE) when the manager is gone, SessionError when it reads nothing.
void send_request(int socket, const Request& request);
/// Does not block; nullopt when there is none. The end of the socket is a Stop.
std::optional<Request> next_request(int socket);

/// There is another launcher.
struct Relaunched {
  base::UniqueFd pidfd;
};
/// The answer to Resize; `refused` says why the team stays what it was.
struct Resized {
  std::string refused;
};
/// The answer to Save.
struct Saved {
  std::uint64_t step = 0;
  std::string path;
  std::uint64_t bytes = 0;
  double write_ms = 0;
  std::string error;  ///< Empty when the checkpoint is on the disk.
  std::vector<std::string> warnings;
};
using Notice = std::variant<Joined, Relaunched, Resized, Saved>;

/// False when the host has not read so many notices that this one finds no room: try again later. Throws
/// SystemError (EPIPE) when the host is gone.
bool send_notice(int socket, const Notice& notice);
/// Does not block; nullopt when there is none, or the manager is gone.
std::optional<Notice> next_notice(int socket);

}  // namespace accelmgr::protocol
