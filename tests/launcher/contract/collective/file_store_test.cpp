#include "file_store.hpp"

#include <gtest/gtest.h>

#include <thread>

#include "accelmgr/communicator.hpp"
#include "message_of.hpp"

namespace accelmgr::collective::contract {
namespace {

TEST(FileStore, GivesBackAnyBytesUnderAnyKey) {
  const TemporaryFolder folder;
  FileStore store(folder.path()), other(folder.path());
  const std::string value("a\0b\n", 4);
  EXPECT_FALSE(other.has("a/../b"));
  store.set("a/../b", value);
  store.set("empty", "");
  EXPECT_TRUE(other.has("a/../b"));
  EXPECT_EQ(other.get("a/../b", base::Deadline::in_seconds(10)), value);
  EXPECT_EQ(other.get("empty", base::Deadline::in_seconds(10)), "");
  store.set("empty", "no more");
  EXPECT_EQ(other.get("empty", base::Deadline::in_seconds(10)), "no more");
}

TEST(FileStore, WaitsForAKeyThatIsNotThere) {
  const TemporaryFolder folder;
  std::string found;
  {
    const std::jthread reader(
        [&] { found = FileStore(folder.path()).get("late", base::Deadline::in_seconds(10)); });
    FileStore(folder.path()).set("late", "there");
  }
  EXPECT_EQ(found, "there");
}

TEST(FileStore, NamesTheKeyThatNobodySets) {
  const TemporaryFolder folder;
  FileStore store(folder.path());
  const auto what =
      test::message_of<CollectiveError>([&] { store.get("missing", base::Deadline::in_seconds(0.01)); });
  EXPECT_NE(what.find("missing"), std::string::npos) << what;
  EXPECT_NE(what.find(folder.path().string()), std::string::npos) << what;
}

TEST(FileStore, AddsOfAllAreCounted) {
  const TemporaryFolder folder;
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        FileStore store(folder.path());
        for (int k = 0; k < 50; ++k) store.add("sum", 2);
      });
  }
  EXPECT_EQ(FileStore(folder.path()).add("sum", -1), 399);
}

}  // namespace
}  // namespace accelmgr::collective::contract
