// The process at the other end of a Unix socket, as the kernel names it.
#pragma once

#include <sys/types.h>

#include <optional>

#include "base/unique_fd.hpp"

namespace accelmgr::service {

struct Peer {
  pid_t pid = 0;
  uid_t uid = 0;
  base::UniqueFd pidfd;
};

/// Who may use a service: processes of the service's user, and those of a group if there is one.
struct Access {
  std::optional<gid_t> group{};
};

/// Throws SystemError: the process has ended, or is of another namespace.
Peer peer_of(int socket);
/// Reads the groups that the peer had when it connected.
bool may_use(const Peer& peer, int socket, const Access& access) noexcept;

}  // namespace accelmgr::service
