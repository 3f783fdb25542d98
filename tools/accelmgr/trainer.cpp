#include "trainer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <utility>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/config/differences.hpp"
#include "base/config/loader.hpp"
#include "base/config/table.hpp"
#include "commands.hpp"
#include "engine/checkpoint/cleanup.hpp"
#include "engine/checkpoint/run_id.hpp"
#include "error_report.hpp"
#include "python.hpp"

namespace accelmgr::program {
namespace {

std::atomic<int> interrupts{0};
std::atomic<Manager*> running{nullptr};

// The first signal ends the run after the current step; the second ends the program at once.
void on_interrupt(int) {
  if (interrupts.fetch_add(1) == 0) return;
  if (auto* manager = running.load()) manager->kill();
  _exit(exit_interrupted);
}

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  for (int number : {SIGINT, SIGTERM, SIGHUP}) sigaction(number, &action, nullptr);
  signal(SIGXFSZ, SIG_IGN);  // A log beyond ulimit -f becomes a write error and does not kill the program.
}

constexpr double checkpoint_patience_s = 600;  // For the last checkpoint: a disk that takes longer hangs.

double ms_since(std::int64_t begin_ns) { return double(base::now_ns() - begin_ns) / 1e6; }

std::string optimizer_of(const Config& config) {
  return config::entries(*config::find_option("optimizer.kind"), config).front().second;
}

std::string used_folder(const std::filesystem::path& checkpoint) {
  return fmt::format(
      "the folder has checkpoints already: '{}' is of another run. Use --resume latest to go on with that "
      "run, another --checkpoint-dir to keep it, or --overwrite to replace it with a new run",
      checkpoint.string());
}

/// Throws ConfigError if a new run could replace or rotate away checkpoints of an earlier run.
const Config& with_free_folder(const Config& config, const TrainOptions& options) {
  const auto& directory = config.checkpoint.directory;
  if (directory.empty() && !options.checkpoint_fallback.empty())
    throw ConfigError(
        "--checkpoint-fallback without --checkpoint-dir has no effect: no checkpoint is written");
  std::error_code none;
  if (!config.checkpoint.resume.empty() || options.overwrites ||
      !std::filesystem::is_directory(directory, none))
    return config;
  if (const auto found = checkpoint::list_folders(directory); !found.empty())
    throw ConfigError(used_folder(found.front().path));
  return config;
}

/// Where the runners of `config` compute, if that was left to the manager: " on 2 GPUs".
std::string devices_in_words(Device asked, const Config& config) {
  if (asked != Device::automatic && asked != Device::cuda) return {};
  const auto& devices = config.runners.devices;
  if (config.runners.device == Device::cpu) return " on the CPU";
  if (config.runners.device == Device::xla) return " on the chips of a TPU";
  std::set<std::string> gpus(devices.begin(), devices.begin() + config.nprocs);
  const bool has_cpu = gpus.erase("cpu") > 0;
  return fmt::format(" on {} GPU{}{}", gpus.size(), gpus.size() == 1 ? "" : "s",
                     has_cpu ? " and the CPU" : "");
}

/// For models or data in Python the manager process is a Python interpreter.
StartOptions start_options(const Config& config) {
  StartOptions options{.lock_checkpoints = true};
  if (!is_of_python(config)) return options;
  if (config.train.evaluate_every > 0)
    throw ConfigError(
        fmt::format("train.evaluate_every is {}, but this program can evaluate only built-in models on "
                    "built-in data; model.kind is {}, data.kind {}: set it to 0",
                    config.train.evaluate_every, config.model.kind, config.data.kind),
        "train.evaluate_every");
  options.command = python_manager();
  return options;
}

}  // namespace

Trainer::Trainer(const Config& config, TrainOptions options)
    : config_(with_free_folder(config, options)),
      options_(std::move(options)),
      log_({options_.log, !config.checkpoint.resume.empty(), options_.overwrites}),
      progress_(options_.log == "-" ? stderr : stdout, config.train.steps, config.train.progress_every_s),
      report_folder_(std::filesystem::path(options_.log).parent_path()) {}

int Trainer::run() {
  catch_interrupts();
  remove_error_report(report_folder_);
  manager_.emplace(Manager::start(config_, start_options(config_)));
  running.store(&*manager_);
  const auto asked = std::exchange(config_, manager_->config()).runners.device;
  const auto updates =
      (config_.train.steps + config_.optimizer.steps_per_update - 1) / config_.optimizer.steps_per_update;
  optimizer_.emplace(config_.optimizer, manager_->groups(), updates);
  if (config_.train.evaluate_every > 0) evaluator_.emplace(*manager_);
  say_what_trains(asked);
  if (manager_->resumed()) resume(*manager_->resumed());
  begin_files();
  if (manager_->resumed() && summary_.steps >= config_.train.steps) return nothing_to_do();
  const auto begin = base::now_ns();
  if (evaluator_ && summary_.steps == 0) evaluate();
  while (summary_.steps < config_.train.steps && interrupts.load() == 0 && step()) {
  }
  summary_.seconds = ms_since(begin) / 1e3;
  return finish();
}

