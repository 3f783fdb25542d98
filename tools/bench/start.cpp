// Measures the time from the call of a training program to its first step, and from the fork of a runner to
// its first backward.
//
// The program executes itself as the host. The host has the shipped configuration, but its model and data
// source note the time and forward to those that the configuration names. All processes write into one
// timeline, which is shared memory of the measuring process.
#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/engine.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/errors.hpp"
#include "accelmgr/evaluator.hpp"
#include "accelmgr/init.hpp"
#include "accelmgr/manager.hpp"
#include "accelmgr/model.hpp"
#include "base/clock.hpp"
#include "base/config/loader.hpp"
#include "base/unique_fd.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr const char* timeline_variable = "BENCH_START_TIMELINE";  // The path of the timeline.
constexpr const char* timed = "timed";
constexpr int max_runners = 24;

/// The time of the first call of now(), 0 before it.
struct Moment {
  std::atomic<std::int64_t> ns;
  void now() {
    std::int64_t never = 0;
    ns.compare_exchange_strong(never, base::now_ns());
  }
};

struct RunnerMoments {
  Moment forked, model_begun, model_made, forward_begun, forward_done, backward_done;
};

struct Timeline {
  Moment called, host_entered, configured, manager_entered, data_made, model_made, started, evaluated,
      stepped;
  std::atomic<int> runners;  ///< Forked; they are forked one after the other, in order of rank.
  RunnerMoments runner[max_runners];
};

// The role of this process and the memory that it writes. Set before any thread or fork.
Timeline* timeline = nullptr;
bool in_host = false;
int forks = 0;                    // Forks since the last exec: 1 in the fork server, 2 in a runner.
RunnerMoments* runner = nullptr;  // Set only in a runner.

void on_forked() {
  if (++forks != 2) return;
  runner = &timeline->runner[timeline->runners.fetch_add(1)];
  runner->forked.now();
}

Timeline* map_timeline(int fd) {
  void* memory = mmap(nullptr, sizeof(Timeline), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw SystemError("mmap of the timeline", errno);
  return static_cast<Timeline*>(memory);
}

class TimedModel final : public Model {
 public:
  explicit TimedModel(std::unique_ptr<Model> model) : model_(std::move(model)) {}
  std::vector<NamedTensor> parameters() override { return model_->parameters(); }
  std::vector<NamedTensor> buffers() override { return model_->buffers(); }
  void train(bool on) override { model_->train(on); }

  Outputs forward(const Batch& batch) override {
    if (runner == nullptr) return model_->forward(batch);
    runner->forward_begun.now();
    auto outputs = model_->forward(batch);
    runner->forward_done.now();
    outputs.loss.register_hook([](const at::Tensor&) {
      torch::autograd::Engine::get_default_engine().queue_callback([] { runner->backward_done.now(); });
    });
    return outputs;
  }

 private:
  std::unique_ptr<Model> model_;
};

/// The shipped configuration. `options` has the names of the model and the data source that are timed.
Config without_timing(Config config) {
  config.model.kind = config.model.options.at(timed);
  config.data.kind = config.data.options.at(timed);
  return config;
}

std::unique_ptr<Model> make_timed_model(const Config& config) {
  if (runner != nullptr) runner->model_begun.now();
  auto model = std::make_unique<TimedModel>(make_model(without_timing(config)));
  if (runner != nullptr) runner->model_made.now();
  if (runner == nullptr && !in_host) timeline->model_made.now();
  return model;
}

std::unique_ptr<BatchSource> make_timed_data(const Config& config) {
  auto source = make_data(without_timing(config));
  if (!in_host) timeline->data_made.now();
  return source;
}

/// Does what `accelmgr train` does up to the end of its first step, then ends the manager.
void train() {
  auto config = config::load_config(SHIPPED_CONFIG, {}, {}).config;
  config.model.options[timed] = std::exchange(config.model.kind, timed);
  config.data.options[timed] = std::exchange(config.data.kind, timed);
  timeline->configured.now();
  auto manager = Manager::start(config);
  timeline->started.now();
  Optimizer optimizer(config.optimizer, manager.groups(), config.train.steps);
  Evaluator(manager).loss();
  timeline->evaluated.now();
  const auto result = manager.step({.accumulate = false});
  if (!result) throw std::runtime_error("start: " + result.error);
  {
    const auto writing = manager.writing();
    optimizer.step();
  }
  timeline->stepped.now();
}

/// Runs this program again as the host. `fd` is the descriptor of the timeline.
void run_host(int fd, char** argv) {
  const auto path = fmt::format("/proc/{}/fd/{}", getpid(), fd);
  setenv(timeline_variable, path.c_str(), 1);
  pid_t pid = 0;
  timeline->called.now();
  char* arguments[] = {argv[0], nullptr};
  if (const int error = posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, arguments, environ); error != 0)
    throw SystemError("posix_spawn of this program", error);
  bench::wait_workers({pid});
}

