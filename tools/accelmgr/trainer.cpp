#include "trainer.hpp"

#include <fmt/core.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "commands.hpp"

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

double ms_since(std::int64_t begin_ns) { return double(base::now_ns() - begin_ns) / 1e6; }

/// What was wrong with the input rather than with the run.
bool bad_input(const StepResult& failure, const Summary& summary) {
  return summary.steps == 0 && (failure.error_type == "ModelError" || failure.error_type == "DataError");
}

}  // namespace

Trainer::Trainer(const Config& config, const std::string& log_file)
    : config_(config), log_(log_file), progress_(config.train.steps, config.train.progress_every_s) {}

int Trainer::run() {
  catch_interrupts();
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
  const auto begin = base::now_ns();
  if (evaluator_) evaluate();
  while (summary_.steps < config_.train.steps && interrupts.load() == 0 && step()) {
  }
  summary_.seconds = ms_since(begin) / 1e3;
  return finish();
}

bool Trainer::step() {
  const auto per_update = config_.optimizer.steps_per_update;
  const bool first_of_update = summary_.steps % per_update == 0;
  const auto result = manager_->step({.accumulate = !first_of_update, .parameters_changed = false});
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
  return true;
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
  log_.run(config_, summary_, *manager_, how);
  manager_->stop();
  running.store(nullptr);
  if (failed)
    fmt::print(stderr, "accelmgr: step {} failed: {}: {}\n", summary_.steps + 1, to_string(failure_.status),
               failure_.error);
  progress_.say(fmt::format("{}: {}", how, closing_summary(summary_)));
  if (failed) return bad_input(failure_, summary_) ? exit_usage : exit_failed;
  return interrupted ? exit_interrupted : exit_done;
}

}  // namespace accelmgr::program
