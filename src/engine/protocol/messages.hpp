// The messages between host and manager on their socket. A step needs none of them: it goes through the
// session.
//
//   host -> manager    Begin, with the session of an earlier manager if there is one; then Free, when that
//                      manager has ended. A host that attaches to a service sends neither
//   manager -> host    Opening, with the session
//   host -> manager    Noted, if it has started the manager
//   manager -> host    Started; or Failed, in its place or in that of Opening
//   host -> manager    Requests, at any time; the last is Leave, or the end of the socket
//   manager -> host    Notices, at any time; the host reads them when it next calls its manager
//
// Every message is checked here: ranks, pids, sizes, the number of descriptors. During the start an invalid
// message throws SessionError. Afterwards it is refused and the run goes on, because it may come from a newer
// or a broken peer.
//
// Functions that take a deadline block until then at most.
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

// `name` of a message is its type on the socket.

/// A runner is ready. It takes part in attempts once the host holds its pidfd.
struct Joined {
  static constexpr const char* name = "Joined";
  int rank = -1;
  std::uint32_t generation = 0;
  pid_t pid = 0;
  base::UniqueFd pidfd;
};

/// To whom a manager belongs.
enum class Tenure {
  /// It has one host, which has started it and may kill it, and it ends when that host leaves.
  of_host,
  /// Hosts come and go, and none may kill it.
  of_service,
};

/// What a manager that a host has started, or an executed fork server, is sent first.
struct Begin {
  static constexpr const char* name = "Begin";
  std::string configuration{};  ///< YAML
  /// That of an earlier manager, as session::Session::fds() returns it. Empty: a new one is to be made.
  std::vector<base::UniqueFd> session{};
  bool reads_again = false;  ///< The elements that are read ahead are read again: the data may have changed.
};

/// The session, which the host drives from now on. A new one holds the initial parameters: the host may free
/// the model that it took them from.
struct Opening {
  static constexpr const char* name = "Opening";
  Tenure tenure = Tenure::of_host;
  std::uint64_t lease = 1;      ///< Counts the hosts of the session. Requests state it.
  std::string configuration{};  ///< YAML, with the devices that the manager has chosen.
  bool needs_values = false;    ///< The host writes the parameters before it sends Noted.
  std::string run_id{};         ///< Of a service.
  /// What an earlier host left half written when it ended: "process 7 (train.py) ended while it wrote
  /// parameters". Empty: nothing.
  std::string unfinished{};
  /// How many steps an earlier host or a client did not wait for; GET /v1/pending tells of them. The host
  /// waits while they are under way. 0: there are none, or others were made since.
  int pending_steps = 0;
  /// The last checkpoint of a service: its path (empty: there is none), and its open files. A host reads
  /// there what the previous host has saved beside the model.
  std::string checkpoint{};
  base::UniqueFd state{}, training{};
  std::vector<base::UniqueFd> session{};  ///< Empty: the host has passed it with Begin.
};

/// The runners that are ready, and the fork server: all that a host needs to begin.
struct Started {
  static constexpr const char* name = "Started";
  base::UniqueFd fork_server_pidfd;
  std::vector<Joined> runners;
};

/// The start failed with an exception: its type and its text.
struct Failed {
  static constexpr const char* name = "Failed";
  std::string type;
  std::string what;
  std::string key;    ///< For ConfigError only.
  int rank = -1;      ///< For RunnerError only.
  std::string phase;  ///< For RunnerError only.
};

/// Counts the changes of these messages.
inline constexpr std::uint64_t messages_version = 6;
/// A hash of the session's layout, messages_version and the version of accelmgr. A service and those who
/// attach to it must have the same one.
std::uint64_t build_fingerprint() noexcept;

/// `session` goes in the place of begin.session. Blocks while the socket is full, at most timing::send_s.
void send_begin(int socket, const Begin& begin, const std::vector<int>& session = {});
/// Throws SessionError on the deadline, and if the peer is gone or sends something else. So do the other
/// receive functions.
Begin receive_begin(int socket, base::Deadline deadline);
/// The processes of the earlier manager have ended: nobody else works on its session.
void send_free(int socket);
void receive_free(int socket, base::Deadline deadline);

/// `session` goes in the place of opening.session. Does not block. Throws SystemError (EPIPE) if the host is
/// gone, SessionError if the socket is full.
void send_opening(int socket, const Opening& opening, const std::vector<int>& session);
/// The host has the session, and has written the parameters if the manager needs them.
void send_noted(int socket);
void receive_noted(int socket, base::Deadline deadline);
void send_started(int socket, const Started& started);
void send_failed(int socket, const std::exception& error);
std::variant<Opening, Started, Failed> receive_answer(int socket, base::Deadline deadline);
/// Throws the exception that `failed` describes.
[[noreturn]] void raise(const Failed& failed);

/// The host drives the session no more. A host of a service has given up its mappings.
struct Leave {
  static constexpr const char* name = "Leave";
};
/// The ranks 0 to `ranks` - 1 are to be the team.
struct Resize {
  static constexpr const char* name = "Resize";
  int ranks = 0;
};
/// A checkpoint to write: memfds with the images of its two files, and one with its description as JSON.
struct Save {
  static constexpr const char* name = "Save";
  std::uint64_t step = 0;
  base::UniqueFd model, training, description;
  base::UniqueFd lock{};  ///< Keeps the directory locked while it is open, also after the host's end.
  std::string missing{};  ///< Not empty: the manager had too many open descriptors to receive these.
};
using Request = std::variant<Leave, Resize, Save>;

/// Throws SystemError (EPIPE) if the manager is gone, SessionError if it does not read for timing::send_s.
void send_request(int socket, const Request& request, std::uint64_t lease);
/// An invalid request, which was taken off the socket.
struct Refused {
  std::string why;
};
/// The end of the socket.
struct Closed {};
using Received = std::variant<Leave, Closed, Resize, Save, Refused>;
/// Does not block; nullopt if there is no request. A request that states another lease than `lease` is
/// refused.
std::optional<Received> next_request(int socket, std::uint64_t lease);

/// The supervisor has started another fork server.
struct Relaunched {
  static constexpr const char* name = "Relaunched";
  base::UniqueFd pidfd;
};
/// The answer to Resize. If `refused` is not empty, the team did not change, and `refused` says why.
struct Resized {
  static constexpr const char* name = "Resized";
  std::string refused;
};
/// The answer to Save.
struct Saved {
  static constexpr const char* name = "Saved";
  std::uint64_t step = 0;
  std::string path;
  std::uint64_t bytes = 0;
  double write_ms = 0;
  std::string error;  ///< Empty if the checkpoint is on the disk.
  std::vector<std::string> warnings;
};
using Notice = std::variant<Joined, Relaunched, Resized, Saved>;

/// Does not block. False if the socket is full of notices that the host has not read: try again later. Throws
/// SystemError (EPIPE) if the host is gone.
bool send_notice(int socket, const Notice& notice);
/// Does not block; nullopt if there is no notice or the manager is gone. Logs and skips invalid notices.
std::optional<Notice> next_notice(int socket);

}  // namespace accelmgr::protocol
