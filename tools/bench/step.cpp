// Measures three things: the whole training cycle of an MLP through a manager (step, gradients in the master,
// SGD in place); the same forward and backward alone; and the time at the machine's memory bandwidth of the
// passes over memory that a cycle has beyond forward and backward.
//
// Every phase runs in processes of its own, forked from one in which torch has computed nothing. The phases
// take turns.
//
// usage: bench_step --shapes FILE --parameters KEY [--quick]
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <fmt/core.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/init.hpp"
#include "accelmgr/manager.hpp"
#include "accelmgr/model.hpp"
#include "base/clock.hpp"
#include "engine/session/kernels.hpp"
#include "measurement.hpp"

namespace {

using namespace accelmgr;

constexpr int batches_in_memory = 8;  // So many that a batch is not in the cache when its turn comes again.
constexpr const char* resident = "resident";

struct Arguments {
  std::string shapes_file, parameters;
  bool quick = false;
};

std::optional<Arguments> parse(int argc, char** argv) {
  Arguments out;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--quick") {
      out.quick = true;
    } else if (argument == "--shapes" && i + 1 < argc) {
      out.shapes_file = argv[++i];
    } else if (argument == "--parameters" && i + 1 < argc) {
      out.parameters = argv[++i];
    } else {
      return std::nullopt;
    }
  }
  if (out.shapes_file.empty() || out.parameters.empty()) return std::nullopt;
  return out;
}

Config config_of(const Arguments& arguments) {
  std::ifstream file(arguments.shapes_file);
  if (!file) throw std::runtime_error("step: cannot read " + arguments.shapes_file);
  const auto json = nlohmann::json::parse(file);
  const auto& shape = json.at("shapes").at(arguments.parameters);
  Config config;
  config.nprocs = json.at("runners");
  config.batch_size_per_device = json.at("batch_size_per_device");
  config.prefetch = 2 * config.batch_size_per_device;
  config.runners.threads = json.at("threads_per_runner");
  config.deterministic = false;  // As in the peers.
  config.model.kind = "mlp";
  config.model.mlp = {.input_size = shape.at("input_size"),
                      .hidden_size = shape.at("hidden_size"),
                      .hidden_layers = shape.at("hidden_layers"),
                      .output_size = shape.at("output_size")};
  config.data.kind = resident;
  config.optimizer.kind = OptimizerKind::sgd;
  config.optimizer.learning_rate = json.at("learning_rate");
  return config;
}

/// Random inputs and targets for `devices` runners.
std::vector<std::pair<std::string, at::Tensor>> elements_of(const Config& config, int devices) {
  const std::int64_t count = std::int64_t{devices} * batches_in_memory * config.batch_size_per_device;
  return {{"input", at::randn({count, config.model.mlp.input_size})},
          {"target", at::randint(config.model.mlp.output_size, {count}, at::kLong)}};
}

struct Counts {
  int warm_up = 5;
  int cycles;
  int turns;
};

/// As many cycles as the peers make, split into turns.
Counts counts_of(const Config& config, bool quick) {
  const auto& mlp = config.model.mlp;
  const int cycles = mlp.hidden_size <= 512 ? 200 : mlp.hidden_size <= 2048 ? 40 : 15;
  return quick ? Counts{.cycles = std::max(5, cycles / 5), .turns = 1}
               : Counts{.cycles = std::max(5, cycles / 2), .turns = 2};
}

double ms_since(std::int64_t begin_ns) { return double(base::now_ns() - begin_ns) / 1e6; }

/// Measurements of one process, in memory that its parent reads.
struct Samples {
  explicit Samples(int count) : values(bench::share<double>(std::size_t(count))), size(count) {}
  double median() const { return bench::median({values, values + size}); }
  double* values;
  int size;
};

/// A barrier of the processes of a phase.
class Meeting {
 public:
  explicit Meeting(int processes) : processes_(processes), arrived_(bench::share<std::atomic<int>>()) {}
  void operator()() {
    const int all = processes_ * ++meetings_;
    arrived_->fetch_add(1);
    while (arrived_->load() < all) bench::relax();
  }

 private:
  int processes_;
  int meetings_ = 0;  ///< Calls of this process.
  std::atomic<int>* arrived_;
};

