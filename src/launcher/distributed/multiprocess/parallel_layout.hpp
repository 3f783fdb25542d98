// Splits the world into model, pipeline and data parallel groups.
//
//   rank = (pipeline stage * data replicas + data replica) * model parallelism + model shard
#pragma once

#include <vector>

namespace accelmgr::distributed {

/// All groups of each kind, ordered by their lowest ranks. Every rank is in exactly one group of each kind.
struct ParallelLayout {
  std::vector<std::vector<int>> model;     ///< Shards of one stage of one replica.
  std::vector<std::vector<int>> pipeline;  ///< Stages of one shard of one replica.
  std::vector<std::vector<int>> data;      ///< Replicas of one shard of one stage.
};

/// Throws ConfigError if a degree is below 1 or their product does not divide the world size.
ParallelLayout parallel_layout(int world_size, int model_parallelism, int pipeline_parallelism);

}  // namespace accelmgr::distributed
