// Checks with random launches that all nodes and local ranks together have every rank of the world exactly
// once, and that their variables say so.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <numeric>

#include "launcher/launch/nodes.hpp"
#include "launcher/launch/plan/child_environment.hpp"

namespace accelmgr::launch {
namespace {

std::string address_of(int node) { return "10.0.1." + std::to_string(node + 1); }

NodeInfo node_of(int node, int gpus) {
  auto node_info = gpu_node(gpus);
  node_info.hostname = "host" + std::to_string(node);
  node_info.addresses = {"127.0.0.1", address_of(node)};
  return node_info;
}

enum class Way { ips, workers, tpu_workers, node_rank, world_size };

Options options_of_node(Way way, int node, int nodes, int nprocs) {
  Options options;
  options.nprocs = nprocs;
  options.oversubscribe = true;
  std::string ips, workers, tpu_workers;
  for (int h = 0; h < nodes; ++h) {
    const std::string bar = h == 0 ? "" : "|", number = std::to_string(h);
    ips += (h == 0 ? "" : ",") + address_of(h);
    workers += bar + "w:" + number + ";" + address_of(h) + ":5000";
    tpu_workers += bar + "w;" + number + ";" + address_of(h) + ":5000";
  }
  if (way == Way::ips) options.ips = ips;
  if (way == Way::workers) options.workers = workers;
  if (way == Way::tpu_workers) options.workers = tpu_workers;
  if (way == Way::node_rank || way == Way::world_size) options.master_addr = address_of(0);
  if (way == Way::node_rank) {
    options.nnodes = nodes;
    options.node_rank = node;
  }
  if (way == Way::world_size) {
    options.world_size = nodes * nprocs;
    options.rank_offset = node * nprocs;
  }
  return options;
}

RC_GTEST_PROP(Ranks, OccurExactlyOnceEach, ()) {
  const auto way =
      *rc::gen::element(Way::ips, Way::workers, Way::tpu_workers, Way::node_rank, Way::world_size);
  const int nodes = *rc::gen::inRange(1, 6), nprocs = *rc::gen::inRange(1, 9), gpus = *rc::gen::inRange(0, 3);
  std::vector<int> ranks;
  for (int node = 0; node < nodes; ++node) {
    const auto node_info = node_of(node, gpus);
    const auto spec = resolve(options_of_node(way, node, nodes, nprocs), node_info);
    RC_ASSERT(spec.node_rank == node);
    RC_ASSERT(spec.world_size == nodes * nprocs);
    for (int i = 0; i < spec.nprocs; ++i) {
      const auto child = child_environment(spec, i, node_info);
      const auto number = [&child](const char* name) { return std::stoi(child.at(name)); };
      ranks.push_back(number("RANK"));
      for (const auto* rank : {"ACCELMGR_ORDINAL", "ACCELMGR_TRAINER_ID"})
        RC_ASSERT(number(rank) == ranks.back());
      for (const auto* rank : {"LOCAL_RANK", "ACCELMGR_LOCAL_ORDINAL"}) RC_ASSERT(number(rank) == i);
      for (const auto* size : {"WORLD_SIZE", "ACCELMGR_WORLD_SIZE", "ACCELMGR_TRAINERS_NUM"})
        RC_ASSERT(number(size) == nodes * nprocs);
      RC_ASSERT(number("LOCAL_WORLD_SIZE") == nprocs);
      RC_ASSERT(number("GROUP_RANK") == node);
      RC_ASSERT(number("GROUP_WORLD_SIZE") == nodes);
      if (way == Way::workers) {
        RC_ASSERT(spec.xla.workers.at(static_cast<std::size_t>(ranks.back())).address ==
                  (ipc::HostPort{address_of(node), 5000 + i}));
      }
    }
  }
  std::vector<int> expected(static_cast<std::size_t>(nodes * nprocs));
  std::iota(expected.begin(), expected.end(), 0);
  RC_ASSERT(ranks == expected);
}

}  // namespace
}  // namespace accelmgr::launch