/// Median ms of the slowest of `nprocs` processes side by side, each with its own replica. Gradients are
/// undefined before backward, because autograd needs the fewest passes then.
double compute_alone_ms(const Config& config, const Counts& counts) {
  std::vector<Samples> samples;
  for (int rank = 0; rank < config.nprocs; ++rank) samples.emplace_back(counts.cycles);
  const Meeting shared_meeting(config.nprocs);
  bench::run_together(config.nprocs, [&](int rank) {
    auto meet = shared_meeting;
    mallopt(M_MMAP_THRESHOLD, 1 << 30);  // As runners do.
    mallopt(M_TRIM_THRESHOLD, 2'000'000'000);
    at::set_num_threads(config.runners.threads);
    const auto model = make_model(config);
    model->train(true);
    const auto parameters = model->parameters();
    const auto elements = elements_of(config, 1);
    const std::int64_t size = config.batch_size_per_device;
    auto forward_and_backward = [&](int i) {
      const auto first = i % batches_in_memory * size;
      std::vector<NamedTensor> fields;
      for (const auto& [name, tensor] : elements) fields.push_back({name, tensor.narrow(0, first, size)});
      const auto loss = model->forward(Batch(std::move(fields))).loss;
      loss.backward();
      for (const auto& parameter : parameters) parameter.tensor.mutable_grad().reset();
      if (!std::isfinite(loss.item().toDouble())) throw std::runtime_error("step: the loss is not finite");
    };
    for (int i = 0; i < counts.warm_up; ++i) forward_and_backward(i);
    meet();
    for (int i = 0; i < counts.cycles; ++i) {
      const auto begin = base::now_ns();
      forward_and_backward(i);
      samples[std::size_t(rank)].values[i] = ms_since(begin);
    }
    meet();  // A process that measured on while the others have ended would be faster.
  });
  double slowest = 0;
  for (const auto& s : samples) slowest = std::max(slowest, s.median());
  return slowest;
}

/// Bytes per second that `nprocs` processes reach together in c = a + b. Each array has `bytes`; all three
/// count.
double stream_bandwidth(int nprocs, std::size_t bytes) {
  constexpr int repetitions = 15;
  Samples samples(repetitions);
  const Meeting shared_meeting(nprocs);
  float* arrays[3];
  for (auto& array : arrays) array = bench::share<float>(bytes / sizeof(float));
  bench::run_together(nprocs, [&](int rank) {
    const bench::Pin pin(rank, nprocs);
    auto meet = shared_meeting;
    const std::size_t count = bytes / sizeof(float) / std::size_t(nprocs), first = count * std::size_t(rank);
    const void* addends[] = {arrays[0] + first, arrays[1] + first};
    const auto into = bytes >= session::non_temporal_from_bytes ? session::SumInto::overwrite_non_temporal
                                                                : session::SumInto::overwrite;
    for (int i = -1; i < repetitions; ++i) {
      meet();
      const auto begin = base::now_ns();
      session::best_kernels().reduce(arrays[2] + first, addends, count, {}, into);
      meet();
      if (rank == 0 && i >= 0) samples.values[i] = ms_since(begin);
    }
  });
  return 3.0 * double(bytes) / (samples.median() / 1e3);
}

/// The time of the passes over memory that are neither forward nor backward. Each runner reads its gradient,
/// to see that it is finite. The reduction reads the slabs and writes the master. SGD reads gradients and
/// parameters and writes parameters.
double pass_bound_ms(const Config& config, std::int64_t parameters) {
  const double bytes = double(parameters) * sizeof(float);
  const double passes = config.nprocs + (config.nprocs + 1) + 3;
  return passes * bytes / stream_bandwidth(config.nprocs, std::size_t(parameters) * sizeof(float)) * 1e3;
}

/// Times of the cycle and its parts, measured in the host.
struct CycleSamples {
  explicit CycleSamples(int count)
      : cycle(count), compute(count), reduce(count), wait(count), update(count), parameters(1) {}
  Samples cycle, compute, reduce, wait, update;
  Samples parameters;
};

void run_cycles(const Config& config, const Counts& counts, CycleSamples& out) {
  auto manager = Manager::start(config);
  Optimizer optimizer(config.optimizer, manager.groups(), counts.cycles);
  for (const auto& parameter : manager.parameters())
    out.parameters.values[0] += double(parameter.tensor.numel());
  for (int i = -counts.warm_up; i < counts.cycles; ++i) {
    const auto begin = base::now_ns();
    const auto result = manager.step({.accumulate = false});
    if (!result) throw std::runtime_error("step: " + result.error);
    const auto stepped = base::now_ns();
    {
      const auto writing = manager.writing();
      optimizer.step();
    }
    if (i < 0) continue;
    out.cycle.values[i] = ms_since(begin);
    out.update.values[i] = ms_since(stepped);
    out.compute.values[i] = result.compute_ms;
    out.reduce.values[i] = result.reduce_ms;
    out.wait.values[i] = result.wait_ms;
  }
}

void measure(const Arguments& arguments) {
  const auto config = config_of(arguments);
  const auto counts = counts_of(config, arguments.quick);
  const std::string size = arguments.parameters + "M";
  for (int turn = 0; turn < counts.turns; ++turn) {
    bench::emit("ours", size, "compute_alone", compute_alone_ms(config, counts), "ms");
    CycleSamples samples(counts.cycles);
    bench::run_together(1, [&](int) { run_cycles(config, counts, samples); });
    bench::emit("ours", size, "cycle", samples.cycle.median(), "ms");
    bench::emit("ours", size, "compute", samples.compute.median(), "ms");
    bench::emit("ours", size, "reduce", samples.reduce.median(), "ms");
    bench::emit("ours", size, "wait", samples.wait.median(), "ms");
    bench::emit("ours", size, "update", samples.update.median(), "ms");
    const auto parameters = static_cast<std::int64_t>(samples.parameters.values[0]);
    bench::emit("ours", size, "pass_bound", pass_bound_ms(config, parameters), "ms");
  }
}

}  // namespace

int main(int argc, char** argv) {
  accelmgr::register_data(resident, [](const Config& config) {
    return accelmgr::tensor_source(elements_of(config, config.nprocs), /*epochs=*/0, /*seed=*/0);
  });
  accelmgr::init(argc, argv);
  const auto arguments = parse(argc, argv);
  if (!arguments) {
    fmt::print(stderr, "usage: {} --shapes FILE --parameters KEY [--quick]\n", argv[0]);
    return 2;
  }
  return bench::exit_code_of([&] { measure(*arguments); });
}
