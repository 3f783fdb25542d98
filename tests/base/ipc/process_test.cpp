#include "base/ipc/process.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <filesystem>
#include <future>
#include <limits>
#include <set>
#include <thread>

#include "accelmgr/errors.hpp"
#include "base/ipc/proc_file.hpp"
#include "base/ipc/socket.hpp"
#include "executed_roles.hpp"
#include "processes.hpp"

namespace accelmgr::ipc::test {

std::string open_descriptors() {
  std::set<int> open;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    open.insert(std::stoi(entry.path().filename()));
  std::string text;
  for (const int fd : open)
    if (fcntl(fd, F_GETFD) >= 0)
      text += fmt::format("{}{}", text.empty() ? "" : " ", fd);  // The listing's own is closed by now.
  return text;
}

namespace {

/// The signals in the line `key` of /proc/self/status, without those that glibc uses itself (32 and 33).
std::string signals(const std::string& key) {
  const auto status = read_proc("/proc/self/status").value_or("");
  const auto mask = std::stoull(status.substr(status.find(key + ":\t") + key.size() + 2), nullptr, 16);
  return fmt::format("{:x}", mask & ~0x1'8000'0000ULL);
}

int ignore_term() {
  signal(SIGTERM, SIG_IGN);
  // A second process of the group. It holds a copy of the socket, which ends only when both have ended.
  if (fork() == 0) hang();
  send(role_socket, "ready");
  hang();
}

Child execute_role(const char* role, int socket) {
  const std::pair<int, int> fds[] = {{socket, role_socket}};
  return execute_self({role_argument, role}, fds);
}

}  // namespace

int play(const std::string& role) {
  if (role == "descriptors") send(role_socket, open_descriptors());
  if (role == "signals")
    send(role_socket, fmt::format("blocked {}, ignored {}, group {}", signals("SigBlk"), signals("SigIgn"),
                                  getpgrp() == getpid() ? "own" : "another's"));
  if (role == "exchange") {
    send(role_socket, "3");
    send(3, "7");
  }
  if (role == "wait") receive(role_socket, soon());
  if (role == "ignore TERM") return ignore_term();
  return role_exit_code;
}

TEST(NameProcess, NamesItFromAnyThread) {
  const auto child = fork_child([] {
    on_new_thread([] { name_process("another"); });
    return read_proc("/proc/self/comm") == "another\n" ? 0 : 1;
  });
  EXPECT_EQ(end_of(child), "exit code 0");
}

// OpenMP keeps a thread's team in such variables.
TEST(OnNewThread, AForkFromThereKnowsNothingOfOtherThreads) {
  static thread_local int known = 0;
  known = 1;
  Child child;
  on_new_thread([&] { child = fork_self([] { _exit(known == 0 && has_one_thread() ? 0 : 1); }); });
  ASSERT_TRUE(wait_ended(child.pidfd.get(), base::Deadline::in_seconds(10)));
  EXPECT_EQ(take_exit_status(child.pidfd.get()), 0);
}

TEST(ExecuteSelf, PassesTheListedDescriptorsAndNoOthers) {
  const base::UniqueFd leaky(open("/dev/null", O_RDONLY));  // Without O_CLOEXEC.
  ASSERT_TRUE(leaky);
  auto [ours, theirs] = socket_pair();
  const auto child = execute_role("descriptors", theirs.get());
  EXPECT_EQ(receive(ours.get(), soon()).value().bytes, "0 1 2 7");
  EXPECT_EQ(end_of(child), "exit code 5");
}

TEST(ExecuteSelf, PassesDescriptorsWhoseNumbersAreExchanged) {
  auto [ours_of_3, theirs_of_3] = socket_pair();
  auto [ours_of_7, theirs_of_7] = socket_pair();
  // Gets number 7 if that is free: the number that theirs_of_7 must have in the child.
  const base::UniqueFd becomes_3(fcntl(theirs_of_3.get(), F_DUPFD_CLOEXEC, 7));
  ASSERT_GE(becomes_3.get(), 7);
  const std::pair<int, int> fds[] = {
      {theirs_of_7.get(), 7}, {becomes_3.get(), 3}, {theirs_of_3.get(), becomes_3.get() + 1}};
  const auto child = execute_self({role_argument, "exchange"}, fds);
  EXPECT_EQ(receive(ours_of_7.get(), soon()).value().bytes, "3");
  EXPECT_EQ(receive(ours_of_3.get(), soon()).value().bytes, "7");
  EXPECT_EQ(end_of(child), "exit code 5");
}

// In Python, that command is the interpreter.
TEST(ExecuteSelf, RunsTheCommandThatStandsForThisProgram) {
  auto [ours, theirs] = socket_pair();
  const std::pair<int, int> fds[] = {{theirs.get(), role_socket}};
  set_self({"/bin/sh", "-c", "exit $#", "sh", "one"});
  const auto child = execute_self({"two", "three"}, fds);
  set_self({});
  EXPECT_EQ(end_of(child), "exit code 3");
  EXPECT_EQ(end_of(execute_role("none", theirs.get())), "exit code 5") << "this program again";
}

TEST(ExecuteSelf, ResetsSignalMaskAndDispositionsAndLeadsAProcessGroup) {
  auto [ours, theirs] = socket_pair();
  const auto host = fork_child([socket = theirs.get()] {
    sigset_t blocked;
    sigfillset(&blocked);
    sigprocmask(SIG_SETMASK, &blocked, nullptr);
    signal(SIGPIPE, SIG_IGN);
    return end_of(execute_role("signals", socket)) == "exit code 5" ? 0 : 1;
  });
  EXPECT_EQ(end_of(host), "exit code 0");
  EXPECT_EQ(receive(ours.get(), soon()).value().bytes, "blocked 0, ignored 0, group own");
}

TEST(ExecuteSelf, RefusesTwoDescriptorsOfOneNumberAndStandardOnes) {
  const std::pair<int, int> twice[] = {{0, 7}, {1, 7}};
  EXPECT_THROW(execute_self({}, twice), UsageError);
  const std::pair<int, int> standard[] = {{0, 1}};
  EXPECT_THROW(execute_self({}, standard), UsageError);
  const std::pair<int, int> closed[] = {{999, 7}};
  EXPECT_THROW(execute_self({}, closed), SystemError);
  expect_no_process_left();
}

TEST(Pidfd, TellsOfTheEndBeforeAndAfterReaping) {
  auto [ours, theirs] = socket_pair();
  const auto child = execute_role("wait", theirs.get());
  theirs.reset();
  EXPECT_FALSE(has_ended(child.pidfd.get()));
  EXPECT_FALSE(wait_ended(child.pidfd.get(), base::Deadline::in_seconds(0)));
  ours.reset();
  EXPECT_TRUE(wait_ended(child.pidfd.get(), soon()));
  EXPECT_EQ(end_of(child), "exit code 5");
  EXPECT_TRUE(has_ended(child.pidfd.get()));
  send_signal(child.pidfd.get(), SIGKILL);  // Must not reach a process that has the pid now.
  EXPECT_FALSE(has_ended(-1));
}

TEST(Pidfd, OfNoProcessIsAnErrorThatNamesIt) {
  const auto child = fork_child([] { return 0; });
  EXPECT_EQ(end_of(child), "exit code 0");
  try {
    open_pidfd(child.pid);
    FAIL();
  } catch (const SystemError& error) {
    EXPECT_EQ(error.code(), ESRCH);
    EXPECT_NE(std::string(error.what()).find(std::to_string(child.pid)), std::string::npos);
  }
}

TEST(EndGroup, TermIsEnoughForAProcessThatHeedsIt) {
  auto [ours, theirs] = socket_pair();
  const auto child = execute_role("wait", theirs.get());
  EXPECT_TRUE(end_group(child, soon()));
  expect_no_process_left();
}

TEST(EndGroup, KillsTheWholeGroupThatIgnoresTerm) {
  auto [ours, theirs] = socket_pair();
  const auto child = execute_role("ignore TERM", theirs.get());
  theirs.reset();
  ASSERT_EQ(receive(ours.get(), soon()).value().bytes, "ready");
  EXPECT_TRUE(end_group(child, base::Deadline::in_seconds(0.02)));
  EXPECT_FALSE(receive(ours.get(), soon())) << "a process of the group still holds the socket";
}

TEST(EndGroup, EndsWhatALeaderThatHasEndedLeftBehind) {
  auto [ours, theirs] = socket_pair();
  const auto child = execute_role("ignore TERM", theirs.get());
  theirs.reset();
  ASSERT_EQ(receive(ours.get(), soon()).value().bytes, "ready");
  send_signal(child.pidfd.get(), SIGKILL);
  ASSERT_TRUE(wait_ended(child.pidfd.get(), soon()));
  EXPECT_FALSE(is_closed(ours.get())) << "the other process of the group should still be there";
  EXPECT_TRUE(end_group(child, soon()));
  EXPECT_FALSE(receive(ours.get(), soon()));
}

TEST(EndGroup, LeavesAProcessAloneThatWasReaped) {
  const auto child = fork_child([] { return 0; });
  EXPECT_EQ(end_of(child), "exit code 0");
  EXPECT_TRUE(end_group(child, soon()));
  EXPECT_TRUE(end_group(Child{}, soon()));
}

TEST(DescribeExit, NamesSignalOrExitCode) {
  EXPECT_EQ(describe_exit(W_EXITCODE(0, SIGKILL)), "killed by signal 9 (KILL)");
  EXPECT_EQ(describe_exit(W_EXITCODE(3, 0)), "exit code 3");
  EXPECT_EQ(describe_exit(W_STOPCODE(SIGSTOP)), "wait status 0x137f");
}

TEST(Usage, SaysMemoryAndStateWhateverTheName) {
  auto [ours, theirs] = socket_pair();
  const auto child = fork_child([socket = theirs.get()] {
    name_process(") Z 1 (x");
    constexpr std::size_t bytes = 64 << 20;
    void* memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    munmap(memory, bytes);
    send(socket, "grown and shrunk");
    raise(SIGSTOP);
    return 0;
  });
  receive(ours.get(), soon());
  siginfo_t info{};
  ASSERT_EQ(waitid(P_PID, static_cast<id_t>(child.pid), &info, WSTOPPED), 0);
  const auto stopped = usage(child.pid).value();
  EXPECT_EQ(stopped.state, 'T');
  EXPECT_GT(stopped.rss_bytes, 0U);
  EXPECT_GE(stopped.peak_rss_bytes, 64U << 20);
  EXPECT_GE(stopped.peak_rss_bytes, stopped.rss_bytes + (32U << 20));
  send_signal(child.pidfd.get(), SIGKILL);
  ASSERT_TRUE(wait_ended(child.pidfd.get(), soon()));
  EXPECT_EQ(usage(child.pid).value().state, 'Z');
  EXPECT_EQ(end_of(child), "killed by signal 9 (KILL)");
  EXPECT_FALSE(usage(child.pid));
}

TEST(Usage, PrivateBytesAreThoseThatNoOtherProcessHas) {
  constexpr std::size_t bytes = 64 << 20;
  constexpr auto populated = MAP_ANONYMOUS | MAP_POPULATE;
  const auto before = private_bytes(getpid()).value();
  void* shared = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | populated, -1, 0);
  EXPECT_LT(private_bytes(getpid()).value(), before + bytes / 2);
  void* own = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | populated, -1, 0);
  EXPECT_GE(private_bytes(getpid()).value(), before + bytes);
  munmap(shared, bytes);
  munmap(own, bytes);
  EXPECT_FALSE(private_bytes(std::numeric_limits<pid_t>::max()));
}

