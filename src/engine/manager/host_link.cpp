#include "engine/manager/host_link.hpp"

#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>

#include "accelmgr/errors.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"

namespace accelmgr::manager {
namespace {

/// Checks getppid() after opening the pidfd: the pid alone could be another process's by now.
base::UniqueFd pidfd_of_parent(int socket) {
  ucred host{};
  socklen_t size = sizeof host;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &host, &size) != 0)
    throw SystemError("asking the socket for the host's pid", errno);
  auto pidfd = ipc::open_pidfd(host.pid);
  if (getppid() != host.pid) throw SessionError("the host ended before the manager began");
  return pidfd;
}

}  // namespace

HostLink::HostLink(int socket, base::UniqueFd pidfd, std::uint64_t lease)
    : socket_(socket), pidfd_(pidfd ? std::move(pidfd) : pidfd_of_parent(socket)), lease_(lease) {}

bool HostLink::is_gone() const noexcept { return ipc::is_closed(socket_) || ipc::has_ended(pidfd_.get()); }

// Not inline: g++ 12 would warn that members of other notices are uninitialized.
void HostLink::tell(protocol::Notice notice) { notices_.push_back(std::move(notice)); }

void HostLink::send_notices(const session::View& view) {
  try {
    while (!notices_.empty() && protocol::send_notice(socket_, notices_.front())) {
      notices_.pop_front();
      view.wake_for_readiness();
    }
  } catch (const SystemError& error) {
    // When the host is gone, its socket and its pidfd report it. After other errors the next call tries
    // again.
    if (ipc::peer_is_gone(error)) notices_.clear();
  }
  // Bounds the queue when the host does not read: only the newest Joined of each rank is kept.
  for (auto n = notices_.begin(); n != notices_.end();) {
    const auto* joined = std::get_if<protocol::Joined>(&*n);
    const bool stale =
        joined != nullptr && joined->generation != view.session().record(joined->rank).generation.load();
    n = stale ? notices_.erase(n) : std::next(n);
  }
}

}  // namespace accelmgr::manager
