// Measures the time from a runner's death to the next committed step.
//
// The runner is killed while it waits for a step. The clock starts when its pidfd is readable, and step() is
// called at once. Parts: `model` and `start` (without the model) are the start of the replacement, `compute`
// is the step's forward and backward, `rest` is the time of supervisor, fork server and host.
#include <fmt/format.h>
#include <signal.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "accelmgr/init.hpp"
#include "accelmgr/manager.hpp"
#include "base/clock.hpp"
#include "base/config/loader.hpp"
#include "base/ipc/process.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr double patience_s = 60;

Config mlp() {
  Config config;
  config.nprocs = 2;
  config.batch_size_per_device = 32;
  config.runners.threads = 1;
  config.model.kind = "mlp";
  config.model.mlp = {.input_size = 512, .hidden_size = 512, .hidden_layers = 4, .output_size = 10};
  return config;
}

Config gpt() {
  auto config = config::load_config(SHIPPED_CONFIG, {}, {}).config;
  config.data.kind = "synthetic";
  config.data.held_out = 0;
  config.train.evaluate_every = 0;
  return config;
}

StepResult counted_step(Manager& manager) {
  auto result = manager.step({.accumulate = false});
  if (!result.counted) throw std::runtime_error(result.error);
  return result;
}

void kill_and_wait(int pid) {
  const auto pidfd = ipc::open_pidfd(pid);
  ipc::send_signal(pidfd.get(), SIGKILL);
  if (!ipc::wait_ended(pidfd.get(), base::Deadline::in_seconds(patience_s)))
    throw std::runtime_error("a killed runner does not end");
}

void measure(const std::string& name, Config config, int deaths) {
  config.runners.on_loss = LossPolicy::restart;
  config.runners.restart_backoff = 0;
  config.runners.restarts_per_window = 0;
  auto manager = Manager::start(config);
  counted_step(manager);
  std::vector<double> total, start, model, compute, rest;
  for (int i = 0; i < deaths; ++i) {
    const int rank = i % config.nprocs;
    const auto victim = static_cast<std::size_t>(rank);
    counted_step(manager);
    kill_and_wait(manager.statistics().runners.at(victim).pid);
    const auto dead_ns = base::now_ns();
    const auto result = counted_step(manager);
    const double ms = double(base::now_ns() - dead_ns) / 1e6;
    const auto runner = manager.statistics().runners.at(victim);
    if (runner.generation != static_cast<std::uint32_t>(2 + i / config.nprocs))
      throw std::runtime_error("the killed runner was not replaced");
    total.push_back(ms);
    model.push_back(runner.model_ms);
    start.push_back(runner.start_ms - runner.model_ms);
    compute.push_back(result.compute_ms);
    rest.push_back(ms - runner.start_ms - result.compute_ms);
  }
  bench::emit("ours", name, "total", bench::median(total), "ms");
  bench::emit("ours", name, "model", bench::median(model), "ms");
  bench::emit("ours", name, "start", bench::median(start), "ms");
  bench::emit("ours", name, "compute", bench::median(compute), "ms");
  bench::emit("ours", name, "rest", bench::median(rest), "ms");
}

}  // namespace

int main(int argc, char** argv) {
  init(argc, argv);
  const int deaths = bench::parse_quick(argc, argv) ? 4 : 20;
  return bench::exit_code_of([deaths] {
    measure("mlp, 1M parameters", mlp(), deaths);
    measure("gpt, 0.8M parameters", gpt(), deaths);
  });
}
