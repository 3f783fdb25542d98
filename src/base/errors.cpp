#include "accelmgr/errors.hpp"

#include <fmt/format.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

#include "base/errno_text.hpp"

namespace accelmgr {

SystemError::SystemError(const std::string& what, int code)
    : Error(fmt::format("{}: {} (errno {})", what, base::errno_text(code), code)), code_(code) {}

namespace base {

std::string errno_text(int code) {
  char buffer[128];  // strerrordesc_np() needs none, and glibc 2.32.
  std::string text = strerror_r(code, buffer, sizeof buffer);
  rlimit files{};
  if (code == EMFILE && getrlimit(RLIMIT_NOFILE, &files) == 0)
    text += fmt::format(": raise ulimit -n (now {})", files.rlim_cur);
  return text;
}

bool is_shortage(int code) noexcept {
  return code == EMFILE || code == ENFILE || code == ENOMEM || code == ENOSPC || code == EDQUOT ||
         code == EAGAIN;
}

}  // namespace base
}  // namespace accelmgr
