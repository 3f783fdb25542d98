// Tests of how runners with a GPU each start: they open their devices at the same time, and build their
// replicas one after the other. Driver and CUDA are fakes; the processes are real.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>

#include "base/ipc/process.hpp"
#include "engine/support/expectations.hpp"
#include "engine/support/fake_device_replica.hpp"
#include "perceptrons.hpp"
#include "support.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::test {
namespace {

using testing::ElementsAre;
using testing::IsSupersetOf;

constexpr const char* noted_starts = "noted_starts";
constexpr int ranks = 3;

/// What runners have done, as lines of a file in the order in which they did it.
class Notes {
 public:
  explicit Notes(const Config& config) : path_(config.model.options.at("notes")) {}
  void add(const char* what, int rank) const {
    std::ofstream(path_, std::ios::app) << fmt::format("{} {}\n", what, rank);
  }
  std::vector<std::string> all() const {
    std::vector<std::string> lines;
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) lines.push_back(line);
    return lines;
  }
  /// The place of the n-th such line, counted from 1.
  std::optional<std::ptrdiff_t> place(const char* what, int rank, int n = 1) const {
    const auto lines = all();
    for (auto it = lines.begin(); it != lines.end(); ++it)
      if (*it == fmt::format("{} {}", what, rank) && --n == 0) return it - lines.begin();
    return std::nullopt;
  }
  void await(const char* what, int rank) const {
    for (const auto deadline = soon(); !place(what, rank); sched_yield())
      if (deadline.passed()) throw std::runtime_error(fmt::format("rank {} never {}", rank, what));
  }

 private:
  std::string path_;
};

/// With the option `together`, others open while rank 0 does, which is done last. With `strikes_rank_1`, rank
/// 1 gets the signal `strikes_with` there when it does that for the time of that number.
void open(const Config& config, replica::Role role) {
  const Notes notes(config);
  const auto& options = config.model.options;
  notes.add("opens", role.rank);
  if (options.contains("strikes_rank_1") && role.rank == 1 &&
      notes.place("opens", 1, std::stoi(options.at("strikes_rank_1"))) &&
      !notes.place("opens", 1, std::stoi(options.at("strikes_rank_1")) + 1))
    raise(std::stoi(options.at("strikes_with")));
  if (options.contains("together")) {
    if (role.rank != 0) notes.await("opens", 0);
    for (int rank = 1; role.rank == 0 && rank < ranks; ++rank) notes.await("has opened", rank);
  }
  notes.add("has opened", role.rank);
}

/// With `together`, a rank is ready only when the next one builds.
device::Nccl no_nccl(const Config& config, int rank) {
  if (config.model.options.contains("together") && rank + 1 < ranks) Notes(config).await("builds", rank + 1);
  throw UsageError("there is no NCCL");
}

const RegisteredReplica noted(
    noted_starts,
    [](const Config& config, replica::Role role) {
      const Notes notes(config);
      if (role.computes()) notes.add("builds", role.rank);
      auto replica = std::make_unique<FakeDeviceReplica>(make_perceptron({.inputs = 4, .hidden = 6}));
      replica->use_nccl([&config, role] { return no_nccl(config, role.rank); });
      if (role.computes()) notes.add("has built", role.rank);
      return replica;
    },
    open);

class DeviceStart : public testing::Test {
 protected:
  DeviceStart() {
    unsetenv("CUDA_VISIBLE_DEVICES");
    setenv("FAKE_DRIVER_GPUS", std::to_string(ranks).c_str(), 1);
    config_ = perceptron_config({.inputs = 4, .hidden = 6}, noted_starts);
    config_.model.options["notes"] = folder_ / "notes";
    config_.nprocs = ranks;
    config_.runners.device = accelmgr::Device::cuda;
    config_.runners.nccl = NcclUse::automatic;
    config_.runners.on_loss = LossPolicy::restart;
    config_.runners.restart_backoff = 0.01;
  }
  ~DeviceStart() override { expect_nothing_left(); }

  void strike_rank_1(int signal, int opening) {
    config_.model.options["strikes_rank_1"] = std::to_string(opening);
    config_.model.options["strikes_with"] = std::to_string(signal);
  }
  std::string error_of_start() const {
    return message_of<RunnerError>([&] { client::Handle(config_, {}); });
  }

  TemporaryFolder folder_;
  Config config_;
};

TEST_F(DeviceStart, OpensAllDevicesAtOnceAndBuildsOneReplicaAfterTheOtherWhileThoseBeforeGoOn) {
  config_.model.options["together"] = "";
  client::Handle manager(config_, {});
  expect_ok(manager);
  const auto notes = Notes(config_).all();
  ASSERT_EQ(notes.size(), 4u * ranks);
  const auto built = notes.begin() + 2 * ranks;
  EXPECT_THAT(std::vector(notes.begin(), built),
              IsSupersetOf({"has opened 0", "has opened 1", "has opened 2"}));
  EXPECT_THAT(std::vector(built, notes.end()),
              ElementsAre("builds 0", "has built 0", "builds 1", "has built 1", "builds 2", "has built 2"));
}

TEST_F(DeviceStart, FailsWhereARunnerDiesWhileItOpensItsDevice) {
  strike_rank_1(SIGKILL, 1);
  expect_contains(error_of_start(),
                  {"runner 1 killed by signal 9 (KILL) in phase init (opening its device)"});
}

TEST_F(DeviceStart, FailsAtStartTimeoutWhereARunnerIsStoppedWhileItOpensItsDevice) {
  config_.start_timeout = 3;
  strike_rank_1(SIGSTOP, 1);
  expect_contains(
      error_of_start(),
      {"runner 1 was not ready within start_timeout (3 s); it is in phase init (opening its device)"});
}

TEST_F(DeviceStart, OfAReplacementWaitsForNoneThatIsStoppedWhileItOpensItsDevice) {
  config_.start_timeout = 5;
  strike_rank_1(SIGSTOP, 2);
  client::Handle manager(config_, {});
  expect_ok(manager);
  for (const std::size_t rank : {1u, 2u}) kill_and_wait(manager.statistics().runners.at(rank).pid);
  EXPECT_TRUE(manager.step().counted);
  const Notes notes(config_);
  ASSERT_TRUE(notes.place("builds", 2, 2) && notes.place("opens", 1, 3));
  EXPECT_LT(*notes.place("builds", 2, 2), *notes.place("opens", 1, 3));
  EXPECT_GT(*notes.place("builds", 1, 2), *notes.place("opens", 1, 3));
}

}  // namespace
}  // namespace accelmgr::test
