// What a runner gets at its start by its rank: its seed, its threads, the device that it sees, and what it
// may write.
#pragma once

#include <cstdint>

#include "accelmgr/config.hpp"

namespace accelmgr::runner {

/// The seed of a rank's generators, unless it goes on with the generators of a predecessor.
std::uint64_t seed_of_rank(const Config& config, int rank) noexcept;

/// The number of threads that a runner computes with: `runners.threads`, or if that is 0 its share of the
/// machine.
int compute_threads(const Config& config);

/// The number of threads that reduce `gradient_bytes` in a runner: its share of the machine, whatever
/// compute_threads() is; 1 if one thread is faster than waking others.
int streaming_threads(const Config& config, std::uint64_t gradient_bytes);

/// The configuration of one rank. `assigned` has devices (device::assign_devices()); in the result
/// `runners.device` is what that rank computes on: cpu, cuda, xla or accelerator. A rank on a GPU may write
/// the master's parameters (`runners.protect_parameters` is false), because a driver registers no other
/// memory; its replica computes on parameters of its own.
Config config_of_rank(const Config& assigned, int rank);

/// Sets what CUDA and its libraries read from the environment of this process. If `runners.devices` of
/// `assigned` has entries, only the GPU of that rank is visible, or none to a rank on the CPU. With
/// `deterministic`, cuBLAS is deterministic, too.
/// Requires: the process has one thread, and nothing has started CUDA.
void set_environment_of_rank(const Config& assigned, int rank);

}  // namespace accelmgr::runner
