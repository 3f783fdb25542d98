#include "torture.hpp"

#include <fmt/format.h>

#include <optional>

#include "accelmgr/errors.hpp"
#include "living_children.hpp"

namespace accelmgr::test {
namespace {

constexpr double recovery_patience_s = 120;  // New managers may be killed in turn while they start.

std::vector<std::string> faults_of(const TortureOptions& options) {
  const auto steps = static_cast<std::uint64_t>(options.steps);
  auto faults = runner_faults(options.seed, steps, options.injected);
  const auto add = [&](const std::string& fault) {
    faults.push_back(fmt::format("{} seed={}", fault, options.seed * 1000 + faults.size()));
  };
  // Kills the manager while it finishes what dead runners have left.
  for (const char* phase : {"undo_saved", "in_flight", "reduced", "chunk", "publish", "published"})
    add(fmt::format("rank=manager generation=any phase={} probability=0.03 fault=kill", phase));
  // Kills the first manager, if nothing else does, while its loader reads an element of the first half.
  const auto elements = steps * static_cast<std::uint64_t>(elements_per_step);
  faults.push_back(fmt::format("rank=manager generation=1 phase=data occurrence={} fault=kill",
                               1 + options.seed % (elements / 2)));
  return faults;
}

/// A training loop that recovers from every loss.
class Training {
 public:
  explicit Training(const Config& config) : manager_(config, {}) {}

  client::Handle& manager() { return manager_; }

  /// Makes step `number`, counted from 0.
  void step(std::uint64_t number) {
    constexpr std::uint64_t steps_per_child = 100;
    if (number % steps_per_child == 0) children_.add();
    if (is_zeroed_before(number)) manager_.zero_grad();
    take({.accumulate = is_accumulated(number), .parameters_changed = false});
    if (is_last_of_block(number)) write_parameters(manager_, updated(manager_));
  }

  std::uint64_t recoveries = 0, failed_recoveries = 0;

 private:
  void take(const StepOptions& options) {
    for (;;) {
      const auto result = manager_.step(options);
      if (result.status == StepStatus::manager_lost) {
        recover();
      } else if (result.status != StepStatus::ok || !result.counted) {
        throw Error(
            fmt::format("{} (counted: {}): {}", to_string(result.status), result.counted, result.error));
      }
      if (result.counted) return;
    }
  }

  void recover() {
    const auto deadline = base::Deadline::in_seconds(recovery_patience_s);
    for (;;) try {
        manager_.recover();
        ++recoveries;
        return;
      } catch (const Error& error) {
        ++failed_recoveries;
        if (deadline.passed()) throw Error(fmt::format("no new manager: {}", error.what()));
      }
  }

  LivingChildren children_;  // They outlive the manager.
  client::Handle manager_;
};

void disturb(const TortureOptions& options, const Course& expected, TortureReport& report) {
  auto config = tortured_config(options.seed);
  config.faults = faults_of(options);
  config.data.options[has_children] = "";
  auto killer_options = options.killer;
  killer_options.seed = options.seed;
  std::optional<Training> training;
  try {
    training.emplace(config);
    Killer killer(killer_options);
    for (std::size_t i = 0; i < expected.states.size() && report.failure.empty(); ++i) {
      training->step(i);
      const auto differs = difference(state_of(training->manager()), expected.states[i]);
      if (!differs.empty()) report.failure = fmt::format("after step {}: {}", i + 1, differs);
    }
    report.killed = killer.end();
    if (report.failure.empty() && !same_bits(end_of(training->manager()), expected.end))
      report.failure = "after the last step: not the same bits";
  } catch (const std::exception& error) {
    report.failure = error.what();
  }
  if (!training) return;
  const auto statistics = training->manager().statistics();
  report.steps = statistics.steps;
  report.losses = statistics.losses;
  report.recoveries = training->recoveries;
  report.failed_recoveries = training->failed_recoveries;
}

}  // namespace

int TortureReport::kills() const { return number_of(killed) + number_of(injected); }

TortureReport torture(const TortureOptions& options) {
  TortureReport report;
  make_round(
      report, options.log_file,
      [&] {
        return undisturbed_course(tortured_config(options.seed), static_cast<std::uint64_t>(options.steps),
                                  /*keep_blocks=*/false);
      },
      [&](const Course& expected) { disturb(options, expected, report); });
  return report;
}

}  // namespace accelmgr::test
