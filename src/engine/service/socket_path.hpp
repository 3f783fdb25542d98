// The socket at a path where a service listens.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "base/unique_fd.hpp"
#include "base/unmovable.hpp"

namespace accelmgr::service {

/// For another service that begins to listen in the same folder, which takes less than a millisecond.
inline constexpr double folder_patience_s = 5;

class SocketPath : base::Unmovable {
 public:
  /// Listens at `path`. Only this user may connect, and the members of `group` if there is one. Replaces a
  /// socket that a killed service has left. Throws ConfigError: the path is too long, another service listens
  /// there, there is something else than a socket, other users may change the folder, or another process
  /// keeps the folder locked for longer than `patience_s`. Blocks until then.
  SocketPath(const std::string& path, std::optional<gid_t> group, double patience_s = folder_patience_s);
  /// Removes the path, unless it is another service's by now.
  ~SocketPath();

  int fd() const noexcept { return fd_.get(); }
  base::UniqueFd take() noexcept { return std::move(fd_); }
  void remove() noexcept;

 private:
  std::string path_;
  base::UniqueFd fd_;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  bool removed_ = false;
};

}  // namespace accelmgr::service
