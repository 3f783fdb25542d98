// The parts of init_dist() and launch_subprocesses(), for callers that have already bound the master's port
// or that wait for the processes in their own way.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "accelmgr/multiprocess_launch.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr {

/// Resolves the configuration, whose rank and local_rank must be set, and joins as
/// init_process_group_from_backend() does, after it has set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
/// MASTER_ADDR and MASTER_PORT and has removed variables of another launch. Not safe while another thread
/// calls getenv(). `caller` is for the error text.
void join_as_rank(MultiprocessConfig config, const char* caller);

/// The socket that resolve() has bound at the master's port, if it did and nobody has taken it.
base::UniqueFd taken_port(const MultiprocessConfig& config);

/// As MultiprocessConfig::resolve(), on a host with so many GPUs.
void resolve(MultiprocessConfig& config, int gpus);

/// As launch_subprocesses(), but does not wait for the processes. nullopt: world size 1, the function ran in
/// this process.
std::optional<launch::SpawnContext> start_subprocesses(
    const std::variant<std::string, launch::Function>& function, MultiprocessConfig config,
    const std::string& setup, int rank_offset, const launch::Value& args);

/// The variables that join_as_rank() sets or removes.
std::vector<const char*> variables_of_a_rank();

}  // namespace accelmgr
