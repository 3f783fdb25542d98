// What a manager process owns: the session, its manifest, and the loader that fills its queues.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/config.hpp"
#include "base/unique_fd.hpp"
#include "engine/data/loader.hpp"
#include "engine/session/manifest.hpp"
#include "engine/session/session.hpp"
#include "engine/session/views.hpp"

namespace accelmgr::manager {

class SessionOwner {
 public:
  /// Called before slabs have memory, with a session that holds the initial values; those of the parameters
  /// only unless `needs_values`.
  using Prepared = std::function<void(const session::Session&, bool needs_values)>;

  /// Creates a session with the initial values of the model, or with those of the checkpoint that `config`
  /// resumes. Throws ConfigError, ModelError, DataError, CheckpointError, SessionError (too little memory).
  static SessionOwner make(const Config& config, const Prepared& prepared);
  /// Takes over the session of an earlier manager, and resets the fields that only that manager could
  /// maintain. Throws SessionError, DataError.
  static SessionOwner take_over(const Config& config, std::vector<base::UniqueFd> fds);

  const session::Session& session() const noexcept { return *session_; }
  session::SupervisorView view() const noexcept { return *session_; }
  session::CheckpointView checkpoint_view() const noexcept { return *session_; }
  /// For a thread of this process that drives the session in the place of a host.
  session::HostView host_view() const noexcept { return *session_; }
  const session::Manifest& manifest() const noexcept { return *manifest_; }

  /// Starts the loader on a detached thread. The thread ends with the process, because the source may block
  /// it for ever. reads_again: see data::Loading. Throws DataError.
  const data::Loader& start_loading(const Config& config, bool reads_again);

 private:
  SessionOwner(session::Session session, session::Manifest manifest, std::unique_ptr<BatchSource> source)
      : session_(std::make_unique<session::Session>(std::move(session))),
        manifest_(std::make_unique<session::Manifest>(std::move(manifest))),
        source_(std::move(source)) {}

  // On the heap: other threads hold their addresses, and this object can be moved.
  std::unique_ptr<session::Session> session_;
  std::unique_ptr<session::Manifest> manifest_;
  std::unique_ptr<BatchSource> source_;
  std::unique_ptr<data::Loader> loader_;
};

}  // namespace accelmgr::manager
