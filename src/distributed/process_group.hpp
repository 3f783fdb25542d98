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

/// Sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT from a resolved
/// configuration, whose rank and local_rank must be set. Removes variables of another launch. Not safe while
/// another thread calls getenv().
void set_environment(const MultiprocessConfig& config);

/// Joins the world, selects the CUDA device, and checks the group with an all-reduce. Without `backend` the
/// environment chooses; if it does not, the default fits the hosts. `socket` as in initialize(). Blocks until
/// all ranks are there. Throws as initialize() does.
void join_process_group(const std::optional<std::string>& backend, std::optional<double> timeout_s,
                        const std::string& init_method = "", base::UniqueFd socket = {});

/// As MultiprocessConfig::resolve(), on a host with so many GPUs.
void resolve(MultiprocessConfig& config, int gpus);

/// As launch_subprocesses(), but does not wait for the processes. nullopt: world size 1, the function ran in
/// this process.
std::optional<launch::SpawnContext> start_subprocesses(
    const std::variant<std::string, launch::Function>& function, MultiprocessConfig config,
    const std::string& setup, int rank_offset, const launch::Value& args);

/// The variables that set_environment() sets or removes.
std::vector<const char*> variables_of_a_rank();

}  // namespace accelmgr
