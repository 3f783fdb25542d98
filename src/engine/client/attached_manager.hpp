// A manager process that serves, as a host sees it that has attached to it.
#pragma once

#include <functional>
#include <string>

#include "engine/client/link.hpp"
#include "engine/protocol/messages.hpp"

namespace accelmgr::client {

/// Used by one thread. The destructor does not detach: the owner must call detach().
class AttachedManager {
 public:
  struct Settings {
    std::string name{};        ///< How the service names this host. Empty: the name of this program.
    double patience_s = 10.0;  ///< How long to wait while the service starts, or another host is ending.
    std::function<bool()> interrupted{};
  };

  /// Becomes the host that drives the session of a service, which socket_path() finds. Blocks for at most
  /// `settings.patience_s` and a second. Throws as socket_path(), and SessionError: there is no service,
  /// another host drives the session, the service is of another build, or the wait was interrupted.
  static AttachedManager attach(const std::string& service, const Settings& settings);
  AttachedManager(AttachedManager&&) = default;
  AttachedManager& operator=(AttachedManager&&) = delete;

  Link& link() noexcept { return link_; }
  const Link& link() const noexcept { return link_; }
  /// What the service has sent. The caller takes the descriptors of the session out of it.
  protocol::Attached& attached() noexcept { return attached_; }
  /// The path of the service's socket.
  const std::string& path() const noexcept { return path_; }

  /// Lets another host drive the session. This process must have given up its mappings.
  void detach() noexcept;
  /// Call it when the manager is gone. Blocks until its fork server and its runners have ended, and kills
  /// those that do not end by themselves. Returns how the manager ended, as text.
  std::string end() noexcept;

 private:
  AttachedManager(std::string path, Link link, protocol::Attached attached)
      : path_(std::move(path)), link_(std::move(link)), attached_(std::move(attached)) {}

  std::string path_;
  Link link_;
  protocol::Attached attached_;
};

}  // namespace accelmgr::client
