// Who drives a session: one host at a time, whose lease has a number that is never used again, or a thread of
// the manager itself (drive_here(), of a service), for which a host waits. A manager that its host has
// started gives one lease, and ends with it.
//
// clang-format off
//   | the session is | meaning                                 | next                                         |
//   |----------------|-----------------------------------------|----------------------------------------------|
//   | free           | no host has the lease                   | driven: admit()                              |
//   | driven         | a host has the lease                    | leaving: the host detaches, closes, or ends  |
//   | leaving        | the host may still write to the session | free: its process has ended or has detached, |
//   |                | or its attempt is open                  | and its attempt is closed                    |
// clang-format on
//
// Who is refused as a host: by a service when it connects (http_server.cpp) or asks for the lease (attach()
// in actions.cpp, both in engine/service), or later by the client's assembly.cpp:
//
// clang-format off
//   | who                                        | is refused by     | with                                |
//   |--------------------------------------------|-------------------|-------------------------------------|
//   | a process of another user                  | may_use()         | not_allowed                         |
//   | one of another build, or over TCP          | check_can_share() | foreign_build, no_unix_socket       |
//   | all while the service makes awaited steps  | check_idle()      | service_drives                      |
//   | all while runners start, or after the end  | check_ready()     | not_ready, given_up, closing        |
//   | a second host                              | check_free()      | host_drives, host_is_ending         |
//   | a host whose lease has ended               | check_lease()     | SessionError                        |
// clang-format on
//
// A mapping cannot be taken back from a process. So a host that closes its socket is leaving until its
// process has ended. Only one that detaches has given up its mappings itself.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include "base/unique_fd.hpp"
#include "engine/manager/driver.hpp"
#include "engine/manager/supervisor.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::manager {

using protocol::Tenure;

/// Used by the thread of its loop, except for standing() and saved().
class Lease {
 public:
  enum class State { free, driven, leaving };
  struct Host {
    std::string name;
    pid_t pid = 0;
    base::UniqueFd pidfd;
  };
  struct Events {
    std::function<void(protocol::Save)> save;
    /// The session is free again. Tenure::of_host: the host leaves.
    std::function<void()> freed;
    /// A checkpoint was written, or failed: one of the last host's.
    std::function<void(const protocol::Saved&)> saved = [](const protocol::Saved&) {};
  };

  /// What `view` shows and `supervisor` must outlive this. `checkpoints`: `checkpoint.directory`.
  Lease(boost::asio::io_context& loop, const session::SupervisorView& view, Supervisor& supervisor,
        const std::filesystem::path& checkpoints, Tenure tenure, Events events);

  /// What others see of it.
  struct Standing {
    State state = State::free;
    std::uint64_t number = 0;
    std::string name;  ///< The host's name.
    pid_t pid = 0;
    std::string unfinished;
    /// Whether a host has the lease, or is leaving.
    bool has_host() const noexcept { return state != State::free; }
  };
  /// Any thread.
  Standing standing() const;

  State state() const noexcept { return state_; }
  bool is_driven_here() const noexcept { return over_ != nullptr; }
  /// The host that drives the session, or is leaving.
  const Host& host() const noexcept { return host_; }
  std::uint64_t number() const noexcept { return number_; }
  /// What a host that has ended left half written, as a sentence. Every host is told until one has marked a
  /// write of its own as whole (HostControl::writes). Empty: nothing.
  const std::string& unfinished() const noexcept { return unfinished_; }
  /// Whether checkpoints that were asked for are not written yet.
  bool is_saving() const noexcept { return !saves_.empty(); }
  /// How many of these the present host has asked for.
  std::size_t saves_of_host() const noexcept {
    return static_cast<std::size_t>(std::ranges::count(saves_, number_));
  }
  /// Committed steps.
  std::uint64_t steps() const noexcept;
  /// The step of the last checkpoint that was written to `checkpoint.directory`.
  std::optional<std::uint64_t> saved_step() const noexcept { return saved_step_; }

  /// Gives the lease to `host`, which has had its opening and is at the other end of `socket`.
  /// Requires: the session is free.
  void give(Host host, base::UniqueFd socket);
  /// Gives the lease to `host`. Adds lease, session and what is unfinished to `opening`. Returns the host's
  /// end of the socket, where it reads `opening` and Started. Throws SystemError, SessionError: then the
  /// session is free. While this process drives, the host must wait.
  /// Requires: the session is free, and the supervisor has started.
  base::UniqueFd admit(Host host, protocol::Opening opening);

  /// Lets a thread of this process drive. No host may do so until `over` is called: when the thread has
  /// closed its socket, and no attempt is open.
  struct Local {
    base::UniqueFd socket;
    std::uint64_t number = 0;  ///< As that of a lease.
    protocol::Started started;
  };
  Local drive_here(std::function<void()> over);

  /// The lease `number` was given to a host which did not get the message.
  void take_back(std::uint64_t number) { leave(number, /*detached=*/true); }

  /// Takes in what the host has sent before a request that comes now, and its end. What follows from that is
  /// posted to the loop.
  void catch_up() {
    if (host_driver_) host_driver_->catch_up();
  }
  /// A process asks for the lease. If it is the host that is leaving, it has given up its mappings: it has
  /// executed another program, or an attach of it has failed half-way.
  void asks_again(pid_t pid);

  /// Asks the host that drives the session for a checkpoint: see Handle::checkpoint_requested().
  void ask_for_checkpoint() noexcept { view_.control().checkpoint_requests.fetch_add(1); }
  /// Sends the host which asked for it the outcome of a checkpoint. Any thread.
  void saved(protocol::Saved saved);
  /// Sends the outcomes that the loop has not sent yet.
  void tell_of_saved();

 private:
  std::optional<Driver>& connect(std::optional<Driver>& driver, base::UniqueFd socket, base::UniqueFd pidfd,
                                 std::uint64_t number);
  void show();
  void report();
  void tell_who_drives();
  void leave(std::uint64_t number, bool detached);
  void look();
  bool host_is_gone();
  bool end_attempt();
  void note_half_written();
  void tell_saved(const protocol::Saved& saved);

  boost::asio::io_context& loop_;
  session::SupervisorView view_;
  Supervisor& supervisor_;
  std::filesystem::path checkpoints_;
  Tenure tenure_;
  Events events_;
  boost::asio::steady_timer timer_;
  State state_ = State::free;
  std::uint64_t given_;       ///< The last number; that of an earlier manager of the session counts.
  std::uint64_t number_ = 0;  ///< That of the last host.
  Host host_;
  bool detached_ = false;
  std::optional<Driver> host_driver_, own_driver_;
  std::function<void()> over_;       ///< Empty: no thread of this process drives.
  bool settles_host_later_ = false;  ///< A host has ended while a thread of this process drove.
  std::deque<std::uint64_t> saves_;  ///< The leases under which checkpoints were asked for, in order.
  std::optional<std::uint64_t> saved_step_;
  session::HalfWritten half_;
  std::uint64_t writes_before_ = 0,
                buffers_before_ = 0;  ///< HostControl's counts when the host was admitted.
  std::string unfinished_;
  mutable std::mutex mutex_;
  Standing shown_;                      ///< Guarded by the mutex.
  std::deque<protocol::Saved> untold_;  ///< Likewise.
};

}  // namespace accelmgr::manager
