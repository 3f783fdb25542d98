// Trains one model with several processes: their configuration, resolved once; a tested process group; groups
// of model, pipeline and data parallel ranks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/config.hpp"
#include "accelmgr/distributed_context.hpp"

namespace accelmgr {

struct MultiprocessConfig {
  int rank = -1;
  int local_rank = -1;
  std::optional<int> world_size{};  ///< nullopt: the number of visible GPUs, or 1.
  /// Processes on this node. nullopt: world_size if master_addr is a loopback address or there is no GPU;
  /// else one for each GPU.
  std::optional<int> local_world_size{};
  std::string master_addr = "127.0.0.1";
  std::optional<int> master_port{};  ///< nullopt: resolve() binds the first free port from 29500 on.
  std::string init_method = "env://";
  int model_parallelism = 1;
  int pipeline_parallelism = 1;
  std::optional<std::string>
      backend{};  ///< nullopt: get_distributed_backend(). The next three, when nullopt, are `backend`.
  std::optional<std::string> model_parallel_backend{};
  std::optional<std::string> pipeline_parallel_backend{};
  std::optional<std::string> data_parallel_backend{};
  launch::StartMethod launch_method = launch::StartMethod::forkserver;

  /// Fills in world_size, local_world_size and master_port where they are missing. Throws ConfigError for
  /// invalid values (world_size 0, degrees of parallelism that do not divide the world).
  static void resolve(MultiprocessConfig& config);
  /// All values, as "key = value" lines.
  std::string text() const;
  /// Takes the values from the `launch` section of a configuration. Not resolved yet.
  static MultiprocessConfig of(const Config& config);

  std::shared_ptr<void> bound_port{};  ///< Keeps the resolved port bound until ranks are started.
};

std::string default_backend();  ///< nccl if it is available and a GPU is visible, else shm.
/// $ACCELMGR_DISTRIBUTED_BACKEND, else $TORCH_DISTRIBUTED_BACKEND, else default_backend().
std::string get_distributed_backend();
/// Sets $ACCELMGR_DISTRIBUTED_BACKEND. Throws ConfigError for a backend that is not available. Not safe while
/// another thread calls getenv().
void set_distributed_backend(const std::string& backend);

/// Joins the process group that the environment describes, and tests it with an all_reduce. Blocks until all
/// ranks have joined, or the timeout. If torch sees CUDA devices, makes one of them current: the local rank
/// modulo their number. Throws CollectiveError, which names the missing ranks, and SessionError when that
/// device cannot be used.
void init_process_group_from_backend(const std::optional<std::string>& backend = std::nullopt,
                                     std::optional<double> timeout_s = std::nullopt);

/// Sets the environment variables for these values, then joins as init_process_group_from_backend() does. Not
/// safe while another thread calls getenv().
void init_dist(int rank, int local_rank, int world_size, int local_world_size, const std::string& master_addr,
               int master_port, const std::string& init_method,
               const std::optional<std::string>& backend = std::nullopt);

/// The groups that this rank belongs to. Ranks are laid out [pipeline][data][model], model fastest.
struct ParallelGroups {
  distributed::Group model, pipeline, data;
};
/// Makes the groups. All ranks must call it. Throws ConfigError when model * pipeline does not divide the
/// world size.
ParallelGroups init_parallelism(int model_parallelism = 1, int pipeline_parallelism = 1,
                                const std::optional<std::string>& model_backend = std::nullopt,
                                const std::optional<std::string>& pipeline_backend = std::nullopt,
                                const std::optional<std::string>& data_backend = std::nullopt);
/// The groups of the last init_parallelism(). Throws UsageError if there was none.
const ParallelGroups& parallel_groups();

/// Resolves `config`, then calls init_dist(), init_parallelism() and the function. Throws ConfigError when
/// rank or local_rank is not set.
launch::Value init_and_run(const launch::Function& function, const MultiprocessConfig& config,
                           const launch::Value& args = launch::Value::array());

/// Calls the function in the local_world_size processes of this node, whose first rank is `rank_offset`, and
/// blocks until they have ended. With world size 1 it calls the function in this process and logs a warning.
/// `setup`: a registered function that each process calls first, but not a world of one. Throws ConfigError
/// for invalid values, and SpawnError.
void launch_subprocesses(const std::variant<std::string, launch::Function>& function,
                         MultiprocessConfig config, const std::string& setup = "", int rank_offset = 0,
                         const launch::Value& args = launch::Value::array());

}  // namespace accelmgr