void Trainer::say_what_trains(Device asked) {
  std::uint64_t parameters = 0;
  for (const auto& p : manager_->parameters()) parameters += static_cast<std::uint64_t>(p.tensor.numel());
  progress_.say(fmt::format("{}: {} parameters; {} runners{}, {} samples a step; session {:.1f} MiB",
                            config_.model.kind, parameters, config_.nprocs, devices_in_words(asked, config_),
                            config_.nprocs * config_.batch_size_per_device * config_.grad_accumulation_steps,
                            double(manager_->statistics().session_bytes) / (1 << 20)));
}

// Removes the log lines and checkpoints of an earlier run only here, when this run is known to begin.
void Trainer::begin_files() {
  const auto& folder = config_.checkpoint.directory;
  const bool known = !manager_->resumed() || !manager_->resumed()->run_id.empty();
  std::vector<checkpoint::Folder> others;
  if (!folder.empty() && known) others = checkpoint::checkpoints_of_other_runs(folder, manager_->run_id());
  if (!others.empty() && !options_.overwrites) throw ConfigError(used_folder(others.front().path));
  log_.begin(manager_->run_id(), summary_.steps);
  std::vector<std::string> warnings;
  for (const auto& other : others) checkpoint::retire(folder, other, warnings);
  for (const auto& warning : warnings) fmt::print(stderr, "accelmgr: warning: {}\n", warning);
}

/// Compares with the configuration in the checkpoint. Throws ConfigError if the optimizer cannot continue;
/// warns of other differences.
void Trainer::compare(const std::string& configuration) const {
  Config saved;
  try {
    saved = config::from_yaml(configuration);
  } catch (const ConfigError&) {
    return;  // Written by a version with other keys.
  }
  if (saved.optimizer.kind != config_.optimizer.kind)
    throw ConfigError(
        fmt::format("the optimizer of the checkpoint is {0}, that of this run {1} (optimizer.kind); go on "
                    "with --set optimizer.kind={0}, or start a new run without --resume",
                    optimizer_of(saved), optimizer_of(config_)),
        "optimizer.kind");
  if (const auto found = config::differences(saved, config_); !found.empty())
    fmt::print(stderr, "accelmgr: warning: the configuration differs from the checkpoint: {}\n",
               fmt::join(found, ", "));
}

int Trainer::nothing_to_do() {
  if (!log_.ended()) log_.run(config_, summary_, *manager_, "done");
  manager_->stop();
  running.store(nullptr);
  progress_.say(fmt::format("nothing to do: the checkpoint is at step {}, train.steps is {}", summary_.steps,
                            config_.train.steps));
  return say_missing() ? exit_failed : exit_done;
}

bool Trainer::say_missing() const {
  const auto missing = log_.missing();
  if (!missing.empty()) fmt::print(stderr, "accelmgr: --log {} lacks {}\n", options_.log, missing);
  return !missing.empty();
}

bool Trainer::step() {
  const auto per_update = config_.optimizer.steps_per_update;
  const bool first_of_update = summary_.steps % per_update == 0;
  const auto result = manager_->step({.accumulate = !first_of_update, .parameters_changed = false});
  if (result.status == StepStatus::manager_lost && config_.runners.on_loss != LossPolicy::fail &&
      recoveries_ < config_.runners.max_restarts) {
    recover(result);
    if (!result.counted) return true;
  }
  if (!result.counted) {
    failure_ = result;
    log_.step(result, 0, {});
    return false;
  }
  double update_ms = 0;
  if ((summary_.steps + 1) % per_update == 0) {
    const auto begin = base::now_ns();
    const auto writing = manager_->writing();
    optimizer_->step();
    update_ms = ms_since(begin);
  }
  summary_.add(result, update_ms);
  progress_.step(summary_, result, update_ms);
  const bool due = evaluator_ && (summary_.steps % config_.train.evaluate_every == 0 ||
                                  summary_.steps == config_.train.steps);
  if (due) evaluate();
  log_.step(result, update_ms, due ? summary_.last_held_out : std::nullopt);
  const bool checkpoint_due = config_.checkpoint.every > 0 && summary_.steps % config_.checkpoint.every == 0;
  if (checkpoint_due) save_checkpoint();
  show_checkpoints(0);
  return true;
}

