#include "launcher/distributed/multiprocess/parallel_layout.hpp"

#include <fmt/format.h>

#include <cstdint>

#include "accelmgr/errors.hpp"

namespace accelmgr::distributed {
namespace {

void check_degree(const char* name, int degree) {
  if (degree < 1) throw ConfigError(fmt::format("{} is {}; it must be 1 or more", name, degree), name);
}

}  // namespace

ParallelLayout parallel_layout(int world_size, int model_parallelism, int pipeline_parallelism) {
  check_degree("model_parallelism", model_parallelism);
  check_degree("pipeline_parallelism", pipeline_parallelism);
  const auto product = std::int64_t{model_parallelism} * pipeline_parallelism;
  if (world_size % product != 0)
    throw ConfigError(
        fmt::format(
            "model_parallelism {} times pipeline_parallelism {} is {}, which does not divide the {} ranks of "
            "the world",
            model_parallelism, pipeline_parallelism, product, world_size),
        "model_parallelism");
  const int replicas = static_cast<int>(world_size / product);
  const auto rank = [&](int stage, int replica, int shard) {
    return (stage * replicas + replica) * model_parallelism + shard;
  };
  const auto group = [](int size, const auto& rank_of) {
    std::vector<int> ranks;
    ranks.reserve(static_cast<std::size_t>(size));
    for (int i = 0; i < size; ++i) ranks.push_back(rank_of(i));
    return ranks;
  };
  ParallelLayout layout;
  for (int stage = 0; stage < pipeline_parallelism; ++stage)
    for (int replica = 0; replica < replicas; ++replica)
      layout.model.push_back(group(model_parallelism, [&](int i) { return rank(stage, replica, i); }));
  for (int replica = 0; replica < replicas; ++replica)
    for (int shard = 0; shard < model_parallelism; ++shard)
      layout.pipeline.push_back(group(pipeline_parallelism, [&](int i) { return rank(i, replica, shard); }));
  for (int stage = 0; stage < pipeline_parallelism; ++stage)
    for (int shard = 0; shard < model_parallelism; ++shard)
      layout.data.push_back(group(replicas, [&](int i) { return rank(stage, i, shard); }));
  return layout;
}

}  // namespace accelmgr::distributed
