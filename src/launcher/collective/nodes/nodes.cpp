#include "launcher/collective/nodes/nodes.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "base/ipc/address.hpp"
#include "launcher/collective/nodes/hierarchical.hpp"
#include "launcher/collective/rendezvous/rendezvous.hpp"
#include "launcher/collective/rendezvous/shared_store.hpp"
#include "launcher/collective/serial.hpp"
#include "launcher/collective/shm/factory.hpp"

namespace accelmgr::collective {
namespace {

void check(const Membership& membership) {
  if (membership.size < 1 || membership.rank < 0 || membership.rank >= membership.size)
    throw UsageError(fmt::format("rank {} is not valid in a world of {} ranks; ranks are counted from 0",
                                 membership.rank, membership.size));
  if (membership.backend != "auto" && membership.backend != "shm" && membership.backend != "gloo")
    throw ConfigError(fmt::format("unknown backend '{}'; it must be auto, shm or gloo", membership.backend));
}

void check_backend(const std::string& backend, const std::vector<std::vector<int>>& nodes) {
  if (backend == "shm" && nodes.size() > 1) {
    std::vector<std::string> lists;
    lists.reserve(nodes.size());
    for (const auto& node : nodes) lists.push_back(fmt::format("{}", fmt::join(node, ", ")));
    throw ConfigError(fmt::format(
        "backend shm is for ranks on one node, but these are on {} nodes: ranks {}; use gloo or auto",
        nodes.size(), fmt::join(lists, " | ")));
  }
}

base::UniqueFd open_world(const std::string& path) {
  base::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) throw SystemError(fmt::format("opening {}, the memory of this node's ranks", path), errno);
  return fd;
}

/// Makes the communicator of this node's ranks. The lowest of them creates its memory.
std::shared_ptr<Communicator> join_node(SharedStore& store, const std::string& name, const NodeLayout& layout,
                                        double timeout_s, base::Deadline deadline) {
  const auto& members = layout.nodes[layout.node];
  const auto key = fmt::format("{}/memory/{}", name, layout.node);
  base::UniqueFd memory;
  if (layout.local == 0) {
    // While a leader is busy on the network, the other ranks' spinning would only take cores from other work.
    const auto waiting = layout.nodes.size() > 1 ? shm::Waiting::parked : shm::Waiting::by_cores;
    memory = shm::create_world(static_cast<int>(members.size()), waiting);
    store.set(key, fmt::format("/proc/{}/fd/{}", getpid(), memory.get()));
  } else {
    memory = open_world(store.get(key, deadline));
  }
  auto local = shm::join_world(memory.get(), static_cast<int>(layout.local),
                               {.timeout_s = timeout_s, .world_ranks = members});
  // The path of the memory must stay valid until all ranks have opened it.
  const auto left_s = static_cast<double>(std::max<std::int64_t>(deadline.remaining_ns(), 1'000'000)) / 1e9;
  local->barrier({.shape = {}, .timeout_s = left_s});
  return local;
}

}  // namespace

std::vector<std::vector<int>> nodes_of(const std::vector<std::string>& keys) {
  std::vector<std::vector<int>> nodes;
  for (std::size_t rank = 0; rank < keys.size(); ++rank) {
    const auto same = [&](const auto& node) { return keys[static_cast<std::size_t>(node[0])] == keys[rank]; };
    auto node = std::ranges::find_if(nodes, same);
    if (node == nodes.end()) node = nodes.emplace(nodes.end());
    node->push_back(static_cast<int>(rank));
  }
  return nodes;
}

std::string node_key() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  const auto name_space = [](const char* kind) {
    return std::filesystem::read_symlink(fmt::format("/proc/self/ns/{}", kind)).string();
  };
  return fmt::format("{} {} {}", boot, name_space("pid"), name_space("net"));
}

std::shared_ptr<Communicator> rendezvous(Store& store, const std::string& name,
                                         const Membership& membership) {
  check(membership);
  const auto deadline = base::Deadline::in_seconds(membership.timeout_s);
  const auto shared = std::make_shared<SharedStore>(store);
  std::vector<int> ranks(static_cast<std::size_t>(membership.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  Rendezvous nodes(*shared, name + "/node", membership.timeout_s, deadline);
  const auto keys = nodes.attempt([&] { return nodes.exchange(membership.rank, ranks, membership.node); });
  NodeLayout layout(nodes_of(keys), membership.rank);
  check_backend(membership.backend, layout.nodes);
  const bool one_node = layout.nodes.size() == 1 && membership.backend != "gloo";
  const bool alone = layout.nodes[layout.node].size() == 1 && !one_node;
  Rendezvous leaders(*shared, Hierarchical::leaders_of(name), membership.timeout_s, deadline);
  auto local = alone ? make_serial(membership.rank) : leaders.attempt([&] {
    return join_node(*shared, name, layout, membership.timeout_s, deadline);
  });
  if (one_node) return local;
  Hierarchical::Setup setup{.store = shared,
                            .name = name,
                            .rank = membership.rank,
                            .ranks = std::move(ranks),
                            .address = ipc::local_address(membership.interface),
                            .timeout_s = membership.timeout_s,
                            .connect_timeout_s = membership.timeout_s,
                            .connect_by = deadline,
                            .world = name};
  return std::make_shared<Hierarchical>(std::move(setup), std::move(layout), std::move(local));
}

}  // namespace accelmgr::collective
