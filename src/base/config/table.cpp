#include "base/config/table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <type_traits>

#include "base/config/start_method.hpp"
#include "base/did_you_mean.hpp"

namespace accelmgr::config {
namespace {

// A key is the path of its field in Config.
// clang-format off
#define KEY(path) #path, [](Config& config) -> auto& { return config.path; }
// clang-format on

template <class Get>
using ValueOf = std::remove_reference_t<std::invoke_result_t<Get, Config&>>;

template <class Get, class T = ValueOf<Get>>
Option number(std::string key, Get field, Interval<T> interval, std::string help) {
  return {std::move(key), Number<T>{field, interval}, std::move(help)};
}

template <class Kind, class Get>
Option plain(std::string key, Get field, std::string help) {
  return {std::move(key), Kind{field}, std::move(help)};
}

// NOLINTBEGIN(performance-unnecessary-value-param): it does not see the std::move() of these.
template <class Get>
Option choice(std::string key, Get field, std::vector<std::string> names, std::string help,
              std::map<std::string, std::string> refused = {}) {
  // NOLINTEND(performance-unnecessary-value-param)
  using Enum = ValueOf<Get>;
  return {
      std::move(key),
      Choice{.names = std::move(names),
             .get = [field](
                        const Config& config) { return static_cast<std::size_t>(read<Enum>(field, config)); },
             .set = [field](Config& config, std::size_t index) { field(config) = static_cast<Enum>(index); },
             .refused = std::move(refused)},
      std::move(help)};
}

// Longer than any sensible time, but its nanoseconds fit 64 bits.
constexpr double longest_seconds = 1e8;
// Catches typing errors in values from which memory sizes follow. The real bound is the available memory.
constexpr int largest_count = 1 << 20;

Option loss_scaling_option() {
  auto option = choice(
      "loss_scaling", [](Config & config) -> auto& { return config.loss_scaling.kind; },
      {"runners", "samples", "sum", "sum_over(FIELD)"},
      "How micro-batches are weighted in the mean: all alike, or by their number of samples. sum: losses are "
      "sums, as of reduction=\"sum\", and so is the gradient. sum_over(tokens): losses are sums, and the "
      "gradient is divided by the total of the number `tokens` of the model's outputs.");
  std::get<Choice>(option.kind).argument = [](Config & config) -> auto& { return config.loss_scaling.field; };
  return option;
}

std::vector<Option> run_options() {
  return {
      number(
          KEY(nprocs), {.min = 1, .max = 24, .also = one_per_device},
          "Number of runners, one per device. -1: one for each device there is (runners.device auto, cuda, "
          "xla), or of runners.devices; the default with these. Where none are there to count, -1 is 2."),
      number(KEY(batch_size_per_device), {.min = 1, .max = largest_count},
             "Elements of one micro-batch of one runner."),
      number(
          KEY(grad_accumulation_steps), {.min = 1, .max = largest_count},
          "Micro-batches of each runner in one step (see runners.share); a step's gradient is their mean."),
      number(KEY(prefetch), {.min = 0, .max = largest_count},
             "Elements loaded ahead for each device. 0: they are read during their step."),
      number(KEY(seed_base), {}, "Runner r is seeded with seed_base + r, the master model with seed_base."),
      number(KEY(step_timeout), {.min = 0, .max = longest_seconds, .above_min = true},
             "Seconds after which a step fails with a timeout."),
      number(KEY(start_timeout), {.min = 0, .max = longest_seconds, .above_min = true},
             "Seconds within which all runners must be ready."),
      number(KEY(abort_grace), {.min = 0, .max = longest_seconds},
             "Seconds a runner may take to leave an aborted step before it is killed."),
      plain<Boolean>(KEY(deterministic), "Ask torch for deterministic algorithms."),
      loss_scaling_option(),
      choice(
          KEY(on_nonfinite), {"abort", "skip_batch", "keep"},
          "What happens when a loss or gradient is infinite or NaN. abort: the step does not count, and its "
          "batches come again. skip_batch: they are left out, and the step tries the next ones. keep: the "
          "step counts, and its result reports it."),
      number(KEY(nonfinite_limit), {.min = 0, .max = largest_count},
             "skip_batch, keep: how many in a row are accepted; one more fails the step."),
      choice(
          KEY(runners.device), {"auto", "cpu", "cuda", "xla", "accelerator"},
          "What each runner computes on: the CPU, a GPU of its own; for models of Python, an XLA device of "
          "its own (torch_xla), or a device of its own of the kind that torch.accelerator names. auto: the "
          "GPUs, else the chips of a TPU, else the CPU.",
          {{"tpu", "a TPU is an XLA device: xla"}, {"gpu", "a GPU is a device of CUDA: cuda"}}),
      plain<TextList>(
          KEY(runners.devices),
          "The device of each rank: a number among the visible GPUs and slices of GPUs, a UUID or its "
          "beginning, or cpu. Empty: the visible ones, in order."),
      plain<Boolean>(KEY(runners.oversubscribe), "Several runners may share a GPU or an accelerator."),
      choice(
          KEY(runners.nccl), {"off", "auto"},
          "Whether runners that have a GPU each sum up their gradients over NCCL. auto: where at least two "
          "of them can. off, until two GPUs have shown it to work: through the memory of the session."),
      choice(
          KEY(runners.cuda_graph), {"off", "auto"},
          "auto: on a GPU, a micro-batch of a model of Python is recorded as a CUDA graph, where that is "
          "possible, and queued by one call from then on. What forward() does in Python is done once then."),
      choice(KEY(runners.share), {"even", "measured"},
             "How the micro-batches of a step are divided over the runners: to each the same number, or more "
             "to those that are measured to be faster."),
      number(KEY(runners.threads), {.min = 0, .max = 1024},
             "Threads of each runner; 0: cores / nprocs, at least 1."),
      choice(
          KEY(runners.autocast), {"off", "bf16", "fp16"},
          "Compute forward passes in bfloat16 or float16 where torch considers it safe; fp16 with a scaled "
          "loss."),
      number(KEY(runners.loss_scale.initial), {.min = 1, .max = 1 << 30},
             "fp16: the factor of the loss in the runners at the beginning of a run; a power of two."),
      number(KEY(runners.loss_scale.growth_steps), {.min = 0, .max = 1'000'000'000},
             "fp16: the factor doubles after so many steps in a row that did not lower it; 0: never."),
      plain<Boolean>(KEY(runners.protect_parameters),
                     "Runners on the CPU map the master parameters read-only: a model may move them in "
                     "forward() and put them back, and no other runner sees it. false: one runner may change "
                     "them."),
      number(KEY(runners.spin_us), {.min = 0, .max = 1'000'000},
             "Microseconds that a waiting runner spins before it sleeps; 0: it sleeps at once."),
      choice(KEY(runners.on_loss), {"fail", "restart", "shrink"},
             "What happens when a runner is lost. fail: steps fail from then on. restart: a replacement "
             "takes over, and the step is repeated. shrink: the other runners go on."),
      number(KEY(runners.max_restarts), {.min = 0, .max = 1'000'000'000},
             "Most replacements in the whole run, of runners (restart) or of the fork server."),
      number(KEY(runners.restarts_per_window), {.min = 0, .max = 1'000'000'000},
             "restart: most replacements in any restart_window; 0: no limit."),
      number(KEY(runners.restart_window), {.min = 0, .max = longest_seconds, .above_min = true},
             "restart: seconds over which replacements are counted."),
      number(KEY(runners.restart_backoff), {.min = 0, .max = 3600},
             "restart: seconds before the second replacement in a window; doubled for each further one."),
      number(KEY(runners.min_runners), {.min = 1, .max = 24},
             "shrink: with fewer runners than this, steps fail."),
      number(KEY(runners.max_runners), {.min = 0, .max = 24},
             "Most runners that a resize can ask for; 0: nprocs."),
      number(KEY(runners.hang_timeout), {.min = 0, .max = longest_seconds},
             "Seconds without a sign of life after which a runner is killed; 0: never."),
      number(
          KEY(runners.reduction_timeout), {.min = 0.1, .max = 3600},
          "Seconds without progress after which a runner that reduces gradients is killed. The step counts."),
      choice(KEY(runners.parameters), {"master", "bf16"},
             "What runners compute with: the master's parameters, or copies in bfloat16 of those that are "
             "float32."),
      choice(KEY(gradients.slab_dtype), {"parameters", "bf16"},
             "Dtype in which runners publish gradients: that of the parameters, or bfloat16 (less memory "
             "traffic)."),
      choice(KEY(gradients.dtype), {"parameters", "float32"},
             "Dtype of the master's gradients of float16 and bfloat16 parameters: theirs, or float32."),
      choice(KEY(buffers.policy), {"rank0", "mean"},
             "Whose buffers (BatchNorm statistics) are kept: those of rank 0, or the mean of all ranks."),
      plain<Boolean>(
          KEY(parameters.snapshot),
          "Of a service: keep the last whole parameters while a host writes them, so that the next one can "
          "go back to them. Takes their size, and a copy for each write."),
      number(KEY(memory.limit_bytes), {.min = 0},
             "Most memory that the run may use, in bytes; 0: what the machine and the control group have "
             "available."),
  };
}

std::vector<Option> model_options() {
  return {
      plain<Text>(
          KEY(model.kind),
          "mlp, convnet, gpt, torchscript, python, or the name of a model that the program registered."),
      plain<Text>(KEY(model.file), "torchscript: a file that torch.jit.save wrote."),
      plain<Text>(KEY(model.factory),
                  "python: package.module:function, which is called with model.options and returns the "
                  "torch.nn.Module."),
      number(KEY(model.mlp.input_size), {.min = 1, .max = largest_count}, "Numbers in one element."),
      number(KEY(model.mlp.hidden_size), {.min = 1, .max = largest_count}, "Width of the hidden layers."),
      number(KEY(model.mlp.hidden_layers), {.min = 1, .max = 1024}, "Hidden layers."),
      number(KEY(model.mlp.output_size), {.min = 1, .max = largest_count}, "Classes."),
      number(KEY(model.convnet.image_size), {.min = 8, .max = 4096},
             "Width and height of the image, in pixels."),
      number(KEY(model.convnet.input_channels), {.min = 1, .max = 4096}, "Channels of the image."),
      number(KEY(model.convnet.channels), {.min = 1, .max = 4096},
             "Channels of the first block; each of the next two blocks has twice as many as the one before."),
      number(KEY(model.convnet.classes), {.min = 1, .max = largest_count}, "Classes."),
      number(KEY(model.gpt.layers), {.min = 1, .max = 1024}, "Transformer blocks."),
      number(KEY(model.gpt.width), {.min = 1, .max = 65536},
             "Width of the residual stream; a multiple of the heads."),
      number(KEY(model.gpt.heads), {.min = 1, .max = 1024}, "Attention heads."),
      number(KEY(model.gpt.context), {.min = 1, .max = largest_count}, "Longest sequence, in tokens."),
      number(KEY(model.gpt.vocabulary), {.min = 2, .max = largest_count},
             "Number of different tokens; text has 256, one for each byte value."),
      number(KEY(model.gpt.dropout), {.min = 0, .max = 1, .below_max = true},
             "Share of activations dropped while training."),
      plain<TextMap>(KEY(model.options),
                     "For registered models and factories; accelmgr does not look inside."),
  };
}

std::vector<Option> data_options() {
  return {
      plain<Text>(KEY(data.kind),
                  "synthetic, text, python, or the name of a source that the program registered."),
      plain<Text>(KEY(data.factory),
                  "python: package.module:function, which is called with data.options and returns the "
                  "dataset."),
      plain<TextList>(KEY(data.files), "text: the files; globs allowed; relative to the working directory."),
      number(KEY(data.sequence_length), {.min = 1, .max = largest_count},
             "text: tokens (bytes) of one element."),
      number(KEY(data.held_out), {.min = 0, .max = 0.9},
             "text: share of the text, in whole documents, that is never trained on."),
      number(KEY(data.elements), {.min = 0}, "synthetic: elements in an epoch; 0: endless."),
      number(KEY(data.epochs), {.min = 0},
             "Passes over the data; 0: endless. If this is not set, a Python dataset is read once."),
      number(KEY(data.seed), {}, "Seed of the order of the elements."),
      plain<Boolean>(
          KEY(data.drop_last),
          "Leave out elements at the end of the data, or of an epoch of a Python dataset, that do not fill a "
          "step; otherwise they make a shorter step."),
      plain<Boolean>(KEY(data.keep_last_step),
                     "Keep the elements of a step in memory, so that the next one can repeat it: "
                     "step(repeat=True)."),
      plain<TextMap>(KEY(data.options),
                     "For registered sources and factories; accelmgr does not look inside."),
  };
}

std::vector<Option> optimizer_options() {
  return {
      choice(
          KEY(optimizer.kind), {"sgd", "adam", "adamw"}, "The rule of the update.",
          {{"lbfgs", "it evaluates the closure several times per update, but a step here is one gradient"}}),
      number(KEY(optimizer.learning_rate), {.min = 0},
             "The learning rate; with warm-up or a schedule, the highest one."),
      number(KEY(optimizer.momentum), {.min = 0, .max = 1, .below_max = true}, "sgd: momentum."),
      plain<Boolean>(KEY(optimizer.nesterov), "sgd: Nesterov's momentum."),
      number(KEY(optimizer.beta1), {.min = 0, .max = 1, .below_max = true},
             "adam, adamw: decay of the mean gradient."),
      number(KEY(optimizer.beta2), {.min = 0, .max = 1, .below_max = true},
             "adam, adamw: decay of the mean squared gradient."),
      number(KEY(optimizer.epsilon), {.min = 0, .above_min = true}, "adam, adamw: added to the denominator."),
      number(KEY(optimizer.weight_decay), {.min = 0},
             "Weight decay; not applied to parameters of fewer than two dimensions (norms, biases)."),
      number(KEY(optimizer.clip_norm), {.min = 0}, "Largest L2 norm of the whole gradient; 0: no clipping."),
      number(KEY(optimizer.steps_per_update), {.min = 1, .max = largest_count},
             "Steps whose gradients are averaged for one update."),
      number(KEY(optimizer.warmup_updates), {.min = 0},
             "Updates over which the learning rate rises linearly from 0."),
      choice(KEY(optimizer.schedule), {"constant", "cosine"}, "The learning rate after warm-up."),
      number(KEY(optimizer.final_learning_rate_ratio), {.min = 0, .max = 1},
             "cosine: the learning rate of the last update, as a share of learning_rate."),
  };
}

std::vector<Option> train_options() {
  return {
      number(KEY(train.steps), {.min = 1}, "Steps of `accelmgr train`."),
      number(KEY(train.evaluate_every), {.min = 0},
             "Steps between evaluations of the held-out loss; 0: none."),
      number(KEY(train.progress_every_s), {.min = 0, .max = longest_seconds, .above_min = true},
             "Seconds between progress lines when standard output is not a terminal."),
  };
}

std::vector<Option> launch_options() {
  return {
      number(KEY(launch.nprocs), {.min = -1, .max = 4096},
             "Processes on this node; -1: one for each visible GPU or, without GPUs, for each core."),
      number(KEY(launch.nnodes), {.min = 1, .max = 65536}, "Number of nodes."),
      number(KEY(launch.min_nodes), {.min = 0, .max = 65536},
             "Number of nodes with which a launch goes on; 0: as many as nnodes."),
      number(KEY(launch.node_rank), {.min = 0, .max = 65535}, "Rank of this node among them, from 0."),
      plain<Text>(
          KEY(launch.rendezvous),
          "HOST:PORT on the first node, at which all processes meet; empty: 127.0.0.1 and a free port."),
      plain<Text>(
          KEY(launch.backend),
          "What carries the collectives: auto (chosen by device and nodes), serial, shm, gloo or nccl."),
      plain<Text>(KEY(launch.interface),
                  "Network interface at which ranks of several nodes connect, as eth0; empty: that of the "
                  "node's name, or of the default route."),
      plain<Text>(KEY(launch.gpus), "GPUs by their absolute ids, one for each process: 4,5."),
      plain<Text>(KEY(launch.workers), "name:ordinal;host:port of every node, joined by |."),
      choice(
          KEY(launch.start_method), {start_methods.begin(), start_methods.end()},
          "How processes are started: executed anew (spawn), forked from this one (fork), or forked from one "
          "that was executed for this purpose (forkserver)."),
      plain<Boolean>(KEY(launch.oversubscribe), "Let several processes share a GPU."),
      number(KEY(launch.max_restarts), {.min = 0, .max = 1'000'000},
             "How often all processes are restarted after one has failed."),
      plain<Text>(KEY(launch.log_directory),
                  "Folder to which the output of each rank is also written; empty: none."),
      number(KEY(launch.timeout), {.min = 0, .max = longest_seconds, .above_min = true},
             "Seconds after which a collective fails with a timeout."),
      number(KEY(launch.rendezvous_timeout), {.min = 0, .max = longest_seconds, .above_min = true},
             "Seconds within which all nodes must have joined."),
      number(KEY(launch.terminate_timeout), {.min = 0, .max = longest_seconds},
             "Seconds from asking processes to end until they are killed."),
      number(KEY(launch.model_parallelism), {.min = 1, .max = 65536},
             "Ranks that share one copy of a layer."),
      number(KEY(launch.pipeline_parallelism), {.min = 1, .max = 65536},
             "Stages of the model, each on ranks of its own."),
      plain<Text>(KEY(launch.model_parallel_backend),
                  "Backend of model parallel groups; empty: launch.backend."),
      plain<Text>(KEY(launch.pipeline_parallel_backend),
                  "Backend of pipeline parallel groups; empty: launch.backend."),
      plain<Text>(KEY(launch.data_parallel_backend),
                  "Backend of data parallel groups; empty: launch.backend."),
  };
}

std::vector<Option> checkpoint_options() {
  return {
      plain<Text>(KEY(checkpoint.directory), "Where checkpoints are written; empty: nowhere."),
      number(KEY(checkpoint.every), {.min = 0}, "Steps between checkpoints; 0: the last step only."),
      number(KEY(checkpoint.keep), {.min = 1, .max = largest_count},
             "How many of the last checkpoints are kept; the best one is kept too."),
      plain<Text>(KEY(checkpoint.resume),
                  "latest (of checkpoint.directory), or the path of a checkpoint; empty: a new run."),
  };
}

#ifdef ACCELMGR_FAULTS
std::vector<Option> fault_options() {
  return {plain<TextList>(KEY(faults), "Builds with tests only: which faults to inject, and when.")};
}
#else
std::vector<Option> fault_options() { return {}; }
#endif

#undef KEY

const std::vector<Option>& table() {
  static const std::vector<Option> all = [] {
    std::vector<Option> joined;
    for (const auto& part : {run_options(), model_options(), data_options(), optimizer_options(),
                             train_options(), checkpoint_options(), launch_options(), fault_options()})
      joined.insert(joined.end(), part.begin(), part.end());
    return joined;
  }();
  return all;
}

std::string joined(std::string_view section, std::string_view name) {
  return section.empty() ? std::string(name) : std::string(section) + "." + std::string(name);
}

std::string section_of(const std::string& key) {
  const auto dot = key.rfind('.');
  return dot == std::string::npos ? std::string() : key.substr(0, dot);
}

// Names of other libraries. A name that is near to a key, or that only one section has, needs no row.
struct Alias {
  std::string_view name;
  std::string_view key;
};
constexpr Alias aliases[]{
    {"batch_size", "batch_size_per_device"},
    {"per_device_train_batch_size", "batch_size_per_device"},
    {"micro_batch_size", "batch_size_per_device"},
    {"train_batch_size", "batch_size_per_device"},
    {"num_workers", "nprocs"},
    {"workers", "nprocs"},
    {"num_processes", "nprocs"},
    {"num_runners", "nprocs"},
    {"devices", "nprocs"},
    {"world_size", "nprocs"},
    {"nproc_per_node", "nprocs"},
    {"accumulation", "grad_accumulation_steps"},
    {"accumulation_steps", "grad_accumulation_steps"},
    {"accumulate_grad_batches", "grad_accumulation_steps"},
    {"gradient_accumulation", "grad_accumulation_steps"},
    {"gradient_accumulation_steps", "grad_accumulation_steps"},
    {"prefetch_factor", "prefetch"},
    {"seed", "seed_base"},
    {"timeout", "step_timeout"},
    {"num_threads", "runners.threads"},
    {"amp", "runners.autocast"},
    {"precision", "runners.autocast"},
    {"mixed_precision", "runners.autocast"},
    {"init_scale", "runners.loss_scale.initial"},
    {"growth_interval", "runners.loss_scale.growth_steps"},
    {"num_epochs", "data.epochs"},
    {"lr", "optimizer.learning_rate"},
    {"max_grad_norm", "optimizer.clip_norm"},
};

std::string_view last_name(std::string_view key) { return key.substr(key.rfind('.') + 1); }

}  // namespace

std::span<const Option> options() { return table(); }

const Option* find_option(std::string_view key) {
  for (const auto& option : table()) {
    if (key == option.key) return &option;
    if (option.is_map() && key.size() > option.key.size() + 1 && key.starts_with(option.key + "."))
      return &option;
  }
  return nullptr;
}

bool is_section(std::string_view key) {
  const auto prefix = std::string(key) + ".";
  return std::ranges::any_of(table(), [&](const Option& option) {
    return option.key.starts_with(prefix) || (option.is_map() && option.key == key);
  });
}

std::vector<std::string> names_in(std::string_view section) {
  const auto prefix = section.empty() ? "" : std::string(section) + ".";
  std::vector<std::string> names;
  for (const auto& option : table()) {
    if (!option.key.starts_with(prefix)) continue;
    auto name = option.key.substr(prefix.size());
    name = name.substr(0, name.find('.'));
    if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

std::string meant_key(const std::string& spelt) {
  std::string key = spelt;
  for (char& c : key) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const auto* alias = std::ranges::find(aliases, key, &Alias::name);
  if (alias != std::end(aliases)) return std::string(alias->key);
  const auto section = section_of(key);
  const bool known_section = section.empty() || is_section(section);
  if (known_section)
    if (const auto name = base::nearest(last_name(key), names_in(section)); !name.empty())
      return joined(section, name);

  std::vector<std::string> all, namesakes;
  for (const auto& option : table()) {
    all.push_back(option.key);
    if (last_name(option.key) == last_name(key)) namesakes.push_back(option.key);
  }
  if (namesakes.size() == 1) return namesakes.front();
  return known_section ? std::string() : base::nearest(key, all);
}

std::string unknown_key(const std::string& key) {
  if (const auto meant = meant_key(key); !meant.empty())
    return fmt::format("unknown key '{}'{}", key, base::did_you_mean(meant));
  const auto section = section_of(key);
  const auto shown = is_section(section) ? section : std::string();
  return fmt::format("unknown key '{}'; the keys {} are {}", key,
                     shown.empty() ? "at the top" : "of '" + shown + "'", fmt::join(names_in(shown), ", "));
}

}  // namespace accelmgr::config
