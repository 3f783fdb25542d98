// Looking after what a test launches.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <string>
#include <vector>

#include "accelmgr/launch.hpp"
#include "ipc/proc_file.hpp"
#include "ipc/process.hpp"
#include "ipc/processes.hpp"
#include "ipc/socket.hpp"
#include "message_of.hpp"

namespace accelmgr::launch::test {

using accelmgr::test::message_of;
using ipc::test::end_of;
using ipc::test::fork_child;
using ipc::test::hang;
using ipc::test::soon;

inline std::string comm(pid_t pid) {
  auto name = ipc::read_proc("/proc/" + std::to_string(pid) + "/comm").value_or("");
  return name.substr(0, name.find('\n'));
}

/// Whether it is the forkserver of this process, which stays: its descriptor 4 is its creator's pidfd.
inline bool is_our_forkserver(pid_t pid) {
  const auto info = ipc::read_proc("/proc/" + std::to_string(pid) + "/fdinfo/4").value_or("");
  return comm(pid) == "accelmgr:server" &&
         ipc::number_after(info, "Pid:") == static_cast<std::uint64_t>(getpid());
}

/// Children of this process, which all orphans become (main() asks for it), but its forkserver. What has
/// ended is reaped, and once more is looked for: what it had may be ours now.
inline std::vector<std::string> left() {
  std::vector<std::string> names;
  bool reaped = true;
  while (reaped) {
    reaped = false;
    names.clear();
    for (const pid_t pid : ipc::children()) {
      if (is_our_forkserver(pid)) continue;
      if (waitpid(pid, nullptr, WNOHANG) == 0)
        names.push_back(comm(pid));
      else
        reaped = true;
    }
  }
  return names;
}

/// Waits for what is on its way out; kills what is not.
inline void expect_nothing_left() {
  const auto deadline = soon();
  while (!left().empty() && !deadline.passed()) sched_yield();
  for (const auto& name : left()) ADD_FAILURE() << "left: " << name;
  for (const pid_t pid : ipc::children())
    if (!is_our_forkserver(pid)) kill(pid, SIGKILL);
}

/// A socket by which forked ranks talk to the test.
struct Line {
  Line() : Line(ipc::socket_pair()) {}
  void tell(std::string_view text, std::span<const int> fds = {}) const {
    ipc::send(theirs.get(), text, fds);
  }
  ipc::Message hear() const { return ipc::receive(ours.get(), soon()).value(); }
  /// A pidfd, of each of `count` processes that call tell_pidfd().
  std::vector<base::UniqueFd> hear_pidfds(int count) const {
    std::vector<base::UniqueFd> pidfds;
    for (int i = 0; i < count; ++i) pidfds.push_back(std::move(hear().fds.at(0)));
    return pidfds;
  }
  /// Of the calling process.
  void tell_pidfd() const {
    const auto pidfd = ipc::open_pidfd(getpid());
    const int fd = pidfd.get();
    tell("here", {&fd, 1});
  }

  base::UniqueFd ours, theirs;

 private:
  explicit Line(std::pair<base::UniqueFd, base::UniqueFd> ends)
      : ours(std::move(ends.first)), theirs(std::move(ends.second)) {}
};

inline void expect_ended(const std::vector<base::UniqueFd>& pidfds) {
  for (const auto& pidfd : pidfds) EXPECT_TRUE(ipc::has_ended(pidfd.get())) << "a process is left";
}

/// Tests of processes: nothing is left after any of them. The thread sanitizer starts a thread of its own in
/// forked processes, and cannot follow them.
class Launched : public testing::Test {
 protected:
  void SetUp() override {
#if defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "the thread sanitizer does not follow forks of processes with threads";
#endif
  }
  void TearDown() override { expect_nothing_left(); }
};

inline const auto every_method =
    testing::Values(StartMethod::spawn, StartMethod::fork, StartMethod::forkserver);

inline std::string method_name(const testing::TestParamInfo<StartMethod>& info) {
  constexpr const char* names[] = {"spawn", "fork", "forkserver"};
  return names[static_cast<int>(info.param)];
}

inline Options options(int nprocs, StartMethod method = StartMethod::fork) {
  Options options;
  options.nprocs = nprocs;
  options.start_method = method;
  options.backend = "shm";
  options.terminate_timeout_s = 10;
  return options;
}

inline Options not_joined(Options options) {
  options.join = false;
  options.daemon = true;
  return options;
}

/// What spawn() or join() throws.
template <class Call>
SpawnError failure_of(Call&& call) {
  try {
    call();
  } catch (const SpawnError& error) {
    return error;
  }
  ADD_FAILURE() << "no SpawnError";
  return SpawnError({}, {});
}

}  // namespace accelmgr::launch::test
