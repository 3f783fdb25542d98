// Checks that the host's optimizers over flat groups compute what libtorch's optimizers compute over single
// tensors.
#include "accelmgr/optimizer.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "refusal.hpp"

namespace accelmgr {
namespace {

using Shape = std::vector<std::int64_t>;

/// Tensors one after the other, as in the master: each begins at a multiple of 64 bytes, with zeros in the
/// gaps.
struct FlatTensors {
  FlatTensors(FlatGroup::Kind kind, const std::vector<Shape>& shapes, at::ScalarType dtype) {
    const auto align = static_cast<std::int64_t>(64 / c10::elementSize(dtype));
    std::vector<std::int64_t> offsets;
    std::int64_t length = 0;
    for (const auto& shape : shapes) {
      offsets.push_back(length);
      length += (c10::multiply_integers(shape) + align - 1) / align * align;
    }
    group = {.kind = kind, .parameters = at::zeros({length}, dtype), .gradients = at::zeros({length}, dtype)};
    for (std::size_t i = 0; i < shapes.size(); ++i) {
      const auto piece = [&](const at::Tensor& flat) {
        return flat.narrow(0, offsets[i], c10::multiply_integers(shapes[i])).view(shapes[i]);
      };
      parameters.push_back(piece(group.parameters));
      gradients.push_back(piece(group.gradients));
    }
  }

  FlatGroup group;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> gradients;
};

/// A model of five tensors in three groups, and the same tensors under libtorch's optimizers: one for those
/// that decay and one for those that do not.
class Comparison {
 public:
  Comparison(const OptimizerConfig& config, at::ScalarType dtype)
      : config_(config),
        random_(at::make_generator<at::CPUGeneratorImpl>(1234)),
        decay_(FlatGroup::Kind::decay, {{17, 9}, {33, 5, 3}}, dtype),
        no_decay_(FlatGroup::Kind::no_decay, {{9}, {33}}, dtype),
        frozen_(FlatGroup::Kind::frozen, {{7, 3}}, dtype) {
    for (auto* tensors : {&decay_, &no_decay_, &frozen_})
      for (auto& parameter : tensors->parameters) parameter.copy_(random_like(parameter));
    for (auto* tensors : {&decay_, &no_decay_}) {
      std::vector<at::Tensor> theirs;
      for (const auto& parameter : tensors->parameters) theirs.push_back(parameter.clone().requires_grad_());
      references_.push_back(make_reference(theirs, tensors == &decay_ ? config.weight_decay : 0));
      parameters.insert(parameters.end(), tensors->parameters.begin(), tensors->parameters.end());
      gradients_.insert(gradients_.end(), tensors->gradients.begin(), tensors->gradients.end());
      reference_parameters_.insert(reference_parameters_.end(), theirs.begin(), theirs.end());
    }
    frozen_.group.gradients.fill_(3.0);
    frozen_parameters_ = frozen_.group.parameters.clone();
    optimizer_.emplace(config, std::vector{decay_.group, no_decay_.group, frozen_.group}, total_updates);
  }

  void update(double gradient_scale) {
    accumulate_gradients(gradient_scale);
    const double rate = scheduled_learning_rate(config_, optimizer_->updates(), total_updates);
    EXPECT_EQ(optimizer_->learning_rate(), rate);
    if (config_.clip_norm > 0)
      reference_norm = torch::nn::utils::clip_grad_norm_(reference_parameters_, config_.clip_norm);
    for (const auto& reference : references_) {
      reference->param_groups().front().options().set_lr(rate);
      reference->step();
    }
    norm = optimizer_->step();
  }

  /// The largest distance of a tensor from libtorch's, relative to the tensor's norm.
  double difference() const {
    double largest = 0;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto expected = reference_parameters_[i].detach();
      const auto error = (parameters[i] - expected).norm().item<double>() / expected.norm().item<double>();
      largest = std::max(largest, error);
    }
    return largest;
  }
  bool frozen_is_untouched() const {
    return at::equal(frozen_.group.parameters, frozen_parameters_) &&
           at::equal(frozen_.group.gradients, at::full_like(frozen_.group.gradients, 3.0));
  }

  static constexpr std::int64_t total_updates = 50;
  std::vector<at::Tensor> parameters;  ///< That are trained.
  double norm = 0, reference_norm = 0;

 private:
  at::Tensor random_like(const at::Tensor& tensor) {
    return at::randn(tensor.sizes(), random_, tensor.options());
  }

  void accumulate_gradients(double scale) {
    for (std::size_t i = 0; i < gradients_.size(); ++i) {
      gradients_[i].zero_();
      for (int step = 0; step < config_.steps_per_update; ++step)
        gradients_[i].add_(random_like(gradients_[i]), scale);
      reference_parameters_[i].mutable_grad() = gradients_[i] / config_.steps_per_update;
    }
  }

