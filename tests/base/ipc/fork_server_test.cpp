#include "base/ipc/fork_server_client.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <future>
#include <optional>
#include <stdexcept>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/ipc/fork_server_messages.hpp"
#include "base/ipc/proc_file.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/wait_ready.hpp"
#include "base/timing.hpp"
#include "executed_roles.hpp"
#include "fuzzed.hpp"
#include "processes.hpp"
#include "system_call.hpp"

namespace accelmgr::ipc::test {
namespace {

using fork_server::Report;
using fork_server::Request;

/// The body of a forked child: it carries out the commands that come over the socket passed to it.
int obey(SpawnRequest request) {
  if (request.fds.size() != 1) return 100;
  const int socket = request.fds[0].get();
  while (const auto order = receive(socket, soon())) {
    const auto& word = order->bytes;
    if (word == "rank") send(socket, std::to_string(request.rank));
    if (word == "generation") send(socket, std::to_string(request.generation));
    if (word == "descriptors") send(socket, open_descriptors());
    if (word == "group") send(socket, getpgrp() == getpid() ? "own" : "another's");
    if (word == "core") {
      rlimit limit{};
      getrlimit(RLIMIT_CORE, &limit);
      send(socket, limit.rlim_cur <= 1 ? "off" : "on");
    }
    if (word == "throw") throw std::runtime_error("as ordered");
    if (word == "exit 3") return 3;
    if (word == "ignore TERM") {
      signal(SIGTERM, SIG_IGN);
      send(socket, "ignored");
    }
    if (word == "have a child") {
      if (fork() == 0) hang();
      send(socket, "born");
    }
  }
  return 0;
}

/// The client of a fork server that a forked child runs.
ForkServerClient client_of(const std::function<int(base::UniqueFd socket)>& run) {
  auto [ours, theirs] = socket_pair();
  auto fork_server = fork_child([&ours = ours, &theirs = theirs, &run] {
    ours.reset();
    return run(std::move(theirs));
  });
  theirs.reset();
  return {std::move(ours), std::move(fork_server)};
}

struct Runner {
  Started started;
  base::UniqueFd socket;

  std::string ask(std::string_view word) const {
    send(socket.get(), word);
    return receive(socket.get(), soon()).value().bytes;
  }
  bool ended() const { return wait_ended(started.pidfd.get(), soon()); }
};

/// Tests that start a fork server of their own.
class OwnForkServerTest : public testing::Test {
 protected:
  void TearDown() override { expect_no_process_left(); }
};

class ForkServerTest : public OwnForkServerTest {
 protected:
  void TearDown() override {
    fork_server_.reset();
    OwnForkServerTest::TearDown();
  }

  Runner spawn(int rank, std::uint32_t generation = 1) {
    auto [ours, theirs] = socket_pair();
    const int fd = theirs.get();
    fork_server_->spawn(rank, generation, {&fd, 1});
    return {std::get<Started>(fork_server_->next(soon()).value()), std::move(ours)};
  }
  Ended next_end() { return std::get<Ended>(fork_server_->next(soon()).value()); }

