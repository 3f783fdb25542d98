// Checks that a run which ends, and a run which resumes from its checkpoint, together give the bits of one
// whole run, and train every element once.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "accelmgr/errors.hpp"
#include "accelmgr/init.hpp"
#include "element_weights.hpp"
#include "engine/support/plain_replica.hpp"
#include "role_process.hpp"
#include "staged_run.hpp"
#include "table_source.hpp"
#include "temporary_folder.hpp"
#include "training.hpp"

namespace accelmgr::test {
namespace {

namespace fs = std::filesystem;

/// Trains the staged model (BatchNorm, dropout) on a source without state(), by sgd with momentum. Lost
/// runners are replaced.
Config resumable_config(const std::string& stage_path, const std::string& directory) {
  auto config = staged_config(stage_path);
  config.runners.on_loss = LossPolicy::restart;
  config.runners.restart_backoff = 0;
  config.checkpoint.directory = directory;
  return config;
}

/// A host with the stage of its first argument and checkpoints in the second. It trains five steps, in which
/// a runner is killed. It saves, says the checkpoint's path, waits for the test, and trains on to step 12.
constexpr const char* trains_and_saves = "trains_and_saves";
const RegisteredRole host(trains_and_saves, [](const Arguments& arguments, int argc, char** argv) {
  init(argc, argv);
  Training training(resumable_config(arguments.at(0), arguments.at(1)));
  training.train(3);
  training.kill_runner(1);
  training.train(5);
  say(training.save());
  wait_for_test();
  training.train(12);
  return 0;
});

/// A source with the fields of the staged source, shuffled in each epoch. A table has state().
const RegisteredData shuffled("shuffled", [](const Config& config) {
  constexpr std::size_t elements = 37, width = 8;
  Column input{{"input", DType::float32, {width}}, {}}, target{{"target", DType::float32, {1}}, {}};
  const auto add = [](Column& column, float value) {
    const auto bytes = std::as_bytes(std::span(&value, 1));
    column.rows.insert(column.rows.end(), bytes.begin(), bytes.end());
  };
  for (std::size_t element = 0; element < elements; ++element) {
    float sum = 0;
    for (std::size_t i = 0; i < width; ++i) {
      const auto value = std::sin(float(element * width + i));
      add(input, value);
      sum += value;
    }
    add(target, sum);
  }
  return table_source({std::move(input), std::move(target), numbers("index", elements)}, config.data.epochs,
                      7);
});

const RegisteredData in_order("in_order", elements_in_order);
const RegisteredReplica tally("tally", [](const Config&, replica::Role) {
  return std::make_unique<PlainReplica>(std::make_unique<ElementWeights>());
});

class Resume : public testing::Test {
 protected:
  ~Resume() override { expect_nothing_left(); }