void Trainer::resume(const Resumed& from) {
  if (!from.configuration.empty()) compare(from.configuration);
  optimizer_->load_state(from.tensors);
  summary_.steps = summary_.resumed_at = saved_step_ = static_cast<std::int64_t>(from.step);
  for (const auto& why : from.refused) progress_.say(fmt::format("refused a checkpoint: {}", why));
  progress_.say(fmt::format("resumed from {} at step {}", from.path, from.step));
}

void Trainer::recover(const StepResult& result) {
  ++recoveries_;
  fmt::print(stderr, "accelmgr: step {}: {}; a new manager takes over\n", summary_.steps + 1, result.error);
  manager_->recover();
}

CheckpointExtras Trainer::extras() const {
  CheckpointExtras extras;
  extras.metric = summary_.last_held_out.value_or(summary_.last_loss);
  extras.tensors = optimizer_->state();
  return extras;
}

void Trainer::save_checkpoint() {
  if (config_.checkpoint.directory.empty() || saved_step_ == summary_.steps) return;
  saved_step_ = summary_.steps;
  try {
    manager_->save_checkpoint(extras());
  } catch (const Error& error) {  // Training goes on; the next one may succeed.
    checkpoint_failed_ = true;
    fmt::print(stderr, "accelmgr: the checkpoint of step {} was not written: {}\n", saved_step_,
               error.what());
  }
}

void Trainer::show_checkpoints(double wait_s) {
  for (const auto& done : manager_->checkpoints_written(wait_s)) {
    if (std::cmp_equal(done.step, saved_step_)) checkpoint_failed_ = !done.error.empty();
    for (const auto& warning : done.warnings) fmt::print(stderr, "accelmgr: warning: {}\n", warning);
    if (!done.error.empty()) {
      fmt::print(stderr, "accelmgr: the checkpoint of step {} was not written: {}\n", done.step, done.error);
    } else {
      progress_.say(
          fmt::format("checkpoint {}: {:.1f} MiB; held up training for {:.1f} ms, written in {:.1f} ms",
                      done.path, double(done.bytes) / (1 << 20), done.copy_ms, done.write_ms));
    }
  }
}

void Trainer::save_last_checkpoint() {
  save_checkpoint();
  show_checkpoints(checkpoint_patience_s);
  if (!checkpoint_failed_) return;
  const auto name = fmt::format("accelmgr-checkpoints-{}", manager_->run_id());
  for (const auto& folder :
       {std::filesystem::path(options_.checkpoint_fallback), report_folder_, std::filesystem::path(".")})
    if (!folder.empty() && save_elsewhere(folder / name)) return;
}

bool Trainer::save_elsewhere(const std::filesystem::path& folder) {
  auto why = std::string("it took too long");
  try {
    auto copy = extras();
    copy.directory = std::filesystem::absolute(folder).lexically_normal().string();
    manager_->save_checkpoint(copy);
    for (const auto& done : manager_->checkpoints_written(checkpoint_patience_s)) {
      why = done.error;
      if (!done.error.empty()) continue;
      fmt::print(
          stderr,
          "accelmgr: the checkpoint of step {} is in {} instead; the same command with --resume {} goes on "
          "from it\n",
          done.step, done.path, done.path);
      return true;
    }
  } catch (const std::exception& error) {
    why = error.what();
  }
  fmt::print(stderr, "accelmgr: it was not written to '{}' either: {}\n", folder.string(), why);
  return false;
}

void Trainer::evaluate() {
  const auto begin = base::now_ns();
  const double loss = evaluator_->loss();
  summary_.evaluate_ms += ms_since(begin);
  if (!summary_.first_held_out) summary_.first_held_out = loss;
  summary_.last_held_out = loss;
  progress_.held_out(summary_, loss);
}

int Trainer::finish() {
  const bool interrupted = interrupts.load() > 0;
  const bool ended = !failure_.error.empty() && failure_.status == StepStatus::data_end &&
                     failure_.error_type.empty() && summary_.steps > 0;
  const bool failed = !failure_.error.empty() && !ended;
  const std::string how = failed ? "failed" : interrupted ? "interrupted" : ended ? "end of data" : "done";
  if (failure_.status != StepStatus::manager_lost && summary_.steps > 0)
    save_last_checkpoint();
  else
    show_checkpoints(checkpoint_patience_s);
  log_.run(config_, summary_, *manager_, how);
  manager_->stop();
  running.store(nullptr);
  if (failed) {
    fmt::print(stderr, "accelmgr: {}\n", failure_text(failure_));
    write_error_report(report_folder_, failure_);
  }
  progress_.say(fmt::format("{}: {}", how, closing_summary(summary_)));
  const bool log_failed = say_missing();
  if (failed || log_failed || checkpoint_failed_) return exit_failed;
  return interrupted ? exit_interrupted : exit_done;
}

}  // namespace accelmgr::program
