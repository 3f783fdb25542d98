#include "launcher/distributed/context/join.hpp"

#include <fcntl.h>
#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <tuple>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/interruption.hpp"
#include "base/ipc/host_port.hpp"
#include "launcher/collective/nodes/nodes.hpp"
#include "launcher/collective/rendezvous/shared_store.hpp"
#include "launcher/collective/serial.hpp"
#include "launcher/collective/shm/factory.hpp"
#include "launcher/distributed/context/backends.hpp"
#include "launcher/distributed/store/file_store.hpp"
#include "launcher/distributed/store/tcp_store.hpp"

namespace accelmgr::distributed {
namespace {

constexpr std::string_view env_method = "env://", tcp_method = "tcp://", file_method = "file://";

bool meets_by_environment(const JoinRequest& request) { return is_by_environment(request.init_method); }

ipc::HostPort address_in(const std::string& tcp) {
  try {
    return ipc::parse_host_port(std::string_view(tcp).substr(tcp_method.size()));
  } catch (const ConfigError& error) {
    throw ConfigError(fmt::format("init_method '{}': {}", tcp, error.what()), "init_method");
  }
}

/// True if our launcher made memory for exactly this world, which must be on one node.
bool has_world_memory(const JoinRequest& request) {
  const auto& environment = request.environment;
  return meets_by_environment(request) && !environment.world_memory.empty() &&
         environment.local_world_size == request.place.world_size && environment.rank == request.place.rank;
}

ipc::HostPort address_of_master(const JoinRequest& request) {
  if (!meets_by_environment(request)) return address_in(request.init_method);
  const auto& environment = request.environment;
  for (const auto& [name, missing] : {std::pair{"MASTER_ADDR", environment.master_addr.empty()},
                                      std::pair{"MASTER_PORT", environment.master_port == 0}})
    if (missing)
      throw ConfigError(fmt::format(
          "{} is not set: the {} ranks cannot find each other. A launcher sets it (accelmgr spawn, "
          "torchrun); or pass init_method tcp://HOST:PORT or file:///PATH",
          name, request.place.world_size));
  return {environment.master_addr, environment.master_port};
}

std::string path_in(const std::string& file) { return file.substr(file_method.size()); }

std::shared_ptr<collective::Store> open_store(JoinRequest& request, base::Deadline deadline) {
  if (request.init_method.starts_with(file_method))
    return std::make_shared<FileStore>(path_in(request.init_method), deadline);
  const auto address = address_of_master(request);
  // Rank 0 serves it as long as it is in the world, unless the launcher does.
  const bool by_rank_0 = !meets_by_environment(request) || !request.environment.agent_store;
  if (request.place.rank == 0 && by_rank_0)
    return TcpStore::serve(request.socket ? std::move(request.socket)
                                          : ipc::bind_tcp(address.host, address.port));
  try {
    return TcpStore::connect(address.host, address.port, deadline);
  } catch (const SessionError& error) {
    throw CollectiveError(fmt::format("{} ({})", error.what(),
                                      by_rank_0 ? "rank 0 serves it, and is missing"
                                                : "the process that launched the ranks serves it"),
                          CollectiveError::Cause::timeout, by_rank_0 ? std::vector{0} : std::vector<int>{});
  }
}

std::string meeting_place(const JoinRequest& request) {
  return meets_by_environment(request) ? ipc::text(address_of_master(request)) : request.init_method;
}

Joined join_memory(const JoinRequest& request) {
  const auto& path = request.environment.world_memory;
  const base::UniqueFd memory(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!memory)
    throw SessionError(
        fmt::format("ACCELMGR_WORLD_MEMORY={}: the memory of the world cannot be opened ({}); has "
                    "the process that launched this one ended?",
                    path, std::strerror(errno)));
  auto world =
      collective::shm::join_world(memory.get(), request.place.rank, {.timeout_s = request.timeout_s});
  return {nullptr, std::move(world), request.place, {}};
}

// A store may outlive a world or a failed rendezvous, whose keys stay in it. The store of torchrun's agent
// outlives whole programs (`sh -c 'a; b'`). So rank 0 gives each rendezvous a new name. The other ranks find
// it, and each takes its seat there, once: a rank of `b` that is early finds its seat in the world of `a`
// taken.
//
//   PREFIX/last     the newest name
//   NAME/next       the name after NAME
//   NAME/over       rank 0 has given up NAME: no other rank needs to try it
//   NAME/seat/RANK  how many processes have tried NAME as this rank
std::string name_world(collective::Store& store, const std::string& prefix, base::Deadline deadline) {
  const auto last = prefix + "/last";
  const auto before = store.has(last) ? store.get(last, deadline) : std::string();
  std::random_device random;
  auto name = fmt::format("{}/world_{:08x}{:08x}", prefix, random(), random());
  store.set(last, name);
  if (!before.empty()) store.set(before + "/next", name);
  return name;
}

/// Blocks until there is a name where the seat of `rank` is free and that rank 0 has not given up.
std::string find_world(collective::Store& store, const std::string& prefix, int rank,
                       base::Deadline deadline) {
  collective::SharedStore interruptible(store);
  for (auto name = interruptible.get(prefix + "/last", deadline);;
       name = interruptible.get(name + "/next", deadline)) {
    const bool is_free = store.add(fmt::format("{}/seat/{}", name, rank), 1) == 1;
    if (is_free && !store.has(name + "/over")) return name;
  }
}

void give_up_world(collective::Store& store, const std::string& name) {
  try {
    store.set(name + "/over", "");
  } catch (const SessionError&) {
    // The store is gone, and the name with it.
  }
}

/// The store, and the name of this rendezvous in it.
std::pair<std::shared_ptr<collective::Store>, std::string> find_store_and_world(JoinRequest& request) {
  const auto prefix = fmt::format("accelmgr/attempt_{}", request.environment.restart_count);
  const auto deadline = base::Deadline::in_seconds(request.timeout_s);
  for (;;) {
    auto store = open_store(request, deadline);
    try {
      if (request.place.rank == 0) return {store, name_world(*store, prefix, deadline)};
      return {store, find_world(*store, prefix, request.place.rank, deadline)};
    } catch (const SessionError&) {
      // This may have been the store of the previous world, or of the previous launch, which has ended. Rank
      // 0, or the process that launches it, will serve a new one there.
      if (request.place.rank == 0 || request.init_method.starts_with(file_method) || deadline.passed() ||
          base::interrupted())
        throw;
    } catch (const CollectiveError&) {
      throw CollectiveError(
          fmt::format("rank 0 did not join the rendezvous within {:g} s (the ranks meet at {})",
                      request.timeout_s, meeting_place(request)),
          CollectiveError::Cause::timeout, {0});
    }
  }
}

Joined join_through_store(JoinRequest request) {
  const auto where = meeting_place(request);
  Joined joined;
  std::string name;
  std::tie(joined.store, name) = find_store_and_world(request);
  try {
    joined.world =
        collective::rendezvous(*joined.store, name,
                               {.rank = request.place.rank,
                                .size = request.place.world_size,
                                .backend = request.backend == nccl_backend ? auto_backend : request.backend,
                                .timeout_s = request.timeout_s,
                                .interface = request.environment.interface});
    // Also a barrier: no rank leaves, and rank 0 does not end the store, before all have read from it.
    joined.nodes = joined.world->all_gather_objects(collective::node_key());
  } catch (const CollectiveError& error) {
    if (request.place.rank == 0) give_up_world(*joined.store, name);
    throw CollectiveError(fmt::format("{} (the ranks meet at {})", error.what(), where), error.cause(),
                          error.ranks());
  }
  joined.place = request.place.is_complete() ? request.place : place_among(request.place.rank, joined.nodes);
  return joined;
}

}  // namespace

bool is_by_environment(const std::string& init_method) {
  return init_method.empty() || init_method == env_method;
}

void check_init_method(const std::string& init_method) {
  if (is_by_environment(init_method)) return;
  if (init_method.starts_with(tcp_method)) {
    address_in(init_method);
  } else if (!init_method.starts_with(file_method)) {
    throw ConfigError(fmt::format("init_method '{}' is unknown; it must be env://, tcp://HOST:PORT or "
                                  "file:///PATH",
                                  init_method),
                      "init_method");
  } else if (const auto path = path_in(init_method); !path.starts_with('/') || path.size() < 2) {
    throw ConfigError(
        fmt::format("init_method '{}': the path of the file must be absolute, as file:///PATH", init_method),
        "init_method");
  }
}

Joined join(JoinRequest request) {
  check_init_method(request.init_method);
  if (request.place.world_size == 1)
    return {nullptr, collective::make_serial(), place_among(0, {collective::node_key()}), {}};
  if (has_world_memory(request)) return join_memory(request);
  return join_through_store(std::move(request));
}

}  // namespace accelmgr::distributed
