// Checks that an optimizer's state can be loaded into another optimizer, which then goes on as the first
// would.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <cstring>
#include <string>
#include <vector>

#include "accelmgr/errors.hpp"
#include "accelmgr/optimizer.hpp"
#include "message_of.hpp"

namespace accelmgr {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

bool same_bits(const std::vector<NamedTensor>& a, const std::vector<NamedTensor>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].name != b[i].name || !same_bits(a[i].tensor, b[i].tensor)) return false;
  return true;
}

/// Copies of the tensors, as a file would hold them.
std::vector<NamedTensor> copies(const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> out;
  for (const auto& [name, tensor] : tensors) out.push_back({name, tensor.clone()});
  return out;
}

std::vector<std::string> names(const std::vector<NamedTensor>& tensors) {
  std::vector<std::string> out;
  for (const auto& [name, tensor] : tensors) out.push_back(name);
  return out;
}

FlatGroup group_of(FlatGroup::Kind kind, std::int64_t length, at::ScalarType dtype = at::kFloat) {
  return {.kind = kind, .parameters = at::ones({length}, dtype), .gradients = at::ones({length}, dtype)};
}

/// An optimizer over two trained groups and a frozen one. The gradients of an update depend only on the
/// update's number.
class Training {
 public:
  explicit Training(const OptimizerConfig& config, at::ScalarType dtype = at::kFloat)
      : groups_{group_of(FlatGroup::Kind::decay, 1009, dtype), group_of(FlatGroup::Kind::no_decay, 77, dtype),
                group_of(FlatGroup::Kind::frozen, 16, dtype)},
        optimizer_(config, groups_, total_updates) {}

  void update_until(std::int64_t updates) {
    while (optimizer_.updates() < updates) {
      auto random = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t(optimizer_.updates()));
      for (auto& group : groups_)
        group.gradients.copy_(at::randn(group.gradients.sizes(), random, group.gradients.options()));
      optimizer_.step();
    }
  }

  std::vector<NamedTensor> parameters() const {
    return {{"decay", groups_[0].parameters}, {"no_decay", groups_[1].parameters}};
  }
  void set_parameters(const std::vector<NamedTensor>& values) {
    for (std::size_t i = 0; i < values.size(); ++i) groups_[i].parameters.copy_(values[i].tensor);
  }
  Optimizer& optimizer() { return optimizer_; }

  static constexpr std::int64_t total_updates = 12;

 private:
  std::vector<FlatGroup> groups_;
  Optimizer optimizer_;
};

struct StateCase {
  const char* name;
  OptimizerConfig config;
  std::size_t tensors;  ///< The number of tensors in its state().
};

std::vector<StateCase> state_cases() {
  using enum OptimizerKind;
  return {
      {"sgd_schedule",
       {.kind = sgd, .learning_rate = 0.02, .warmup_updates = 3, .schedule = Schedule::cosine},
       1},
      {"sgd_momentum", {.kind = sgd, .learning_rate = 0.02, .momentum = 0.9, .weight_decay = 0.1}, 3},
      {"sgd_nesterov", {.kind = sgd, .learning_rate = 0.02, .momentum = 0.9, .nesterov = true}, 3},
      {"adam", {.kind = adam, .learning_rate = 0.01, .weight_decay = 0.1}, 5},
      {"adamw_all",
       {.kind = adamw,
        .learning_rate = 0.01,
        .weight_decay = 0.1,
        .clip_norm = 3,
        .steps_per_update = 3,
        .warmup_updates = 3,
        .schedule = Schedule::cosine},
       5},
  };
}

class OptimizerState : public testing::TestWithParam<std::tuple<StateCase, at::ScalarType>> {};

