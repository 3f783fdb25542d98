#include "trainer.hpp"

#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "commands.hpp"
#include "error_report.hpp"

namespace accelmgr::program {
namespace {

std::atomic<int> interrupts{0};
std::atomic<Manager*> running{nullptr};

// The first finishes the step; the second ends everything at once.
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
}

constexpr double checkpoint_patience_s = 600;  // For the last one: a disk that takes longer hangs.

double ms_since(std::int64_t begin_ns) { return double(base::now_ns() - begin_ns) / 1e6; }

}  // namespace

Trainer::Trainer(const Config& config, const std::string& log_file)
    : config_(config),
      log_(log_file),
      progress_(config.train.steps, config.train.progress_every_s),
      report_folder_(std::filesystem::path(log_file).parent_path()) {}

int Trainer::run() {
  catch_interrupts();
  remove_error_report(report_folder_);
  manager_.emplace(Manager::start(config_));
  running.store(&*manager_);
  const auto updates =
      (config_.train.steps + config_.optimizer.steps_per_update - 1) / config_.optimizer.steps_per_update;
  optimizer_.emplace(config_.optimizer, manager_->groups(), updates);
  if (config_.train.evaluate_every > 0) evaluator_.emplace(*manager_);

  std::uint64_t parameters = 0;
  for (const auto& p : manager_->parameters()) parameters += static_cast<std::uint64_t>(p.tensor.numel());
  progress_.say(fmt::format("{}: {} parameters; {} runners, {} samples a step; session {:.1f} MiB",
                            config_.model.kind, parameters, config_.nprocs,
                            config_.nprocs * config_.batch_size_per_device * config_.grad_accumulation_steps,
                            double(manager_->statistics().session_bytes) / (1 << 20)));
  if (manager_->resumed()) resume(*manager_->resumed());
  const auto begin = base::now_ns();
  if (evaluator_ && summary_.steps == 0) evaluate();
  while (summary_.steps < config_.train.steps && interrupts.load() == 0 && step()) {
  }
  summary_.seconds = ms_since(begin) / 1e3;
  return finish();
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
  optimizer_->load_state(from.tensors);
  summary_.steps = summary_.resumed_at = saved_step_ = static_cast<std::int64_t>(from.step);
  for (const auto& why : from.refused) progress_.say(fmt::format("refused: {}", why));
  progress_.say(fmt::format("resumed from {} at step {}", from.path, from.step));
}

void Trainer::recover(const StepResult& result) {
  ++recoveries_;
  fmt::print(stderr, "accelmgr: step {}: {}; a new manager takes over\n", summary_.steps + 1, result.error);
  manager_->recover();
}

void Trainer::save_checkpoint() {
  if (config_.checkpoint.directory.empty() || saved_step_ == summary_.steps) return;
  CheckpointExtras extras;
  extras.metric = summary_.last_held_out.value_or(summary_.last_loss);
  extras.tensors = optimizer_->state();
  saved_step_ = summary_.steps;
  try {
    manager_->save_checkpoint(extras);
  } catch (const Error& error) {  // Training goes on; the next one may succeed.
    checkpoint_failed_ = true;
    fmt::print(stderr, "accelmgr: the checkpoint of step {} was not written: {}\n", saved_step_,
               error.what());
  }
}

void Trainer::show_checkpoints(double wait_s) {
  for (const auto& done : manager_->checkpoints_written(wait_s)) {
    checkpoint_failed_ = !done.error.empty();
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
  if (failure_.status != StepStatus::manager_lost && summary_.steps > 0) save_checkpoint();
  show_checkpoints(checkpoint_patience_s);
  log_.run(config_, summary_, *manager_, how);
  manager_->stop();
  running.store(nullptr);
  if (failed) {
    fmt::print(stderr, "accelmgr: {}\n", failure_text(failure_));
    write_error_report(report_folder_, failure_);
  }
  progress_.say(fmt::format("{}: {}", how, closing_summary(summary_)));
  if (failed || checkpoint_failed_) return exit_failed;
  return interrupted ? exit_interrupted : exit_done;
}

}  // namespace accelmgr::program
