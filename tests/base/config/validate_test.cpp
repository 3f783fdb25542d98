// Tests of validate() and warnings(): rules between values, and values that a program has set in Config.
#include <functional>
#include <limits>

#include "base/config/support.hpp"

namespace accelmgr::config {
namespace {

Config gpt_of_text() {
  Config config;
  config.model.kind = "gpt";
  config.data.kind = "text";
  config.data.files = {"a.txt"};
  return config;
}

TEST(BadCombination, IsRefusedWithBothSides) {
  const auto expect_bad = [](const std::function<void(Config&)>& change, const std::string& key,
                             const std::vector<std::string>& parts) {
    SCOPED_TRACE(key + " and " + ::testing::PrintToString(parts));
    auto config = gpt_of_text();
    ASSERT_NO_THROW(validate(config));
    change(config);
    const auto refused = refusal([&] { validate(config); });
    EXPECT_TRUE(says(refused, parts));
    EXPECT_EQ(refused.key, key);
  };
  const auto two_hosts = [](Config& c) {
    c.launch.nnodes = 2;
    c.launch.rendezvous = "10.0.0.1:2222";
  };
  expect_bad([](Config& c) { c.nprocs = 0; }, "nprocs", {"nprocs is 0", "from 1 to 24"});
  expect_bad([](Config& c) { c.nprocs = one_per_device; }, "nprocs",
             {"nprocs is -1, one for each device", "runners.device is cpu"});
  expect_bad(
      [](Config& c) {
        c.runners.devices = {"0", "1"};
      },
      "runners.devices", {"runners.device is cpu", "set auto or cuda"});
  expect_bad(
      [](Config& c) {
        c.runners.device = Device::cuda, c.runners.devices = {"0", "1", "2"};
      },
      "runners.devices", {"runners.devices has 3 devices", "nprocs is 2"});
  expect_bad([](Config& c) { c.data.held_out = -0.1; }, "data.held_out", {"from 0 to 0.9"});
  expect_bad([](Config& c) { c.data.held_out = 1; }, "data.held_out", {"is 1"});
  expect_bad([](Config& c) { c.optimizer.learning_rate = std::numeric_limits<double>::quiet_NaN(); },
             "optimizer.learning_rate", {"is nan"});
  expect_bad([](Config& c) { c.optimizer.kind = static_cast<OptimizerKind>(7); }, "optimizer.kind", {"7"});
  expect_bad([](Config& c) { c.model.options[""] = "x"; }, "model.options", {});
  expect_bad([](Config& c) { c.model.gpt.heads = 3; }, "model.gpt.width",
             {"model.gpt.width is 128", "model.gpt.heads, which is 3"});
  expect_bad([](Config& c) { c.data.sequence_length = 129; }, "data.sequence_length",
             {"is 129", "at most model.gpt.context, which is 128"});
  expect_bad([](Config& c) { c.model.gpt.vocabulary = 255; }, "model.gpt.vocabulary",
             {"is 255", "at least 256"});
  expect_bad([](Config& c) { c.data.files.clear(); }, "data.files", {"at least one file"});
  expect_bad([](Config& c) { c.data.files.push_back(""); }, "data.files", {"an empty name"});
  expect_bad([](Config& c) { c.model.kind = "mlp"; }, "model.kind", {"model.kind is mlp", "data.kind text"});
  expect_bad([](Config& c) { c.model.kind = "torchscript"; }, "model.file",
             {"model.file is empty", "torchscript"});
  expect_bad([](Config& c) { c.model.kind = ""; }, "model.kind", {"model.kind is empty"});
  expect_bad([](Config& c) { c.data.kind = ""; }, "data.kind", {"data.kind is empty"});
  expect_bad([](Config& c) { c.optimizer.kind = OptimizerKind::sgd, c.optimizer.nesterov = true; },
             "optimizer.nesterov", {"optimizer.nesterov is true", "optimizer.momentum is 0"});
  expect_bad([](Config& c) { c.runners.loss_scale.initial = 1000; }, "runners.loss_scale.initial",
             {"is 1000", "power of two"});
  expect_bad([](Config& c) { c.launch.nprocs = 0; }, "launch.nprocs", {"launch.nprocs is 0", "at least 1"});
  expect_bad([&](Config& c) { two_hosts(c), c.launch.node_rank = 2; }, "launch.node_rank",
             {"launch.node_rank is 2", "launch.nnodes is 2", "0 to 1"});
  expect_bad([&](Config& c) { two_hosts(c), c.launch.min_nodes = 3; }, "launch.min_nodes",
             {"launch.min_nodes is 3", "at most 2", "launch.nnodes is 2"});
  expect_bad(
      [](Config& c) {
        c.launch.nnodes = 2, c.launch.min_nodes = 1;
        c.launch.workers = "a;10.0.0.1:2222|b;10.0.0.2:2222";
      },
      "launch.min_nodes", {"launch.min_nodes is 1", "launch.workers lists nodes"});
  expect_bad([](Config& c) { c.launch.nnodes = 2; }, "launch.rendezvous",
             {"launch.nnodes is 2", "HOST:PORT"});
  expect_bad([&](Config& c) { two_hosts(c), c.launch.backend = "shm"; }, "launch.backend",
             {"launch.backend is shm", "launch.nnodes is 2", "gloo"});
  expect_bad([](Config& c) { c.launch.nprocs = 2, c.launch.backend = "serial"; }, "launch.backend",
             {"launch.backend is serial", "launch.nprocs is 2"});
  expect_bad([](Config& c) { c.train.evaluate_every = 10; }, "train.evaluate_every",
             {"train.evaluate_every is 10", "data.held_out is 0"});
}

TEST(Config, SaysWhereTheRefusedHalfOfACombinationCameFrom) {
  const auto refused = refusal([] { load_text("prefetch: 1\noptimizer.nesterov: true\n"); });
  EXPECT_TRUE(says(refused, {"comes from: file ", "run.yaml:2"}));
  EXPECT_EQ(refused.key, "optimizer.nesterov");
}

TEST(Config, TakesDevicesForAsManyRunnersAsThereAreOrAsAResizeMayAskFor) {
  Config config;
  config.runners.device = Device::cuda;
  config.runners.devices = {"0", "cpu"};
  EXPECT_NO_THROW(validate(config));
  config.runners.devices.emplace_back("1");
  config.runners.max_runners = 3;
  EXPECT_NO_THROW(validate(config));
  config.nprocs = one_per_device;
  config.runners.min_runners = 3;  // Whether there are so many is not known yet.
  EXPECT_NO_THROW(validate(config));
}

TEST(Config, TakesHostsThatMeetAtARendezvousOrByTheirWorkers) {
  Config config;
  config.launch.nnodes = 2;
  config.launch.node_rank = 1;
  config.launch.rendezvous = "10.0.0.1:2222";
  EXPECT_NO_THROW(validate(config));
  config.launch.rendezvous.clear();
  config.launch.workers = "a:0;10.0.0.1:2222|a:1;10.0.0.2:2222";
  EXPECT_NO_THROW(validate(config));
}

TEST(ConfigWarnings, AreNoneForTheDefault) { EXPECT_TRUE(warnings(Config{}, 2).empty()); }

TEST(ConfigWarnings, TellOfMoreThreadsThanCores) {
  Config config;
  config.nprocs = 2;
  config.runners.threads = 2;
  EXPECT_TRUE(warnings(config, 4).empty());
  ASSERT_EQ(warnings(config, 3).size(), 1u);
  EXPECT_TRUE(says({warnings(config, 3).front(), ""}, {"2 runners", "2 threads", "3 cores"}));
  config.runners.threads = 0;
  EXPECT_TRUE(warnings(config, 2).empty());
  EXPECT_EQ(warnings(config, 1).size(), 1u);
}

TEST(ConfigWarnings, AreNoneOfThreadsWhileTheNumberOfRunnersIsOpen) {
  Config config;
  config.runners.device = Device::automatic;
  config.nprocs = one_per_device;
  EXPECT_TRUE(warnings(config, 1).empty());
}

TEST(ConfigWarnings, TellOfSettingsThatTheOptimizerDoesNotRead) {
  Config config;
  config.optimizer.momentum = 0.9;
  ASSERT_EQ(warnings(config, 2).size(), 1u);
  EXPECT_TRUE(says({warnings(config, 2).front(), ""}, {"adamw does not read optimizer.momentum"}));
  config.optimizer.kind = OptimizerKind::sgd;
  EXPECT_TRUE(warnings(config, 2).empty());
}

TEST(ConfigWarnings, TellOfSharesOfOneMicroBatchThatCannotBeDivided) {
  Config config;
  config.runners.share = Share::measured;
  ASSERT_EQ(warnings(config, 2).size(), 1u);
  EXPECT_TRUE(says({warnings(config, 2).front(), ""}, {"runners.share", "grad_accumulation_steps is 1"}));
  config.grad_accumulation_steps = 2;
  EXPECT_TRUE(warnings(config, 2).empty());
}

TEST(ConfigWarnings, TellOfRunsTooShortForTheirSchedule) {
  Config config;
  config.train.steps = 10;
  config.optimizer.steps_per_update = 4;
  config.optimizer.warmup_updates = 3;
  ASSERT_EQ(warnings(config, 2).size(), 1u);
  EXPECT_TRUE(says({warnings(config, 2).front(), ""}, {"warmup_updates is 3", "2 updates"}));
  config.optimizer.steps_per_update = 11;
  ASSERT_EQ(warnings(config, 2).size(), 1u);
  EXPECT_TRUE(says({warnings(config, 2).front(), ""}, {"train.steps is 10", "11 steps"}));
}

}  // namespace
}  // namespace accelmgr::config
