#include "collective/shm/liveness.hpp"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "ipc/proc_file.hpp"
#include "ipc/process.hpp"

namespace accelmgr::collective::shm {
namespace {

constexpr int start_time_field = 22;  // In /proc/PID/stat, see proc(5); counted from 1.

}  // namespace

Identity identity_of(pid_t pid) {
  const auto stat = ipc::read_proc(fmt::format("/proc/{}/stat", pid));
  if (!stat) return 0;
  // The second field, the name in parentheses, may contain blanks and parentheses.
  std::string_view rest(*stat);
  rest.remove_prefix(std::min(rest.rfind(')') + 1, rest.size()));
  for (int field = 3; field < start_time_field; ++field)
    rest.remove_prefix(std::min(rest.find(' ', 1), rest.size()));
  const auto start_time = ipc::leading_number(rest);
  if (!start_time) return 0;
  return (*start_time & 0xffffffffu) << 32 | static_cast<std::uint32_t>(pid);
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
