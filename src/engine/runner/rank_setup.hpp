// What a runner is given at its start, by its rank: its seed, its threads, the device that it sees, and what
// it may write.
#pragma once

#include <cstdint>

#include "accelmgr/config.hpp"

namespace accelmgr::runner {

/// The seed of its generators, unless it goes on with those of a predecessor.
std::uint64_t seed_of_rank(const Config& config, int rank) noexcept;

/// The number of threads that it computes with: `runners.threads`, or if that is 0 its share of the machine.
int compute_threads(const Config& config);

/// Threads of a runner that reduce gradients of so many bytes: its share of the machine, however many the
/// model computes with; 1 if that takes less time than to wake them.
int streaming_threads(const Config& config, std::uint64_t gradient_bytes);

/// The configuration of one rank, where `assigned` is one with devices (device::assign_devices()):
/// `runners.device` is cpu, cuda, xla or accelerator, what that rank computes on. A rank on a GPU may write
/// the master's parameters (`runners.protect_parameters` is false), because a driver registers no other
/// memory; its replica computes on parameters of its own.
Config config_of_rank(const Config& assigned, int rank);

/// Sets what CUDA and its libraries read from the environment of this process. Call it while the process has
/// one thread, before anything starts CUDA. If `runners.devices` of `assigned` has entries, the GPU of that
/// rank is visible alone, or none to a rank on the CPU. With `deterministic`, cuBLAS is too.
void set_environment_of_rank(const Config& assigned, int rank);

}  // namespace accelmgr::runner
