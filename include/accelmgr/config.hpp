// The typed configuration. Its sources, strongest first: flag (`--set key=value`), environment (`ACCELMGR_`
// and the key in capitals, dots as two underscores), file (YAML), default. `accelmgr config show` prints
// every value with its source.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace accelmgr {

/// What the loss of a micro-batch weighs in the mean: every micro-batch alike, or by its number of samples.
enum class LossScaling { runners, samples };
/// What a non-finite loss or gradient does: the step is aborted, nothing is added and the same batches come
/// again; the batches are consumed without a trace and the next are tried; or it is kept and reported.
enum class NonfinitePolicy { abort, skip_batch, keep };
/// What the loss of a runner does: every later step fails; a replacement of the same rank takes over and the
/// step is repeated with the same elements; or the rest go on, and the mean is over those that take part.
enum class LossPolicy { fail, restart, shrink };
/// Whose buffers (BatchNorm statistics) are the master's: those of rank 0, or the mean of all ranks.
enum class BufferPolicy { rank0, mean };
/// dtype in which runners publish gradients: that of the parameters, or bfloat16 (less memory traffic).
enum class SlabDtype { parameters, bf16 };
enum class Autocast { off, bf16 };
enum class OptimizerKind { sgd, adam, adamw };
enum class Schedule { constant, cosine };
/// How a launched process comes to be. spawn: this program is executed again for each; safest, slowest.
/// forkserver: it is executed once, and forks for this and all later launches. fork: this process is forked
/// as it stands, which a program with other threads or a CUDA context should not do: a warning names the
/// threads.
enum class StartMethod { spawn, fork, forkserver };

struct RunnersConfig {
  int threads = 0;  ///< Intra-op threads of each runner; 0: cores / nprocs, at least 1.
  Autocast autocast = Autocast::off;
  bool protect_parameters = true;  ///< Runners map the master parameters read-only.
  int spin_us = 20;                ///< How long a waiting runner spins before it parks; 0: parks at once.
  LossPolicy on_loss = LossPolicy::restart;
  int max_restarts = 100;        ///< restart: replacements in the whole run; one more loss is an error.
  int restarts_per_window = 5;   ///< restart: replacements in any `restart_window`; 0: no such limit.
  double restart_window = 60.0;  ///< Seconds.
  double restart_backoff =
      0.1;              ///< Seconds before the second replacement in a window; doubled for each further.
  int min_runners = 1;  ///< shrink: fewer than these are an error.
  int max_runners = 0;  ///< Most that Manager::resize() may ask for; 0: nprocs.
  double hang_timeout = 60.0;  ///< Seconds without a sign of life after which a runner is ended; 0: never.

  bool operator==(const RunnersConfig&) const = default;
};

struct GradientsConfig {
  SlabDtype slab_dtype = SlabDtype::parameters;

  bool operator==(const GradientsConfig&) const = default;
};

struct BuffersConfig {
  BufferPolicy policy = BufferPolicy::rank0;

  bool operator==(const BuffersConfig&) const = default;
};

struct MemoryConfig {
  /// Most that the session may take; 0: what the machine and the cgroup have available.
  std::int64_t limit_bytes = 0;

  bool operator==(const MemoryConfig&) const = default;
};

struct MlpConfig {
  int input_size = 64;
  int hidden_size = 128;
  int hidden_layers = 2;
  int output_size = 10;  ///< Classes.

  bool operator==(const MlpConfig&) const = default;
};

struct ConvNetConfig {
  int image_size = 16;  ///< Pixels of a side.
  int input_channels = 3;
  int channels = 16;  ///< Of the first block; each of the two following has twice as many.
  int classes = 10;

  bool operator==(const ConvNetConfig&) const = default;
};

struct GptConfig {
  int layers = 4;
  int width = 128;
  int heads = 4;
  int context = 128;  ///< Longest sequence, in tokens.
  int vocabulary = 256;
  double dropout = 0.1;

  bool operator==(const GptConfig&) const = default;
};

struct ModelConfig {
  std::string kind = "mlp";  ///< mlp, convnet, gpt, torchscript, or a name given to register_model().
  std::string file{};        ///< The TorchScript file.
  MlpConfig mlp{};
  ConvNetConfig convnet{};
  GptConfig gpt{};
  std::map<std::string, std::string> options{};  ///< For registered models; accelmgr does not look inside.

  bool operator==(const ModelConfig&) const = default;
};

struct DataConfig {
  std::string kind = "synthetic";    ///< synthetic, text, or a name given to register_data().
  std::vector<std::string> files{};  ///< Text files; globs allowed; relative to the working directory.
  int sequence_length = 128;         ///< Tokens (bytes) of one element of text.
  double held_out = 0.0;             ///< Share of the text, in whole documents, that is never trained on.
  std::int64_t elements = 0;         ///< Elements of synthetic data in an epoch; 0: endless.
  int epochs = 0;                    ///< 0: endless.
  std::uint64_t seed = 0;            ///< Seed of the order in which elements are read.
  bool drop_last = true;             ///< An uneven end is left out; otherwise it makes a last, shorter step.
  std::map<std::string, std::string> options{};  ///< For registered sources; accelmgr does not look inside.

