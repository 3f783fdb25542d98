// Checks that user code may throw anything, anywhere. It becomes the error of the start or of the step, and
// the error names the code that threw it.
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>

#include <string_view>

#include "accelmgr/evaluator.hpp"
#include "base/ipc/process.hpp"
#include "engine/support/expectations.hpp"
#include "support.hpp"

namespace accelmgr::test {
namespace {

struct Silent : std::exception {
  const char* what() const noexcept override { return ""; }
};

/// Throws what the options of `config` say, at the place that they name.
class Place {
 public:
  explicit Place(const std::map<std::string, std::string>& options) : options_(options) {}

  void meets(const std::string& name) const {
    const auto at = options_.find("at");
    if (at == options_.end() || at->second != name) return;
    if (options_.at("what") == "42") throw 42;
    if (options_.at("what") == "silent") throw Silent();
    if (options_.at("what") == "own") throw ModelError("");
    at::matmul(at::ones({4, 16}), at::ones({8, 32}));
  }

 private:
  std::map<std::string, std::string> options_;
};

/// Whether this process is a runner, by the name that ps shows.
bool in_runner() {
  char name[16] = {};
  prctl(PR_GET_NAME, name);
  const std::string_view shown(name);
  return shown.starts_with("accelmgr:") && shown != "accelmgr:mgr" && shown != "accelmgr:fork";
}

class ForeignModel final : public Model {
 public:
  explicit ForeignModel(const Config& config) : place_(config.model.options) {
    place_.meets("factory");
    if (in_runner()) place_.meets("factory in the runner");
  }
  std::vector<NamedTensor> parameters() override {
    place_.meets("parameters");
    return {{"weight", weight_}};
  }
  std::vector<NamedTensor> buffers() override {
    place_.meets("buffers");
    if (steps_ > 0) place_.meets("buffers in a step");
    return {};
  }
  std::vector<std::string> non_persistent_buffers() const override {
    place_.meets("non_persistent_buffers");
    return {};
  }
  void train(bool on) override {
    place_.meets(on ? "train" : "eval");
    training_ = on;
  }
  Outputs forward(const Batch& batch) override {
    ++steps_;
    place_.meets(training_ ? "forward" : "evaluation");
    auto loss = batch["input"].mul(weight_).mean();
    if (training_) loss.register_hook([this](const at::Tensor&) { place_.meets("backward"); });
    return {.loss = loss};
  }

 private:
  Place place_;
  bool training_ = true;
  int steps_ = 0;
  at::Tensor weight_ = at::ones({1}).requires_grad_();
};

class ForeignSource final : public BatchSource {
 public:
  explicit ForeignSource(const std::map<std::string, std::string>& options, int left = -1)
      : left_(left), place_(options) {
    place_.meets("factory");
  }
  std::span<const FieldSpec> fields() const override {
    place_.meets("fields");
    return fields_;
  }
  bool next(ElementWriter& element) override {
    place_.meets("next");
    if (left_-- == 0) return false;
    element.set(0, at::ones({4}));
    return true;
  }
  std::optional<std::string> state() const override {
    place_.meets("state");
    return "somewhere";
  }
  void restore(const std::string&) override { place_.meets("restore"); }
  std::unique_ptr<BatchSource> held_out() override {
    place_.meets("held_out");
    return std::make_unique<ForeignSource>(std::map<std::string, std::string>(), 8);
  }

