// The typed configuration. A value comes from the first of these sources that has it: flag (`--set
// key=value`), environment (`ACCELMGR_` and the key in capitals, with two underscores for each dot), file
// (YAML), default. `accelmgr config show` prints every value with its source.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace accelmgr {

/// The divisor of the losses of a step's micro-batches, by which they are divided before gradients are added.
struct LossScaling {
  enum Kind : std::uint8_t {
    runners,  ///< The number of micro-batches.
    samples,  ///< As runners, but a micro-batch with fewer samples counts less.
    sum,      ///< 1: losses are sums, and so is the gradient.
    sum_over  ///< The total of `field`, a number that the model returns beside each loss; losses are sums.
  };
  LossScaling(Kind kind = runners, std::string field = {}) : kind(kind), field(std::move(field)) {}
  bool operator==(const LossScaling&) const = default;

  Kind kind;
  std::string field;  ///< Of sum_over: the name of that number in the model's outputs. Otherwise empty.
};

/// What happens when a loss or gradient is not finite. abort: the step does not count and its batches come
/// again. skip_batch: the batches are consumed, nothing is added, and the step continues with the next ones.
/// keep: the step counts, and its result says nonfinite.
enum class NonfinitePolicy { abort, skip_batch, keep };
/// What happens when a runner is lost. fail: every later step fails. restart: a replacement takes its rank
/// and the step is repeated with the same elements. shrink: the other runners go on without it, and the mean
/// is over the runners that take part.
enum class LossPolicy { fail, restart, shrink };
/// Which buffers (BatchNorm statistics) a committed step keeps: those of rank 0, or the mean of all ranks.
enum class BufferPolicy { rank0, mean };
/// dtype of the gradients that runners publish: the parameters' dtype, or bfloat16 (less memory traffic).
enum class SlabDtype { parameters, bf16 };
enum class GradientDtype { parameters, float32 };
enum class RunnerParameters { master, bf16 };
/// dtype in which forward passes compute where torch considers it safe: the parameters' dtype, bfloat16 or
/// float16. With float16 the loss is scaled up, so that small gradients do not become zero (LossScaleConfig).
enum class Autocast { off, bf16, fp16 };
/// How the micro-batches of a step are divided over the runners. even: each computes
/// `grad_accumulation_steps`. measured: faster runners compute more of them, so that all end at the same
/// time.
enum class Share { even, measured };
/// What runners compute on. automatic (`auto`): every GPU; where there is none, the chips of a TPU; else the
/// CPU. cuda: a GPU for each runner. Two more for models of Python. xla: a device of torch_xla for each
/// runner. accelerator: for each runner a device of the kind that torch.accelerator names.
enum class Device { automatic, cpu, cuda, xla, accelerator };
/// Whether runners with a GPU each sum up their gradients over NCCL. automatic (`auto`): where two of them
/// can. off: through the memory of the session.
enum class NcclUse { off, automatic };
enum class CudaGraph { off, automatic };
enum class OptimizerKind { sgd, adam, adamw };
enum class Schedule { constant, cosine };
/// How a process is started. spawn: this program is executed again for each process; safest and slowest.
/// forkserver: this program is executed again once, and that process forks for this launch and all later
/// ones. fork: this process is forked. Do not use fork in a program with other threads or a CUDA context; a
/// warning names the threads.
enum class StartMethod { spawn, fork, forkserver };

/// `runners.autocast: fp16`: the factor of the loss in the runners. It is always a power of two. A step whose
/// gradients are infinite is tried again with half of it; the master's gradients never contain it.
struct LossScaleConfig {
  double initial = 65536;   ///< The factor when a new run begins.
  int growth_steps = 2000;  ///< Doubles after so many steps in a row that did not lower it; 0: never.

  bool operator==(const LossScaleConfig&) const = default;
};

