// Tests of write() and open(): open() returns what write() was given, from the folder of that step.
#include <gmock/gmock.h>
#include <sys/syscall.h>

#include <cmath>

#include "base/ipc/processes.hpp"
#include "base/ipc/system_call.hpp"
#include "engine/checkpoint/checkpoint.hpp"
#include "support.hpp"

namespace accelmgr::checkpoint::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(Checkpoint, ComesBackAsItWasWritten) {
  const TemporaryFolder directory;
  const auto written = write_sample(directory.path(), 123, 0.1, 0.5f);
  EXPECT_EQ(written.path, directory / "step-00000123");
  EXPECT_THAT(written.removed, IsEmpty());
  EXPECT_THAT(written.warnings, IsEmpty());
  EXPECT_EQ(names_in(directory.path()), Names{"step-00000123"});
  EXPECT_EQ(names_in(written.path), (Names{"model.safetensors", "training.safetensors", "state.json"}));
  std::uint64_t bytes = 0;
  for (const auto& file : fs::directory_iterator(written.path)) bytes += file.file_size();
  EXPECT_EQ(written.bytes, bytes);

  for (const auto& path : {written.path, written.path / ""}) {
    const auto checkpoint = open(path);
    EXPECT_EQ(checkpoint.path, written.path);
    EXPECT_EQ(checkpoint.metric, 0.1);
    EXPECT_TRUE(is_sample(checkpoint, 123, 0.5f));
  }
}

TEST(Checkpoint, IsReadableByThoseWhoMayReadNewFiles) {
  const TemporaryFolder directory;
  const auto before = umask(027);
  const auto path = write_sample(directory.path(), 1).path;
  umask(before);
  using enum fs::perms;
  EXPECT_EQ(fs::status(path).permissions(), owner_all | group_read | group_exec);
  for (const auto& file : fs::directory_iterator(path))
    EXPECT_EQ(file.status().permissions(), owner_read | owner_write | group_read) << file;
}

TEST(Checkpoint, GoesToADirectoryThatIsMadeWithItsParents) {
  const TemporaryFolder directory;
  for (const auto& path : {directory / "a" / "b" / "c", directory / "d" / "e" / ""}) {
    write_sample(path, 1);
    EXPECT_TRUE(is_sample(open_latest(path, {}), 1));
  }
}

TEST(Checkpoint, OfAStepThatIsThereReplacesIt) {
  const TemporaryFolder directory;
  write_sample(directory.path(), 5, {}, 1);
  const auto old = open(directory / "step-00000005");
  const auto written = write_sample(directory.path(), 5, {}, 2);
  EXPECT_THAT(written.warnings, IsEmpty());
  EXPECT_EQ(names_in(directory.path()), Names{"step-00000005"});
  EXPECT_TRUE(is_sample(open(written.path), 5, 2));
  EXPECT_TRUE(is_sample(old, 5, 1)) << "who has it open goes on reading it";
}

TEST(Checkpoint, ReplacesADamagedOneOfItsStep) {
  const TemporaryFolder directory;
  const auto path = write_sample(directory.path(), 5).path;
  fs::remove(path / "state.json");
  write_sample(directory.path(), 5);
  EXPECT_TRUE(is_sample(open(path), 5));
}

TEST(Checkpoint, ReplacesWhereTheFileSystemCannotExchange) {
  for (const int error : {EINVAL, ENOSYS}) {
    const TemporaryFolder directory;
    write_sample(directory.path(), 5, {}, 1);
    const auto child = ipc::test::fork_child([&] {
      ipc::test::fail_system_call(SYS_renameat2, error);
      write_sample(directory.path(), 5, {}, 2);
      write_sample(directory.path(), 6);
      return 0;
    });
    EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
    EXPECT_EQ(names_in(directory.path()), (Names{"step-00000005", "step-00000006"}));
    EXPECT_TRUE(is_sample(open(directory / "step-00000005"), 5, 2));
    EXPECT_TRUE(is_sample(open(directory / "step-00000006"), 6));
  }
}

TEST(Checkpoint, IsNotWrittenOfWhatCouldNotBeReadBack) {
  const TemporaryFolder directory;
  const Sample sample(1);
  auto contents = sample.contents();
  contents.training = contents.training.first(contents.training.size() - 1);
  EXPECT_THAT(message_of<CheckpointError>([&] { write(directory.path(), contents, 1); }),
              HasSubstr("'step-00000001/training.safetensors' is not a whole safetensors file"));
  contents = sample.contents();
  contents.model = {};
  EXPECT_THAT(message_of<CheckpointError>([&] { write(directory.path(), contents, 1); }),
              HasSubstr("'step-00000001/model.safetensors' is not"));
  contents = sample.contents();
  contents.state = {{"loss", std::nan("")}};
  EXPECT_THAT(message_of<CheckpointError>([&] { write(directory.path(), contents, 1); }), HasSubstr("/loss"));
  EXPECT_THAT(message_of<CheckpointError>([&] { write(directory.path(), sample.contents(), 0); }),
              HasSubstr("keep is 0"));
  EXPECT_THAT(names_in(directory.path()), IsEmpty());
}

TEST(Checkpoint, OfManyDigitsIsFound) {
  const TemporaryFolder directory;
  write_sample(directory.path(), 99'999'999);
  write_sample(directory.path(), 100'000'000);
  EXPECT_EQ(names_in(directory.path()), (Names{"step-99999999", "step-100000000"}));
  EXPECT_EQ(open_latest(directory.path(), {}).step, 100'000'000u);
}

}  // namespace
}  // namespace accelmgr::checkpoint::test