 private:
  int left_;
  Place place_;
  std::vector<FieldSpec> fields_{{"input", at::kFloat, {4}}};
};

const RegisteredModel throwing_model("foreign", [](const Config& config) {
  return std::make_unique<ForeignModel>(config);
});
const RegisteredData throwing_source("foreign", [](const Config& config) {
  return std::make_unique<ForeignSource>(config.data.options);
});

Config foreign_config() {
  auto config = small_config("foreign");
  config.nprocs = 1;
  config.runners.on_loss = LossPolicy::fail;
  config.data.kind = "foreign";
  return config;
}

Config with_model(const std::string& at, const std::string& what) {
  auto config = foreign_config();
  config.model.options = {{"at", at}, {"what", what}};
  return config;
}

Config with_source(const std::string& at, const std::string& what) {
  auto config = foreign_config();
  config.data.options = {{"at", at}, {"what", what}};
  return config;
}

/// Expects all `parts`, and no C++ frames, which torch adds.
void expect_plain(const std::string& text, std::initializer_list<std::string> parts) {
  expect_contains(text, parts);
  EXPECT_EQ(text.find("Exception raised from"), std::string::npos) << text;
  EXPECT_EQ(text.find("frame #"), std::string::npos) << text;
}

const std::map<std::string, std::string> said = {
    {"42", "an exception of type int without a text"},
    {"silent", "Silent without a text"},
    {"own", "accelmgr::ModelError without a text"},
    {"torch", "mat1 and mat2 shapes cannot be multiplied (4x16 and 8x32)"}};

class Thrown : public testing::TestWithParam<std::string> {
 protected:
  std::string text() const { return said.at(GetParam()); }
  /// Expects this error with these parts where what is thrown is thrown at each place.
  template <class Error>
  static void expect_no_start(Config (*with)(const std::string& at, const std::string& what),
                              std::initializer_list<const char*> places,
                              std::initializer_list<std::string> parts) {
    for (const char* at : places) {
      expect_plain(message_of<Error>([&] { Manager::start(with(at, GetParam())); }), parts);
      expect_nothing_left();
    }
  }
};

TEST_P(Thrown, WhereModelOrSourceIsMadeIsTheErrorOfTheStart) {
  expect_no_start<ModelError>(with_model, {"factory", "parameters", "buffers", "non_persistent_buffers"},
                              {"model 'foreign'", text()});
  expect_no_start<RunnerError>(with_model, {"factory in the runner", "train"},
                               {"runner 0", "phase init", "model 'foreign'", text()});
  expect_no_start<DataError>(with_source, {"factory", "fields"}, {"data source 'foreign'", text()});
}

TEST_P(Thrown, ByASourceThatIsReadIsTheErrorOfTheStep) {
  for (const char* at : {"next", "state"}) {
    auto manager = Manager::start(with_source(at, GetParam()));
    const auto result = manager.step();
    EXPECT_EQ(result.status, StepStatus::data_end);
    EXPECT_EQ(result.error_type, "DataError");
    expect_plain(result.error, {"the data source 'foreign' failed", text()});
  }
}

TEST_P(Thrown, ByASourceThatIsToGoOnIsTheErrorOfTheRecovery) {
  auto manager = Manager::start(with_source("restore", GetParam()));
  // More elements than the loader reads ahead, so that the source's state is in the session.
  while (manager.statistics().elements < 60) expect_ok(manager);
  const auto killed = ipc::open_pidfd(manager.statistics().manager_pid);
  ipc::send_signal(killed.get(), SIGKILL);
  EXPECT_TRUE(ipc::wait_ended(killed.get(), soon()));
  EXPECT_EQ(manager.step().status, StepStatus::manager_lost);
  expect_plain(message_of<DataError>([&] { manager.recover(); }), {"data source 'foreign'", text()});
}

TEST_P(Thrown, InAStepIsTheErrorOfThatStep) {
  for (const auto& [at, phase] : std::map<std::string, std::string>{
           {"forward", "forward"}, {"backward", "backward"}, {"buffers in a step", "vote"}}) {
    auto manager = Manager::start(with_model(at, GetParam()));
    const auto result = manager.step();
    EXPECT_EQ(result.status, StepStatus::runner_lost);
    EXPECT_EQ(result.rank, 0);
    expect_plain(result.error, {"runner 0", "phase " + phase, text()});
    ASSERT_EQ(result.causes.size(), 1u);
    expect_plain(result.causes[0].what, {text()});
  }
}

TEST_P(Thrown, InTheEvaluationNamesModelOrSource) {
  for (const char* at : {"eval", "evaluation"}) {
    auto manager = Manager::start(with_model(at, GetParam()));
    expect_plain(message_of<ModelError>([&] { Evaluator(manager).loss(); }),
                 {"model 'foreign', in the evaluation", text()});
  }
  auto manager = Manager::start(with_source("held_out", GetParam()));
  expect_plain(message_of<DataError>([&] { Evaluator evaluator(manager); }),
               {"data source 'foreign', in the evaluation", text()});
}

INSTANTIATE_TEST_SUITE_P(ByUserCode, Thrown, testing::Values("42", "silent", "torch"),
                         [](const auto& info) { return info.param == "42" ? "a_number" : info.param; });

TEST(ThrownErrors, OfOurOwnThatSayNothingAreNamedToo) {
  expect_plain(message_of<ModelError>([&] { Manager::start(with_model("factory", "own")); }),
               {"model 'foreign'", "accelmgr::ModelError without a text"});
}

TEST(TorchsErrors, AreNoReasonToTryAgainAndSayWhatForwardWasGiven) {
  auto config = with_model("forward", "torch");
  config.runners.on_loss = LossPolicy::restart;
  auto manager = Manager::start(config);
  const auto result = manager.step();
  EXPECT_EQ(result.status, StepStatus::runner_lost);
  EXPECT_EQ(result.error_type, "ModelError");
  EXPECT_EQ(result.tries, 1u);
  EXPECT_EQ(manager.statistics().replacements, 0u);
  expect_plain(result.error, {said.at("torch") + " (forward() was given input Float [3, 4])"});
}

TEST(Restarts, OfTheSameExceptionTellItOnce) {
  auto config = with_model("forward", "silent");
  config.runners.on_loss = LossPolicy::restart;
  config.runners.restarts_per_window = 2;
  config.runners.restart_backoff = 0;
  auto manager = Manager::start(config);
  const auto result = manager.step();
  ASSERT_EQ(result.causes.size(), 3u);
  const auto first = result.error.find(said.at("silent"));
  ASSERT_NE(first, std::string::npos) << result.error;
  EXPECT_EQ(result.error.find(said.at("silent"), first + 1), std::string::npos) << result.error;
}

}  // namespace
}  // namespace accelmgr::test
