// A host of the service under torture, and what it says to the test.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

#include "accelmgr/step_result.hpp"
#include "torture_course.hpp"

namespace accelmgr::test {

/// The user that a host becomes. A host without one stays the user that runs the test.
struct HostUser {
  uid_t uid;
  gid_t gid;
  gid_t group;  ///< A further group.
};

/// How a host ends or leaves by itself.
enum class HostEnd : std::uint8_t {
  killed_before_update,
  killed_while_writing,
  killed_after_update,
  killed_after_zeroing,
  exits,
  detaches,
};
inline constexpr std::size_t host_ends = 6;
const char* to_string(HostEnd end) noexcept;

/// In memory that the test and all hosts share.
struct Board {
  /// The host that was admitted last, and its service; 0: it has detached.
  std::atomic<std::uint64_t> driver{0};
  std::atomic<bool> over{false};  ///< All steps are made: hosts end.
  std::atomic<int> ends[host_ends]{};
  std::atomic<int> checkpoints{0};  ///< That hosts have asked for.
  // Attempts to attach that failed because
  std::atomic<int> refused{0};     ///< another host drove the session,
  std::atomic<int> unanswered{0};  ///< the service stood still,
  std::atomic<int> unreached{0};   ///< or it was killed.
};

/// What a host says. The test reads these from a pipe, in the order in which they were written.
struct Said {
  enum class What : std::uint8_t { attached, stepped, updated, timed_out, stood_still, lost, wrong };
  What what;
  pid_t pid, service;
  State state;
  // Of a host that has attached:
  std::uint64_t lease;
  LeftGradients left;
  bool unfinished;
  char text[512];  ///< What is wrong.
};

struct HostTask {
  std::string folder;  ///< Where the socket of the service is.
  const Course& course;
  Board& board;
  bool services_end;  ///< The test kills services: a host may lose its own, and find none.
  int says;           ///< The writing end of a pipe for Said.
  std::uint64_t seed, number;
  std::optional<HostUser> user;
};

/// The life of a host, in a process that was forked for it. It drives the session whenever it is admitted,
/// until it is killed or all steps are made.
[[noreturn]] void live_as_host(const HostTask& task);

}  // namespace accelmgr::test
