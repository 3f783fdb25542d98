// Checks that a writer that is killed, at whatever point, leaves the previous checkpoint good or the new one
// whole, and that the next write removes the leftovers.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/syscall.h>

#include <atomic>

#include "base/fault_point.hpp"
#include "base/ipc/processes.hpp"
#include "base/ipc/system_call.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using ::testing::IsEmpty;

std::atomic<int> points_to_go;

struct Fault {};

template <void (*strike)()>
base::FaultEffect reach(base::FaultPhase phase) {
  if (phase == base::FaultPhase::checkpoint && --points_to_go == 0) strike();
  return base::FaultEffect::none;
}

void kill_self() { kill(getpid(), SIGKILL); }
void throw_fault() { throw Fault(); }

constexpr base::FaultHandler killer{.arm = nullptr, .reach = reach<kill_self>};
constexpr base::FaultHandler thrower{.arm = nullptr, .reach = reach<throw_fault>};

constexpr int points = 4;  // One after each of the three files, and one before the folder gets its name.

constexpr const char* done = "exit code 0";
constexpr const char* killed = "killed by signal 9 (KILL)";
constexpr const char* killed_by_filter = "killed by signal 31 (SYS)";  // base/ipc/system_call.hpp

class KilledWriter : public ::testing::TestWithParam<std::uint64_t> {
 protected:
  KilledWriter() { begin(); }
  /// In a new directory.
  void begin() {
    directory_.emplace();
    write_sample(directory_->path(), 1);
  }

  /// Forks a child that calls `before`, then writes a checkpoint of step GetParam() and another run. Returns
  /// how the child ends.
  template <typename Before>
  std::string end_of_write(Before before) {
    const auto child = ipc::test::fork_child([&] {
      before();
      write_sample(directory_->path(), GetParam(), {}, 0.5f, 1);
      return 0;
    });
    return ipc::test::end_of(child);
  }
  void expect_first() { EXPECT_TRUE(is_sample(latest(), 1)); }
  void expect_second() { EXPECT_TRUE(is_sample(latest(), GetParam(), 0.5f)); }
  void expect_next_write_clears_up() {
    EXPECT_GT(names_in(directory_->path()).size(), 1u) << "nothing was left";
    EXPECT_THAT(write_sample(directory_->path(), 3, {}, 0, 1).warnings, IsEmpty());
    EXPECT_EQ(names_in(directory_->path()), Names{"step-00000003"});
    EXPECT_TRUE(is_sample(latest(), 3));
  }

  std::optional<TemporaryFolder> directory_;

 private:
  Checkpoint latest() {
    return open_latest(directory_->path(),
                       [](const auto&, const std::string& reason) { ADD_FAILURE() << reason; });
  }
};

TEST_P(KilledWriter, AtAnyPoint) {
  for (int point = 1; point <= points + 1; ++point) {
    begin();
    const auto end = end_of_write([&] {
      points_to_go = point;
      base::fault_handler = &killer;
    });
    if (point > points) {
      EXPECT_EQ(end, done) << "there are no more";
      expect_second();
    } else {
      EXPECT_EQ(end, killed) << point;
      expect_first();
      expect_next_write_clears_up();
    }
  }
}

TEST_P(KilledWriter, InTheRename) {
  EXPECT_EQ(end_of_write([] { ipc::test::die_of_system_call(SYS_renameat2); }), killed_by_filter);
  expect_first();
  expect_next_write_clears_up();
}

// The old one is the checkpoint that the write replaced, or the one that it no longer keeps.
TEST_P(KilledWriter, InTheRemovalOfTheOldOne) {
  EXPECT_EQ(end_of_write([] { ipc::test::die_of_system_call(SYS_unlinkat); }), killed_by_filter);
  expect_second();
  expect_next_write_clears_up();
}

TEST_P(KilledWriter, AnExceptionLeavesNothing) {
  for (int point = 1; point <= points; ++point) {
    points_to_go = point;
    base::fault_handler = &thrower;
    EXPECT_THROW(write_sample(directory_->path(), GetParam(), {}, 0.5f), Fault);
    base::fault_handler = nullptr;
    EXPECT_EQ(names_in(directory_->path()), Names{"step-00000001"});
    expect_first();
  }
}

std::string name_of(const ::testing::TestParamInfo<std::uint64_t>& step) {
  return step.param == 1 ? "ReplacingAStep" : "OfANewStep";
}

INSTANTIATE_TEST_SUITE_P(Checkpoint, KilledWriter, ::testing::Values(1, 2), name_of);

}  // namespace
}  // namespace accelmgr::checkpoint::test