struct RunnersConfig {
  Device device = Device::cpu;
  /// The device of each rank: "0" (among the visible GPUs), a GPU's UUID or its beginning, or "cpu". Empty:
  /// the visible GPUs, in order.
  std::vector<std::string> devices{};
  bool oversubscribe = false;  ///< Several runners may share a GPU.
  NcclUse nccl = NcclUse::off;
  CudaGraph cuda_graph = CudaGraph::off;
  Share share = Share::even;
  int threads = 0;  ///< Intra-op threads of each runner; 0: cores / nprocs, at least 1.
  Autocast autocast = Autocast::off;
  RunnerParameters parameters = RunnerParameters::master;
  LossScaleConfig loss_scale{};
  bool protect_parameters = true;  ///< Runners on the CPU map the master parameters read-only.
  int spin_us = 20;                ///< How long a waiting runner spins before it parks; 0: parks at once.
  LossPolicy on_loss = LossPolicy::restart;
  int max_restarts = 100;        ///< Most replacements in the whole run; one more loss is an error.
  int restarts_per_window = 5;   ///< restart: most replacements in any `restart_window`; 0: no such limit.
  double restart_window = 60.0;  ///< Seconds.
  double restart_backoff =
      0.1;              ///< Seconds before the second replacement in a window; doubled for each further.
  int min_runners = 1;  ///< shrink: fewer than these are an error.
  int max_runners = 0;  ///< Largest argument of Manager::resize(); 0: nprocs.
  double hang_timeout = 60.0;  ///< Seconds without a sign of life until a runner is killed; 0: never.
  /// Seconds without progress until a runner that reduces gradients is killed; a reduction takes
  /// milliseconds. The step counts: all gradients are computed, and other processes finish the runner's part.
  double reduction_timeout = 2.0;

  bool operator==(const RunnersConfig&) const = default;
};

struct GradientsConfig {
  SlabDtype slab_dtype = SlabDtype::parameters;
  GradientDtype dtype = GradientDtype::parameters;  ///< dtype of the master gradients of 16-bit parameters.

  bool operator==(const GradientsConfig&) const = default;
};

struct BuffersConfig {
  BufferPolicy policy = BufferPolicy::rank0;

  bool operator==(const BuffersConfig&) const = default;
};

struct ParametersConfig {
  bool snapshot = false;  ///< Service: keep the last whole version of the parameters while a host writes.

  bool operator==(const ParametersConfig&) const = default;
};

struct MemoryConfig {
  /// Largest size of the session; 0: what the machine and the cgroup have available.
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
  int image_size = 16;  ///< Side of the square image, in pixels.
  int input_channels = 3;
  int channels = 16;  ///< Channels of the first block; each of the next two blocks doubles them.
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
  std::string factory{};     ///< python: package.module:function, which makes the model.
  MlpConfig mlp{};
  ConvNetConfig convnet{};
  GptConfig gpt{};
  std::map<std::string, std::string> options{};  ///< For registered models; accelmgr does not look inside.

  bool operator==(const ModelConfig&) const = default;
};

struct DataConfig {
  std::string kind = "synthetic";    ///< synthetic, text, or a name given to register_data().
  std::string factory{};             ///< python: package.module:function, which makes the dataset.
  std::vector<std::string> files{};  ///< Text files; globs allowed; relative to the working directory.
  int sequence_length = 128;         ///< Tokens (bytes) of one element of text.
  double held_out = 0.0;             ///< Share of the text, in whole documents, that is never trained on.
  std::int64_t elements = 0;         ///< Elements of synthetic data in an epoch; 0: endless.
  int epochs = 0;                    ///< 0: endless.
  std::uint64_t seed = 0;            ///< Seed of the order in which elements are read.
  bool drop_last = true;             ///< Leave out an incomplete last step; false: make a shorter one.
  bool keep_last_step = false;       ///< Keep its elements in memory: StepOptions::repeat needs them.
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
  double progress_every_s = 5.0;    ///< Seconds between progress lines if standard output is no terminal.

  bool operator==(const TrainConfig&) const = default;
};

struct CheckpointConfig {
  std::string directory{};  ///< Where checkpoints are written; empty: nowhere.
  std::int64_t every = 0;   ///< Steps between checkpoints; 0: the last step only.
  int keep = 3;             ///< How many of the latest checkpoints to keep; the best is kept too.
  std::string resume{};     ///< `latest` (in `directory`), or the path of a checkpoint; empty: a new run.

