// Tests of the master parameters: who may write them and when, what runners compute with, and what becomes of
// buffers.
#include <ATen/ops/rand_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>

#include "base/unique_fd.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

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
  EXPECT_THAT(message([](Values& v) { v.pop_back(); }), HasSubstr("5 tensors for 6 parameters"));
  EXPECT_THAT(message([](Values& v) { v.back() = at::zeros({5}); }),
              AllOf(HasSubstr("'output.bias'"), HasSubstr("[5]")));
  EXPECT_THAT(message([](Values& v) { v.back() = v.back().to(at::kDouble); }),
              AllOf(HasSubstr("'output.bias'"), HasSubstr("float64")));
  EXPECT_THAT(message([](Values& v) { v.back() = at::Tensor(); }), HasSubstr("'output.bias'"));
  EXPECT_THAT(message([](Values& v) { v.back() = v.back().to_sparse(); }),
              AllOf(HasSubstr("'output.bias'"), HasSubstr("SparseCPUFloatType")));
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
    EXPECT_THAT(message_of<UsageError>([&] { manager.step(); }), HasSubstr("writing()"));
    EXPECT_THAT(message_of<UsageError>([&] { const auto nested = manager.writing(); }),
                HasSubstr("writing()"));
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
  EXPECT_THAT(message({"nobody's", tensor}), HasSubstr("no buffer 'nobody's'"));
  EXPECT_THAT(message({name, at::zeros({3, 7})}), AllOf(HasSubstr(name), HasSubstr("[3, 7]")));
  EXPECT_THAT(message({name, tensor.to(at::kDouble)}), HasSubstr("float64"));
}

TEST(Parameters, WhoseRequiresGradWasChangedAreToldApart) {
  auto manager = Manager::start(small_config("mlp"));
  const auto& [name, tensor] = manager.parameters()[1];
  tensor.set_requires_grad(false);
  EXPECT_THAT(message_of<UsageError>([&] { manager.step(); }), HasSubstr("'" + name + "' was changed"));
  tensor.set_requires_grad(true);
  expect_ok(manager);
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

// With gradients of one process and updates of libtorch's optimizer, a training loop is a plain one.
TEST(Groups, HoldWhatDecaysApartAndGradientsInTheSamePlaces) {
  const auto manager = Manager::start(small_config("mlp"));
  for (const auto& [name, tensor] : manager.parameters()) {
    const auto offset_in = [](const at::Tensor& part, const at::Tensor& flat) {
      return static_cast<const float*>(part.const_data_ptr()) -
             static_cast<const float*>(flat.const_data_ptr());
    };
    const auto group = std::ranges::find_if(manager.groups(), [&](const FlatGroup& each) {
      const auto offset = offset_in(tensor, each.parameters);
      return offset >= 0 && offset < each.parameters.numel();
    });
    ASSERT_NE(group, manager.groups().end()) << name;
    EXPECT_EQ(group->kind, tensor.dim() < 2 ? FlatGroup::Kind::no_decay : FlatGroup::Kind::decay) << name;
    EXPECT_EQ(offset_in(tensor.grad(), group->gradients), offset_in(tensor, group->parameters)) << name;
  }
}

}  // namespace
}  // namespace accelmgr::test
