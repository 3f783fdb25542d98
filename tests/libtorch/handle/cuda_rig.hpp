// A CudaReplica without a GPU. Torch's CPU stands for the device, and computes when it is called; the fake of
// the CUDA runtime copies late, in any order that the events allow. In front of forward() the model catches
// up with the compute stream: so torch computes what kernels on that stream would, no earlier and no later.
#pragma once

#include <ATen/ops/embedding.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "accelmgr/model.hpp"
#include "engine/support/fake_cuda.hpp"
#include "libtorch/handle/cuda_replica.hpp"
#include "libtorch/handle/replica.hpp"
#include "libtorch/model/layers.hpp"
#include "libtorch/tensor/generator.hpp"
#include "replica_bench.hpp"

namespace accelmgr::test {

// The streams of a CudaReplica, in the order in which it makes them.
inline constexpr int compute_stream = 0, input_stream = 1, parameter_stream = 2, gradient_stream = 3;

/// Computes as late as kernels on the compute stream of a GPU.
class LateModel final : public Model {
 public:
  LateModel(std::unique_ptr<Model> model, FakeCuda& fake) : model_(std::move(model)), fake_(fake) {}
  std::vector<NamedTensor> parameters() override { return model_->parameters(); }
  std::vector<NamedTensor> buffers() override { return model_->buffers(); }
  Outputs forward(const Batch& batch) override {
    kept_.push_back(batch);
    fake_.catch_up(compute_stream);
    return model_->forward(batch);
  }
  void train(bool on) override { model_->train(on); }

 private:
  std::unique_ptr<Model> model_;
  FakeCuda& fake_;
  std::vector<Batch> kept_;  ///< A device that hangs, or for which nobody waits, still writes to it.
};

/// One of everything that is special: tied weights (one is the transposed other, in the same memory), a
/// sparse gradient, a parameter that only some batches use, a frozen one, buffers, float64, dropout, scalars
/// of both kinds.
class OddModel final : public model::ParameterModel {
 public:
  explicit OddModel(at::ScalarType dtype) {
    const auto options = at::TensorOptions().dtype(dtype);
    encoder_ = parameter("encoder", at::randn({width, inner}, options));
    decoder_ = parameter("decoder", encoder_.detach().t());
    table_ = parameter("table", at::randn({rows, width}, options));
    rare_ = parameter("rare", at::ones({width}, options));
    frozen_ = parameter("frozen", at::randn({width}, options));
    frozen_.set_requires_grad(false);
    empty_ = parameter("empty", at::zeros({0, 3}, options));
    calls_ = buffer("calls", at::zeros({}, at::TensorOptions().dtype(at::kLong)));
    mean_ = buffer("mean", at::zeros({width}, options));
  }

  Outputs forward(const Batch& batch) override {
    const auto& row = batch["row"];
    calls_.add_(1);
    auto x = at::embedding(table_, row, -1, false, /*sparse=*/true).add(frozen_);
    mean_.mul_(0.9).add_(x.detach().mean(0), 0.1);
    x = model::add_dropped(x, x.mm(encoder_).tanh().mm(decoder_), 0.25);
    const bool uses_rare = row.min().item().toLong() == 0;
    if (uses_rare) x = x.mul(rare_);
    const auto loss = x.sub(mean_).pow(2).mean();
    return {.loss = loss,
            .scalars = {{"rows", double(row.size(0))}},
            .scalar_tensors = {{"norm", x.detach().norm()}, {"calls", calls_}}};
  }

  static constexpr std::int64_t width = 6, inner = 4, rows = 9;

