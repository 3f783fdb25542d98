// Tests of the master parameters: who may write them and when, what runners compute with, what becomes of
// buffers, and a training loop.
#include <ATen/ops/ones.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "accelmgr/batch_source.hpp"
#include "accelmgr/model.hpp"
#include "base/unique_fd.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

std::vector<at::Tensor> random_like(const std::vector<NamedTensor>& tensors) {
  std::vector<at::Tensor> out;
  for (const auto& [name, tensor] : tensors) out.push_back(at::rand_like(tensor.detach()));
  return out;
}

TEST(Parameters, AndGradientsNeverChangeTheirAddresses) {
  const auto config = small_config("mlp");
  auto manager = Manager::start(config);
  const auto parameters = addresses(manager.parameters());
  const auto gradients = addresses(manager.gradients());
  const auto expect_in_place = [&](const char* after) {
    EXPECT_EQ(addresses(manager.parameters()), parameters) << after;
    EXPECT_EQ(addresses(manager.gradients()), gradients) << after;
    for (std::size_t i = 0; i < gradients.size(); ++i)
      EXPECT_EQ(manager.parameters()[i].tensor.grad().const_data_ptr(), gradients[i]) << after;
  };
  expect_in_place("start");
  expect_ok(manager);
  expect_in_place("a step");
  Optimizer(config.optimizer, manager.groups(), 1).step();
  expect_in_place("an update by an optimizer");
  manager.update_model_parameters(random_like(manager.parameters()));
  expect_in_place("update_model_parameters()");
  expect_ok(manager, {.accumulate = false});
  manager.zero_grad();
  expect_in_place("zero_grad()");
  manager.stop();
  expect_in_place("stop()");
}

