// Trains while processes are killed at random, and checks that the result is that of an undisturbed run.
//
// Kills come from the fault library of tests/engine/faults, at its phases, and from a killer process
// (killer.hpp), at any instant. Both draw from one seed. Only the library's kills are the same in every run
// with that seed.
#pragma once

#include <cstdint>
#include <string>

#include "torture_course.hpp"

namespace accelmgr::test {

struct TortureOptions {
  std::uint64_t seed = 0;
  int steps = 3000;       ///< In blocks of four; each block ends with an update of the parameters.
  double injected = 100;  ///< The expected number of kills by the library.
  KillerOptions killer;   ///< torture() sets its seed.
  std::string log_file;   ///< Has the library's kills too; removed if nothing failed.
};

struct TortureReport : RoundReport {
  std::uint64_t recoveries = 0;         ///< New managers that started.
  std::uint64_t failed_recoveries = 0;  ///< Starts of a new manager that failed.

  int kills() const;
};

/// Makes the undisturbed run, then the disturbed one, and compares parameters, gradients, buffers and
/// counters after every step. Processes of the disturbed run log to the log file. Orphans of this process's
/// descendants must become its children.
TortureReport torture(const TortureOptions& options);

}  // namespace accelmgr::test
