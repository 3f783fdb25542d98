// Training of one model by several processes: their configuration, resolved once; the process group, proved
// to work; groups of model, pipeline and data parallel ranks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/distributed.hpp"
#include "accelmgr/model.hpp"

namespace accelmgr {

struct MultiprocessConfig {
  int rank = -1;
  int local_rank = -1;
  std::optional<int> world_size{};        ///< Resolved: the GPUs, or 1.
  std::optional<int> local_world_size{};  ///< Resolved: processes of this host.
  std::string master_addr = "127.0.0.1";
  std::optional<int> master_port{};  ///< Resolved: the first free one from 29500 on, bound already.
  std::string init_method = "env://";
  int model_parallelism = 1;
  int pipeline_parallelism = 1;
  std::optional<std::string>
      backend{};  ///< Here and below, nullopt: that of the line above, at last get_distributed_backend().
  std::optional<std::string> model_parallel_backend{};
  std::optional<std::string> pipeline_parallel_backend{};
  std::optional<std::string> data_parallel_backend{};
  launch::StartMethod launch_method = launch::StartMethod::forkserver;

  /// Fills in what is missing. Throws ConfigError for what cannot be (nprocs 0, degrees that do not divide
  /// the world).
  static void resolve(MultiprocessConfig& config);
  /// "key = value" lines.
  std::string text() const;
  /// Of the `launch` part of a configuration.
  static MultiprocessConfig of(const Config& config);

  std::shared_ptr<void> bound_port{};  ///< Keeps the resolved port bound until the store listens on it.
};

std::string default_backend();  ///< nccl with a GPU, else shm.
/// $ACCELMGR_DISTRIBUTED_BACKEND, else $TORCH_DISTRIBUTED_BACKEND, else default_backend().
std::string get_distributed_backend();
void set_distributed_backend(const std::string& backend);

/// Joins the process group that the environment describes, and proves it by an all_reduce. Where torch sees
/// CUDA devices, the one whose number is the local rank modulo theirs becomes the current one. Throws
/// CollectiveError, which names the ranks that are missing, and SessionError for such a device that cannot be
/// used.
void init_process_group_from_backend(const std::optional<std::string>& backend = std::nullopt,
                                     std::optional<double> timeout_s = std::nullopt);

/// Sets the environment that the values describe, and joins.
void init_dist(int rank, int local_rank, int world_size, int local_world_size, const std::string& master_addr,
               int master_port, const std::string& init_method,
               const std::optional<std::string>& backend = std::nullopt);

/// The groups that this rank belongs to. Ranks are laid out [pipeline][data][model], model fastest.
struct ParallelGroups {
  distributed::Group model, pipeline, data;
};
/// Called by all ranks. Throws ConfigError when model * pipeline does not divide the world.
ParallelGroups init_parallelism(int model_parallelism = 1, int pipeline_parallelism = 1,
                                const std::optional<std::string>& model_backend = std::nullopt,
                                const std::optional<std::string>& pipeline_backend = std::nullopt,
                                const std::optional<std::string>& data_backend = std::nullopt);
/// Those of the last init_parallelism(). Throws UsageError before.
const ParallelGroups& parallel_groups();

/// init_dist(), init_parallelism() and the function, by a resolved configuration.
launch::Value init_and_run(const launch::Function& function, const MultiprocessConfig& config,
                           const launch::Value& args = launch::Value::array());

/// The function in world_size processes. World size 1: in place, with a warning. Throws SpawnError.
void launch_subprocesses(const std::variant<std::string, launch::Function>& function,
                         MultiprocessConfig config, const std::string& setup = "", int rank_offset = 0,
                         const launch::Value& args = launch::Value::array());

/// A model built once, before the processes are forked, and moved to each one's device, one process at a
/// time.
class ModelWrapper {
 public:
  explicit ModelWrapper(std::shared_ptr<Model> model);
  /// The same model every time, its parameters and buffers on `device`: the same tensors, with their memory
  /// there. Throws ModelError when one cannot be moved; then none is.
  Model& to(at::Device device);

 private:
  std::shared_ptr<Model> model_;
  launch::SerialExecutor turn_;
};

}  // namespace accelmgr
