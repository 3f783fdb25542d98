// The parts of distributed::spawn(), init_dist() and launch_subprocesses(), for each other and for callers
// that wait for the processes in their own way.
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

/// Joins the world, selects the CUDA device, and checks the group with an all-reduce. Without `backend` the
/// environment chooses; if it does not, the default fits the nodes. `socket` as in initialize().
void join_process_group(const std::optional<std::string>& backend, std::optional<double> timeout_s,
                        const std::string& init_method, base::UniqueFd socket = {});

/// The socket that resolve() has bound at the master's port; empty if there is none, or it was taken already.
base::UniqueFd taken_port(const MultiprocessConfig& config);

/// Throws ConfigError with this key if the value is out of range: "KEY is 7; OF it must be 1 to 5".
void check_range(const char* key, int value, int least, int most, const std::string& of = "");

/// As MultiprocessConfig::resolve(), on a node with so many GPUs.
void resolve(MultiprocessConfig& config, int gpus);

/// What the ranks of start_ranks() run: it joins the world as `task` says, and calls the user's function.
/// Registered by name, because a child that executes this program again finds functions only by name.
struct RankEntry {
  using Run = launch::Value (*)(const launch::Function& function, int rank, const launch::Value& task);
  RankEntry(const char* entry_name, Run run_rank);
  std::string name;
  Run run;
};

/// Launches ranks that run the entry. With `at_store`, the ranks of several nodes meet at a store at the
/// master's address. On the first node this process serves it until the ranks have ended, at `socket` if that
/// is bound already. Throws as launch::spawn() and ipc::bind_tcp().
launch::SpawnContext start_ranks(const RankEntry& entry,
                                 const std::variant<std::string, launch::Function>& function,
                                 launch::Value task, launch::Options options, bool at_store,
                                 base::UniqueFd socket = {});

/// As launch_subprocesses(), but does not wait for the processes. nullopt: world size 1, the function ran in
/// this process.
std::optional<launch::SpawnContext> start_subprocesses(
    const std::variant<std::string, launch::Function>& function, MultiprocessConfig config,
    const std::string& setup, int rank_offset, const launch::Value& args);

/// The variables that join_as_rank() sets or removes.
std::vector<const char*> variables_of_a_rank();

}  // namespace accelmgr
