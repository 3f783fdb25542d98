// Checks that replicas which break their contract are refused, with an error that says what is wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

#include "engine/support/network.hpp"
#include "engine/support/plain_replica.hpp"
#include "staged_run.hpp"

namespace accelmgr::test {
namespace {

/// A replica that breaks its contract as the option `misdeed` says.
class Misdoer final : public replica::Replica {
 public:
  explicit Misdoer(const Config& config) : misdeed_(config.model.options.at("misdeed")) {}
  replica::Description describe() override {
    if (misdeed_ == "has an unknown dtype")
      return {{weight_},
              {{.name = "b",
                .dtype = static_cast<DType>(200),
                .shape = {1},
                .strides = {1},
                .data = memory_,
                .identity = 3}}};
    return {{weight_}, {}};
  }
  void bind(const replica::Binding& to) override { binding_.emplace(to); }
  void seed(std::uint64_t) override {}
  void begin_attempt() override { batches_ = 0; }
  void run(std::span<const replica::Field>, double) override {
    ++batches_;
    binding_->progress.backward_begins();
  }
  replica::Totals collect() override {
    if (misdeed_ == "has no result without a batch" && batches_ == 0)
      throw std::runtime_error("there was no batch");
    if (misdeed_ == "cannot collect") throw std::runtime_error("the device is on fire");
    return {};
  }
  void save(const replica::State& to) override {
    if (misdeed_ == "cannot save" && to.buffers != nullptr) throw std::runtime_error("no room for that");
  }
  void load(const replica::ConstState&) override {}

 private:
  std::string misdeed_;
  std::optional<replica::Binding> binding_;
  int batches_ = 0;  ///< Batches of this attempt.
  alignas(8) std::byte memory_[32]{};
  replica::Tensor weight_{.name = "weight", .shape = {2}, .strides = {1}, .data = memory_, .identity = 1};
};

const RegisteredReplica misdoer("misdoer",
                                [](const Config& config, replica::Role) -> std::unique_ptr<replica::Replica> {
                                  if (config.model.options.at("misdeed") == "is none") return nullptr;
                                  return std::make_unique<Misdoer>(config);
                                });

Config config_of(const Stage& stage, const std::string& misdeed) {
  auto config = staged_config(stage);
  config.model.kind = "misdoer";
  config.model.options["misdeed"] = misdeed;
  return config;
}

/// The error of a start with that misdeed.
template <class Exception>
std::string refusal_of(const std::string& misdeed) {
  const Stage stage;
  const auto what = message_of<Exception>([&] { client::Handle(config_of(stage, misdeed), {}); });
  expect_nothing_left();
  return what;
}

TEST(BadReplica, IsRefusedWithWhatIsWrong) {
  const std::pair<const char*, std::vector<const char*>> misdeeds[]{
      {"has an unknown dtype", {"'b'", "200"}}, {"is none", {"model 'misdoer'", "returned null"}}};
  for (const auto& [misdeed, parts] : misdeeds)
    for (const auto what = refusal_of<ModelError>(misdeed); const auto* part : parts)
      expect_contains(what, {part});
}

/// The first step with that misdeed.
StepResult step_of(const std::string& misdeed) {
  Stage stage;
  StagedRun run(config_of(stage, misdeed));
  auto result = run.manager().step();
  EXPECT_TRUE(std::ranges::all_of(run.gradients(), [](const Tensor& tensor) { return tensor[0] == 0; }));
  return result;
}

TEST(BadReplica, ThatCannotCollectOrSaveEndsTheStepWithWhatItSaid) {
  expect_failed(step_of("cannot collect"), StepStatus::runner_lost,
                {"phase backward", "the device is on fire"});
  expect_failed(step_of("cannot save"), StepStatus::runner_lost, {"phase vote", "no room for that"});
}

TEST(Replica, IsAskedForNoResultOfAnAttemptThatIsOverBeforeItsFirstBatch) {
  Stage stage;
  auto config = config_of(stage, "has no result without a batch");
  config.runners.on_loss = LossPolicy::restart;
  config.faults = {"rank=0 step=1 phase=backward fault=exception",
                   "rank=1 step=1 phase=load_parameters fault=slow:300"};
  RunAfterOneStep run(config);
  EXPECT_EQ(run.manager().statistics().losses, 1u);
}

TEST(BadReplica, ThatHandsOverNothingCountsAsZeros) {
  Stage stage;
  StagedRun run(config_of(stage, "does nothing"));
  EXPECT_EQ(expect_ok(run.manager()).loss, 0);
}

}  // namespace
}  // namespace accelmgr::test
