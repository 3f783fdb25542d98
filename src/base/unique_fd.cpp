#include "base/unique_fd.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>

#include "accelmgr/errors.hpp"

namespace accelmgr::base {

UniqueFd duplicate(int fd) {
  UniqueFd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) throw SystemError(fmt::format("duplicating descriptor {}", fd), errno);
  return copy;
}

}  // namespace accelmgr::base