/// Counts the pages of the tensor that are not present in this process's page table.
std::size_t missing_pages(const at::Tensor& tensor) {
  constexpr std::uint64_t present = std::uint64_t{1} << 63;
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const base::UniqueFd pages(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  std::size_t missing = 0;
  for (auto number = first / page; number * page < first + tensor.nbytes(); ++number) {
    std::uint64_t entry = 0;
    const auto read = pread(pages.get(), &entry, sizeof entry, static_cast<off_t>(number * sizeof entry));
    EXPECT_EQ(read, static_cast<ssize_t>(sizeof entry));
    if ((entry & present) == 0) ++missing;
  }
  return missing;
}

// Pages that are present from the start spare the steps page faults.
TEST(Parameters, AndGradientsAreInTheHostsPageTableFromTheStart) {
  auto config = small_config("mlp");
  config.model.mlp.hidden_size = 600;  // Less than 2 MiB, with a gap between parameters and gradients.
  const auto manager = Manager::start(config);
  for (const auto* tensors : {&manager.parameters(), &manager.gradients()})
    for (const auto& [name, tensor] : *tensors) EXPECT_EQ(missing_pages(tensor), 0u) << name;
}

TEST(Parameters, OfAnUpdateAreThoseOfTheNextStep) {
  const auto config = small_config("mlp");
  auto manager = Manager::start(config);
  Reference reference(config);
  for (int step = 0; step < 2; ++step) {
    const auto values = random_like(manager.parameters());
    manager.update_model_parameters(values);
    EXPECT_TRUE(same_bits(copies(manager.parameters()), values));
    // update() itself notes that the parameters have changed.
    expect_ok(manager, {.accumulate = false, .parameters_changed = false});
    EXPECT_LE(distance(copies(manager.gradients()), reference.step(values).gradients), 1e-6);
  }
}

TEST(Parameters, OfWrongCountShapeOrDtypeAreRefusedAndNothingChanges) {
  auto manager = Manager::start(small_config("mlp"));
  const auto before = copies(manager.parameters());
  const auto version = manager.statistics().parameter_version;
  const auto good = random_like(manager.parameters());
  const auto message = [&](auto&& spoil) {
    auto values = good;
    spoil(values);
    const auto text = message_of<ModelError>([&] { manager.update_model_parameters(values); });
    EXPECT_TRUE(same_bits(copies(manager.parameters()), before)) << text;
    EXPECT_EQ(manager.statistics().parameter_version, version) << text;
    return text;
  };
  // The wrong tensor is the last one. Tensors before it must not be written either.
  using Values = std::vector<at::Tensor>;
  EXPECT_THAT(message([](Values& v) { v.pop_back(); }), testing::HasSubstr("5 tensors for 6 parameters"));
  EXPECT_THAT(message([](Values& v) { v.back() = at::zeros({5}); }),
              testing::AllOf(testing::HasSubstr("'output.bias'"), testing::HasSubstr("[5]")));
  EXPECT_THAT(message([](Values& v) { v.back() = v.back().to(at::kDouble); }),
              testing::AllOf(testing::HasSubstr("'output.bias'"), testing::HasSubstr("float64")));
  EXPECT_THAT(message([](Values& v) { v.back() = at::Tensor(); }), testing::HasSubstr("'output.bias'"));
  EXPECT_THAT(message([](Values& v) { v.back() = v.back().to_sparse(); }),
              testing::AllOf(testing::HasSubstr("'output.bias'"), testing::HasSubstr("SparseCPUFloatType")));
  expect_ok(manager);
}

TEST(Parameters, HaveAVersionThatTheResultNames) {
  auto manager = Manager::start(small_config("mlp"));
  const auto version_of = [&](bool changed) {
    return expect_ok(manager, {.parameters_changed = changed}).parameter_version;
  };
  const auto first = version_of(true);
  EXPECT_EQ(manager.statistics().parameter_version, first);
  EXPECT_EQ(version_of(false), first);
  const auto second = version_of(true);
  EXPECT_GT(second, first);
  { const auto writing = manager.writing(); }
  const auto third = version_of(false);
  EXPECT_GT(third, second);
  manager.update_model_parameters(random_like(manager.parameters()));
  EXPECT_GT(version_of(false), third);
}

TEST(Parameters, CannotBeSteppedWithNorUpdatedWhileTheyAreWritten) {
  auto manager = Manager::start(small_config("mlp"));
  const auto before = copies(manager.parameters());
  {
    const auto writing = manager.writing();
    EXPECT_THAT(message_of<UsageError>([&] { manager.step(); }), testing::HasSubstr("writing()"));
    EXPECT_THAT(message_of<UsageError>([&] { const auto nested = manager.writing(); }),
                testing::HasSubstr("writing()"));
    message_of<UsageError>([&] { manager.update_model_parameters(random_like(manager.parameters())); });
  }
  EXPECT_TRUE(same_bits(copies(manager.parameters()), before));
  EXPECT_EQ(expect_ok(manager).step, 1u) << "the step that threw is none";
}

std::vector<at::Tensor> buffers_of(const Reference& reference, const Config& config) {
  std::vector<at::Tensor> out;
  const auto first = reference.buffers(0);
  for (std::size_t i = 0; i < first.size(); ++i) {
    std::vector<at::Tensor> ranks;
    for (int rank = 0; rank < config.nprocs; ++rank) ranks.push_back(reference.buffers(rank)[i].tensor);
    const bool mean = config.buffers.policy == BufferPolicy::mean && ranks[0].is_floating_point();
    out.push_back(mean ? at::stack(ranks).mean(0) : ranks[0].clone());
  }
  return out;
}

class Buffers : public testing::TestWithParam<bool> {};

TEST_P(Buffers, AreThoseOfRanksThatKeepTheirOwnByPolicy) {
  auto config = small_config("convnet");
  config.grad_accumulation_steps = 2;
  config.buffers.policy = GetParam() ? BufferPolicy::mean : BufferPolicy::rank0;
  auto manager = Manager::start(config);
  Reference reference(config);
  EXPECT_EQ(manager.buffers().size(), 9u);
  EXPECT_TRUE(same_bits(copies(manager.buffers()), buffers_of(reference, config))) << "before any step";
  for (int step = 0; step < 3; ++step) {
    reference.step(copies(manager.parameters()));
    expect_ok(manager);
    EXPECT_LE(distance(copies(manager.buffers()), buffers_of(reference, config)), 1e-6) << step;
  }
  EXPECT_GT(distance(copies(reference.buffers(0)), copies(reference.buffers(1))), 1e-3)
      << "the ranks' do not differ: the policy makes no difference";
}

INSTANTIATE_TEST_SUITE_P(Policy, Buffers, testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "Mean" : "Rank0"); });