  const std::string descriptors_before_ = open_descriptors();
  std::optional<ForkServerClient> fork_server_ = ForkServerClient::start(obey);
};

std::string comm(pid_t pid) { return read_proc("/proc/" + std::to_string(pid) + "/comm").value_or(""); }

TEST_F(ForkServerTest, ChildrenGetTheirRequestANameAGroupOfTheirOwnAndNoCoreDumps) {
  const auto first = spawn(0, 1), second = spawn(23, 7);
  EXPECT_EQ(first.started.rank, 0);
  EXPECT_EQ(second.started.rank, 23);
  EXPECT_EQ(second.started.generation, 7U);
  EXPECT_EQ(first.ask("rank"), "0");
  EXPECT_EQ(second.ask("rank"), "23");  // When it answers, its name is set, and the fork server's is too.
  EXPECT_EQ(second.ask("generation"), "7");
  EXPECT_EQ(comm(second.started.pid), "accelmgr:run23\n");
  EXPECT_EQ(comm(fork_server_->pid()), "accelmgr:fork\n");
  EXPECT_EQ(second.ask("group"), "own");
  EXPECT_EQ(second.ask("core"), "off");
  EXPECT_NE(getpgid(fork_server_->pid()), getpgrp());
}

TEST_F(ForkServerTest, ChildrenHoldNoDescriptorsOfTheForkServerOrOfEachOther) {
  const auto count = [](const std::string& list) { return std::count(list.begin(), list.end(), ' ') + 1; };
  const auto inherited_and_passed = count(descriptors_before_) + 1;
  std::vector<Runner> runners;
  for (int rank = 0; rank < 3; ++rank) {
    runners.push_back(spawn(rank));
    EXPECT_EQ(count(runners.back().ask("descriptors")), inherited_and_passed);
  }
}

TEST_F(ForkServerTest, ExitCodesAreReported) {
  const auto runner = spawn(4, 9);
  send(runner.socket.get(), "exit 3");
  const auto ended = next_end();
  EXPECT_EQ(ended.rank, 4);
  EXPECT_EQ(ended.generation, 9U);
  EXPECT_EQ(ended.pid, runner.started.pid);
  EXPECT_EQ(describe_exit(ended.wait_status), "exit code 3");
  EXPECT_TRUE(has_ended(runner.started.pidfd.get()));
  const auto throws = spawn(0);
  send(throws.socket.get(), "throw");
  EXPECT_EQ(next_end().wait_status, W_EXITCODE(exit_uncaught, 0));
}

TEST_F(ForkServerTest, AKilledChildIsReportedAndReplaced) {
  for (std::uint32_t generation = 1; generation <= 20; ++generation) {
    const auto runner = spawn(0, generation);
    EXPECT_EQ(runner.ask("generation"), std::to_string(generation));
    send_signal(runner.started.pidfd.get(), SIGKILL);
    const auto ended = next_end();
    EXPECT_EQ(ended.generation, generation);
    EXPECT_EQ(describe_exit(ended.wait_status), "killed by signal 9 (KILL)");
  }
}

TEST_F(ForkServerTest, WhatAChildLeftInItsGroupEndsWithIt) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("have a child"), "born");
  send(runner.socket.get(), "exit 3");
  next_end();
  EXPECT_FALSE(receive(runner.socket.get(), soon())) << "the grandchild still holds the socket";
}

TEST_F(ForkServerTest, ChildrenDieWithTheForkServer) {
  const auto first = spawn(0);
  const auto second = spawn(1);
  EXPECT_EQ(first.ask("rank"), "0");  // When they answer, both have set PR_SET_PDEATHSIG.
  EXPECT_EQ(second.ask("ignore TERM"), "ignored");
  send_signal(fork_server_->pidfd(), SIGKILL);
  EXPECT_TRUE(first.ended());
  EXPECT_TRUE(second.ended());
  for (int rank = 0; rank < 2; ++rank) {
    const auto ended = next_end();
    EXPECT_EQ(ended.rank, rank);
    EXPECT_TRUE(ended.with_server);
    EXPECT_EQ(describe_exit(ended.wait_status), "killed by signal 9 (KILL)");
  }
  EXPECT_FALSE(fork_server_->next(soon()));
  EXPECT_EQ(fork_server_->server_exit(), SIGKILL);
  EXPECT_THROW(fork_server_->spawn(0, 2, {}), SystemError);
}

