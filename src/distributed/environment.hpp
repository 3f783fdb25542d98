// What the environment of this process says about the others: set by our launcher, by torchrun, or by hand.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace accelmgr::distributed {

struct Environment {
  std::optional<int> rank, world_size;
  std::optional<int> local_rank, local_world_size;
  std::optional<int> node_rank, node_count;
  std::string master_addr;          ///< Empty: not set.
  int master_port = 0;              ///< 0: not set.
  bool agent_store = false;         ///< Whoever launched us serves the store; rank 0 must not.
  int restart_count = 0;            ///< Of torchrun: earlier attempts have left their keys in its store.
  std::string backend;              ///< Of our launcher; empty: somebody else's.
  std::optional<double> timeout_s;  ///< Of our launcher.
  std::string world_memory;         ///< Of our launcher: where the ranks of this host find their memory.

  bool operator==(const Environment&) const = default;
  bool has_ranks() const noexcept { return rank && world_size; }
  bool by_accelmgr() const noexcept { return !backend.empty() || !world_memory.empty(); }
};

/// As std::getenv(): nullptr when it is not set.
using Lookup = std::function<const char*(const char*)>;

/// Throws ConfigError, which names the variable and its value, for what is no number or cannot be (a rank
/// beyond the world).
Environment read_environment(const Lookup& lookup);
Environment read_environment();
/// Whether it has ranks, without reading more: cheap enough for every question.
bool environment_has_ranks() noexcept;

/// Where a process stands. What nobody has said yet is nullopt.
struct Place {
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank, local_world_size;
  std::optional<int> node_rank, node_count;

  bool is_complete() const noexcept { return local_rank && local_world_size && node_rank && node_count; }
  bool on_one_host() const noexcept { return node_count == 1; }
};

/// By what the environment says; it has ranks. A world that meets at a loopback address is on one host.
Place place_of(const Environment& environment);

/// Of rank `rank`, by the host of each rank: hosts are numbered by their lowest ranks.
Place place_among(int rank, const std::vector<std::string>& hosts);

}  // namespace accelmgr::distributed
