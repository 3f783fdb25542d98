// Reads the log of an earlier run: is it a log, and which of its lines does a resumed run keep?
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace accelmgr::program {

/// True if the file begins as a log does. Throws SystemError if it cannot be read.
bool is_log(const std::string& file);

struct Kept {
  off_t bytes = 0;
  std::int64_t last_step = 0;  ///< 0: there is none.
  bool ended = false;          ///< The last line is the one for the end of the run.
};

/// The part of its log that a run resumed after `steps` steps keeps: all lines before the first of a later
/// step, without an incomplete last line. Throws ConfigError, which says what was found, if a line does not
/// belong to a log or a counted step belongs to another run than `run_id`; SystemError if it cannot be read.
Kept kept_of_log(const std::string& file, const std::string& run_id, std::int64_t steps);

}  // namespace accelmgr::program