TEST_F(ForkServerTest, EventsOfAForkServerThatIsGoneCanStillBeTaken) {
  const auto runner = spawn(0);
  send(runner.socket.get(), "exit 3");
  pollfd report{.fd = fork_server_->socket(), .events = POLLIN, .revents = 0};
  ASSERT_EQ(poll(&report, 1, 20'000), 1);
  send_signal(fork_server_->pidfd(), SIGKILL);
  ASSERT_TRUE(wait_ended(fork_server_->pidfd(), soon()));
  const auto ended = next_end();
  EXPECT_EQ(describe_exit(ended.wait_status), "exit code 3");
  EXPECT_FALSE(ended.with_server);
  EXPECT_FALSE(fork_server_->next(soon()));
}

TEST_F(ForkServerTest, AnEndThatAStoppedForkServerDoesNotReportIsSeenWithoutItAndOnlyOnce) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("rank"), "0");
  send_signal(fork_server_->pidfd(), SIGSTOP);
  send_signal(runner.started.pidfd.get(), SIGKILL);
  ASSERT_TRUE(runner.ended());
  const auto ns = [](double s) { return static_cast<std::int64_t>(s * 1e9); };
  EXPECT_FALSE(fork_server_->take(ns(100)));
  EXPECT_FALSE(fork_server_->take(ns(100 + 0.9 * timing::end_report_s)));
  const auto ended = std::get<Ended>(fork_server_->take(ns(100 + timing::end_report_s)).value());
  EXPECT_EQ(ended.pid, runner.started.pid);
  EXPECT_EQ(ended.wait_status, unknown_exit);
  EXPECT_FALSE(ended.with_server);
  EXPECT_FALSE(fork_server_->has_children());
  // The rank has its next child when the report comes at last.
  const auto [ours, theirs] = socket_pair();
  const int fd = theirs.get();
  fork_server_->spawn(0, 2, {&fd, 1});
  send_signal(fork_server_->pidfd(), SIGCONT);
  EXPECT_EQ(std::get<Started>(fork_server_->next(soon()).value()).generation, 2U);
  send(ours.get(), "exit 3");
  EXPECT_EQ(describe_exit(next_end().wait_status), "exit code 3");
}

TEST_F(ForkServerTest, AChildThatWasAskedForEndsWithTheForkServerThoughItWasNeverForked) {
  send_signal(fork_server_->pidfd(), SIGSTOP);
  fork_server_->spawn(3, 1, {});
  send_signal(fork_server_->pidfd(), SIGKILL);
  const auto ended = next_end();
  EXPECT_EQ(ended.rank, 3);
  EXPECT_EQ(ended.pid, 0);
  EXPECT_TRUE(ended.with_server);
  EXPECT_FALSE(fork_server_->next(soon()));
}

TEST_F(OwnForkServerTest, AForkServerThatClosesItsSocketAndHangsIsKilled) {
  auto client = client_of([](base::UniqueFd socket) {
    socket.reset();
    hang();
    return 0;
  });
  ASSERT_TRUE(wait_ready(client.socket(), POLLIN, soon()));
  EXPECT_FALSE(client.take(1));
  EXPECT_FALSE(client.server_exit());
  EXPECT_FALSE(client.take(1 + static_cast<std::int64_t>(timing::fork_server_kill_s * 1e9)));
  EXPECT_EQ(client.server_exit(soon()), SIGKILL);
}

TEST_F(ForkServerTest, NextEndsAtItsDeadline) {
  EXPECT_FALSE(fork_server_->next(base::Deadline::in_seconds(0.01)));
}

TEST_F(ForkServerTest, StopEndsChildrenThatIgnoreTerm) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("ignore TERM"), "ignored");
  EXPECT_EQ(runner.ask("have a child"), "born");
  fork_server_->stop(soon());
  EXPECT_TRUE(has_ended(runner.started.pidfd.get()));
  EXPECT_FALSE(receive(runner.socket.get(), soon())) << "the grandchild still holds the socket";
  EXPECT_FALSE(fork_server_->next(soon()));
  fork_server_->stop(soon());
}

