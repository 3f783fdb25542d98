#include "torture.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "data/random.hpp"
#include "faults/plan.hpp"
#include "staged_run.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

constexpr int runners = 3;
constexpr int micro_batches = 2;
constexpr int steps_per_update = 4;
constexpr float learning_rate = 0.05F;
constexpr double recovery_patience_s = 120;  // New managers may be killed in turn while they start.

double seconds_since(std::int64_t begin_ns) { return double(base::now_ns() - begin_ns) / 1e9; }

Config config_of(std::uint64_t seed) {
  Config config;
  config.nprocs = runners;
  config.batch_size_per_device = 3;
  config.grad_accumulation_steps = micro_batches;
  config.prefetch = 8;
  config.seed_base = seed;
  config.step_timeout = 120;  // Longer than a step takes with all its losses.
  config.runners.threads = 1;
  config.runners.on_loss = LossPolicy::restart;
  config.runners.restart_backoff = 0;
  config.runners.restarts_per_window = 0;
  config.runners.max_restarts = 1'000'000'000;
  config.runners.hang_timeout = 0.5;
  config.buffers.policy = BufferPolicy::mean;  // The mean, so that the buffers of every rank are compared.
  config.model.kind = tortured;
  config.data.kind = tortured;
  config.data.seed = seed;
  return config;
}

/// Where runners die, and how often a step reaches that place. Each place gets the same number of kills.
struct Place {
  const char* phase;
  double reached;
};
constexpr Place places[] = {{"load_parameters", 1},   {"data", 2},    {"forward", 2}, {"backward", 2},
                            {"gradient_capture", 17}, {"vote", 1},    {"voted", 1},   {"undo_saved", 3.8},
                            {"in_flight", 3.8},       {"reduced", 4}, {"chunk", 4},   {"publish", 1},
                            {"published", 1},         {"close", 1}};

std::vector<std::string> faults_of(const TortureOptions& options) {
  std::vector<std::string> faults;
  const auto add = [&](const std::string& fault) {
    faults.push_back(fmt::format("{} seed={}", fault, options.seed * 1000 + faults.size()));
  };
  const double reached_by_all = double(options.steps) * runners;
  for (const auto& place : places)
    add(fmt::format("rank=any generation=any phase={} probability={} fault=kill", place.phase,
                    options.injected / std::size(places) / reached_by_all / place.reached));
  // Kills replacements before they have begun.
  for (int generation = 2; generation < 6; ++generation)
    add(fmt::format("rank=any generation={} phase=init probability=0.2 fault=kill", generation));
  // Kills the manager while it finishes what dead runners have left.
  for (const char* phase : {"undo_saved", "in_flight", "reduced", "chunk", "publish", "published"})
    add(fmt::format("rank=manager generation=any phase={} probability=0.03 fault=kill", phase));
  // Kills the manager in its loader's thread.
  add(fmt::format("rank=manager generation=any phase=data probability={} fault=kill", 0.5 / reached_by_all));
  // Delays ranks now and then, so that they meet what other processes do meanwhile.
  add("rank=any generation=any phase=any probability=0.0002 fault=slow:3");
  return faults;
}

/// The state that must be the same in both runs.
struct State {
  std::size_t parameters = 0, gradients = 0, buffers = 0;  ///< Hashes of all bytes.
  std::uint64_t steps = 0, samples = 0, elements = 0;
};

