#include "launcher/collective/shm/liveness.hpp"

#include <signal.h>
#include <unistd.h>

#include <cerrno>

#include "accelmgr/errors.hpp"
#include "base/ipc/process.hpp"

namespace accelmgr::collective::shm {

Identity identity_of(pid_t pid) {
  const auto began = ipc::began_at(pid);
  if (!began) return 0;
  return (*began & 0xffffffffu) << 32 | static_cast<std::uint32_t>(pid);
}

Liveness::Watched Liveness::watch(Identity identity) {
  Watched watched;
  try {
    watched.pidfd = ipc::open_pidfd(pid_of(identity));
  } catch (const SystemError& error) {
    if (error.code() != ESRCH) throw;
    watched.ended = true;
    return watched;
  }
  // The descriptor refers to whatever process has the pid now. Its start time tells whether that is the one
  // meant.
  const auto now = identity_of(pid_of(identity));
  watched.ended = now != 0 && now != identity;
  return watched;
}

bool Liveness::has_ended(Identity identity) {
  if (identity == 0 || pid_of(identity) == getpid()) return false;
  const std::scoped_lock lock(mutex_);
  auto found = watched_.find(identity);
  if (found == watched_.end()) {
    try {
      found = watched_.emplace(identity, watch(identity)).first;
    } catch (const SystemError&) {
      return kill(pid_of(identity), 0) != 0 && errno == ESRCH;  // Without a descriptor no more can be known.
    }
  }
  auto& watched = found->second;
  if (!watched.ended && ipc::has_ended(watched.pidfd.get())) {
    watched.ended = true;
    watched.pidfd.reset();
  }
  return watched.ended;
}

}  // namespace accelmgr::collective::shm