TEST_F(ForkServerTest, StopIsHeardThoughOthersHoldACopyOfTheSocket) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("have a child"), "born");
  auto [ours, theirs] = socket_pair();
  const auto copy = fork_child([socket = theirs.get()] {
    receive(socket, soon());
    return 0;
  });
  fork_server_->stop(soon());
  // The fork server has stopped in order: if stop() had killed it, the grandchild would still live.
  EXPECT_FALSE(receive(runner.socket.get(), soon()));
  send(ours.get(), "end");
  EXPECT_EQ(end_of(copy), "exit code 0");
}

TEST_F(ForkServerTest, AStoppedForkServerIsKilledAtTheBound) {
  const auto runner = spawn(0);
  EXPECT_EQ(runner.ask("rank"), "0");
  send_signal(fork_server_->pidfd(), SIGSTOP);
  fork_server_->stop(base::Deadline::in_seconds(0.02));
  EXPECT_TRUE(runner.ended());
}

TEST_F(OwnForkServerTest, AChildThatCannotBeForkedIsReportedWithTheReason) {
  for (const auto& [call, error] : {std::pair(SYS_pidfd_open, EMFILE), std::pair(SYS_clone, EAGAIN)}) {
    auto client = client_of([call = call, error = error](base::UniqueFd socket) {
      fail_system_call(static_cast<unsigned>(call), error);
      return run_fork_server(std::move(socket), obey);
    });
    client.spawn(5, 1, {});
    const auto ended = std::get<Ended>(client.next(soon()).value());
    EXPECT_EQ(ended.rank, 5);
    EXPECT_EQ(ended.pid, 0);
    EXPECT_EQ(ended.wait_status, W_EXITCODE(exit_not_forked, 0));
    EXPECT_EQ(ended.error, error);
  }
}

TEST_F(OwnForkServerTest, EverythingDiesWithTheClient) {
  auto [ours, theirs] = socket_pair();
  const auto client = fork_child([socket = theirs.get()] {
    auto fork_server = ForkServerClient::start(obey);
    auto [runner_socket, passed] = socket_pair();
    const int fd = passed.get();
    fork_server.spawn(0, 1, {&fd, 1});
    const auto started = std::get<Started>(fork_server.next(soon()).value());
    send(runner_socket.get(), "rank");
    receive(runner_socket.get(), soon());
    const int pidfds[] = {fork_server.pidfd(), started.pidfd.get()};
    send(socket, "started", pidfds);
    hang();
    return 0;
  });
  const auto message = receive(ours.get(), soon()).value();
  ASSERT_EQ(message.fds.size(), 2U);
  send_signal(client.pidfd.get(), SIGKILL);
  EXPECT_TRUE(wait_ended(message.fds[0].get(), soon())) << "the fork server is left";
  EXPECT_TRUE(wait_ended(message.fds[1].get(), soon())) << "the runner is left";
}

TEST_F(OwnForkServerTest, ReportsWaitForAClientThatIsBusy) {
  auto client = client_of([](base::UniqueFd socket) {
    const int few_bytes = 1;  // The kernel makes it its minimum: room for a few reports.
    if (setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &few_bytes, sizeof few_bytes) != 0) return 1;
    return run_fork_server(std::move(socket), [](const SpawnRequest& request) { return request.rank; });
  });
  constexpr int children = 30;
  for (int rank = 0; rank < children; ++rank) client.spawn(rank, 1, {});
  int started = 0, ended = 0;
  while (ended < children) {
    const auto event = client.next(soon());
    ASSERT_TRUE(event);
    if (const auto* start = std::get_if<Started>(&*event)) {
      EXPECT_EQ(start->rank, started++);
      EXPECT_GT(start->pid, 0);
    } else {
      const auto& end = std::get<Ended>(*event);
      EXPECT_EQ(end.wait_status, W_EXITCODE(end.rank, 0));
      ++ended;
    }
  }
  EXPECT_EQ(started, children);
}

