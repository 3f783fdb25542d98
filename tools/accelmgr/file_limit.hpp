// Checks that files can be opened, before a library fails because they cannot.
#pragma once

#include <unistd.h>

#include <vector>

#include "base/unique_fd.hpp"

namespace accelmgr::program {

/// Throws SystemError, which names the limit to raise, unless `count` more files can be opened. Without this
/// check torch's store would end the process, and the errors of boost do not name the limit.
inline void check_file_limit(int count) {
  std::vector<base::UniqueFd> opened;
  for (int i = 0; i < count; ++i) opened.push_back(base::duplicate(STDERR_FILENO));
}

}  // namespace accelmgr::program
