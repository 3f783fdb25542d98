// Counters of a manager and its runners.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace accelmgr {

struct RunnerStatistics {
  int rank = 0;
  int pid = 0;                          ///< 0 while it is being replaced.
  std::uint32_t generation = 0;         ///< How many processes this rank has had.
  std::string phase{};                  ///< init, waiting, forward, backward, vote, reduce, ...
  std::uint64_t attempt = 0;            ///< The last attempt that it took part in.
  std::uint64_t samples = 0;            ///< In all committed steps.
  std::uint64_t peak_memory_bytes = 0;  ///< VmHWM.
  double start_ms = 0;                  ///< From the fork of its process until it was ready.
  double model_ms = 0;                  ///< The part of start_ms that building the model took.
};

struct Statistics {
  std::uint64_t steps = 0;  ///< Committed.
  std::uint64_t attempts = 0;
  std::uint64_t samples = 0;       ///< In all committed steps.
  std::uint64_t elements = 0;      ///< Consumed elements of the data source: `samples` and the skipped ones.
  std::uint64_t skips = 0;         ///< Attempts whose batches were left out (`on_nonfinite: skip_batch`).
  std::uint64_t replacements = 0;  ///< Runners that were started in place of lost ones.
  std::uint64_t losses = 0;        ///< Lost runners and fork servers.
  std::uint64_t parameter_version = 0;
  std::uint64_t session_bytes = 0;  ///< Shared memory of the session.
  int manager_pid = 0;
  std::uint64_t manager_peak_memory_bytes = 0;  ///< VmHWM.
  std::vector<RunnerStatistics> runners{};      ///< The team, by rank.
};

}  // namespace accelmgr