  std::unique_ptr<torch::optim::Optimizer> make_reference(const std::vector<at::Tensor>& tensors,
                                                          double weight_decay) const {
    const auto rate = config_.learning_rate;
    const auto moments = [&](auto options) {
      return options.betas({config_.beta1, config_.beta2}).eps(config_.epsilon).weight_decay(weight_decay);
    };
    if (config_.kind == OptimizerKind::adam)
      return std::make_unique<torch::optim::Adam>(tensors, moments(torch::optim::AdamOptions(rate)));
    if (config_.kind == OptimizerKind::adamw)
      return std::make_unique<torch::optim::AdamW>(tensors, moments(torch::optim::AdamWOptions(rate)));
    return std::make_unique<torch::optim::SGD>(tensors, torch::optim::SGDOptions(rate)
                                                            .momentum(config_.momentum)
                                                            .nesterov(config_.nesterov)
                                                            .weight_decay(weight_decay));
  }

  OptimizerConfig config_;
  at::Generator random_;
  FlatTensors decay_, no_decay_, frozen_;
  at::Tensor frozen_parameters_;
  std::vector<at::Tensor> gradients_, reference_parameters_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> references_;
  std::optional<Optimizer> optimizer_;
};

struct Case {
  const char* name;
  OptimizerConfig config;
};

std::vector<Case> cases() {
  using enum OptimizerKind;
  return {
      {"sgd", {.kind = sgd, .learning_rate = 0.02}},
      {"sgd_momentum", {.kind = sgd, .learning_rate = 0.02, .momentum = 0.9, .weight_decay = 0.1}},
      {"sgd_nesterov",
       {.kind = sgd, .learning_rate = 0.02, .momentum = 0.9, .nesterov = true, .weight_decay = 0.1}},
      {"adam", {.kind = adam, .learning_rate = 0.01, .weight_decay = 0.1}},
      {"adamw", {.kind = adamw, .learning_rate = 0.01, .beta2 = 0.95, .weight_decay = 0.1}},
      {"sgd_clipped_steps_per_update",
       {.kind = sgd, .learning_rate = 0.02, .momentum = 0.9, .clip_norm = 11, .steps_per_update = 3}},
      {"adamw_all",
       {.kind = adamw,
        .learning_rate = 0.01,
        .beta2 = 0.95,
        .weight_decay = 0.1,
        .clip_norm = 11,
        .steps_per_update = 3,
        .warmup_updates = 7,
        .schedule = Schedule::cosine}},
  };
}

class OptimizerEquality : public testing::TestWithParam<std::tuple<Case, at::ScalarType>> {};

TEST_P(OptimizerEquality, FiftyUpdatesAreThoseOfLibtorch) {
  const auto& [chosen, dtype] = GetParam();
  const double tolerance = dtype == at::kDouble ? 1e-12 : 1e-6;
  Comparison comparison(chosen.config, dtype);
  const auto initial = comparison.parameters.front().clone();
  int clipped = 0;
  for (int update = 0; update < Comparison::total_updates; ++update) {
    comparison.update(update % 2 == 0 ? 1.0 : 0.5);  // Norms on either side of the clipping norm.
    if (chosen.config.clip_norm > 0) {
      EXPECT_NEAR(comparison.norm, comparison.reference_norm, tolerance * comparison.reference_norm);
      clipped += comparison.norm > chosen.config.clip_norm;
    } else {
      EXPECT_TRUE(std::isnan(comparison.norm));
    }
  }
  EXPECT_LE(comparison.difference(), tolerance);
  EXPECT_GT((comparison.parameters.front() - initial).norm().item<double>(), 0.1);
  EXPECT_EQ(clipped, chosen.config.clip_norm > 0 ? Comparison::total_updates / 2 : 0);
  EXPECT_TRUE(comparison.frozen_is_untouched());
}

INSTANTIATE_TEST_SUITE_P(AllKinds, OptimizerEquality,
                         testing::Combine(testing::ValuesIn(cases()),
                                          testing::Values(at::kFloat, at::kDouble)),
                         [](const auto& info) {
                           const bool is_double = std::get<1>(info.param) == at::kDouble;
                           return std::string(std::get<0>(info.param).name) +
                                  (is_double ? "_float64" : "_float32");
                         });

/// A group of parameters of 1, with all gradients `gradient`.
FlatGroup constant_group(FlatGroup::Kind kind, double gradient, std::int64_t length = 8) {
  const auto parameters = at::ones({length}, at::kDouble);
  return {.kind = kind, .parameters = parameters, .gradients = at::full_like(parameters, gradient)};
}

TEST(Optimizer, GapsBetweenTensorsStayZero) {
  for (const auto kind : {OptimizerKind::sgd, OptimizerKind::adam, OptimizerKind::adamw}) {
    FlatTensors tensors(FlatGroup::Kind::decay, {{3}, {5}}, at::kFloat);
    for (auto& parameter : tensors.parameters) parameter.fill_(1.0);
    for (auto& gradient : tensors.gradients) gradient.fill_(1.0);
    Optimizer optimizer({.kind = kind, .weight_decay = 0.1, .clip_norm = 0.5, .steps_per_update = 2},
                        {tensors.group}, 3);
    for (int update = 0; update < 3; ++update) optimizer.step();
    EXPECT_TRUE(at::equal(tensors.group.parameters.narrow(0, 3, 13), at::zeros({13})));
    EXPECT_TRUE(at::equal(tensors.group.parameters.narrow(0, 21, 11), at::zeros({11})));
    EXPECT_NE(tensors.group.parameters[0].item<float>(), 1.0F);
  }
}

TEST(Optimizer, NormOfManyFloat32IsRightToTheLastDigits) {
  auto random = at::make_generator<at::CPUGeneratorImpl>(7);
  const FlatGroup group{.kind = FlatGroup::Kind::decay,
                        .parameters = at::zeros({4'000'003}),
                        .gradients = at::rand({4'000'003}, random, at::kFloat)};
  const double expected = at::linalg_vector_norm(group.gradients.to(at::kDouble)).item<double>();
  Optimizer optimizer({.kind = OptimizerKind::sgd, .clip_norm = 1e9}, {group}, 1);
  EXPECT_NEAR(optimizer.step(), expected, 1e-7 * expected);
}

TEST(Optimizer, NonFiniteNormDoesWhatClipGradNormOfLibtorchDoes) {
  for (const double bad :
       {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const auto group = constant_group(FlatGroup::Kind::decay, 1.0);
    group.gradients[5] = bad;
    auto reference = at::ones({8}, at::kDouble).requires_grad_();
    reference.mutable_grad() = group.gradients.clone();
    torch::nn::utils::clip_grad_norm_(reference, 1.0);
    torch::optim::SGD(std::vector<at::Tensor>{reference}, torch::optim::SGDOptions(0.1)).step();

    Optimizer optimizer({.kind = OptimizerKind::sgd, .learning_rate = 0.1, .clip_norm = 1.0}, {group}, 1);
    EXPECT_FALSE(std::isfinite(optimizer.step()));
    EXPECT_TRUE(at::equal(group.parameters.isnan(), reference.isnan()));
    EXPECT_TRUE(at::equal(group.parameters.nan_to_num(), reference.detach().nan_to_num()));
  }
}

TEST(Optimizer, RefusesNesterovWithoutMomentumAndUpdatesOfNoSteps) {
  const auto key = [](const OptimizerConfig& config) {
    return test::config_key_of([&] { Optimizer(config, {}, 1); });
  };
  EXPECT_EQ(key({.kind = OptimizerKind::sgd, .nesterov = true}), "optimizer.nesterov");
  EXPECT_EQ(key({.steps_per_update = 0}), "optimizer.steps_per_update");
}

TEST(Optimizer, RefusesGroupsItWouldWritePastTheEndOf) {
  const auto ones = [](std::int64_t length, at::ScalarType dtype) { return at::ones({length}, dtype); };
  const auto attempt = [](const at::Tensor& parameters, const at::Tensor& gradients) {
    Optimizer({}, {FlatGroup{.parameters = parameters, .gradients = gradients}}, 1);
  };
  EXPECT_THROW(attempt(ones(8, at::kFloat), ones(7, at::kFloat)), UsageError);
  EXPECT_THROW(attempt(ones(8, at::kFloat), ones(8, at::kDouble)), UsageError);
  EXPECT_THROW(attempt(ones(8, at::kLong), ones(8, at::kLong)), UsageError);
  EXPECT_THROW(attempt(ones(8, at::kFloat), {}), UsageError);
  EXPECT_THROW(attempt(at::ones({4, 2}), at::ones({4, 2})), UsageError);
  EXPECT_THROW(attempt(at::ones({8, 2}).select(1, 0), at::ones({8})), UsageError);
}

TEST(ScheduledLearningRate, WarmUpRisesLinearlyToTheFullRate) {
  const OptimizerConfig config{.learning_rate = 0.8, .warmup_updates = 4};
  for (std::int64_t update = 0; update < 4; ++update) {
    EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, update, 100), 0.2 * static_cast<double>(update + 1));
  }
  EXPECT_EQ(scheduled_learning_rate(config, 4, 100), 0.8);
  EXPECT_EQ(scheduled_learning_rate(config, 99, 100), 0.8);
}

TEST(ScheduledLearningRate, CosineFallsFromTheFullRateToItsShareAtTheLastUpdate) {
  const OptimizerConfig config{.learning_rate = 2.0,
                               .warmup_updates = 10,
                               .schedule = Schedule::cosine,
                               .final_learning_rate_ratio = 0.1};
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 9, 111), 2.0);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 10, 111), 2.0);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 60, 111), 1.1);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 35, 111), 0.2 + 1.8 * (2.0 + std::sqrt(2.0)) / 4.0);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 110, 111), 0.2);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 500, 111), 0.2);
}

TEST(ScheduledLearningRate, IsDefinedWhereNothingIsLeftForTheCosine) {
  const OptimizerConfig config{.learning_rate = 1.0,
                               .warmup_updates = 4,
                               .schedule = Schedule::cosine,
                               .final_learning_rate_ratio = 0.1};
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 2, 3), 0.75);  // Training ends within the warm-up.
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 4, 5), 0.1);   // Only the last update is left.
}

}  // namespace
}  // namespace accelmgr