  bool operator==(const CheckpointConfig&) const = default;
};

/// Options of `accelmgr spawn` and MultiprocessConfig::of().
struct LaunchConfig {
  int nprocs = -1;  ///< Processes on this node; -1: the visible GPUs, or the cores where there are none.
  int nnodes = 1;
  int min_nodes = 0;  ///< `accelmgr spawn`: the launch goes on with as few nodes; 0: nnodes.
  int node_rank = 0;
  std::string rendezvous{};      ///< HOST:PORT on the first node; empty: 127.0.0.1 and a free port.
  std::string backend = "auto";  ///< auto, serial, shm, gloo, nccl.
  /// Network interface at which ranks of several nodes connect: "eth0". Empty: the interface of the node's
  /// name, or of the default route.
  std::string interface {};
  std::string gpus{};     ///< Absolute ids, one per process: "4,5".
  std::string workers{};  ///< All nodes, as "name:ordinal;[grpc://]host:port|...".
  StartMethod start_method = StartMethod::spawn;
  bool oversubscribe = false;      ///< Allow more processes than GPUs; they share the GPUs.
  int max_restarts = 0;            ///< How often all processes are started again after one has failed.
  std::string log_directory{};     ///< Also write the output of each rank here; empty: do not.
  double timeout = 300.0;          ///< Seconds, of each collective.
  double rendezvous_timeout = 60;  ///< Seconds within which all nodes must be there.
  double terminate_timeout = 5;    ///< Seconds between SIGTERM and SIGKILL when processes are ended.
  int model_parallelism = 1;
  int pipeline_parallelism = 1;
  std::string model_parallel_backend{};  ///< For this and the next two, empty: `backend`.
  std::string pipeline_parallel_backend{};
  std::string data_parallel_backend{};

  bool operator==(const LaunchConfig&) const = default;
};

/// A value of Config::nprocs: a runner for each device that there is, or that `runners.devices` lists.
inline constexpr int one_per_device = -1;

struct Config {
  /// Runners, one per device; 1 to 24. one_per_device needs `runners.device` other than cpu; a
  /// handle's configuration has the number instead.
  int nprocs = 2;
  int batch_size_per_device = 1;
  int grad_accumulation_steps = 1;  ///< Micro-batches of each runner in a step; with `runners.share:
                                    ///< measured` their mean over the runners.
  /// Elements loaded ahead for each runner. 0: elements are read during their step, after the host has
  /// written parameters; use it if the data source depends on the model or on the loop.
  int prefetch = 16;
  std::uint64_t seed_base = 42;  ///< Runner r is seeded with seed_base + r; the master model with seed_base.
  double step_timeout = 300.0;   ///< Seconds after which step() gives up.
  /// Seconds within which all runners must be ready. A runner that is started later, as a replacement, has
  /// this time for its own start: its wait while others build their replicas does not count.
  double start_timeout = 120.0;
  double abort_grace = 5.0;   ///< Seconds a runner may take to leave an aborted step before it is killed.
  bool deterministic = true;  ///< Ask torch for deterministic algorithms.
  LossScaling loss_scaling{};
  NonfinitePolicy on_nonfinite = NonfinitePolicy::abort;
  int nonfinite_limit =
      10;  ///< skip_batch, keep: non-finite attempts in a row that are tolerated; one more fails.
  RunnersConfig runners{};
  GradientsConfig gradients{};
  BuffersConfig buffers{};
  ParametersConfig parameters{};
  MemoryConfig memory{};
  ModelConfig model{};
  DataConfig data{};
  OptimizerConfig optimizer{};
  TrainConfig train{};
  CheckpointConfig checkpoint{};
  LaunchConfig launch{};
#ifdef ACCELMGR_FAULTS
  std::vector<std::string> faults{};  ///< Faults to inject on purpose, for tests;
                                      ///< tests/engine/faults/plan.hpp describes the syntax.
#endif

  bool operator==(const Config&) const = default;
};

}  // namespace accelmgr