TEST(Usage, CountsProcessorTime) {
  const auto before = usage(getpid()).value().cpu_ns;
  timespec used{};
  const auto process_ns = [&] {
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return static_cast<std::uint64_t>(used.tv_sec) * 1'000'000'000U +
           static_cast<std::uint64_t>(used.tv_nsec);
  };
  const auto begin = process_ns();
  while (process_ns() - begin < 60'000'000) {
  }
  EXPECT_GE(usage(getpid()).value().cpu_ns, before + 30'000'000);
}

TEST(BeganAt, IsTheSameForTheLifeOfAProcessAndNothingAfterIt) {
  const auto ticks_now = [] {
    timespec now{};
    clock_gettime(CLOCK_BOOTTIME, &now);
    const auto per_s = static_cast<std::uint64_t>(sysconf(_SC_CLK_TCK));
    return static_cast<std::uint64_t>(now.tv_sec) * per_s +
           static_cast<std::uint64_t>(now.tv_nsec) * per_s / 1'000'000'000;
  };
  const auto began = began_at(getpid());
  ASSERT_TRUE(began);
  const auto before = ticks_now();
  const auto child = fork_child([] {
    name_process(") 1 2 (x");
    return began_at(getpid()).has_value() ? 0 : 1;
  });
  const auto of_child = began_at(child.pid).value();
  EXPECT_GE(of_child, before - 1);
  EXPECT_LE(of_child, ticks_now() + 1);
  EXPECT_EQ(end_of(child), "exit code 0");
  EXPECT_EQ(began_at(child.pid), std::nullopt);
  EXPECT_EQ(began_at(getpid()), began);
}

TEST(Threads, AreCountedAndNamed) {
  const int before = thread_count();
  std::promise<void> named, end;
  std::jthread thread([&] {
    pthread_setname_np(pthread_self(), "counted");
    named.set_value();
    end.get_future().wait();
  });
  named.get_future().wait();
  EXPECT_GT(thread_count(), before);
  const auto names = thread_names();
  EXPECT_EQ(std::count(names.begin(), names.end(), "counted"), 1);
  end.set_value();
}

}  // namespace accelmgr::ipc::test