  bool operator==(const DataConfig&) const = default;
};

struct OptimizerConfig {
  OptimizerKind kind = OptimizerKind::adamw;
  double learning_rate = 1e-3;
  double momentum = 0.0;      ///< sgd
  bool nesterov = false;      ///< sgd
  double beta1 = 0.9;         ///< adam, adamw
  double beta2 = 0.999;       ///< adam, adamw
  double epsilon = 1e-8;      ///< adam, adamw
  double weight_decay = 0.0;  ///< Not applied to parameters of fewer than two dimensions (norms, biases).
  double clip_norm = 0.0;     ///< Largest L2 norm of the whole gradient; 0: no clipping.
  int steps_per_update = 1;   ///< Steps whose mean gradients are averaged for one update.
  int warmup_updates = 0;     ///< Updates over which the learning rate rises linearly from 0.
  Schedule schedule = Schedule::constant;
  /// cosine: the learning rate of the last update, as a share of learning_rate.
  double final_learning_rate_ratio = 0.1;

  bool operator==(const OptimizerConfig&) const = default;
};

struct TrainConfig {
  std::int64_t steps = 100;
  std::int64_t evaluate_every = 0;  ///< Steps between evaluations of the held-out loss; 0: none.
  double progress_every_s = 5.0;    ///< Seconds between progress lines where standard output is no terminal.

  bool operator==(const TrainConfig&) const = default;
};

struct CheckpointConfig {
  std::string directory{};  ///< Where checkpoints are written; empty: nowhere.
  std::int64_t every = 0;   ///< Steps between checkpoints; 0: the last step only.
  int keep = 3;             ///< The last so many are kept, and the best.
  std::string resume{};     ///< `latest` (of `directory`), or the path of a checkpoint; empty: a new run.

  bool operator==(const CheckpointConfig&) const = default;
};

/// What `accelmgr spawn` and MultiprocessConfig::of() read.
struct LaunchConfig {
  int nprocs = -1;  ///< Processes on this host; -1: the visible GPUs, or the cores where there are none.
  int nnodes = 1;
  int node_rank = 0;
  std::string rendezvous{};      ///< HOST:PORT on the first host; empty: 127.0.0.1 and a free port.
  std::string backend = "auto";  ///< auto, serial, shm, gloo, nccl.
  std::string gpus{};            ///< Absolute ids, one per process: "4,5".
  std::string workers{};         ///< "name:ordinal;[grpc://]host:port|..." of all hosts.
  StartMethod start_method = StartMethod::spawn;
  bool oversubscribe = false;      ///< More processes than GPUs may share them.
  int max_restarts = 0;            ///< Of all processes together, after a failure.
  std::string log_directory{};     ///< Where the output of each rank goes too; empty: nowhere.
  double timeout = 300.0;          ///< Seconds, of collectives.
  double rendezvous_timeout = 60;  ///< Seconds within which all hosts must be there.
  double terminate_timeout = 5;    ///< Seconds from asking processes to end until they are killed.
  int model_parallelism = 1;
  int pipeline_parallelism = 1;
  std::string model_parallel_backend{};  ///< Here and below, empty: `backend`.
  std::string pipeline_parallel_backend{};
  std::string data_parallel_backend{};

  bool operator==(const LaunchConfig&) const = default;
};

struct Config {
  int nprocs = 2;  ///< Runners, one per device; 1 to 24.
  int batch_size_per_device = 1;
  int grad_accumulation_steps = 1;
  int prefetch = 16;             ///< Elements loaded ahead for each device.
  std::uint64_t seed_base = 42;  ///< Runner r is seeded with seed_base + r; the master model with seed_base.
  double step_timeout = 300.0;   ///< Seconds after which step() gives up.
  double start_timeout = 120.0;  ///< Seconds within which all runners must be ready.
  double abort_grace = 5.0;      ///< Seconds a runner may take to leave an aborted step before it is killed.
  bool deterministic = true;     ///< Ask torch for deterministic algorithms.
  LossScaling loss_scaling = LossScaling::runners;
  NonfinitePolicy on_nonfinite = NonfinitePolicy::abort;
  int nonfinite_limit =
      10;  ///< skip_batch, keep: non-finite attempts in a row that are let pass; one more fails.
  RunnersConfig runners{};
  GradientsConfig gradients{};
  BuffersConfig buffers{};
  MemoryConfig memory{};
  ModelConfig model{};
  DataConfig data{};
  OptimizerConfig optimizer{};
  TrainConfig train{};
  CheckpointConfig checkpoint{};
  LaunchConfig launch{};
#ifdef ACCELMGR_FAULTS
  std::vector<std::string>
      faults{};  ///< What is to be broken on purpose; tests/faults/plan.hpp says how it is written.
#endif

  bool operator==(const Config&) const = default;
};

}  // namespace accelmgr
