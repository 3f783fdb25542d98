#include "base/ipc/socket.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "accelmgr/errors.hpp"
#include "processes.hpp"

namespace accelmgr::ipc::test {
namespace {

const std::string largest_packet(max_packet_bytes, 'x');

TEST(Socket, KeepsPacketsApartAndInOrder) {
  auto [a, b] = socket_pair();
  for (const int fd : {a.get(), b.get()}) EXPECT_EQ(fcntl(fd, F_GETFD), FD_CLOEXEC);
  send(a.get(), "first");
  send(a.get(), largest_packet);
  send(a.get(), std::string_view("\0", 1));
  EXPECT_EQ(receive(b.get(), soon()).value().bytes, "first");
  EXPECT_EQ(receive(b.get(), soon()).value().bytes, largest_packet);
  EXPECT_EQ(receive(b.get(), soon()).value().bytes, std::string(1, '\0'));
}

TEST(Socket, PassesDescriptorsInOrder) {
  auto [a, b] = socket_pair();
  std::vector<base::UniqueFd> writers, readers;
  std::vector<int> passed;
  for (std::size_t i = 0; i < max_packet_fds; ++i) {
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    readers.emplace_back(ends[0]);
    writers.emplace_back(ends[1]);
    passed.push_back(ends[1]);
  }
  send(a.get(), "pipes", passed);
  writers.clear();
  const auto message = receive(b.get(), soon()).value();
  ASSERT_EQ(message.fds.size(), max_packet_fds);
  for (std::size_t i = 0; i < message.fds.size(); ++i) {
    EXPECT_EQ(fcntl(message.fds[i].get(), F_GETFD), FD_CLOEXEC);
    const char sent = static_cast<char>(i);
    char got = -1;
    ASSERT_EQ(write(message.fds[i].get(), &sent, 1), 1);
    ASSERT_EQ(read(readers[i].get(), &got, 1), 1);
    EXPECT_EQ(got, sent);
  }
}

void limit_descriptors(int count) {
  const rlimit limit{.rlim_cur = static_cast<rlim_t>(count), .rlim_max = 1024};
  setrlimit(RLIMIT_NOFILE, &limit);
}

TEST(Socket, APacketWhoseDescriptorsFindNoRoomIsAnErrorAndThereWhenTheyDo) {
  const auto child = fork_child([] {
    auto [a, b] = socket_pair();
    limit_descriptors(b.get() + 2);
    const int passed[] = {0, 1, 2};
    send(a.get(), "first", passed);
    send(a.get(), "second");
    try {
      receive(b.get(), soon());
      return 1;
    } catch (const SystemError& error) {
      if (error.code() != EMFILE) return 4;
    }
    if (fcntl(b.get() + 1, F_GETFD) >= 0) return 5;
    limit_descriptors(b.get() + 4);
    const auto first = receive(b.get(), soon());
    if (!first || first->bytes != "first" || first->fds.size() != 3) return 2;
    return receive(b.get(), soon())->bytes == "second" ? 0 : 3;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}

TEST(Socket, ThePacketsAreThereWithoutTheirDescriptorsForWhoHasNoRoom) {
  const auto child = fork_child([] {
    auto [a, b] = socket_pair();
    auto [c, d] = socket_pair();
    const int passed[] = {d.get()};
    send(a.get(), "first", passed);
    send(a.get(), "second");
    d.reset();
    const auto d_was = passed[0];
    limit_descriptors(d_was);
    const auto first = receive_what_fits(b.get(), soon());
    if (!first || first->bytes != "first" || !first->fds.empty() || first->missing.empty()) return 1;
    if (!is_closed(c.get())) return 2;  // The passed descriptor is still open.
    const auto second = receive_what_fits(b.get(), soon());
    return second && second->bytes == "second" && second->missing.empty() ? 0 : 3;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}

TEST(Socket, APacketThatNobodyOfUsSendsIsAnErrorAndTheNextOneIsThere) {
  auto [a, b] = socket_pair();
  ASSERT_EQ(::send(a.get(), "", 0, 0), 0);
  const std::string large(max_packet_bytes + 1, 'x');
  ASSERT_EQ(::send(a.get(), large.data(), large.size(), 0), static_cast<ssize_t>(large.size()));
  send(a.get(), "next");
  EXPECT_THROW(receive(b.get(), soon()), SessionError) << "no bytes, and not the end";
  EXPECT_THROW(receive(b.get(), soon()), SessionError) << "too many bytes";
  EXPECT_EQ(receive(b.get(), soon()).value().bytes, "next");
}

TEST(Socket, TheEndComesAfterAllPackets) {
  auto [a, b] = socket_pair();
  send(b.get(), "never read");  // a ends without reading it: b gets ECONNRESET, which is not the end.
  send(a.get(), "last");
  EXPECT_FALSE(is_closed(b.get()));
  a.reset();
  EXPECT_TRUE(is_closed(b.get()));
  EXPECT_EQ(receive(b.get(), soon()).value().bytes, "last");
  EXPECT_FALSE(receive(b.get(), soon()));
  EXPECT_FALSE(receive(b.get(), soon()));
}

TEST(Socket, SendingToAPeerThatIsGoneIsAnErrorAndNoSignal) {
  auto [a, b] = socket_pair();
  b.reset();
  try {
    send(a.get(), "x");
    FAIL();
  } catch (const SystemError& error) {
    EXPECT_EQ(error.code(), EPIPE);
    EXPECT_TRUE(peer_is_gone(error));
  }
  EXPECT_FALSE(peer_is_gone(SystemError("sending", ENOBUFS)));
}

TEST(Socket, ReceivingEndsAtTheDeadline) {
  auto [a, b] = socket_pair();
  EXPECT_THROW(receive(b.get(), base::Deadline::in_seconds(0)), SessionError);
  EXPECT_THROW(receive(b.get(), base::Deadline::in_seconds(0.01)), SessionError);
  send(a.get(), "late");
  EXPECT_EQ(receive(b.get(), base::Deadline::in_seconds(0)).value().bytes, "late");
}

TEST(Socket, SendingToAPeerThatReadsNothingEndsAtTheDeadline) {
  auto [a, b] = socket_pair();
  const auto fill = [&a = a] {
    for (int i = 0; i < 10'000; ++i) send(a.get(), largest_packet, {}, base::Deadline::in_seconds(0.01));
  };
  EXPECT_THROW(fill(), SessionError);
}

TEST(Socket, RefusesPacketsThatAreEmptyOrTooLarge) {
  auto [a, b] = socket_pair();
  EXPECT_THROW(send(a.get(), ""), UsageError);
  EXPECT_THROW(send(a.get(), largest_packet + "x"), UsageError);
  EXPECT_THROW(send(a.get(), "x", std::vector<int>(max_packet_fds + 1, 0)), UsageError);
}

}  // namespace
}  // namespace accelmgr::ipc::test
