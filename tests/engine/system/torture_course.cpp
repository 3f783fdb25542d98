#include "torture_course.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "base/split_mix.hpp"
#include "base/unique_fd.hpp"
#include "engine/faults/plan.hpp"
#include "engine/support/expectations.hpp"

namespace accelmgr::test {
namespace {

constexpr double learning_rate = 0.05;

/// Where runners die, and how often a step reaches that place. Each place gets the same number of kills.
struct Place {
  const char* phase;
  double reached;
};
constexpr Place places[] = {{"load_parameters", 1},   {"data", 2},    {"forward", 2}, {"backward", 2},
                            {"gradient_capture", 17}, {"vote", 1},    {"voted", 1},   {"undo_saved", 3.8},
                            {"in_flight", 3.8},       {"reduced", 4}, {"chunk", 4},   {"publish", 1},
                            {"published", 1},         {"close", 1}};

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

/// The kills in the log: the fault library logs a fault before it strikes.
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

std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

double seconds_since(std::int64_t begin_ns) { return double(base::now_ns() - begin_ns) / 1e9; }

}  // namespace

Config tortured_config(std::uint64_t seed) {
  Config config;
  config.nprocs = tortured_ranks;
  config.batch_size_per_device = tortured_batch_size;
  config.grad_accumulation_steps = tortured_accumulation_steps;
  config.prefetch = 8;
  config.seed_base = seed;
  config.step_timeout = 120;  // Longer than a step takes with all its losses.
  config.runners.threads = 1;
  config.runners.on_loss = LossPolicy::restart;
  config.runners.restart_backoff = 0;
  config.runners.restarts_per_window = 0;
  config.runners.max_restarts = 1'000'000'000;
  config.runners.hang_timeout = 0.5;
  // Another seed, other precision: in turn that of the parameters, more, or less.
  const auto precision = seed / 2 % 4;
  if (precision == 1) config.gradients.dtype = GradientDtype::float32;
  if (precision == 2) config.gradients.slab_dtype = SlabDtype::bf16;
  if (precision == 3) config.runners.parameters = RunnerParameters::bf16;
  config.buffers.policy = BufferPolicy::mean;  // The mean, so that the buffers of every rank are compared.
  config.model.kind = tortured;
  config.data.kind = tortured;
  config.data.seed = seed;
  return config;
}

std::vector<std::string> runner_faults(std::uint64_t seed, std::uint64_t steps, double expected) {
  std::vector<std::string> faults;
  const auto add = [&](const std::string& fault) {
    faults.push_back(fmt::format("{} seed={}", fault, seed * 1000 + faults.size()));
  };
  const double reached_by_all = double(steps) * tortured_ranks;
  for (const auto& place : places)
    add(fmt::format("rank=any generation=any phase={} probability={} fault=kill", place.phase,
                    expected / std::size(places) / reached_by_all / place.reached));
  // Kills replacements before they have begun.
  for (int generation = 2; generation < 6; ++generation)
    add(fmt::format("rank=any generation={} phase=init probability=0.2 fault=kill", generation));
  // Delays ranks now and then, so that they meet what other processes do meanwhile.
  add("rank=any generation=any phase=any probability=0.0002 fault=slow:3");
  return faults;
}

std::size_t hash_of(const Tensors& tensors) {
  std::size_t hash = 0;
  for (const auto& tensor : tensors) {
    const std::string_view bytes(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
    hash = base::mix(hash + std::hash<std::string_view>{}(bytes));
  }
  return hash;
}

State state_of(const client::Handle& manager) {
  const auto statistics = manager.statistics();
  return {hash_of(parameters_of(manager)),
          hash_of(gradients_of(manager)),
          hash_of(buffers_of(manager)),
          statistics.steps,
          statistics.samples,
          statistics.elements};
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

Tensors end_of(const client::Handle& manager) {
  auto end = parameters_of(manager);
  for (const auto& tensors : {gradients_of(manager), buffers_of(manager)})
    end.insert(end.end(), tensors.begin(), tensors.end());
  return end;
}

Tensors updated(const client::Handle& manager) {
  auto parameters = parameters_of(manager), gradients = gradients_of(manager);
  for (std::size_t t = 0; t < parameters.size(); ++t) {
    const auto gradient = elements_of(gradients[t]).numbers();
    elements_of(parameters[t]).change([&](double value, std::uint64_t i) {
      return value - learning_rate * gradient[i];
    });
  }
  return parameters;
}

Course undisturbed_course(const Config& config, std::uint64_t steps, bool keep_blocks) {
  client::Handle manager(config, {});
  Course course;
  manager.zero_grad();
  course.begin = state_of(manager);
  if (keep_blocks) course.parameters.push_back(parameters_of(manager));
  for (std::uint64_t step = 0; step < steps; ++step) {
    if (is_zeroed_before(step)) manager.zero_grad();
    const auto result = manager.step({.accumulate = is_accumulated(step), .parameters_changed = false});
    if (!result) throw Error(fmt::format("{}: {}", to_string(result.status), result.error));
    if (is_last_of_block(step)) {
      write_parameters(manager, updated(manager));
      if (keep_blocks) course.parameters.push_back(parameters_of(manager));
      if (keep_blocks) course.gradients.push_back(gradients_of(manager));
    }
    course.states.push_back(state_of(manager));
  }
  course.end = end_of(manager);
  return course;
}

int number_of(const Kills& kills) {
  int sum = 0;
  for (const auto& [kind, number] : kills)
    if (!kind.ends_with("stopped")) sum += number;
  return sum;
}

void make_round(RoundReport& report, const std::string& log_file, const std::function<Course()>& undisturbed,
                const std::function<void(const Course& expected)>& disturb) {
  auto begin_ns = base::now_ns();
  const auto expected = undisturbed();
  report.undisturbed_s = seconds_since(begin_ns);
  begin_ns = base::now_ns();
  const auto descriptors = open_descriptors();
  {
    const LogTo log(log_file);
    try {
      disturb(expected);
    } catch (const std::exception& error) {
      report.failure = error.what();
    }
  }
  report.disturbed_s = seconds_since(begin_ns);
  report.injected = injected_kills(log_file);
  if (const auto left = left_behind(); report.failure.empty()) report.failure = left;
  if (report.failure.empty() && open_descriptors() != descriptors)
    report.failure = fmt::format("{} descriptors are open, {} were before", open_descriptors(), descriptors);
  if (report.failure.empty()) std::filesystem::remove(log_file);
}

}  // namespace accelmgr::test
