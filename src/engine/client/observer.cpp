#include "engine/client/observer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/interruption.hpp"
#include "base/timing.hpp"
#include "engine/client/service_name.hpp"
#include "engine/client/service_socket.hpp"
#include "engine/client/statistics.hpp"
#include "engine/protocol/messages.hpp"
#include "engine/session/sequence_lock.hpp"
#include "engine/session/step_history.hpp"

namespace accelmgr::client {
namespace {

/// What of a session changes when parameters may have been written.
struct Moment {
  std::uint64_t attempt;
  bool closed;
  bool is_updated;  ///< The session itself writes the parameters.
  std::uint64_t lease, version;
  bool operator==(const Moment&) const = default;
  /// A host writes between its steps, and need not say so: only writing() makes the version odd. No host
  /// writes during an attempt.
  bool is_quiet() const noexcept { return version % 2 == 0 && !is_updated && (!closed || lease == 0); }
};

Moment now(const session::Session& session) noexcept {
  const auto word = session.word();
  // In this order: when a host leaves, the version advances before the lease is 0.
  const auto lease = session.control().lease.load();
  const auto& request = session.control().request;
  const bool is_updated =
      !word.closed && request.applies == session::Applies::session && word.committed(request.participants);
  return {word.attempt, word.closed, is_updated, lease, session.control().parameter_version.load()};
}

/// Waits that poll, because a host tells no process of its steps: that would cost it a system call. They wait
/// on the service's end meanwhile.
class Polling {
 public:
  explicit Polling(double timeout_s) noexcept : deadline_(base::Deadline::in_seconds(timeout_s)) {}
  /// False at the deadline. Throws SessionError if the wait is interrupted.
  bool pause(int service) {
    if (base::interrupted()) throw SessionError("interrupted while a service was observed");
    if (deadline_.passed()) return false;
    const auto soon = base::Deadline::at_ns(base::now_ns() + pause_ns_);
    pause_ns_ = std::min(2 * pause_ns_, timing::look_ns);
    ipc::wait_ended(service, base::earlier(deadline_, soon));
    return true;
  }

 private:
  base::Deadline deadline_;
  std::int64_t pause_ns_ = timing::short_look_ns;
};

}  // namespace

Observer::Observer(std::string path, ipc::Child service, session::Session session)
    : path_(std::move(path)),
      service_(std::move(service)),
      session_(std::make_unique<const session::Session>(std::move(session))),
      manifest_(session::read_manifest(*session_)),
      seen_(session::recorded_steps(*session_)) {}

Observer Observer::attach(const std::string& service, double timeout_s) {
  const auto path = socket_path(service);
  const auto deadline = base::Deadline::in_seconds(timeout_s);
  auto socket = ServiceSocket::connect(path, deadline);
  const auto answer = socket.ask("GET", "/v1/observe",
                                 fmt::format("Connection: Upgrade\r\nUpgrade: accelmgr-observer\r\n"
                                             "Accelmgr-Build: {:016x}\r\n",
                                             protocol::build_fingerprint()),
                                 "", deadline);
  if (answer.status != 101 || !answer.fd)
    throw SessionError(
        fmt::format("the service at '{}' does not admit this observer: {}", path, error_text(answer)));
  return {path, socket.take_service(), session::Session::observe(answer.fd)};
}

Statistics Observer::statistics() const { return statistics_of(*session_, service_.pid); }

std::optional<StepResult> Observer::last_step() const noexcept {
  for (;;) {
    const auto recorded = session::recorded_steps(*session_);
    if (recorded == 0) return std::nullopt;
    if (const auto record = session::step_record(*session_, recorded)) return session::result_of(*record);
  }
}

std::optional<StepResult> Observer::next_step(double timeout_s) {
  Polling polling(timeout_s);
  for (;;) {
    const bool ended = has_ended();  // Before the look: what was recorded until then is returned.
    const auto recorded = session::recorded_steps(*session_);
    while (seen_ < recorded) {
      seen_ = std::max(seen_ + 1, session::first_step_record(recorded));
      if (const auto record = session::step_record(*session_, seen_)) return session::result_of(*record);
    }
    if (ended) refuse("next_step()", "the service has ended");
    if (!polling.pause(service_.pidfd.get())) return std::nullopt;
  }
}

ParameterValues Observer::parameters(double timeout_s) const {
  const auto bytes = session_->header().bytes.parameters;
  ParameterValues copy{.values = std::shared_ptr<std::byte[]>(new std::byte[bytes])};
  Polling polling(timeout_s);
  for (;;) {
    // A host of a service that has ended may go on writing.
    if (has_ended()) refuse("parameters()", "the service has ended");
    const auto before = now(*session_);
    if (before.is_quiet()) {
      copy.version = before.version;
      copy.step = session_->counters(session_->word().index).steps;
      std::memcpy(copy.values.get(), session_->parameters(), bytes);
      session::end_copy();
      if (now(*session_) == before && !has_ended()) return copy;
    }
    if (!polling.pause(service_.pidfd.get()))
      refuse("parameters()", before.version % 2 != 0 ? "a host writes them"
                             : before.closed         ? "a host is between its steps, where it may write them"
                                             : "each copy took longer than an attempt; allow more time");
  }
}

void Observer::refuse(const std::string& what, const std::string& why) const {
  throw SessionError(fmt::format("{} of an observer of the service at '{}': {}", what, path_, why));
}

}  // namespace accelmgr::client