 private:
  at::Tensor encoder_, decoder_, table_, rare_, frozen_, empty_, calls_, mean_;
};

inline Config bench_config(const std::string& kind) {
  Config config;
  config.model.kind = kind;
  config.step_timeout = 30;
  config.model.mlp = {.input_size = 6, .hidden_size = 8, .hidden_layers = 2, .output_size = 4};
  config.model.convnet = {.image_size = 8, .input_channels = 3, .channels = 4, .classes = 4};
  config.model.gpt = {.layers = 2, .width = 16, .heads = 4, .context = 8, .vocabulary = 32, .dropout = 0.1};
  return config;
}

/// `kind`: of a built-in model, or "odd" and "odd64".
inline std::unique_ptr<Model> make_bench_model(const Config& config) {
  tensor::seed_generator(5);
  auto model = config.model.kind.starts_with("odd")
                   ? std::make_unique<OddModel>(config.model.kind == "odd" ? at::kFloat : at::kDouble)
                   : make_model(config);
  model->train(true);
  return model;
}

/// A batch of `elements` elements for bench_config(kind); others for each number.
inline BenchBatch bench_batch(const std::string& kind, std::uint64_t number, std::int64_t elements = 4) {
  std::mt19937_64 random(number);
  const auto integers = [&](std::size_t count, std::int64_t below) {
    std::vector<std::int64_t> values(count);
    for (auto& value : values) value = std::int64_t(random() % std::uint64_t(below));
    return values;
  };
  const auto n = std::size_t(elements);
  BenchBatch batch;
  if (kind.starts_with("odd")) {
    // Distinct ones: entries of one row of a sparse gradient are summed in another order.
    std::vector<std::int64_t> rows(OddModel::rows - 1);
    std::iota(rows.begin(), rows.end(), 1);
    std::ranges::shuffle(rows, random);
    rows.resize(n);
    if (number % 3 == 0) rows[0] = 0;
    batch.add("row", DType::int64, {elements}, rows);
    return batch;
  }
  if (kind == "gpt") {
    for (const char* name : {"input", "target"})
      batch.add(name, DType::int64, {elements, 8}, integers(n * 8, 32));
    return batch;
  }
  std::vector<std::int64_t> shape{elements, 6};
  if (kind == "convnet") shape = {elements, 3, 8, 8};
  std::vector<float> input(kind == "convnet" ? n * 3 * 8 * 8 : n * 6);
  std::normal_distribution<float> normal;
  for (auto& value : input) value = normal(random);
  batch.add("input", DType::float32, shape, input);
  batch.add("target", DType::int64, {elements}, integers(n, 4));
  return batch;
}

inline std::vector<BenchBatch> bench_batches(const std::string& kind, std::uint64_t first, int count) {
  std::vector<BenchBatch> batches;
  for (int i = 0; i < count; ++i) batches.push_back(bench_batch(kind, first + std::uint64_t(i), 4 - i % 2));
  return batches;
}

/// A replica on the fake device.
class CudaRig {
 public:
  struct Options {
    std::string kind = "mlp";
    FakeCuda::Execution execution = FakeCuda::Execution::stepped;
    std::uint64_t seed = 0;
    bool has_slab = true;
    session::Precision precision = {};
    double step_timeout = 30;
    Autocast autocast = Autocast::off;
    std::function<std::unique_ptr<Model>(const Config&)> make = make_bench_model;
  };
  explicit CudaRig(const Options& options)
      : config(bench_config(options.kind)), fake(options.execution, options.seed) {
    config.step_timeout = options.step_timeout;
    config.runners.autocast = options.autocast;
    fake.take_any_memory();
    bench.emplace(std::make_unique<libtorch::CudaReplica>(
                      config, std::make_unique<LateModel>(options.make(config), fake), at::Device(at::kCPU),
                      FakeCuda::runtime()),
                  options.has_slab, options.precision);
  }
  ReplicaBench* operator->() { return &*bench; }

  Config config;
  FakeCuda fake;
  std::optional<ReplicaBench> bench;
};

/// The replica in CPU memory, of the same model.
class CpuRig {
 public:
  explicit CpuRig(const CudaRig::Options& options)
      : config(bench_config(options.kind)),
        bench(std::make_unique<libtorch::Replica>(config, options.make(config)), options.has_slab,
              options.precision) {
    config.runners.autocast = options.autocast;
  }
  ReplicaBench* operator->() { return &bench; }

  Config config;
  ReplicaBench bench;
};

}  // namespace accelmgr::test
