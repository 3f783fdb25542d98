// Tests of Mailbox, which sends objects from one rank to another over TCP.
#include "collective/mailbox.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include "accelmgr/errors.hpp"
#include "base/interruption.hpp"
#include "base/unique_fd.hpp"
#include "contract/collective/file_store.hpp"

namespace accelmgr::collective {
namespace {

using Result = Mailbox::Result;

class MailboxTest : public testing::Test {
 protected:
  base::Deadline soon() const { return base::Deadline::in_seconds(20); }
  std::optional<Mailbox> open(int rank) {
    return std::make_optional<Mailbox>(shared_, "mail", rank, "127.0.0.1");
  }
  std::string received(Mailbox& mailbox, int from) {
    std::string object;
    EXPECT_EQ(mailbox.receive(object, from, soon()), Result::done);
    return object;
  }
  /// A connection to the port of `rank` that does not come from a Mailbox.
  base::UniqueFd stranger(int rank) {
    std::istringstream words(store_.get("mail/" + std::to_string(rank), soon()));
    std::string host;
    std::uint16_t port = 0;
    words >> host >> port;
    base::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    return socket;
  }

  contract::TemporaryFolder folder_;
  contract::FileStore store_{folder_.path()};
  SharedStore shared_{store_};
};

TEST_F(MailboxTest, TheSenderOfShortObjectsNeedsNobodyAtTheOtherEnd) {
  auto sender = open(0);
  auto receiver = open(1);
  for (const char* object : {"first", "", "third"}) EXPECT_EQ(sender->send(object, 1, soon()), Result::done);
  for (const char* object : {"first", "", "third"}) EXPECT_EQ(received(*receiver, 0), object);
}

// A sender may end as soon as send() returns. If its last packets are lost, its kernel sends them again; that
// helps only if the receiver's host knows of the connection by then.
TEST_F(MailboxTest, SendReturnsWhenTheReceiversHostKnowsOfTheConnection) {
  const base::UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  ASSERT_EQ(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  store_.set("mail/1", "127.0.0.1 " + std::to_string(ntohs(address.sin_port)) + " 1234");
  // The listener gets only TCP packets with the flag SYN. It answers the first one, and all that follow it
  // are lost.
  sock_filter only_syn[] = {{BPF_LD | BPF_B | BPF_ABS, 0, 0, 13},
                            {BPF_JMP | BPF_JSET | BPF_K, 0, 1, 2},
                            {BPF_RET | BPF_K, 0, 0, 0xffff},
                            {BPF_RET | BPF_K, 0, 0, 0}};
  const sock_fprog program{.len = 4, .filter = only_syn};
  ASSERT_EQ(setsockopt(listener.get(), SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program), 0);
  EXPECT_EQ(open(0)->send("last words", 1, base::Deadline::in_seconds(0.1)), Result::timeout);

  const int none = 0;
  setsockopt(listener.get(), SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof none);
  EXPECT_EQ(open(2)->send("last words", 1, soon()), Result::done);
}

TEST_F(MailboxTest, ObjectsOfSeveralSendersAreToldApart) {
  auto a = open(0);
  auto b = open(1);
  auto receiver = open(2);
  ASSERT_EQ(a->send("from 0", 2, soon()), Result::done);
  ASSERT_EQ(b->send("from 1", 2, soon()), Result::done);
  EXPECT_EQ(received(*receiver, 1), "from 1");
  EXPECT_EQ(received(*receiver, 0), "from 0");
}

TEST_F(MailboxTest, DeathOfTheSenderIsSeenWhileItsForkedChildLivesOn) {
  int pipe_of_child[2];
  ASSERT_EQ(pipe2(pipe_of_child, O_CLOEXEC), 0);
  base::UniqueFd until(pipe_of_child[0]), lives(pipe_of_child[1]);
  const auto sender = fork();
  if (sender == 0) {
    auto mailbox = open(0);
    if (fork() == 0) {
      lives.reset();
      char none = 0;
      _exit(static_cast<int>(read(until.get(), &none, 1)));  // It lives until the test ends.
    }
    raise(SIGKILL);
  }
  waitpid(sender, nullptr, 0);
  auto receiver = open(1);
  std::string object;
  EXPECT_EQ(receiver->receive(object, 0, soon()), Result::lost);
}

TEST_F(MailboxTest, LongObjectsArriveWhole) {
  auto sender = open(0);
  auto receiver = open(1);
  const std::string object(30'000'000, 'x');
  const std::jthread sending([&] { EXPECT_EQ(sender->send(object, 1, soon()), Result::done); });
  EXPECT_TRUE(received(*receiver, 0) == object);
}

TEST_F(MailboxTest, WhatWasSentBeforeTheSenderEndedArrives) {
  auto sender = open(0);
  auto receiver = open(1);
  ASSERT_EQ(sender->send("last words", 1, soon()), Result::done);
  sender.reset();
  EXPECT_EQ(received(*receiver, 0), "last words");
  std::string none;
  EXPECT_EQ(receiver->receive(none, 0, soon()), Result::lost);
}

TEST_F(MailboxTest, TheEndOfTheSenderEndsTheWait) {
  auto sender = open(0);
  auto receiver = open(1);
  std::string none;
  // The receiver has a connection once this short wait has ended: only then may the sender end.
  ASSERT_EQ(receiver->receive(none, 0, base::Deadline::in_seconds(0.01)), Result::timeout);
  const std::jthread ending([&] { sender.reset(); });
  EXPECT_EQ(receiver->receive(none, 0, soon()), Result::lost);
}

TEST_F(MailboxTest, ALongObjectThatNobodyTakesIsATimeout) {
  auto sender = open(0);
  auto receiver = open(1);
  EXPECT_EQ(sender->send(std::string(100'000'000, 'x'), 1, base::Deadline::in_seconds(0.1)), Result::timeout);
}

TEST_F(MailboxTest, StrangersAreSentAway) {
  auto sender = open(0);
  auto receiver = open(1);
  const auto noisy = stranger(1);
  const std::string noise(64, '\1');
  ASSERT_EQ(write(noisy.get(), noise.data(), noise.size()), static_cast<ssize_t>(noise.size()));
  ASSERT_EQ(sender->send("true", 1, soon()), Result::done);
  EXPECT_EQ(received(*receiver, 0), "true");
}

TEST_F(MailboxTest, StrangersThatSayNothingDoNotMoveTheDeadline) {
  auto sender = open(0);
  auto receiver = open(1);
  std::vector<base::UniqueFd> silent;
  while (silent.size() < 30) silent.push_back(stranger(1));
  const auto bound = soon();
  std::string none;
  EXPECT_EQ(receiver->receive(none, 0, base::Deadline::in_seconds(0.1)), Result::timeout);
  EXPECT_FALSE(bound.passed());
}

TEST_F(MailboxTest, WithoutADescriptorForTheConnectionTheObjectIsReceivedLater) {
  auto sender = open(0);
  auto receiver = open(1);
  std::string object;
  ASSERT_EQ(receiver->receive(object, 0, base::Deadline::in_seconds(0.01)), Result::timeout);
  ASSERT_EQ(sender->send("patient", 1, soon()), Result::done);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const auto next = static_cast<rlim_t>(base::UniqueFd(dup(STDOUT_FILENO)).get());
  const rlimit none{.rlim_cur = next, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  EXPECT_THROW(receiver->receive(object, 0, soon()), SystemError);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(received(*receiver, 0), "patient");
}

TEST_F(MailboxTest, AnInterruptionEndsTheWait) {
  auto sender = open(0);
  auto receiver = open(1);
  const std::function<bool()> hook = [] { return true; };
  const base::InterruptionScope scope(hook);
  const auto deadline = soon();
  std::string none;
  EXPECT_EQ(receiver->receive(none, 0, deadline), Result::timeout);
  EXPECT_EQ(sender->send(std::string(100'000'000, 'x'), 1, deadline), Result::timeout);
  EXPECT_FALSE(deadline.passed());
}

}  // namespace
}  // namespace accelmgr::collective