TEST_F(ForkServerTest, SignalsReachTheGroupsOfAllAndStoppedOnesGoOn) {
  const auto first = spawn(0);
  const auto second = spawn(1);
  EXPECT_EQ(first.ask("have a child"), "born");
  send_signal(second.started.pidfd.get(), SIGSTOP);
  fork_server_->signal(SIGTERM);
  EXPECT_EQ(describe_exit(next_end().wait_status), "killed by signal 15 (TERM)");
  EXPECT_EQ(describe_exit(next_end().wait_status), "killed by signal 15 (TERM)");
  EXPECT_FALSE(receive(first.socket.get(), soon())) << "the grandchild still holds the socket";
}

TEST_F(OwnForkServerTest, TheEndOfTheSocketAloneEndsIt) {
  auto [ours, theirs] = socket_pair();
  const auto fork_server = fork_child([&ours = ours, &theirs = theirs] {
    ours.reset();
    return run_fork_server(std::move(theirs), obey);
  });
  theirs.reset();
  ours.reset();
  EXPECT_EQ(end_of(fork_server), "exit code 0");
}

TEST_F(OwnForkServerTest, ClosesWhatItIsToldTo) {
  auto [ours, theirs] = socket_pair();
  const int closed[] = {theirs.get()};
  const auto fork_server = ForkServerClient::start(obey, {}, closed);
  theirs.reset();
  EXPECT_FALSE(receive(ours.get(), soon()));
}

/// A client that leads a process group, starts a fork server, and forks a child of its own as user code may.
/// The child holds the other end of `alive` and does nothing. If "stop" is sent to `told`, the client stops
/// the fork server, and then does nothing either.
struct ClientWithAChild {
  explicit ClientWithAChild(int host = -1) {
    auto [ours, theirs] = socket_pair();
    auto [hears, tells] = socket_pair();
    client = fork_child([&theirs = theirs, &tells = tells, host] {
      setpgid(0, 0);
      auto server = ForkServerClient::start(obey, {.creator_group = getpid(), .host = host});
      if (fork() == 0) hang();
      theirs.reset();
      const int pidfd[] = {server.pidfd()};
      send(tells.get(), "started", pidfd);
      if (receive(tells.get(), soon())->bytes == "stop") {
        // The fork server cannot report the end of this runner any more.
        server.spawn(0, 1, {});
        server.stop(soon());
        send(tells.get(), "stopped");
      }
      hang();
      return 0;
    });
    fork_server = std::move(receive(hears.get(), soon()).value().fds.at(0));
    alive = std::move(ours);
    told = std::move(hears);
  }
  void expect_all_ended() const {
    EXPECT_NE(wait_ready(alive.get(), POLLIN, soon()), 0) << "what it had forked is left";
    EXPECT_TRUE(wait_ended(fork_server.get(), soon())) << "the fork server is left";
    EXPECT_EQ(end_of(client), "killed by signal 9 (KILL)");
  }

  base::UniqueFd alive, told, fork_server;
  Child client;
};

TEST_F(OwnForkServerTest, WhatWasForkedInAClientThatIsKilledEndsWithIt) {
  const ClientWithAChild started;
  send_signal(started.client.pidfd.get(), SIGKILL);
  started.expect_all_ended();
}

TEST_F(OwnForkServerTest, AClientThatOutlivesItsHostIsEndedWithWhatItForked) {
  const auto host = fork_child([] {
    hang();
    return 0;
  });
  const ClientWithAChild started(host.pidfd.get());
  send_signal(host.pidfd.get(), SIGKILL);
  started.expect_all_ended();
  EXPECT_EQ(end_of(host), "killed by signal 9 (KILL)");
}

