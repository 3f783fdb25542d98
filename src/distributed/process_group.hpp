// init_dist(), for callers that have bound the master's port already; launch_subprocesses(), for those that
// wait in their own way.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>

#include "accelmgr/multiprocess.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr {

/// The environment that the values of a resolved configuration describe; rank and local_rank are set. What it
/// had of another launch is removed.
void set_environment(const MultiprocessConfig& config);

/// Joins, and proves it. A backend that nobody has chosen is the one that serves these hosts.
void join_process_group(const std::optional<std::string>& backend, std::optional<double> timeout_s,
                        const std::string& init_method = "", base::UniqueFd socket = {});

/// While they run, the store at which the ranks of several hosts meet is served.
struct Subprocesses {
  std::shared_ptr<void> store;
  std::optional<launch::SpawnContext> context;  ///< None: world size 1, it has been called in place.
};
/// As launch_subprocesses(), but does not wait for them.
Subprocesses start_subprocesses(const std::variant<std::string, launch::Function>& function,
                                MultiprocessConfig config, const std::string& setup, int rank_offset,
                                const launch::Value& args);

/// What set_environment() changes is put back at the end.
class EnvironmentScope {
 public:
  EnvironmentScope();
  ~EnvironmentScope();
  EnvironmentScope(const EnvironmentScope&) = delete;
  EnvironmentScope& operator=(const EnvironmentScope&) = delete;

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> before_;
};

}  // namespace accelmgr