TEST(BufferUpdates, ThatTheHostReplacesAreThoseOfTheNextStepInEveryRunner) {
  const auto config = small_config("convnet");
  auto manager = Manager::start(config);
  expect_ok(manager);
  auto wanted = manager.buffers();
  for (auto& [name, tensor] : wanted)  // As after so many batches that one more changes little.
    tensor = name.ends_with("num_batches_tracked") ? tensor.mul(0).add(1000) : tensor.mul(0).add(0.5);
  manager.update_buffers({wanted[0], wanted[1]});
  manager.update_buffers({wanted.begin() + 2, wanted.end()});
  EXPECT_TRUE(same_bits(copies(manager.buffers()), copies(wanted)));
  expect_ok(manager);
  for (const auto& [name, tensor] : manager.buffers()) {
    if (!name.ends_with("num_batches_tracked")) continue;
    EXPECT_EQ(tensor.item().toLong(), 1001) << name;
  }
}

TEST(BufferUpdates, OfAnotherNameShapeOrDtypeAreRefusedAndNothingChanges) {
  auto manager = Manager::start(small_config("convnet"));
  const auto before = manager.buffers();
  const auto message = [&](NamedTensor last) {
    std::vector<NamedTensor> values = before;
    for (auto& [name, tensor] : values) tensor = tensor.add(1);
    values.push_back(std::move(last));
    const auto text = message_of<ModelError>([&] { manager.update_buffers(values); });
    EXPECT_TRUE(same_bits(copies(manager.buffers()), copies(before))) << text;
    return text;
  };
  const auto& [name, tensor] = before[0];
  EXPECT_THAT(message({"nobody's", tensor}), testing::HasSubstr("no buffer 'nobody's'"));
  EXPECT_THAT(message({name, at::zeros({3, 7})}),
              testing::AllOf(testing::HasSubstr(name), testing::HasSubstr("[3, 7]")));
  EXPECT_THAT(message({name, tensor.to(at::kDouble)}), testing::HasSubstr("float64"));
}

TEST(Parameters, WhoseRequiresGradWasChangedAreToldApart) {
  auto manager = Manager::start(small_config("mlp"));
  const auto& [name, tensor] = manager.parameters()[1];
  tensor.set_requires_grad(false);
  EXPECT_THAT(message_of<UsageError>([&] { manager.step(); }),
              testing::HasSubstr("'" + name + "' was changed"));
  tensor.set_requires_grad(true);
  expect_ok(manager);
}

/// Assigns its weight a new tensor, like a module that computes its weight.
struct Replacing final : Model {
  at::Tensor weight = at::ones({4}).requires_grad_();
  std::vector<NamedTensor> parameters() override { return {{"weight", weight}}; }
  std::vector<NamedTensor> buffers() override { return {}; }
  Outputs forward(const Batch&) override {
    weight = weight.detach().mul(2).requires_grad_();
    return {weight.sum(), {}};
  }
  void train(bool) override {}
};
struct Ones final : BatchSource {
  std::vector<FieldSpec> field{{"one", at::kFloat, {1}}};
  std::span<const FieldSpec> fields() const override { return field; }
  bool next(ElementWriter& element) override {
    element.set(0, at::ones({1}));
    return true;
  }
};
const bool replacing_is_registered = [] {
  register_model("replacing", [](const Config&) { return std::make_unique<Replacing>(); });
  register_data("ones", [](const Config&) { return std::make_unique<Ones>(); });
  return true;
}();