TEST_F(OwnForkServerTest, AClientThatStopsItIsLeftAlone) {
  const ClientWithAChild started;
  send(started.told.get(), "stop");
  EXPECT_EQ(receive(started.told.get(), soon()).value().bytes, "stopped");
  EXPECT_TRUE(has_ended(started.fork_server.get()));
  EXPECT_FALSE(has_ended(started.client.pidfd.get()));
  EXPECT_FALSE(is_readable(started.alive.get()));
  kill(-started.client.pid, SIGKILL);
  EXPECT_EQ(end_of(started.client), "killed by signal 9 (KILL)");
}

TEST_F(OwnForkServerTest, AChildWhoseDescriptorsFindNoRoomInTheForkServerIsReported) {
  auto client = client_of([](base::UniqueFd socket) {
    const rlimit limit{.rlim_cur = static_cast<rlim_t>(socket.get()) + 1, .rlim_max = 1024};
    setrlimit(RLIMIT_NOFILE, &limit);
    return run_fork_server(std::move(socket), obey);
  });
  const int passed[] = {0, 1, 2, 0, 1, 2};
  for (std::uint32_t generation = 1; generation <= 2; ++generation) {
    client.spawn(5, generation, passed);
    const auto ended = std::get<Ended>(client.next(soon()).value());
    EXPECT_EQ(ended.generation, generation);
    EXPECT_EQ(ended.pid, 0);
    EXPECT_EQ(ended.error, EMFILE);
  }
}

TEST_F(OwnForkServerTest, AChildWhosePidfdFindsNoRoomInTheClientIsEndedAndReported) {
  const auto client = fork_child([] {
    auto fork_server = ForkServerClient::start(obey);
    auto [ours, theirs] = socket_pair();
    const int passed[] = {theirs.get()};
    fork_server.spawn(5, 1, passed);
    theirs.reset();
    const rlimit limit{.rlim_cur = 3, .rlim_max = 1024};
    setrlimit(RLIMIT_NOFILE, &limit);
    const auto ended = std::get<Ended>(fork_server.next(soon()).value());
    if (ended.rank != 5 || ended.pid != 0 || ended.error != EMFILE) return 1;
    return receive(ours.get(), soon()) ? 2 : 0;  // The socket's end: the child has ended.
  });
  EXPECT_EQ(end_of(client), "exit code 0");
}

TEST_F(OwnForkServerTest, WantOfMemoryForAReportIsNotTheEndOfTheClient) {
  auto client = client_of([](base::UniqueFd socket) {
    fail_system_call(SYS_sendmsg, ENOBUFS);
    return run_fork_server(std::move(socket), [](const SpawnRequest& request) -> int {
      if (write(request.fds.at(0).get(), "x", 1) == 1) hang();
      return 1;
    });
  });
  for (int rank = 0; rank < 2; ++rank) {
    auto [child, passed] = socket_pair();
    const int fd[] = {passed.get()};
    client.spawn(rank, 1, fd);
    passed.reset();
    EXPECT_EQ(receive(child.get(), soon()).value_or(Message{}).bytes, "x") << "child " << rank;
  }
  client.stop(soon());
}

TEST_F(ForkServerTest, WorksBesideAThreadThatIsIdle) {
  std::promise<void> end;
  std::jthread thread([&] { end.get_future().wait(); });
  fork_server_.emplace(ForkServerClient::start(obey));
  EXPECT_EQ(spawn(0).ask("rank"), "0");
  end.set_value();
}

template <class Packet>
std::string raw(const Packet& packet) {
  return std::string(fork_server::bytes_of(packet));
}

bool is_request(const std::string& bytes) {
  if (bytes.size() != sizeof(Request)) return false;
  const auto request = fork_server::packet_of<Request>(bytes);
  return (request.kind == Request::Kind::spawn && request.rank >= 0) || request.kind == Request::Kind::stop ||
         (request.kind == Request::Kind::signal && request.rank >= 1 && request.rank <= SIGRTMAX);
}

