// Whether files can be opened, before libraries find out that they cannot.
#pragma once

#include <unistd.h>

#include <vector>

#include "base/unique_fd.hpp"

namespace accelmgr::program {

/// Throws SystemError, which says what to raise, unless `count` more files can be opened. torch's store ends
/// the process where it can open none, and what boost says does not name the limit.
inline void check_file_limit(int count) {
  std::vector<base::UniqueFd> opened;
  for (int i = 0; i < count; ++i) opened.push_back(base::duplicate(STDERR_FILENO));
}

}  // namespace accelmgr::program
