#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/config/device_name.hpp"
#include "base/config/loader.hpp"
#include "base/config/table.hpp"
#include "base/power_of_two.hpp"

namespace accelmgr::config {
namespace {

constexpr int byte_values = 256;

void require(bool holds, const std::string& key, const std::string& what) {
  if (!holds) throw ConfigError(what, key);
}

void validate_model(const ModelConfig& model) {
  require(!model.kind.empty(), "model.kind", "model.kind is empty; it must name a model");
  require(model.kind != "torchscript" || !model.file.empty(), "model.file",
          "model.file is empty; model.kind torchscript needs a file that torch.jit.save wrote");
  require(model.kind != "gpt" || model.gpt.width % model.gpt.heads == 0, "model.gpt.width",
          fmt::format("model.gpt.width is {}; it must be a multiple of model.gpt.heads, which is {}",
                      model.gpt.width, model.gpt.heads));
}

void validate_text(const Config& config) {
  const auto& data = config.data;
  const auto& model = config.model;
  require(!data.files.empty(), "data.files",
          "data.files is empty; data.kind text needs at least one file or glob");
  for (const auto& file : data.files)
    require(!file.empty(), "data.files", "data.files has an empty name in it");
  require(
      model.kind != "mlp" && model.kind != "convnet", "model.kind",
      fmt::format("model.kind is {}, which cannot read the tokens of data.kind text; gpt can", model.kind));
  if (model.kind == "gpt") {
    require(data.sequence_length <= model.gpt.context, "data.sequence_length",
            fmt::format("data.sequence_length is {}; it must be at most model.gpt.context, which is {}",
                        data.sequence_length, model.gpt.context));
    require(model.gpt.vocabulary >= byte_values, "model.gpt.vocabulary",
            fmt::format("model.gpt.vocabulary is {}; the bytes of data.kind text need at least {}",
                        model.gpt.vocabulary, byte_values));
  }
  require(config.train.evaluate_every == 0 || data.held_out > 0, "train.evaluate_every",
          fmt::format("train.evaluate_every is {}, but data.held_out is 0: there is no text to evaluate on",
                      config.train.evaluate_every));
}

/// What the devices of this machine decide is checked where they are known: device::assign_devices().
void validate_devices(const Config& config) {
  const auto& runners = config.runners;
  const bool has_gpus = runners.device == Device::automatic || runners.device == Device::cuda;
  require(config.nprocs != one_per_device || runners.device != Device::cpu, "nprocs",
          "nprocs is -1, one for each device, but runners.device is cpu; set auto, cuda, xla or accelerator, "
          "or a number");
  require(runners.protect_parameters || config.nprocs <= 1 || runners.device != Device::cpu,
          "runners.protect_parameters",
          fmt::format(
              "runners.protect_parameters is false, so models may change the master parameters, but nprocs "
              "is {}: several runners would write at the same time; set nprocs=1 or leave it true",
              config.nprocs));
  require(runners.devices.empty() || has_gpus, "runners.devices",
          fmt::format("runners.devices names GPUs, but runners.device is {}; set auto or cuda",
                      name_of(runners.device)));
  const auto listed = runners.devices.size();
  require(runners.devices.empty() || config.nprocs == one_per_device ||
              std::cmp_equal(listed, config.nprocs) || std::cmp_equal(listed, runners.max_runners),
          "runners.devices",
          fmt::format("runners.devices has {} devices, one for each runner, but nprocs is {}", listed,
                      config.nprocs));
}

void validate_launch(const LaunchConfig& launch) {
  require(launch.nprocs != 0, "launch.nprocs",
          "launch.nprocs is 0; it must be at least 1, or -1 for all visible devices");
  require(launch.node_rank < launch.nnodes, "launch.node_rank",
          fmt::format("launch.node_rank is {}; it must be 0 to {}, because launch.nnodes is {}",
                      launch.node_rank, launch.nnodes - 1, launch.nnodes));
  require(launch.min_nodes <= launch.nnodes, "launch.min_nodes",
          fmt::format("launch.min_nodes is {}; it must be at most {}, because launch.nnodes is {}",
                      launch.min_nodes, launch.nnodes, launch.nnodes));
  require(
      launch.min_nodes == 0 || launch.min_nodes == launch.nnodes || launch.workers.empty(),
      "launch.min_nodes",
      fmt::format("launch.min_nodes is {} and launch.nnodes {}, but launch.workers lists nodes that are all "
                  "needed; leave launch.min_nodes out",
                  launch.min_nodes, launch.nnodes));
  require(launch.nnodes == 1 || !launch.rendezvous.empty() || !launch.workers.empty(), "launch.rendezvous",
          fmt::format("launch.nnodes is {}, but launch.rendezvous is empty, and so is launch.workers: nodes "
                      "need a HOST:PORT at which they meet",
                      launch.nnodes));
  require(
      launch.nnodes == 1 || launch.backend != "shm", "launch.backend",
      fmt::format("launch.backend is shm, which connects the processes of one node only, but launch.nnodes "
                  "is {}; gloo connects several nodes",
                  launch.nnodes));
  require(launch.backend != "serial" || (launch.nnodes == 1 && launch.nprocs <= 1), "launch.backend",
          fmt::format("launch.backend is serial, which is for one process only, but launch.nprocs is {} and "
                      "launch.nnodes is {}",
                      launch.nprocs, launch.nnodes));
}

// Keys that have another value than their default, although this kind of optimizer does not read them.
std::vector<std::string> unread_optimizer_keys(const OptimizerConfig& optimizer) {
  const OptimizerConfig defaults;
  std::vector<std::string> unread;
  const auto add = [&](bool changed, const char* key) {
    if (changed) unread.emplace_back(key);
  };
  if (optimizer.kind == OptimizerKind::sgd) {
    add(optimizer.beta1 != defaults.beta1, "optimizer.beta1");
    add(optimizer.beta2 != defaults.beta2, "optimizer.beta2");
    add(optimizer.epsilon != defaults.epsilon, "optimizer.epsilon");
  } else {
    add(optimizer.momentum != defaults.momentum, "optimizer.momentum");
    add(optimizer.nesterov != defaults.nesterov, "optimizer.nesterov");
  }
  return unread;
}

}  // namespace

void validate(const Config& config) {
  for (const auto& option : options()) check(option, config);
  validate_model(config.model);
  require(!config.data.kind.empty(), "data.kind", "data.kind is empty; it must name a source of data");
  if (config.data.kind == "text") validate_text(config);
  validate_devices(config);
  const auto& runners = config.runners;
  const bool is_counted = config.nprocs != one_per_device;  // Otherwise assign_devices() checks again.
  require(!is_counted || runners.min_runners <= config.nprocs, "runners.min_runners",
          fmt::format("runners.min_runners is {}, but there are {} runners (nprocs)", runners.min_runners,
                      config.nprocs));
  require(!is_counted || runners.max_runners == 0 || runners.max_runners >= config.nprocs,
          "runners.max_runners",
          fmt::format(
              "runners.max_runners is {}; it must be at least nprocs, which is {}, or 0, which means nprocs",
              runners.max_runners, config.nprocs));
  require(base::is_power_of_two(runners.loss_scale.initial), "runners.loss_scale.initial",
          fmt::format("runners.loss_scale.initial is {}; it must be a power of two, which scales without "
                      "rounding",
                      runners.loss_scale.initial));
  const auto& checkpoint = config.checkpoint;
  require(checkpoint.resume != "latest" || !checkpoint.directory.empty(), "checkpoint.resume",
          "checkpoint.resume is 'latest', but checkpoint.directory is empty; it must name the directory to "
          "look in");
  require(checkpoint.every == 0 || !checkpoint.directory.empty(), "checkpoint.every",
          fmt::format("checkpoint.every is {}, but checkpoint.directory is empty: there is nowhere to write",
                      checkpoint.every));
  validate_launch(config.launch);
  require(!config.optimizer.nesterov || config.optimizer.momentum > 0, "optimizer.nesterov",
          "optimizer.nesterov is true, but optimizer.momentum is 0; it must be above 0");
}

std::vector<std::string> warnings(const Config& config, int cores) {
  std::vector<std::string> found;
  const int threads =
      config.runners.threads > 0 ? config.runners.threads : std::max(1, cores / config.nprocs);
  if (config.nprocs != one_per_device && config.nprocs * threads > cores)
    found.push_back(
        fmt::format("{} runners (nprocs) with {} threads each (runners.threads) need more than the {} cores: "
                    "they will wait for each other",
                    config.nprocs, threads, cores));
  if (config.runners.share == Share::measured && config.grad_accumulation_steps == 1)
    found.push_back(
        "runners.share is measured, but grad_accumulation_steps is 1: each runner computes the one "
        "micro-batch "
        "that it must compute at least");
  if (const auto unread = unread_optimizer_keys(config.optimizer); !unread.empty())
    found.push_back(fmt::format("optimizer.kind {} does not read {}",
                                entries(*find_option("optimizer.kind"), config).front().second,
                                fmt::join(unread, ", ")));
  const auto updates = config.train.steps / config.optimizer.steps_per_update;
  if (updates == 0)
    found.push_back(
        fmt::format("train.steps is {}, but an update takes {} steps (optimizer.steps_per_update): no update "
                    "will be made",
                    config.train.steps, config.optimizer.steps_per_update));
  else if (config.optimizer.warmup_updates > updates)
    found.push_back(fmt::format(
        "optimizer.warmup_updates is {}, but the run has {} updates: the learning rate never reaches "
        "optimizer.learning_rate",
        config.optimizer.warmup_updates, updates));
  return found;
}

}  // namespace accelmgr::config
