#include "engine/service/socket_path.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/clock.hpp"
#include "engine/client/service_socket.hpp"
#include "message_of.hpp"
#include "temporary_folder.hpp"

namespace accelmgr::service {
namespace {

using test::message_of;
using testing::HasSubstr;

struct SocketPathTest : testing::Test {
  test::TemporaryFolder folder;
  std::string path = (folder / "socket").string();

  std::string why_not() {
    return message_of<ConfigError>([&] { SocketPath(path, {}); });
  }
  bool is_there() const { return std::filesystem::exists(std::filesystem::symlink_status(path)); }
  /// What a killed service leaves.
  void leave_stale() {
    SocketPath killed(path, {});
    std::filesystem::rename(path, path + ".kept");
    killed.remove();  // The path is not its socket any more, as for a service that was killed.
    std::filesystem::rename(path + ".kept", path);
  }
};

TEST_F(SocketPathTest, OnlyThisUserMayConnectOrAGroupWhateverTheMaskSays) {
  struct Case {
    mode_t mask;
    std::optional<gid_t> group;
    mode_t mode;
  };
  for (const auto& [mask, group, mode] : {Case{0, {}, 0600}, Case{077, getegid(), 0660}}) {
    const auto before = umask(mask);
    const SocketPath socket(path, group);
    umask(before);
    struct stat found {};
    ASSERT_EQ(lstat(path.c_str(), &found), 0);
    EXPECT_EQ(found.st_mode, S_IFSOCK | mode);
    EXPECT_EQ(found.st_gid, getegid());
  }
}

TEST_F(SocketPathTest, GoesWithTheServiceAndThatOfASuccessorStays) {
  { const SocketPath socket(path, {}); }
  EXPECT_FALSE(is_there());
  SocketPath first(path, {});
  std::filesystem::remove(path);
  const SocketPath second(path, {});
  first.remove();
  EXPECT_TRUE(is_there());
}

TEST_F(SocketPathTest, AStaleSocketIsReplaced) {
  leave_stale();
  ASSERT_TRUE(is_there());
  const SocketPath socket(path, {});
  EXPECT_NO_THROW(client::ServiceSocket::connect(path, base::Deadline::in_seconds(10)));
}

TEST_F(SocketPathTest, ALiveSocketIsNotReplaced) {
  const SocketPath socket(path, {});
  EXPECT_THAT(why_not(), HasSubstr(fmt::format("another service listens there (process {})", getpid())));
  EXPECT_NO_THROW(client::ServiceSocket::connect(path, base::Deadline::in_seconds(10)));
}

TEST_F(SocketPathTest, OfServicesThatBeginAtOnceOneListens) {
  leave_stale();
  std::atomic<int> listening{0};
  std::vector<std::unique_ptr<SocketPath>> sockets(8);
  {
    std::vector<std::jthread> threads;
    for (auto& socket : sockets)
      threads.emplace_back([&] {
        try {
          socket = std::make_unique<SocketPath>(path, std::nullopt);
          ++listening;
        } catch (const ConfigError&) {
        }
      });
  }
  EXPECT_EQ(listening.load(), 1);
}

// Anybody who may read a folder may lock it.
TEST_F(SocketPathTest, AFolderThatStaysLockedIsRefused) {
  const base::UniqueFd held(open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(flock(held.get(), LOCK_EX), 0);
  EXPECT_THAT(
      message_of<ConfigError>([&] { SocketPath(path, {}, 0.05); }),
      AllOf(HasSubstr(folder.path().string()), HasSubstr("has been locked"), HasSubstr(" for 0.05 s")));
  ASSERT_EQ(flock(held.get(), LOCK_UN), 0);
  EXPECT_NO_THROW(SocketPath(path, {}));
}

TEST_F(SocketPathTest, WhatIsNoSocketStaysAndALinkIsNotFollowed) {
  const auto target = folder.write("target", "text");
  std::filesystem::create_symlink(target, path);
  EXPECT_THAT(why_not(), HasSubstr("not a socket"));
  EXPECT_TRUE(is_there());
  path = target;
  EXPECT_THAT(why_not(), HasSubstr("not a socket"));
  EXPECT_TRUE(is_there());
}

TEST_F(SocketPathTest, AFolderThatOthersMayChangeIsRefused) {
  const auto open_folder = folder / "open";
  std::filesystem::create_directory(open_folder);
  chmod(open_folder.c_str(), 0777);
  path = open_folder / "socket";
  EXPECT_THAT(why_not(), HasSubstr("other users may replace files"));
  chmod(open_folder.c_str(), 01777);  // As /tmp: nobody removes the files of others.
  EXPECT_NO_THROW(SocketPath(path, {}));
}

TEST_F(SocketPathTest, AWrongPathIsSaid) {
  path = folder / "missing" / "socket";
  EXPECT_THAT(why_not(), HasSubstr("its folder cannot be opened"));
  path = folder / std::string(120, 'x');
  EXPECT_THAT(why_not(), HasSubstr("must have 1 to 107 characters"));
  EXPECT_THAT(
      message_of<SessionError>([&] { client::ServiceSocket::connect(path, base::Deadline::at_ns(0)); }),
      HasSubstr("must have 1 to 107 characters"));
}

}  // namespace
}  // namespace accelmgr::service