std::size_t hash_of(const Tensors& tensors) {
  std::size_t hash = 0;
  for (const auto& tensor : tensors) {
    const std::string_view bytes(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
    hash = base::mix(hash + std::hash<std::string_view>{}(bytes));
  }
  return hash;
}

std::string difference(const State& is, const State& expected) {
  std::string text;
  const auto compare = [&](const char* what, auto a, auto b) {
    if (a != b) text += fmt::format("{}{} {:x} instead of {:x}", text.empty() ? "" : ", ", what, a, b);
  };
  compare("parameters", is.parameters, expected.parameters);
  compare("gradients", is.gradients, expected.gradients);
  compare("buffers", is.buffers, expected.buffers);
  compare("steps", is.steps, expected.steps);
  compare("samples", is.samples, expected.samples);
  compare("elements", is.elements, expected.elements);
  return text;
}

/// A training loop that recovers from every loss.
class Training {
 public:
  explicit Training(const Config& config) : manager_(config, {}) {}

  client::Handle& manager() { return manager_; }

  /// Makes step `number`, counted from 0. The first block of steps accumulates onto zeroed gradients; the
  /// first step of the second block overwrites them; and so on in turn.
  void step(int number) {
    const bool first = number % steps_per_update == 0;
    const bool zeroed = number / steps_per_update % 2 == 0;
    if (first && zeroed) manager_.zero_grad();
    take({.accumulate = zeroed || !first, .parameters_changed = false});
    if ((number + 1) % steps_per_update == 0) update();
  }

  State state() const {
    const auto statistics = manager_.statistics();
    return {hash_of(parameters_of(manager_)),
            hash_of(gradients_of(manager_)),
            hash_of(buffers_of(manager_)),
            statistics.steps,
            statistics.samples,
            statistics.elements};
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

  void update() {
    auto parameters = parameters_of(manager_), gradients = gradients_of(manager_);
    for (std::size_t t = 0; t < parameters.size(); ++t) {
      auto* values = reinterpret_cast<float*>(parameters[t].bytes.data());
      const auto* gradient = reinterpret_cast<const float*>(gradients[t].bytes.data());
      for (std::size_t i = 0; i < parameters[t].count(); ++i) values[i] -= learning_rate * gradient[i];
    }
    write_parameters(manager_, parameters);
  }

  client::Handle manager_;
};

/// Writes standard error of this process, and of the processes that it starts, to a file.
class LogTo {
 public:
  explicit LogTo(const std::string& file) : before_(dup(STDERR_FILENO)) {
    const base::UniqueFd log(open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600));
    if (!before_ || !log) throw SystemError("opening " + file, errno);
    std::fflush(stderr);
    dup2(log.get(), STDERR_FILENO);
    setenv("ACCELMGR_LOG_LEVEL", "info", 1);
  }
  ~LogTo() {
    std::fflush(stderr);
    dup2(before_.get(), STDERR_FILENO);
    unsetenv("ACCELMGR_LOG_LEVEL");
  }
  LogTo(const LogTo&) = delete;
  LogTo& operator=(const LogTo&) = delete;

 private:
  base::UniqueFd before_;
};

/// The kills in the log: the library logs a fault before it strikes.
Kills injected_kills(const std::string& log_file) {
  const std::string_view says = "injecting a fault: ";
  Kills kills;
  std::ifstream log(log_file);
  for (std::string line; std::getline(log, line);) {
    const auto at = line.find(says);
    if (at == std::string::npos) continue;
    const auto fault = faults::parse(line.substr(at + says.size()));
    if (fault.action != faults::Action::kill) continue;
    ++kills[fmt::format("{}{}", fault.rank == faults::manager_rank ? "manager " : "",
                        faults::name_of(*fault.phase))];
  }
  return kills;
}

/// The states after every step, and all tensors after the last step.
struct Course {
  std::vector<State> states;
  Tensors end;
};

Tensors end_of(const client::Handle& manager) {
  auto end = parameters_of(manager);
  for (const auto& tensors : {gradients_of(manager), buffers_of(manager)})
    end.insert(end.end(), tensors.begin(), tensors.end());
  return end;
}

Course undisturbed(const TortureOptions& options) {
  Training training(config_of(options.seed));
  Course course;
  for (int i = 0; i < options.steps; ++i) {
    training.step(i);
    course.states.push_back(training.state());
  }
  course.end = end_of(training.manager());
  return course;
}

void disturb(const TortureOptions& options, const Course& expected, TortureReport& report) {
  auto config = config_of(options.seed);
  config.faults = faults_of(options);
  auto killer_options = options.killer;
  killer_options.seed = options.seed;
  std::optional<Training> training;
  try {
    training.emplace(config);
    Killer killer(killer_options);
    for (int i = 0; i < options.steps && report.failure.empty(); ++i) {
      training->step(i);
      const auto differs = difference(training->state(), expected.states[static_cast<std::size_t>(i)]);
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

std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

int sum_of(const Kills& kills) {
  int sum = 0;
  for (const auto& [kind, number] : kills)
    if (!kind.ends_with("stopped")) sum += number;
  return sum;
}

}  // namespace

int TortureReport::kills() const { return sum_of(killed) + sum_of(injected); }

TortureReport torture(const TortureOptions& options) {
  TortureReport report;
  auto begin = base::now_ns();
  const auto expected = undisturbed(options);
  report.undisturbed_s = seconds_since(begin);
  begin = base::now_ns();
  const auto descriptors = open_descriptors();
  {
    const LogTo log(options.log_file);
    disturb(options, expected, report);
  }
  report.disturbed_s = seconds_since(begin);
  report.injected = injected_kills(options.log_file);
  if (report.failure.empty()) report.failure = left_behind();
  if (report.failure.empty() && open_descriptors() != descriptors)
    report.failure = fmt::format("{} descriptors are open, {} were before", open_descriptors(), descriptors);
  if (report.failure.empty()) std::filesystem::remove(options.log_file);
  return report;
}

}  // namespace accelmgr::test
