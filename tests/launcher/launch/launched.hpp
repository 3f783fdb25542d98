// Talks to the processes that a test launches, and checks that none is left.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "accelmgr/launch.hpp"
#include "base/ipc/proc_file.hpp"
#include "base/ipc/process.hpp"
#include "base/ipc/processes.hpp"
#include "base/ipc/socket.hpp"
#include "base/ipc/wait_ready.hpp"
#include "message_of.hpp"
#include "refusal.hpp"

namespace accelmgr::launch::test {

using accelmgr::test::message_of;
using accelmgr::test::says;
using ipc::test::end_of;
using ipc::test::fork_child;
using ipc::test::hang;
using ipc::test::soon;

inline std::string comm(pid_t pid) {
  auto name = ipc::read_proc("/proc/" + std::to_string(pid) + "/comm").value_or("");
  return name.substr(0, name.find('\n'));
}

/// Whether the process is the zygote of this process, which stays alive. A zygote's descriptor 4 is its
/// creator's pidfd.
inline bool is_our_zygote(pid_t pid) {
  const auto info = ipc::read_proc("/proc/" + std::to_string(pid) + "/fdinfo/4").value_or("");
  return comm(pid) == "accelmgr:zygote" &&
         ipc::number_after(info, "Pid:") == static_cast<std::uint64_t>(getpid());
}

/// The names of all children of this process but its zygote. main() makes orphans children of this process.
/// Reaps children that have ended, and then looks again, because their children may have become orphans.
inline std::vector<std::string> left() {
  std::vector<std::string> names;
  bool reaped = true;
  while (reaped) {
    reaped = false;
    names.clear();
    for (const pid_t pid : ipc::children()) {
      if (is_our_zygote(pid)) continue;
      if (waitpid(pid, nullptr, WNOHANG) == 0)
        names.push_back(comm(pid));
      else
        reaped = true;
    }
  }
  return names;
}

/// Waits until all children have ended. Fails the test for each child that is left at the deadline, and kills
/// it.
inline void expect_nothing_left() {
  const auto deadline = soon();
  auto names = left();
  while (!names.empty() && !deadline.passed()) {
    sched_yield();
    names = left();
  }
  // Not those of another look: /proc may miss a child while others end, and find it in the next look.
  for (const auto& name : names) ADD_FAILURE() << "left: " << name;
  for (const pid_t pid : ipc::children())
    if (!is_our_zygote(pid)) kill(pid, SIGKILL);
}

/// A socket pair through which forked ranks talk to the test.
struct Line {
  Line() : Line(ipc::socket_pair()) {}
  void tell(std::string_view text, std::span<const int> fds = {}) const {
    ipc::send(theirs.get(), text, fds);
  }
  ipc::Message hear() const { return ipc::receive(ours.get(), soon()).value(); }
  /// Gives so many ranks the order that they await.
  void order(int ranks = 1) const {
    for (; ranks > 0; --ranks) ipc::send(ours.get(), "order");
  }
  /// A rank: waits for one packet of the test. Several ranks may wait at the same time, each for one, which
  /// ipc::receive() does not allow.
  void await_order() const {
    char byte;
    ssize_t got = -1;
    const auto deadline = soon();
    while (got < 0 && !deadline.passed()) {
      ipc::wait_ready(theirs.get(), POLLIN, deadline);
      got = recv(theirs.get(), &byte, 1, MSG_DONTWAIT);
    }
    if (got < 0) throw std::runtime_error("the test gave no order");
  }
  /// Receives the pidfds of `count` processes that call tell_pidfd().
  std::vector<base::UniqueFd> hear_pidfds(int count) const {
    std::vector<base::UniqueFd> pidfds;
    for (int i = 0; i < count; ++i) pidfds.push_back(std::move(hear().fds.at(0)));
    return pidfds;
  }
  /// Sends the pidfd of the calling process.
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

inline void expect_all_end(const std::vector<base::UniqueFd>& pidfds) {
  for (const auto& pidfd : pidfds) EXPECT_TRUE(ipc::wait_ended(pidfd.get(), soon())) << "a process is left";
}

inline std::vector<base::UniqueFd> pidfds_of(const SpawnContext& context) {
  std::vector<base::UniqueFd> pidfds;
  for (const pid_t pid : context.pids()) pidfds.push_back(ipc::open_pidfd(pid));
  return pidfds;
}

/// Ranks that tell their pidfds, and return when the test orders it.
inline Function until_told(const Line& line) {
  return [&line](int rank, const Value&) {
    line.tell_pidfd();
    line.await_order();
    return Value(rank);
  };
}

/// Ranks that tell their pidfds, and run until they are killed.
inline Function hanging(const Line& line) {
  return [&line](int, const Value&) -> Value {
    line.tell_pidfd();
    hang();
  };
}

/// A fixture for tests of processes: none may be left after a test.
class Launched : public testing::Test {
 protected:
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

/// The SpawnError that spawn() or join() throws.
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
