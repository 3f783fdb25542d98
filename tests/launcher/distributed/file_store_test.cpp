#include "launcher/distributed/store/file_store.hpp"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "accelmgr/communicator.hpp"
#include "base/ipc/processes.hpp"
#include "base/unique_fd.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::distributed {
namespace {

namespace fs = std::filesystem;
using base::Deadline;
using test::message_of;
using testing::AllOf;
using testing::HasSubstr;

constexpr double plenty_s = 20;
Deadline plenty() { return Deadline::in_seconds(plenty_s); }

class FileStoreTest : public testing::Test {
 protected:
  FileStore open() const { return FileStore(path_.string(), plenty()); }

  const test::TemporaryFolder folder_;
  const fs::path path_ = folder_ / "store";
};

TEST_F(FileStoreTest, AllOfItsUsersSeeWhatOneHasSet) {
  auto a = open(), b = open();
  const std::string bytes("\0a\xff\n", 4);
  a.set("key", bytes);
  a.set("empty", "");
  EXPECT_EQ(b.get("key", plenty()), bytes);
  EXPECT_EQ(b.get("empty", plenty()), "");
  EXPECT_FALSE(b.has("other"));
  b.set("key", "new");
  EXPECT_EQ(a.get("key", plenty()), "new");
}

TEST_F(FileStoreTest, GetWaitsForTheKey) {
  auto a = open(), b = open();
  auto waiting = std::async(std::launch::async, [&] { return a.get("late", plenty()); });
  b.set("late", "here");
  EXPECT_EQ(waiting.get(), "here");
}

TEST_F(FileStoreTest, AKeyThatNobodySetsIsATimeoutThatNamesItAndTheFile) {
  auto store = open();
  EXPECT_THAT(message_of<CollectiveError>([&] { store.get("rank/3", Deadline::in_seconds(0.02)); }),
              AllOf(HasSubstr("rank/3"), HasSubstr(path_.string())));
}

TEST_F(FileStoreTest, SumsOfManyProcessesMissNothing) {
  auto store = open();
  constexpr int processes = 4, times = 50;
  std::vector<ipc::Child> children;
  for (int i = 0; i < processes; ++i)
    children.push_back(ipc::test::fork_child([this] {
      auto mine = open();
      for (int j = 0; j < times; ++j) mine.add("sum", 1);
      return 0;
    }));
  for (const auto& child : children) EXPECT_EQ(ipc::test::end_of(child), "exit code 0");
  EXPECT_EQ(store.add("sum", 0), processes * times);
}

TEST_F(FileStoreTest, TheLastUserRemovesTheFile) {
  {
    auto a = open();
    { auto b = open(); }
    EXPECT_TRUE(fs::exists(path_));
  }
  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(FileStoreTest, WhatAKilledRunLeftIsForgotten) {
  const auto child = ipc::test::fork_child([this] {
    auto mine = open();
    mine.set("old", "value");
    return kill(getpid(), SIGKILL);
  });
  EXPECT_EQ(ipc::test::end_of(child), "killed by signal 9 (KILL)");
  ASSERT_TRUE(fs::exists(path_));
  auto store = open();
  EXPECT_FALSE(store.has("old"));
}

TEST_F(FileStoreTest, ARecordThatWasNotCommittedIsWrittenOver) {
  auto a = open();
  a.set("first", "1");
  std::ofstream(path_, std::ios::app | std::ios::binary) << "what a killed writer began";
  auto b = open();
  EXPECT_FALSE(b.has("second"));
  b.set("second", "2");
  EXPECT_EQ(a.get("second", plenty()), "2");
  EXPECT_EQ(a.get("first", plenty()), "1");
}

TEST_F(FileStoreTest, AFileThatWasCutOffIsNamed) {
  auto store = open();
  store.set("key", "value");
  fs::resize_file(path_, 0);
  EXPECT_THAT(message_of<SessionError>([&] { store.has("other"); }),
              AllOf(HasSubstr("file://" + path_.string()), HasSubstr("another process truncated it")));
}

TEST_F(FileStoreTest, AFileThatAStrangerHasLockedIsNamed) {
  const base::UniqueFd stranger(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  struct flock all {};
  all.l_type = F_WRLCK;
  all.l_whence = SEEK_SET;
  ASSERT_EQ(fcntl(stranger.get(), F_OFD_SETLK, &all), 0);
  EXPECT_THAT(message_of<SessionError>([&] { FileStore(path_.string(), Deadline::in_seconds(0.02)); }),
              AllOf(HasSubstr("file://" + path_.string()), HasSubstr("another process has it locked")));
}

TEST_F(FileStoreTest, AFileThatCannotBeOpenedIsNamed) {
  const auto path = (folder_ / "missing" / "store").string();
  EXPECT_THAT(message_of<SessionError>([&] { FileStore(path, plenty()); }), HasSubstr(path));
}

}  // namespace
}  // namespace accelmgr::distributed
