#include "backends.hpp"

#include <mutex>
#include <stdexcept>

#include "launcher/collective/nodes/nodes.hpp"
#include "launcher/collective/serial.hpp"
#include "launcher/collective/shm/factory.hpp"
#include "launcher/distributed/store/file_store.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::collective::contract {
namespace {

Backend serial() {
  return {.name = "serial",
          .sizes = {1},
          .starts = {Start::threads},
          .prepare = [](int) { return Prepared{}; },
          .join = [](const Prepared&, int, int, double) { return make_serial(); }};
}

Prepared memory_of_world(int size) {
  Prepared prepared;
  prepared.fds.push_back(shm::create_world(size));
  return prepared;
}

Backend shm() {
  return {.name = "shm",
          .sizes = {1, 2, 3, 4, 7},
          .starts = {Start::threads, Start::forked, Start::executed},
          .prepare = memory_of_world,
          .join = [](const Prepared& prepared, int rank, int, double timeout_s) {
            return shm::join_world(prepared.fds.front().get(), rank,
                                   {.timeout_s = timeout_s, .world_ranks = {}});
          }};
}

/// A store that lives until the process exits, so that it outlives all communicators.
Store& store_at(const std::string& path, double timeout_s) {
  static std::mutex mutex;
  static std::vector<std::unique_ptr<Store>> stores;
  const std::lock_guard lock(mutex);
  return *stores.emplace_back(
      std::make_unique<distributed::FileStore>(path, base::Deadline::in_seconds(timeout_s)));
}

Prepared folder_for_store(int) {
  const auto folder = std::make_shared<test::TemporaryFolder>();
  return {.fds = {}, .text = *folder / "store", .kept = folder};
}

/// Meets the other ranks in the store of `prepared`.
std::shared_ptr<Communicator> meet(const Prepared& prepared, int rank, int size, double timeout_s,
                                   const std::string& node) {
  return rendezvous(
      store_at(prepared.text, timeout_s), "world",
      {.rank = rank, .size = size, .backend = "gloo", .timeout_s = timeout_s, .interface = {}, .node = node});
}

/// Every rank counts as a node of its own: all of them communicate over gloo.
Backend gloo_threads() {
  return {.name = "gloo",
          .sizes = {1, 2, 3, 4, 7},
          .starts = {Start::threads},
          .prepare = folder_for_store,
          .join = [](const Prepared& prepared, int rank, int size, double timeout_s) {
            return meet(prepared, rank, size, timeout_s, "node of rank " + std::to_string(rank));
          }};
}

/// The same with processes; of one size, because connecting takes long.
Backend gloo_processes() {
  Backend backend = gloo_threads();
  backend.name = "gloo_processes";
  backend.sizes = {3};
  backend.starts = {Start::forked, Start::executed};
  return backend;
}

/// One node that works like one of several: it has a leader, but there are no other leaders.
Backend gloo_on_one_node() {
  Backend backend = gloo_threads();
  backend.name = "gloo_on_one_node";
  backend.sizes = {3};
  backend.join = [](const Prepared& prepared, int rank, int size, double timeout_s) {
    return meet(prepared, rank, size, timeout_s, node_key());
  };
  return backend;
}

/// Ranks of this machine that count as those of two nodes: halves, or in turn if they are odd in number. For
/// nodes that share nothing see tests/launcher/collective/two_nodes_test.cpp.
Backend gloo_on_two_nodes() {
  Backend backend = gloo_threads();
  backend.name = "gloo_on_two_nodes";
  backend.sizes = {3, 4, 5, 7};
  // Each node reduces the data of its own ranks first.
  backend.in_rank_order = false;
  // A rank hears of other nodes from its leader alone: not while the leader is late, and not before it has
  // waited for the ranks of its own node. A leader that waits for them may be named in place of the one that
  // is late.
  backend.exceptions = {"Absent.AreAllNamed", "Group.IsMadeAtASecondTryAfterOneMemberWasLate",
                        "Death.IsToldToAllEvenIfOneComesMuchLater"};
  backend.join = [](const Prepared& prepared, int rank, int size, double timeout_s) {
    const int node = size % 2 == 0 ? 2 * rank / size : rank % 2;
    return meet(prepared, rank, size, timeout_s, "node " + std::to_string(node));
  };
  return backend;
}

Backend gloo_on_two_nodes_processes() {
  Backend backend = gloo_on_two_nodes();
  backend.name = "gloo_on_two_nodes_processes";
  backend.sizes = {4};
  backend.starts = {Start::forked};
  return backend;
}

}  // namespace

std::string name_of(Start start) {
  constexpr const char* names[] = {"threads", "forked", "executed"};
  return names[static_cast<int>(start)];
}

const std::vector<Backend>& backends() {
  static const std::vector<Backend> all{serial(),
                                        shm(),
                                        gloo_threads(),
                                        gloo_processes(),
                                        gloo_on_one_node(),
                                        gloo_on_two_nodes(),
                                        gloo_on_two_nodes_processes()};
  return all;
}

const Backend& find_backend(const std::string& name) {
  for (const auto& backend : backends())
    if (backend.name == name) return backend;
  throw std::invalid_argument("no backend " + name);
}

}  // namespace accelmgr::collective::contract
