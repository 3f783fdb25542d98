// What a log of an earlier run holds: whether it is one, and where its lines end that a resumed run keeps.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace accelmgr::program {

/// Whether the file begins as a log does. Throws SystemError when it cannot be read.
bool is_log(const std::string& file);

struct Kept {
  off_t bytes = 0;
  std::int64_t last_step = 0;  ///< 0: there is none.
  bool ended = false;          ///< The last line tells the end of the run.
};

/// What a run that goes on at `steps` keeps of its log: all lines before the first of a later step, but for a
/// last one that was not written to its end. Throws ConfigError, which says what was found, when a line is
/// none of a log, or a counted step is of another run than `run_id`; SystemError when it cannot be read.
Kept kept_of_log(const std::string& file, const std::string& run_id, std::int64_t steps);

}  // namespace accelmgr::program