TEST_F(ForkServerTest, WhatIsNoRequestIsRefusedAndTheForkServerGoesOn) {
  accelmgr::test::Fuzzed fuzzed(20261122);
  const auto runner = spawn(0);
  int sent = 0;
  for (int round = 0; round < 1000; ++round) {
    const Request wrong{
        .kind = fuzzed.one_in(2) ? static_cast<Request::Kind>(fuzzed.edge()) : Request::Kind::signal,
        .rank = static_cast<int>(fuzzed.edge()),
        .generation = 1};
    const auto bytes = fuzzed.one_in(3) ? fuzzed.mutated(raw(wrong)) : raw(wrong);
    if (is_request(bytes)) continue;
    while (
        !accelmgr::test::send_raw(fork_server_->socket(), bytes, accelmgr::test::some_descriptors(fuzzed, 3)))
      wait_ready(fork_server_->socket(), POLLOUT, soon());
    ++sent;
  }
  EXPECT_GT(sent, 500);
  EXPECT_EQ(runner.ask("rank"), "0") << "no signal reached it";
  const auto next = spawn(1);
  EXPECT_EQ(next.ask("rank"), "1");
  EXPECT_EQ(next.ask("descriptors"), runner.ask("descriptors")) << "none of the refused packets is left";
}

TEST(ForkServerClientTest, WhatIsNoReportOfAChildThatWasAskedForIsPassedOver) {
  accelmgr::test::Fuzzed fuzzed(20261122);
  auto [ours, theirs] = socket_pair();
  ForkServerClient client(std::move(ours), Child{});
  const auto ask = [&client = client, &theirs = theirs] {
    client.spawn(2, 7, {});
    ASSERT_TRUE(receive(theirs.get(), soon()));
  };
  ask();
  constexpr pid_t nobody = 4194304 + 1;  // More than the kernel gives.
  const Report started{Report::Kind::started, 2, 7, nobody, 0, 0, 99};
  const auto open_before = accelmgr::test::open_count();
  std::optional<pid_t> pid;  ///< The pid of the child that runs; none while no child does.
  int starts = 0, ends = 0, wrong = 0;
  for (int round = 0; round < 4000; ++round) {
    const Report ended{Report::Kind::ended, 2, 7, pid.value_or(0), 9, 0, 99};
    auto bytes = raw(fuzzed.one_in(2) ? started : ended);
    if (fuzzed.one_in(2))
      fuzzed.damage(reinterpret_cast<std::byte*>(bytes.data()), bytes.size());
    else
      bytes = fuzzed.one_in(10) ? fuzzed.bytes(60) : fuzzed.mutated(bytes);
    ASSERT_TRUE(accelmgr::test::send_raw(theirs.get(), bytes, accelmgr::test::some_descriptors(fuzzed, 2)));
    const auto event = client.take(1);
    ASSERT_FALSE(is_readable(client.socket()));
    if (!event) {
      ++wrong;
    } else if (const auto* start = std::get_if<Started>(&*event)) {
      EXPECT_FALSE(pid) << "a second one of this rank";
      EXPECT_EQ(start->rank, 2);
      EXPECT_GT(start->pid, 1);
      EXPECT_TRUE(start->pidfd);
      pid = start->pid;
      ++starts;
    } else {
      const auto& end = std::get<Ended>(*event);
      EXPECT_EQ(end.rank, 2);
      EXPECT_EQ(end.pid, pid.value_or(0));
      EXPECT_TRUE(end.wait_status >= 0 && end.wait_status <= 0xffff) << end.wait_status;
      EXPECT_TRUE(end.error >= 0 && end.error <= 4095) << end.error;
      pid.reset();
      ++ends;
      ask();
    }
  }
  EXPECT_GT(starts, 20);
  EXPECT_GT(ends, 20);
  EXPECT_GT(wrong, 1000);
  EXPECT_EQ(accelmgr::test::open_count(), open_before + (pid ? 1 : 0));
}

}  // namespace
}  // namespace accelmgr::ipc::test
