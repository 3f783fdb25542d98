#include "launcher/distributed/context/group.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "launcher/distributed/arrays/device_group.hpp"
#include "launcher/distributed/context/backends.hpp"

namespace accelmgr::distributed {
namespace {

std::vector<int> checked(std::vector<int> ranks, int world_size) {
  if (ranks.empty() && world_size > 1) throw ConfigError("a group needs at least one rank; none was given");
  std::sort(ranks.begin(), ranks.end());
  if (std::adjacent_find(ranks.begin(), ranks.end()) != ranks.end())
    throw ConfigError(fmt::format("each rank may be in a group only once, not [{}]", fmt::join(ranks, ", ")));
  for (const int rank : ranks)
    if (rank < 0 || rank >= world_size)
      throw ConfigError(fmt::format("a group cannot have rank {}: in a world of {}, ranks are 0 to {}", rank,
                                    world_size, world_size - 1));
  return ranks;
}

/// The index of `rank` in sorted `ranks`; -1 if it is not there.
int place_in(const std::vector<int>& ranks, int rank) {
  const auto found = std::lower_bound(ranks.begin(), ranks.end(), rank);
  return found == ranks.end() || *found != rank ? -1 : static_cast<int>(found - ranks.begin());
}

}  // namespace

const std::vector<int>& Group::ranks() const noexcept { return state_->ranks; }

bool Group::contains(int rank) const noexcept { return place_in(state_->ranks, rank) >= 0; }

int Group::rank() const noexcept { return state_->rank; }

int Group::size() const noexcept { return static_cast<int>(state_->ranks.size()); }

Group new_group(const std::vector<int>& ranks, const std::optional<std::string>& backend) {
  if (backend) check_backend(*backend);
  auto& context = current();
  auto state = std::make_shared<Group::State>();
  state->ranks = checked(ranks, context.world_size());
  state->rank = place_in(state->ranks, context.rank());
  state->context = context.number();
  if (state->rank >= 0) {
    // Groups are made by the world's communicator, which uses memory within a node and TCP between nodes.
    if (backend == "shm" && !context.share_node(state->ranks))
      throw ConfigError(
          fmt::format("backend 'shm' is for ranks on one node, but ranks [{}] are on several nodes",
                      fmt::join(state->ranks, ", ")));
    state->communicator = context.world()->group(state->ranks);
    if (backend) context.device_group(state->communicator, backend);
  }
  return Group(std::move(state));
}

Members members_of(const GroupArgument& argument) {
  auto& context = current();
  const bool alone = context.world_size() == 1;
  if (const auto* ranks = std::get_if<std::vector<int>>(&argument)) {
    const auto sorted = checked(*ranks, context.world_size());
    const bool outside = place_in(sorted, context.rank()) < 0;
    return {context, alone || outside ? nullptr : context.group_of(sorted)};
  }
  if (const auto* group = std::get_if<Group>(&argument)) {
    if (group->state()->context != context.number())
      throw UsageError(
          fmt::format("the group [{}] belongs to a context that has ended; make it again with new_group()",
                      fmt::join(group->ranks(), ", ")));
    return {context, alone ? nullptr : group->state()->communicator};
  }
  return {context, alone ? nullptr : context.world()};
}

}  // namespace accelmgr::distributed
