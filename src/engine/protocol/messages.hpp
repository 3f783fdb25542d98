// The messages between host and manager on their socket. A step needs none of them: it goes through the
// session.
//
//   host -> manager    configuration (YAML)
//   host -> manager    Begin, with the session of an earlier manager if there is one
//   host -> manager    then says when that manager has ended
//   manager -> host    Assigned, if the session is new and the manager has chosen its devices
//   manager -> host    Prepared, if the session is new
//   host -> manager    acknowledges Prepared
//   manager -> host    Started; or Failed, in its place or in the place of an earlier answer
//   host -> manager    Requests, at any time; the last is Leave, or the end of the socket
//   manager -> host    Notices, at any time; the host reads them when it next calls its manager
//
// A host that attaches to a service does not start the manager. It gets another beginning:
//
//   manager -> host    Attached, with the session; then Started
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

/// A runner is ready. It takes part in attempts once the host holds its pidfd.
struct Joined {
  int rank = -1;
  std::uint32_t generation = 0;
  pid_t pid = 0;
  base::UniqueFd pidfd;
};

/// The devices that the manager has chosen, as values of the configuration.
struct Assigned {
  int nprocs = 0;
  std::string device;                ///< cpu, cuda, xla or accelerator
  std::vector<std::string> devices;  ///< runners.devices
};

/// The session exists and holds the initial parameters. The host may free the model that it took them from.
struct Prepared {
  std::vector<base::UniqueFd> session;  ///< As session::Session::fds() returns them.
  bool needs_values = false;            ///< The host writes the parameters before it acknowledges.
};

/// All runners are ready for the first attempt.
struct Started {
  base::UniqueFd fork_server_pidfd;
  std::vector<Joined> runners;
};

/// The start failed with an exception: its type and its text.
struct Failed {
  std::string type;
  std::string what;
  std::string key;    ///< For ConfigError only.
  int rank = -1;      ///< For RunnerError only.
  std::string phase;  ///< For RunnerError only.
};

/// The host drives the session of a service from now on.
struct Attached {
  std::string configuration{};  ///< YAML, with the devices that the service has chosen.
  std::uint64_t lease = 0;      ///< Counts the hosts that the service has admitted. Requests state it.
  std::string run_id{};
  /// What an earlier host left half written when it ended: "process 7 (train.py) ended while it wrote
  /// parameters". Empty: nothing.
  std::string unfinished{};
  /// How many steps an earlier host or a client did not wait for; GET /v1/pending tells of them. The host
  /// waits while they are under way. 0: there are none, or others were made since.
  int pending_steps = 0;
  std::vector<base::UniqueFd> session{};  ///< As session::Session::fds() returns them.
  /// The last checkpoint: its path (empty: there is none), and its open files. A host reads there what the
  /// previous host has saved beside the model.
  std::string checkpoint{};
  base::UniqueFd state{}, training{};
};

/// Counts the changes of these messages.
inline constexpr std::uint64_t messages_version = 4;
/// A hash of the session's layout, messages_version and the version of accelmgr. A service and those who
/// attach to it must have the same one.
std::uint64_t build_fingerprint() noexcept;

void send_configuration(int socket, const std::string& yaml);
/// Throws SessionError on the deadline, and if the peer is gone or sends something else. So do the other
/// receive functions.
std::string receive_configuration(int socket, base::Deadline deadline);

/// `session` has the descriptors of an earlier manager's session; it is empty for a new session.
void send_begin(int socket, const std::vector<int>& session);
std::vector<base::UniqueFd> receive_begin(int socket, base::Deadline deadline);
/// The processes of the earlier manager have ended: nobody else works on its session.
void send_free(int socket);
void receive_free(int socket, base::Deadline deadline);

void send_assigned(int socket, const Assigned& assigned);
/// Blocks until the host has called take_note_of_prepared(). Throws SessionError on the deadline, and if the
/// host is gone.
void send_prepared(int socket, const std::vector<int>& session, bool needs_values, base::Deadline deadline);
void take_note_of_prepared(int socket);
void send_started(int socket, const Started& started);
void send_failed(int socket, const std::exception& error);
std::variant<Assigned, Prepared, Started, Failed> receive_answer(int socket, base::Deadline deadline);
/// Throws the exception that `failed` describes.
[[noreturn]] void raise(const Failed& failed);

/// Sends `session` in the place of attached.session. Throws SystemError (EPIPE) if the host is gone,
/// SessionError if the socket is full. Does not block.
void send_attached(int socket, const Attached& attached, const std::vector<int>& session);
Attached receive_attached(int socket, base::Deadline deadline);

/// The host drives the session no more; one that has attached has given up its mappings.
struct Leave {};
/// The ranks 0 to `ranks` - 1 are to be the team.
struct Resize {
  int ranks = 0;
};
/// A checkpoint to write: memfds with the images of its two files, and one with its description as JSON.
struct Save {
  std::uint64_t step = 0;
  base::UniqueFd model, training, description;
  base::UniqueFd lock{};  ///< Keeps the directory locked while it is open, also after the host's end.
  std::string missing{};  ///< Not empty: the manager had too many open descriptors to receive these.
};
using Request = std::variant<Leave, Resize, Save>;

/// `lease` is the number of an attached host's lease; 0 for the host that started the manager. Throws
/// SystemError (EPIPE) if the manager is gone, SessionError if it does not read for timing::send_s.
void send_request(int socket, const Request& request, std::uint64_t lease = 0);
/// An invalid request, which was taken off the socket.
struct Refused {
  std::string why;
};
/// The end of the socket.
struct Closed {};
using Received = std::variant<Leave, Closed, Resize, Save, Refused>;
/// Does not block; nullopt if there is no request. A request that states
/// another lease than `lease` is refused.
std::optional<Received> next_request(int socket, std::uint64_t lease = 0);

/// The supervisor has started another fork server.
struct Relaunched {
  base::UniqueFd pidfd;
};
/// The answer to Resize. If `refused` is not empty, the team did not change, and `refused` says why.
struct Resized {
  std::string refused;
};
/// The answer to Save.
struct Saved {
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