TEST(Parameters, ThatTheModelReplacesAreAnErrorOfTheStep) {
  ASSERT_TRUE(replacing_is_registered);
  auto config = small_config("mlp");
  config.model.kind = "replacing";
  config.data.kind = "ones";
  config.runners.on_loss = LossPolicy::fail;
  auto manager = Manager::start(config);
  const auto result = manager.step();
  EXPECT_EQ(result.status, StepStatus::runner_lost);
  EXPECT_EQ(result.error_type, "ModelError");
  EXPECT_THAT(result.error, testing::HasSubstr("parameter 'weight' was replaced by the model"));
}

TEST(StateDict, HoldsCopiesOfAllParametersAndBuffers) {
  auto manager = Manager::start(small_config("convnet"));
  expect_ok(manager);
  const auto state = manager.state_dict();
  auto expected = manager.buffers();
  for (const auto& [name, tensor] : manager.parameters()) expected.push_back({name, tensor.detach().clone()});
  ASSERT_EQ(state.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    const auto found = std::ranges::find(state, name, &NamedTensor::name);
    ASSERT_NE(found, state.end()) << name;
    EXPECT_TRUE(same_bits({found->tensor}, {tensor})) << name;
  }
  manager.update_model_parameters(random_like(manager.parameters()));
  for (const auto& [name, tensor] : expected)
    EXPECT_TRUE(same_bits({std::ranges::find(state, name, &NamedTensor::name)->tensor}, {tensor})) << name;
}

/// libtorch's own optimizer, over tensors of this process.
class PlainTraining {
 public:
  PlainTraining(const Config& config, const std::vector<NamedTensor>& parameters) : reference_(config) {
    std::vector<at::Tensor> decayed, others;
    for (const auto& tensor : copies(parameters)) {
      parameters_.push_back(tensor.clone().requires_grad_());
      (tensor.dim() < 2 ? others : decayed).push_back(parameters_.back());
    }
    const auto options = [&](double decay) {
      return std::make_unique<torch::optim::AdamWOptions>(
          torch::optim::AdamWOptions(config.optimizer.learning_rate).weight_decay(decay));
    };
    optimizer_ = std::make_unique<torch::optim::AdamW>(std::vector<torch::optim::OptimizerParamGroup>{
        {decayed, options(config.optimizer.weight_decay)}, {others, options(0)}});
  }

  double step() {
    const auto [loss, samples, scalars, gradients] = reference_.step(detached());
    for (std::size_t i = 0; i < parameters_.size(); ++i) parameters_[i].mutable_grad() = gradients[i];
    optimizer_->step();
    return loss;
  }

  std::vector<at::Tensor> detached() const {
    std::vector<at::Tensor> out;
    for (const auto& parameter : parameters_) out.push_back(parameter.detach());
    return out;
  }

 private:
  Reference reference_;
  std::vector<at::Tensor> parameters_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

TEST(Training, ThroughTheManagerIsThatOfAPlainLoop) {
  auto config = small_config("mlp");
  config.grad_accumulation_steps = 2;
  config.data.elements = 12;  // Each step trains the same elements, so the loss must fall.
  config.optimizer.learning_rate = 0.01;
  config.optimizer.weight_decay = 0.1;
  auto manager = Manager::start(config);
  PlainTraining plain(config, manager.parameters());
  Optimizer optimizer(config.optimizer, manager.groups(), 5);
  double last_loss = std::numeric_limits<double>::infinity();
  for (int step = 0; step < 5; ++step) {
    const auto loss = expect_ok(manager, {.accumulate = false}).loss;
    optimizer.step();
    EXPECT_NEAR(loss, plain.step(), 1e-5);
    EXPECT_LT(loss, last_loss);
    last_loss = loss;
  }
  EXPECT_LE(distance(copies(manager.parameters()), plain.detached()), 1e-5);
}

}  // namespace
}  // namespace accelmgr::test