/// Prints the time of each part. A part begins at the end of the part before.
class Parts {
 public:
  Parts(std::string in_case, const Moment& begin) : case_(std::move(in_case)), last_(begin.ns.load()) {}
  void part(const std::string& name, const Moment& end) {
    const auto ns = end.ns.load();
    if (ns == 0) throw std::runtime_error(fmt::format("start: '{}' never ended", name));
    const double ms = double(ns - last_) / 1e6;
    bench::emit("ours", case_, name, ms, "ms");
    total_ms_ += ms;
    last_ = ns;
  }
  /// Leaves out the time up to `moment`, in which other processes work.
  void skip_to(const Moment& moment) { last_ = moment.ns.load(); }
  void total() const { bench::emit("ours", case_, "total", total_ms_, "ms"); }

 private:
  std::string case_;
  std::int64_t last_;
  double total_ms_ = 0;
};

void report(const Timeline& t) {
  Parts train("train", t.called);
  train.part("exec and load", t.host_entered);
  train.part("configuration", t.configured);
  train.part("manager: exec and load", t.manager_entered);
  train.part("manager: model", t.model_made);
  train.part("manager: data", t.data_made);
  train.part("manager: session", t.runner[0].forked);
  train.part("runners, one after the other", t.started);
  train.part("held-out loss", t.evaluated);
  train.part("first step", t.stepped);
  train.total();

  const auto& first = t.runner[0];
  Parts runner("runner", first.forked);
  runner.part("session mapped", first.model_begun);
  runner.part("model", first.model_made);
  runner.part("bound, and ready", t.runner[1].forked);  // The next is forked when this one is ready.
  runner.skip_to(first.forward_begun);
  runner.part("forward", first.forward_done);
  runner.part("backward", first.backward_done);
  runner.total();
}

void measure(bool quick, char** argv) {
  for (int turn = 0; turn < (quick ? 1 : 3); ++turn) {
    const base::UniqueFd fd(memfd_create("timeline", MFD_CLOEXEC));
    if (!fd || ftruncate(fd.get(), sizeof(Timeline)) != 0) throw SystemError("memfd of the timeline", errno);
    timeline = map_timeline(fd.get());
    run_host(fd.get(), argv);
    report(*timeline);
    munmap(timeline, sizeof(Timeline));
  }
}

/// Runs in host and manager. The manager and its forks do not return from accelmgr::init().
void take_part(const char* path, int argc, char** argv) {
  const base::UniqueFd fd(open(path, O_RDWR | O_CLOEXEC));
  if (!fd) throw SystemError(fmt::format("open of {}", path), errno);
  timeline = map_timeline(fd.get());
  timeline->host_entered.ns.load() == 0 ? timeline->host_entered.now() : timeline->manager_entered.now();
  pthread_atfork(nullptr, nullptr, on_forked);
  register_model(timed, make_timed_model);
  register_data(timed, make_timed_data);
  init(argc, argv);
  in_host = true;
  train();
}

}  // namespace

int main(int argc, char** argv) {
  if (const char* path = std::getenv(timeline_variable))
    return bench::exit_code_of([&] { take_part(path, argc, argv); });
  const bool quick = bench::parse_quick(argc, argv);
  return bench::exit_code_of([&] { measure(quick, argv); });
}
