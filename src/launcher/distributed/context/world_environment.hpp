// The variables that describe the world to this process. Our launcher, torchrun or the user sets them.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace accelmgr::distributed {

struct Environment {
  std::optional<int> rank, world_size;
  std::optional<int> local_rank, local_world_size;
  std::optional<int> node_rank, node_count;
  std::string master_addr;          ///< Empty: not set.
  int master_port = 0;              ///< 0: not set.
  bool agent_store = false;         ///< The launcher serves the store, so rank 0 must not.
  int restart_count = 0;            ///< Set by torchrun: earlier attempts left their keys in its store.
  std::string backend;              ///< Set by our launcher; empty under another launcher.
  std::string interface;            ///< Set by our launcher, or the first of gloo's; may be empty.
  std::optional<double> timeout_s;  ///< Set by our launcher.
  std::string world_memory;         ///< Set by our launcher: path of the memory of this node's ranks.

  bool operator==(const Environment&) const = default;
  bool by_accelmgr() const noexcept { return !backend.empty() || !world_memory.empty(); }
};

/// As std::getenv(): nullptr if the variable is not set.
using Lookup = std::function<const char*(const char*)>;

/// "localhost" and the loopback addresses.
bool is_loopback(std::string_view address);

/// Throws ConfigError, which names the variable and its value, if it is not a number or is out of range (a
/// rank beyond the world).
Environment read_environment(const Lookup& lookup);
Environment read_environment();
/// True if RANK and WORLD_SIZE are set. Cheap enough to be called by every getter.
bool environment_has_ranks() noexcept;

/// The place of a process in the world. nullopt: not known yet.
struct Place {
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank, local_world_size;
  std::optional<int> node_rank, node_count;

  bool is_complete() const noexcept { return local_rank && local_world_size && node_rank && node_count; }
};

/// The place that an environment with ranks describes. If LOCAL_WORLD_SIZE is not set and MASTER_ADDR is a
/// loopback address, the world is taken to be on one node.
Place place_of(const Environment& environment);

/// The place of rank `rank`, where nodes[i] is the node of rank i. Nodes are numbered by their lowest ranks.
Place place_among(int rank, const std::vector<std::string>& nodes);

}  // namespace accelmgr::distributed
