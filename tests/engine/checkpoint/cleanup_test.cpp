// Checks which checkpoints and leftovers a write keeps, which it removes, and what it leaves alone because it
// is not accelmgr's.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <cmath>

#include "base/clock.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/processes.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "engine/checkpoint/cleanup.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class Kept : public ::testing::Test {
 protected:
  Written write_one(std::uint64_t step, std::optional<double> metric, std::int64_t keep) {
    auto written = write_sample(directory_.path(), step, metric, 0, keep);
    for (const auto& path : written.removed) removed_.insert(path.filename().string());
    return written;
  }
  Names names() const { return names_in(directory_.path()); }

  const TemporaryFolder directory_;
  Names removed_;
};

pid_t dead_pid() {
  const auto child = ipc::test::fork_child([] { return 0; });
  ipc::test::end_of(child);
  return child.pid;
}

TEST_F(Kept, AreTheLastAndTheBest) {
  const std::optional<double> metrics[] = {0.5, 0.2, {}, 0.3, 0.4, std::nan(""), 0.6};
  for (std::uint64_t step = 0; step < std::size(metrics); ++step) write_one(step, metrics[step], 2);
  EXPECT_EQ(names(), (Names{"step-00000001", "step-00000005", "step-00000006"}));
  EXPECT_EQ(removed_, (Names{"step-00000000", "step-00000002", "step-00000003", "step-00000004"}));
  for (const auto& name : names()) EXPECT_NO_THROW(open(directory_ / name)) << name;
}

TEST_F(Kept, OfEquallyGoodOnesTheLatest) {
  for (std::uint64_t step = 1; step <= 4; ++step) write_one(step, step <= 2 ? 0.1 : 0.2, 1);
  EXPECT_EQ(names(), (Names{"step-00000002", "step-00000004"}));
}

TEST_F(Kept, IsWhatWasJustWrittenThoughLaterOnesAreThere) {
  write_one(200, {}, 2);
  write_one(300, {}, 2);
  const auto written = write_one(150, {}, 2);  // As a run that resumed from an earlier checkpoint would.
  EXPECT_EQ(names(), (Names{"step-00000150", "step-00000200", "step-00000300"}));
  EXPECT_THAT(written.warnings, ElementsAre(HasSubstr("step-00000300' is of a later step than 150")));
}

TEST_F(Kept, IsWhatIsNotKnownToBeOurs) {
  write_one(1, {}, 1);
  fs::create_directory(directory_ / "step-00000002");
  write_text(directory_ / "step-00000002" / "precious", "data");
  write_text(directory_ / "step-00000003", "a file");
  write_text(directory_ / "notes", "mine");
  const auto written = write_one(4, {}, 1);
  EXPECT_THAT(written.removed, ElementsAre(directory_ / "step-00000001"));
  EXPECT_THAT(written.warnings, ElementsAre(HasSubstr("step-00000003' is left as it is: "),
                                            HasSubstr("step-00000002' is left as it is: ")));
  EXPECT_EQ(names(), (Names{"notes", "step-00000002", "step-00000003", "step-00000004"}));
  EXPECT_EQ(read_text(directory_ / "step-00000002" / "precious"), "data");
}

TEST_F(Kept, AreLeftoversOfTheLivingAndNotOfTheDead) {
  const auto living = ".step-00000001.tmp-" + std::to_string(getppid());
  const auto dead = std::to_string(dead_pid());
  for (const auto& name : {living, ".step-00000001.tmp-" + dead, ".step-00000002.replaced-" + dead,
                           ".step-00000003.tmp-" + std::to_string(getpid())}) {
    fs::create_directory(directory_ / name);
    write_text(directory_ / name / "model.safetensors", "half");
  }
  const Names others{".step-00000001.tmp-", ".step-00000001.tmp-0", ".step-00000001.tmp-" + dead + "x",
                     ".step-1.tmp-" + dead, "step-00000001.tmp-" + dead};
  for (const auto& name : others) fs::create_directory(directory_ / name);
  write_one(2, {}, 1);
  auto expected = others;
  expected.insert({living, "step-00000002"});
  EXPECT_EQ(names(), expected);
}

TEST_F(Kept, IsNoLeftoverOfAWriterWhosePidAnotherProcessHas) {
  const auto parent = std::to_string(getppid());
  const auto began = ipc::began_at(getppid()).value();
  const auto living = fmt::format(".step-00000001.tmp-{}-{}", parent, began);
  const auto earlier = fmt::format(".step-00000001.tmp-{}-{}", parent, began - 1);
  for (const auto& name : {living, earlier}) fs::create_directory(directory_ / name);
  write_one(2, {}, 1);
  EXPECT_EQ(names(), (Names{living, "step-00000002"}));
}

TEST_F(Kept, AreThoseThatCannotBeReadUnderAnotherName) {
  for (const auto* name : {"step-00000002.unreadable", "step-00000002.unreadable-2"}) {
    fs::create_directory(directory_ / "step-00000002");
    EXPECT_EQ(set_unreadable_aside(directory_ / "step-00000002"), directory_ / name);
  }
  for (const std::uint64_t step : {2, 3}) write_one(step, {}, 1);
  EXPECT_EQ(names(), (Names{"step-00000002.unreadable", "step-00000002.unreadable-2", "step-00000003"}));
}

// In a container whose first process waits for nobody, a killed run stays in the table of processes.
TEST_F(Kept, IsNoLeftoverOfOneThatHasEndedAndThatNobodyHasWaitedFor) {
  const auto child = ipc::test::fork_child([] { return 0; });
  ASSERT_TRUE(ipc::wait_ended(child.pidfd.get(), base::Deadline::in_seconds(20)));
  const auto leftover = directory_ / (".step-00000001.tmp-" + std::to_string(child.pid));
  fs::create_directory(leftover);
  write_one(2, {}, 1);
  EXPECT_EQ(names(), Names{"step-00000002"});
  EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
}

TEST_F(Kept, IsOneThatWasPutAsideAndNotReplaced) {
  write_one(5, {}, 9);
  fs::rename(directory_ / "step-00000005",
             directory_ / (".step-00000005.replaced-" + std::to_string(dead_pid())));
  write_one(6, {}, 9);
  EXPECT_EQ(names(), (Names{"step-00000005", "step-00000006"}));
  EXPECT_TRUE(is_sample(open(directory_ / "step-00000005"), 5));
}

TEST_F(Kept, WhatCannotBeRemovedFailsNoWrite) {
  const auto old = write_one(1, {}, 1).path;
  fs::permissions(directory_.path(), fs::perms::all);
  fs::permissions(old, fs::perms::owner_write, fs::perm_options::remove);
  const auto child = ipc::test::fork_child([&] {
    become_unprivileged();
    const auto written = write_one(2, {}, 1);
    EXPECT_THAT(written.warnings, ElementsAre(HasSubstr("could not be removed: Permission denied")));
    EXPECT_EQ(names().count("step-00000001"), 0u);
    return exit_code();
  });
  EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
  const auto leftovers = list_leftovers(directory_.path());
  ASSERT_EQ(leftovers.size(), 1u);
  EXPECT_EQ(leftovers[0].pid, child.pid);
  const auto leftover = leftovers[0].path;
  fs::permissions(leftover, fs::perms::owner_write, fs::perm_options::add);
  EXPECT_THAT(write_one(3, {}, 1).warnings, IsEmpty());
  EXPECT_EQ(names(), Names{"step-00000003"});
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