TEST_P(OptimizerState, LoadedGoesOnBitForBit) {
  const auto& [chosen, dtype] = GetParam();
  Training undisturbed(chosen.config, dtype);
  undisturbed.update_until(Training::total_updates);
  // Stops before the first update, within the warm-up and after it. An optimizer without updates loads the
  // state, and one that has made other updates.
  for (const std::int64_t stop : {0, 1, 5}) {
    Training stopped(chosen.config, dtype);
    stopped.update_until(stop);
    const auto state = copies(stopped.optimizer().state());
    EXPECT_EQ(state.size(), chosen.tensors);
    for (const std::int64_t before : {0, 7}) {
      Training resumed(chosen.config, dtype);
      resumed.update_until(before);
      resumed.set_parameters(stopped.parameters());
      resumed.optimizer().load_state(state);
      EXPECT_EQ(resumed.optimizer().updates(), stop);
      EXPECT_EQ(resumed.optimizer().learning_rate(), stopped.optimizer().learning_rate());
      resumed.update_until(Training::total_updates);
      EXPECT_TRUE(same_bits(resumed.parameters(), undisturbed.parameters())) << stop << ' ' << before;
      EXPECT_TRUE(same_bits(resumed.optimizer().state(), undisturbed.optimizer().state()))
          << stop << ' ' << before;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllKinds, OptimizerState,
                         testing::Combine(testing::ValuesIn(state_cases()),
                                          testing::Values(at::kFloat, at::kDouble)),
                         [](const auto& info) {
                           const bool is_double = std::get<1>(info.param) == at::kDouble;
                           return std::string(std::get<0>(info.param).name) +
                                  (is_double ? "_float64" : "_float32");
                         });

TEST(OptimizerState, NamesItsTensorsByTheKindOfTheirGroup) {
  using enum FlatGroup::Kind;
  const std::vector<FlatGroup> groups{group_of(decay, 8), group_of(frozen, 4), group_of(no_decay, 2),
                                      group_of(decay, 6)};
  const Optimizer adam({.kind = OptimizerKind::adam}, groups, 1);
  EXPECT_THAT(names(adam.state()),
              ElementsAre("optimizer/decay/exp_avg", "optimizer/decay/exp_avg_sq",
                          "optimizer/no_decay/exp_avg", "optimizer/no_decay/exp_avg_sq",
                          "optimizer/decay.2/exp_avg", "optimizer/decay.2/exp_avg_sq", "optimizer/updates"));
  const Optimizer momentum({.kind = OptimizerKind::sgd, .momentum = 0.9}, groups, 1);
  EXPECT_THAT(names(momentum.state()),
              ElementsAre("optimizer/decay/momentum_buffer", "optimizer/no_decay/momentum_buffer",
                          "optimizer/decay.2/momentum_buffer", "optimizer/updates"));
  EXPECT_EQ(momentum.state()[2].tensor.sizes(), at::IntArrayRef{6});
  const auto updates = momentum.state().back().tensor;
  EXPECT_EQ(updates.dim(), 0);
  EXPECT_EQ(updates.scalar_type(), at::kLong);
}

TEST(OptimizerState, IsAViewThatFollowsTheUpdates) {
  Training training({.kind = OptimizerKind::adamw});
  const auto state = training.optimizer().state();
  EXPECT_TRUE(same_bits(state.front().tensor, at::zeros({1009})));
  training.update_until(2);
  EXPECT_TRUE(same_bits(state, training.optimizer().state()));
  EXPECT_FALSE(same_bits(state.front().tensor, at::zeros({1009})));
  EXPECT_EQ(state.back().tensor.item<std::int64_t>(), 2);
}

TEST(OptimizerState, ThatDoesNotFitIsRefusedAndNothingChanges) {
  using State = std::vector<NamedTensor>;
  Training other({.kind = OptimizerKind::adamw});
  other.update_until(3);
  const auto good = copies(other.optimizer().state());

  Training training({.kind = OptimizerKind::adamw});
  training.update_until(1);
  const auto before = copies(training.optimizer().state());
  // The wrong tensor is the last one. Tensors before it must not be copied either.
  const auto message = [&](auto&& spoil) {
    auto state = copies(good);
    spoil(state);
    const auto text = test::message_of<ModelError>([&] { training.optimizer().load_state(state); });
    EXPECT_TRUE(same_bits(training.optimizer().state(), before)) << text;
    EXPECT_THAT(text, HasSubstr("nothing was changed"));
    return text;
  };
  const std::string exp_avg_sq = "'optimizer/no_decay/exp_avg_sq'";
  EXPECT_THAT(message([](State& s) { s.pop_back(); }),
              HasSubstr("'optimizer/updates' is missing: Long [] is needed"));
  EXPECT_THAT(message([](State& s) { s.clear(); }), HasSubstr("has nothing"));
  EXPECT_THAT(message([](State& s) {
                s.push_back({"optimizer/decay/momentum_buffer", at::zeros({1009})});
              }),
              HasSubstr("'optimizer/decay/momentum_buffer' is unknown"));
  EXPECT_THAT(message([](State& s) { s.push_back(s.front()); }),
              HasSubstr("'optimizer/decay/exp_avg' is given 2 times"));
  const auto message_of_tensor = [&](const at::Tensor& wrong) {
    return message([&](State& s) { s[3].tensor = wrong; });
  };
  EXPECT_THAT(message_of_tensor(at::zeros({78})), HasSubstr(exp_avg_sq + " is Float [78]; Float [77] is"));
  EXPECT_THAT(message_of_tensor(at::zeros({77, 1})), HasSubstr(exp_avg_sq + " is Float [77, 1]; Float [77]"));
  EXPECT_THAT(message_of_tensor(at::zeros({77}, at::kDouble)), HasSubstr(exp_avg_sq + " is Double [77]"));
  EXPECT_THAT(message_of_tensor({}), HasSubstr(exp_avg_sq + " is undefined"));
  EXPECT_THAT(message_of_tensor(at::zeros({77}).to_sparse()), HasSubstr("SparseCPUFloatType"));
  EXPECT_THAT(message_of_tensor(at::zeros({77}, at::kMeta)), HasSubstr("on the CPU"));
  EXPECT_THAT(message([](State& s) { s.back().tensor = at::full({}, 3.0); }),
              HasSubstr("'optimizer/updates' is Float []; Long [] is needed"));
  EXPECT_THAT(message([](State& s) { s.back().tensor.fill_(-1); }), HasSubstr("'optimizer/updates' is -1"));

  training.optimizer().load_state(good);
  EXPECT_TRUE(same_bits(training.optimizer().state(), good));
}

TEST(OptimizerState, MayBeInAnyOrderAndWithStrides) {
  Training from({.kind = OptimizerKind::adamw}), to({.kind = OptimizerKind::adamw});
  from.update_until(3);
  std::vector<NamedTensor> state;
  for (const auto& [name, tensor] : from.optimizer().state()) {
    auto strided = tensor.dim() == 0 ? tensor : at::zeros({tensor.numel(), 2}).select(1, 1);
    strided.copy_(tensor);
    state.insert(state.begin(), {name, strided});
  }
  to.optimizer().load_state(state);
  EXPECT_TRUE(same_bits(to.optimizer().state(), from.optimizer().state()));
}

}  // namespace
}  // namespace accelmgr
