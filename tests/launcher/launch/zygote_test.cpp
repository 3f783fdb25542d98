// Tests that the zygote refuses requests that it cannot read, and goes on.
#include "base/ipc/zygote.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>

#include "base/ipc/process.hpp"
#include "base/ipc/socket.hpp"
#include "fuzzed.hpp"

namespace accelmgr::launch::test {
namespace {

base::Deadline soon() { return base::Deadline::in_seconds(20); }

struct RawAnswer {
  pid_t pid;
  int error;
};

TEST(Zygote, RefusesWhatIsNoRequestAndGoesOn) {
  accelmgr::test::Fuzzed fuzzed(20261122);
  auto [ours, theirs] = ipc::socket_pair();
  const auto creator = ipc::open_pidfd(getpid());
  const std::pair<int, int> inherited[] = {{theirs.get(), 3}, {creator.get(), 4}};
  const auto server = ipc::execute_self({ipc::zygote_argument}, inherited);
  theirs.reset();
  const auto answer_to = [&ours = ours](std::string_view role, const std::vector<base::UniqueFd>& fds) {
    EXPECT_TRUE(accelmgr::test::send_raw(ours.get(), role, fds));
    const auto message = ipc::receive(ours.get(), soon());
    RawAnswer answer{-1, -1};
    EXPECT_TRUE(message && message->bytes.size() == sizeof answer);
    if (message) std::memcpy(&answer, message->bytes.data(), std::min(message->bytes.size(), sizeof answer));
    return answer;
  };
  EXPECT_EQ(answer_to("fork_server", {}).error, EINVAL);
  EXPECT_EQ(answer_to("dancer", {}).error, ENOSYS);
  EXPECT_EQ(answer_to("", {}).error, ENOSYS);
  EXPECT_EQ(answer_to(std::string(ipc::max_packet_bytes + 1, 'x'), {}).error, ENOSYS);
  for (int round = 0; round < 300; ++round) {
    const auto role = fuzzed.one_in(2) ? "fork_server" : fuzzed.mutated(std::string("fork_server"));
    const auto answer = answer_to(role, accelmgr::test::some_descriptors(fuzzed, 6));  // It needs seven.
    ASSERT_EQ(answer.pid, 0) << role;
    ASSERT_TRUE(answer.error == EINVAL || answer.error == ENOSYS) << answer.error;
  }
  auto [socket, socket_theirs] = ipc::socket_pair();
  int status[2];
  ASSERT_EQ(pipe2(status, O_CLOEXEC), 0);
  const base::UniqueFd status_ours(status[0]);
  std::vector<base::UniqueFd> fds;
  fds.push_back(std::move(socket_theirs));
  fds.push_back(ipc::open_pidfd(getpid()));
  fds.emplace_back(status[1]);
  fds.emplace_back(open(".", O_PATH | O_CLOEXEC));
  for (const int stream : {0, 1, 2}) fds.push_back(base::duplicate(stream));
  EXPECT_GT(answer_to("fork_server", fds).pid, 1) << "the next one is served";
  fds.clear();
  socket.reset();
  int how = -1;
  EXPECT_EQ(read(status_ours.get(), &how, sizeof how), static_cast<ssize_t>(sizeof how));
  EXPECT_EQ(ipc::describe_exit(how), "exit code 0");
  ours.reset();
  EXPECT_TRUE(ipc::wait_ended(server.pidfd.get(), soon()));
  EXPECT_EQ(ipc::take_exit_status(server.pidfd.get()), 0);
}

}  // namespace
}  // namespace accelmgr::launch::test
