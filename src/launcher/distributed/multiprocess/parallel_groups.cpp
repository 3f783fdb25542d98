#include <algorithm>

#include "accelmgr/multiprocess_launch.hpp"
#include "launcher/distributed/context/context.hpp"
#include "launcher/distributed/multiprocess/parallel_layout.hpp"

namespace accelmgr {
namespace {

struct Made {
  std::uint64_t context;
  ParallelGroups groups;
};
std::optional<Made> made;

distributed::Group own_group(const std::vector<std::vector<int>>& groups, int rank,
                             const std::optional<std::string>& backend) {
  const auto own = std::find_if(groups.begin(), groups.end(), [rank](const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  });
  return distributed::new_group(*own, backend);
}

}  // namespace

ParallelGroups init_parallelism(int model_parallelism, int pipeline_parallelism,
                                const std::optional<std::string>& model_backend,
                                const std::optional<std::string>& pipeline_backend,
                                const std::optional<std::string>& data_backend) {
  const auto& context = distributed::current();
  const int rank = context.rank();
  const auto layout =
      distributed::parallel_layout(context.world_size(), model_parallelism, pipeline_parallelism);
  // All ranks make groups of one kind before those of the next, so that ranks cannot wait for each other in a
  // circle.
  auto model = own_group(layout.model, rank, model_backend);
  auto pipeline = own_group(layout.pipeline, rank, pipeline_backend);
  auto data = own_group(layout.data, rank, data_backend);
  made.emplace(Made{context.number(), {std::move(model), std::move(pipeline), std::move(data)}});
  return made->groups;
}

const ParallelGroups& parallel_groups() {
  if (!made || made->context != distributed::current().number())
    throw UsageError("parallel_groups(): this context has none; call init_parallelism() first");
  return made->groups;
}

}  // namespace accelmgr
