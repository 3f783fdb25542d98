#include "protocol/messages.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <thread>

#include "accelmgr/errors.hpp"
#include "ipc/socket.hpp"

namespace accelmgr::protocol {
namespace {

base::Deadline soon() { return base::Deadline::in_seconds(10); }

class MessagesTest : public testing::Test {
 protected:
  MessagesTest() { std::tie(host, manager) = ipc::socket_pair(); }

  template <class Exception>
  void expect_raised(const Exception& error) {
    send_failed(manager.get(), error);
    const auto answer = receive_answer(host.get(), soon());
    EXPECT_THROW(raise(std::get<Failed>(answer)), Exception);
  }

  base::UniqueFd host, manager;
};

TEST_F(MessagesTest, AConfigurationLargerThanAPacketArrivesWhole) {
  const std::string yaml = "data:\n" + std::string(300'000, 'x');
  std::jthread sender(
      [&] { send_configuration(host.get(), yaml); });  // The socket holds less than all of it.
  EXPECT_EQ(receive_configuration(manager.get(), soon()), yaml);
}

TEST_F(MessagesTest, StartedPassesEveryDescriptorInItsPlace) {
  // /dev/null and /dev/zero are told apart by their device numbers.
  const base::UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC)),
      zero(open("/dev/zero", O_RDONLY | O_CLOEXEC));
  send_started(manager.get(), {null.get(), zero.get()}, 42, zero.get(), {null.get(), zero.get(), null.get()});
  auto answer = receive_answer(host.get(), soon());
  auto& started = std::get<Started>(answer);
  const auto device = [](const base::UniqueFd& fd) {
    struct stat status {};
    EXPECT_EQ(fstat(fd.get(), &status), 0);
    return status.st_rdev;
  };
  EXPECT_EQ(started.launcher_pid, 42);
  EXPECT_EQ(device(started.launcher_pidfd), device(zero));
  ASSERT_EQ(started.runner_pidfds.size(), 3u);
  EXPECT_EQ(device(started.runner_pidfds[1]), device(zero));
  ASSERT_EQ(started.session.size(), 2u);
  EXPECT_EQ(device(started.session[0]), device(null));
  EXPECT_EQ(device(started.session[1]), device(zero));
}

TEST_F(MessagesTest, AFailureArrivesAsTheExceptionItWas) {
  expect_raised(ModelError("no loss"));
  expect_raised(DataError("no file"));
  expect_raised(SessionError("no memory"));
  expect_raised(UsageError("no init"));
  expect_raised(Error("something"));
  send_failed(manager.get(), ConfigError("out of range", "nprocs"));
  try {
    raise(std::get<Failed>(receive_answer(host.get(), soon())));
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "out of range");
    EXPECT_EQ(error.key(), "nprocs");
  }
  send_failed(manager.get(), RunnerError("killed", 3, "forward"));
  try {
    raise(std::get<Failed>(receive_answer(host.get(), soon())));
  } catch (const RunnerError& error) {
    EXPECT_EQ(error.rank(), 3);
    EXPECT_EQ(error.phase(), "forward");
  }
}

TEST_F(MessagesTest, TextThatIsNoUtf8DoesNotBreakTheAnswer) {
  send_failed(manager.get(), DataError("file \xff\xfe"));
  EXPECT_NE(std::get<Failed>(receive_answer(host.get(), soon())).what.find("file"), std::string::npos);
}

TEST_F(MessagesTest, TheEndOfThePeerIsSaid) {
  manager.reset();
  EXPECT_THROW(receive_answer(host.get(), soon()), SessionError);
  EXPECT_NO_THROW(send_stop(host.get()));
  auto [ours, theirs] = ipc::socket_pair();
  theirs.reset();
  EXPECT_THROW(receive_configuration(ours.get(), soon()), SessionError);
}

TEST_F(MessagesTest, WaitingForAnAnswerEndsAtTheDeadline) {
  EXPECT_THROW(receive_answer(host.get(), base::Deadline::in_seconds(0.01)), SessionError);
}

}  // namespace
}  // namespace accelmgr::protocol
