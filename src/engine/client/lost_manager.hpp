// What the host does when its manager is gone: it ends what is left of the manager's processes, and aborts or
// finishes the attempt under way itself.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "accelmgr/step_result.hpp"
#include "engine/client/link.hpp"
#include "engine/client/outcome.hpp"
#include "engine/session/parameter_update.hpp"
#include "engine/session/reduction.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::client {

/// Used by one thread at a time.
class LostManager {
 public:
  /// Ends what is left of the processes of a manager that is gone. Blocks while they end. Returns how the
  /// manager ended, as text.
  using EndProcesses = std::function<std::string()>;
  LostManager(const session::HostView& view, const session::Manifest& manifest, Link& link,
              EndProcesses end_processes)
      : view_(view),
        session_(view.session()),
        reduction_(view, manifest),
        update_(view, manifest),
        link_(link),
        end_processes_(std::move(end_processes)) {}

  /// Ends the processes of the manager, then the attempt. Blocks while they end. Throws SessionError if a
  /// participant of a committed attempt cannot be ended.
  Outcome end(std::uint64_t attempt);
  /// Calls end() for the attempt under way if the manager is gone. Returns whether it is.
  bool end_if_lost();
  /// Of the manager that end() was called for, until there is another one.
  const std::optional<Failure>& loss() const noexcept { return loss_; }
  /// There is a new manager.
  void recovered() noexcept { loss_.reset(); }

 private:
  session::HostView view_;
  const session::Session& session_;
  session::Reduction reduction_;
  session::ParameterUpdate update_;
  Link& link_;
  EndProcesses end_processes_;
  std::optional<Failure> loss_;
};

}  // namespace accelmgr::client
