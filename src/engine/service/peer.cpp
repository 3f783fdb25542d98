#include "engine/service/peer.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/ipc/process.hpp"

#ifndef SO_PEERPIDFD  // Linux 6.5
#define SO_PEERPIDFD 77
#endif
#ifndef SO_PEERGROUPS  // Linux 4.13
#define SO_PEERGROUPS 59
#endif

namespace accelmgr::service {

Peer peer_of(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0)
    throw SystemError("asking a socket for its peer", errno);
  if (credentials.pid <= 0) throw SystemError("the peer of a socket has no number here", ESRCH);
  int pidfd = -1;
  size = sizeof pidfd;
  // Kernels before 6.5 know the pid alone, which may be another process's by now.
  auto peer = getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0
                  ? base::UniqueFd(pidfd)
                  : ipc::open_pidfd(credentials.pid);
  return {credentials.pid, credentials.uid, std::move(peer)};
}

bool may_use(const Peer& peer, int socket, const Access& access) noexcept {
  if (peer.uid == geteuid()) return true;
  if (!access.group) return false;
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return false;
  if (credentials.gid == *access.group) return true;
  constexpr std::size_t most_groups = 65536;  // NGROUPS_MAX of Linux.
  std::vector<gid_t> groups(most_groups);
  size = static_cast<socklen_t>(groups.size() * sizeof(gid_t));
  if (getsockopt(socket, SOL_SOCKET, SO_PEERGROUPS, groups.data(), &size) != 0) return false;
  groups.resize(size / sizeof(gid_t));
  return std::ranges::find(groups, *access.group) != groups.end();
}

}  // namespace accelmgr::service
