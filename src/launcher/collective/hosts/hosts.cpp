#include "launcher/collective/hosts/hosts.hpp"

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
#include "launcher/collective/hosts/hierarchical.hpp"
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

void check_backend(const std::string& backend, const std::vector<std::vector<int>>& hosts) {
  if (backend == "shm" && hosts.size() > 1) {
    std::vector<std::string> lists;
    lists.reserve(hosts.size());
    for (const auto& host : hosts) lists.push_back(fmt::format("{}", fmt::join(host, ", ")));
    throw ConfigError(fmt::format(
        "backend shm is for ranks on one host, but these are on {} hosts: ranks {}; use gloo or auto",
        hosts.size(), fmt::join(lists, " | ")));
  }
}

base::UniqueFd open_world(const std::string& path) {
  base::UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) throw SystemError(fmt::format("opening {}, the memory of this host's ranks", path), errno);
  return fd;
}

/// Makes the communicator of this node's ranks. The lowest of them creates its memory.
std::shared_ptr<Communicator> join_host(SharedStore& store, const std::string& name, const HostLayout& layout,
                                        double timeout_s, base::Deadline deadline) {
  const auto& members = layout.hosts[layout.host];
  const auto key = fmt::format("{}/memory/{}", name, layout.host);
  base::UniqueFd memory;
  if (layout.local == 0) {
    // While a leader is busy on the network, the other ranks' spinning would only take cores from other work.
    const auto waiting = layout.hosts.size() > 1 ? shm::Waiting::parked : shm::Waiting::by_cores;
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

std::vector<std::vector<int>> hosts_of(const std::vector<std::string>& keys) {
  std::vector<std::vector<int>> hosts;
  for (std::size_t rank = 0; rank < keys.size(); ++rank) {
    const auto same = [&](const auto& host) { return keys[static_cast<std::size_t>(host[0])] == keys[rank]; };
    auto host = std::ranges::find_if(hosts, same);
    if (host == hosts.end()) host = hosts.emplace(hosts.end());
    host->push_back(static_cast<int>(rank));
  }
  return hosts;
}

std::string host_key() {
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
  Rendezvous hosts(*shared, name + "/host", membership.timeout_s, deadline);
  const auto keys = hosts.attempt([&] { return hosts.exchange(membership.rank, ranks, membership.host); });
  HostLayout layout(hosts_of(keys), membership.rank);
  check_backend(membership.backend, layout.hosts);
  const bool one_host = layout.hosts.size() == 1 && membership.backend != "gloo";
  const bool alone = layout.hosts[layout.host].size() == 1 && !one_host;
  Rendezvous leaders(*shared, Hierarchical::leaders_of(name), membership.timeout_s, deadline);
  auto local = alone ? make_serial(membership.rank) : leaders.attempt([&] {
    return join_host(*shared, name, layout, membership.timeout_s, deadline);
  });
  if (one_host) return local;
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
