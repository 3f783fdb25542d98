// What a handle has, for the sources that implement it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "engine/checkpoint/checkpoint.hpp"
#include "engine/client/checkpoints.hpp"
#include "engine/client/handle.hpp"
#include "engine/client/left_gradients.hpp"
#include "engine/client/opening.hpp"
#include "engine/client/single_user.hpp"
#include "engine/client/stepper.hpp"
#include "engine/session/spans.hpp"

namespace accelmgr::client {

struct Handle::State {
  /// Of a host that starts its manager.
  State(const Config& of, const StartSettings& settings);
  /// Of a host of the service with its socket at `path`.
  State(const protocol::Opening& opening, std::string path);
  ~State() { stop(); }

  using Use = SingleUser::Use;
  /// Also throws UsageError while the service makes steps in the place of this host.
  struct DrivingUse : Use {
    DrivingUse(State& state, const char* call) : Use(state.user, call) { state.check_drives(call); }
  };
  /// Also throws UsageError after stop().
  struct OpenUse : Use {
    OpenUse(State& state, const char* call) : Use(state.user, call) { state.check_open(call); }
  };

  std::uint64_t steps() const noexcept { return session->counters(session->word().index).steps; }
  void check_open(const char* call);
  void check_drives(const char* call);
  bool service_drives();
  /// Throws SessionError unless the session may have so many bytes more.
  void check_room(std::uint64_t more) const;
  void take(protocol::Opening opening);
  /// The runners are ready: this host may step.
  void drive(Link to);
  /// Starts a manager over the session. The one before has ended, or was asked to stop.
  void start_over(bool reads_again);
  void stop() noexcept;
  void end() noexcept;
  void warn_of_unwritten() noexcept;
  void detach() noexcept;
  void keep_whole() noexcept;

  Config config;
  Run run;  ///< Holds the directory lock until the processes of the manager have ended.
  Origin origin;
  SingleUser user;
  bool stopped = false;
  std::string unfinished;
  bool half_written = false;  ///< The parameters: an earlier host has died while it wrote them.
  std::string service;        ///< The path of its socket. Empty: this process has started the manager.
  std::optional<Link> link;   ///< To the process of the manager. Its address does not change.
  std::optional<checkpoint::HostFiles> saved;  ///< What an earlier host of the service has saved.
  int found_steps = 0;
  std::shared_ptr<session::Session> session;
  std::optional<session::HostView> view;
  std::optional<session::SpanWriter> spans;
  std::int64_t writing_since_ns = 0;
  session::Manifest manifest;
  std::optional<Stepper> stepper;
  std::optional<Checkpoints> checkpoints;
  std::uint64_t requests_answered = 0;  ///< Of Control::checkpoint_requests.
  bool waits_for_service = false;
  LeftGradients left = LeftGradients::none;
  bool overwrites = false;  ///< The first step does, whatever its options say.
};

}  // namespace accelmgr::client
