#include <fmt/format.h>

#include "accelmgr/distributed_context.hpp"
#include "base/log.hpp"
#include "launcher/distributed/context/context.hpp"
#include "launcher/distributed/store/torch.hpp"
#include "launcher/launch/plan/node_info.hpp"

namespace accelmgr::distributed {

std::optional<std::string> backend() { return current().backend(); }

std::string model_name() { return current().model_name(); }

std::vector<std::string> registered_computation_models() {
  return {"serial", "native-dist", "accelmgr-dist"};
}

bool has_native_dist_support() { return registered_torch() != nullptr; }

bool has_xla_support() { return false; }

bool has_hvd_support() { return false; }

std::string device_name() {
  if (backend() != "nccl") return "cpu";
  const int local_rank = get_local_rank();
  return fmt::format("cuda:{}", cuda_device(local_rank).value_or(local_rank));
}

int get_rank() { return current().rank(); }

int get_world_size() { return current().world_size(); }

int get_local_rank() {
  const auto& context = current();
  if (!context.is_serial())
    if (const auto hint = local_rank_hint()) return *hint;
  return *context.whole_place().local_rank;
}

int get_nproc_per_node() { return *current().whole_place().local_world_size; }

int get_nnodes() { return *current().whole_place().node_count; }

int get_node_rank() { return *current().whole_place().node_rank; }

std::string hostname() { return launch::own_hostname(); }

void show_config() {
  auto log = base::log();
  log.info("distributed configuration: {}", model_name());
  log.info("backend: {}", backend().value_or("none"));
  log.info("device: {}", device_name());
  log.info("hostname: {}", hostname());
  log.info("world size: {}", get_world_size());
  log.info("rank: {}", get_rank());
  log.info("local rank: {}", get_local_rank());
  log.info("num processes per_node: {}", get_nproc_per_node());
  log.info("num nodes: {}", get_nnodes());
  log.info("node rank: {}", get_node_rank());
}

}  // namespace accelmgr::distributed
