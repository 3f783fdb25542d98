// Training whose processes are killed at random, and which must go on as if nobody had been.
//
// Kills come from the library of tests/faults, at its phases, and from a process that knows nothing
// (killer.hpp), at any instant. Both draw from one seed; the library's part comes again with it.
#pragma once

#include <cstdint>
#include <string>

#include "killer.hpp"

namespace accelmgr::test {

/// The registered name of the model, and of the source.
inline constexpr const char* tortured = "tortured";

struct TortureOptions {
  std::uint64_t seed = 0;
  int steps = 3000;       ///< In blocks of four, each ended by an update of the parameters.
  double injected = 100;  ///< Kills by the library that are to be expected.
  KillerOptions killer;   ///< Its seed is set.
  std::string log_file;   ///< Holds the library's kills, too; removed if nothing failed.
};

struct TortureReport {
  std::uint64_t steps = 0;  ///< That the disturbed run has committed.
  Kills killed;             ///< By the other process.
  Kills injected;           ///< By the library: "forward", "manager in_flight", ...
  std::uint64_t losses = 0;
  std::uint64_t recoveries = 0;         ///< New managers ...
  std::uint64_t failed_recoveries = 0;  ///< ... and those that were killed while they started.
  double undisturbed_s = 0, disturbed_s = 0;
  /// What differs from the undisturbed run, and after which step; an error; or what is left behind. Or empty.
  std::string failure;

  int kills() const;
};

/// First the undisturbed run, then the disturbed one, compared after every step: parameters, gradients,
/// buffers and counters. What the disturbed run's processes log goes to the log file. This process must be
/// the one that orphans of its descendants get as their parent.
TortureReport torture(const TortureOptions& options);

}  // namespace accelmgr::test