  Config config() const { return resumable_config(stage_.path(), directory_); }
  static Config from(Config config, const std::string& resume) {
    config.checkpoint.resume = resume;
    return config;
  }
  static Outcome undisturbed(const Config& config, std::uint64_t steps) {
    Training training(config);
    training.train(steps);
    return training.outcome();
  }
  /// Trains `steps` steps, saves a checkpoint after the last one, and stops. Returns the path.
  static std::string train_and_save(const Config& config, std::uint64_t steps) {
    Training training(config);
    training.train(steps);
    return training.save();
  }
  const TemporaryFolder folder_;
  const std::string directory_ = folder_.path();
  Stage stage_;
};

TEST_F(Resume, EndsAsOneRunAcrossEpochsOfAShuffledSource) {
  auto shuffled = config();
  shuffled.data.kind = "shuffled";
  shuffled.buffers.policy = BufferPolicy::mean;
  const auto path = train_and_save(shuffled, 5);  // Within an update.
  Training resumed(from(shuffled, "latest"));
  ASSERT_TRUE(resumed.manager().resumed());
  EXPECT_EQ(resumed.manager().resumed()->step, 5u);
  EXPECT_EQ(resumed.manager().resumed()->path, path);
  EXPECT_EQ(resumed.manager().statistics().steps, 5u);
  resumed.train(12);
  expect_same(resumed.outcome(), undisturbed(shuffled, 12));
}

/// Runs a host in a process of its own, and kills it in its sixth step. Returns its checkpoint.
std::string checkpoint_of_killed_host(Stage& stage, const std::string& directory) {
  RoleProcess host(trains_and_saves, {stage.path(), directory});
  const auto path = host.line();
  EXPECT_NE(path, "") << "it ended before it had a checkpoint";
  stage.tell(1, Act::block);
  host.let_go();
  stage.wait_until_blocked(1);
  host.kill_and_wait();
  stage.tell(1, Act::compute);
  expect_nothing_left();
  return path;
}

TEST_F(Resume, AfterTheHostWasKilledEndsAsOneRunThroughAllRestarts) {
  const auto expected = undisturbed(config(), 12);
  const auto path = checkpoint_of_killed_host(stage_, directory_);
  for (const auto& resume : {std::string("latest"), path}) {
    Training resumed(from(config(), resume));
    ASSERT_TRUE(resumed.manager().resumed());
    EXPECT_EQ(resumed.manager().resumed()->step, 5u);
    resumed.train(8);
    resumed.kill_runner(0);
    resumed.train(12);
    EXPECT_EQ(resumed.manager().statistics().replacements, 1u);
    expect_same(resumed.outcome(), expected);
  }
}

TEST_F(Resume, WithAnotherNumberOfRunnersTrainsEveryElementOnce) {
  auto config = staged_config(stage_);
  config.model.kind = "tally";
  config.data.kind = "in_order";
  config.data.epochs = 1;
  config.checkpoint.directory = directory_;
  const auto save_after = [&](int runners, std::uint64_t steps, const std::string& resume) {
    config.nprocs = runners;
    client::Handle manager(from(config, resume), {});
    for (std::uint64_t step = 0; step < steps; ++step) expect_ok(manager);
    EXPECT_EQ(manager.statistics().runners.size(), static_cast<std::size_t>(runners));
    manager.save_checkpoint({});
    EXPECT_EQ(manager.checkpoints_written(30).size(), 1u);
    return gradients_of(manager).at(0);
  };
  save_after(2, 3, "");
  save_after(3, 2, "latest");
  const auto seen = save_after(1, 2, "latest");
  for (std::size_t element = 0; element < weighed_elements; ++element) {
    const double mean_over = staged_batch_size * (element < 24 ? 2 : element < 48 ? 3 : 1);
    EXPECT_FLOAT_EQ(float(seen[element]), element < 56 ? float(1 / mean_over) : 0) << "element " << element;
  }
}

TEST_F(Resume, ACheckpointUnderWayEndsWithTheManagerThatWroteIt) {
  RunAfterOneStep run(config());
  ipc::send_signal(run.processes().manager.get(), SIGSTOP);
  run.manager().save_checkpoint({});
  run.kill_and_wait(run.processes().manager.get());
  EXPECT_EQ(run.manager().step().status, StepStatus::manager_lost);
  const auto written = run.manager().checkpoints_written(30);
  ASSERT_EQ(written.size(), 1u);
  expect_contains(written[0].error, {"the manager process ended before the checkpoint was written"});
  EXPECT_THROW(run.manager().save_checkpoint({}), SessionError);
}

TEST_F(Resume, AnotherRunReplacesNothing) {
  train_and_save(config(), 2);
  client::Handle manager(config(), {});
  expect_ok(manager);
  expect_contains(message_of<CheckpointError>([&] { manager.save_checkpoint({}); }),
                  {"step-00000002' is of another run", "checkpoint.resume", "checkpoint.directory"});
  const auto elsewhere = directory_ + "/elsewhere";
  manager.save_checkpoint({.directory = elsewhere});
  const auto written = manager.checkpoints_written(30);
  ASSERT_EQ(written.size(), 1u);
  EXPECT_EQ(written[0].path, elsewhere + "/step-00000001");
}

TEST_F(Resume, OfAnotherModelIsRefusedWithTheTensor) {
  train_and_save(config(), 1);
  auto other = from(config(), "latest");
  other.model.kind = "tally";
  other.data.kind = "in_order";
  expect_contains(message_of<CheckpointError>([&] { client::Handle(other, {}); }),
                  {directory_, "'weight'", "another model"});
  expect_nothing_left();
}

TEST_F(Resume, WithoutADirectoryNothingCanBeSaved) {
  auto config = staged_config(stage_);
  client::Handle manager(config, {});
  expect_contains(message_of<UsageError>([&] { manager.save_checkpoint({}); }),
                  {"save_checkpoint()", "checkpoint.directory"});
  EXPECT_TRUE(manager.checkpoints_written(0).empty());
}

TEST_F(Resume, AManagerKilledWhileItWritesIsToldAndTheNextCheckpointIsGood) {
  auto faulty = config();
  faulty.faults = {"rank=manager phase=checkpoint occurrence=6 fault=kill"};  // Four for each checkpoint.
  {
    Training training(faulty);
    training.train(3);
    training.save();
    training.train(4);
    training.manager().save_checkpoint({});
    const auto written = training.manager().checkpoints_written(30);
    ASSERT_EQ(written.size(), 1u);
    EXPECT_EQ(written[0].step, 4u);
    expect_contains(written[0].error, {"the manager process ended before the checkpoint was written"});
    expect_failed(training.manager().step(), StepStatus::manager_lost, {"killed by signal 9 (KILL)"});
    training.manager().recover();
    training.train(5);
    training.save();
  }
  Training resumed(from(config(), "latest"));
  EXPECT_EQ(resumed.manager().resumed()->step, 5u);
  EXPECT_TRUE(resumed.manager().resumed()->refused.empty());
  resumed.train(12);
  expect_same(resumed.outcome(), undisturbed(config(), 12));
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), {}), 2) << "what was left of step 4";
}

/// What a manager that is stopped while it writes a checkpoint prints, and its folder.
std::string stopped_while_it_writes(const std::string& fault, const TemporaryFolder& folder) {
  Stage stage;
  auto config = resumable_config(stage.path(), folder.path());
  config.faults = {"rank=manager phase=checkpoint fault=" + fault};
  StagedRun run(config);
  expect_ok(run.manager());
  run.manager().save_checkpoint({});
  testing::internal::CaptureStderr();
  run.manager().stop();
  return testing::internal::GetCapturedStderr();
}

TEST(Stop, WaitsForACheckpointThatIsBeingWritten) {
  const TemporaryFolder folder;
  EXPECT_EQ(stopped_while_it_writes("slow:500", folder), "");
  EXPECT_TRUE(fs::exists(folder / "step-00000001"));
}

TEST(Stop, WarnsOfACheckpointThatIsNotWrittenInTimeOrFailsMeanwhile) {
  for (const auto& [fault, why] :
       {std::pair{"hang", "stop() waits"}, {"exception:no-more-room", "no-more-room"}}) {
    const TemporaryFolder folder;
    expect_contains(stopped_while_it_writes(fault, folder),
                    {std::string("the checkpoint of step 1 was not written: ") + why});
    EXPECT_FALSE(fs::exists(folder / "step-00000001"));
  }
}

}  // namespace
}  // namespace accelmgr::test
