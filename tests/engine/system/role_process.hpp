// Roles in which a test executes its program again: processes that it kills or misuses. What a role says to
// the test, and how it waits for it.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "base/ipc/process.hpp"
#include "base/unique_fd.hpp"

namespace accelmgr::test {

/// Arguments of the program: this, the role's name, and its arguments.
inline constexpr const char* role_argument = "--role";
using Arguments = std::vector<std::string>;

/// Registers a role before main() begins. Files have it as a constant. `play` returns the exit code; it calls
/// init(argc, argv) itself, if at all.
struct RegisteredRole {
  using Play = int (*)(const Arguments& arguments, int argc, char** argv);
  RegisteredRole(const char* name, Play play);
};

/// Another deed of the program: its first argument, and what is done with the others instead of the tests.
struct Command {
  const char* argument;
  int (*run)(const Arguments& arguments);
};

/// main() of test programs: plays the role that the arguments name, or does the command, or runs the tests.
int run_tests(int argc, char** argv, std::initializer_list<Command> commands = {});
/// Descriptors of a role. It writes to the test through one, and reads from the other until the test closes
/// its end.
inline constexpr int role_says = 5;
inline constexpr int role_waits = 6;

// For the role. They end the process if the test is gone.

/// Says a line to the test.
void say(const std::string& line);
/// Returns when the test lets it go.
void wait_for_test();

// For the test.

/// The reading and the writing end.
std::pair<base::UniqueFd, base::UniqueFd> make_pipe();

/// A child of this process in a role. Its standard output is that of the test.
class RoleProcess {
 public:
  RoleProcess(const std::string& role, const Arguments& arguments);
  RoleProcess(RoleProcess&&) = default;
  ~RoleProcess() { let_go(); }

  /// The next line that it says; empty if it has ended instead.
  std::string line();
  int pidfd() const noexcept { return process_.pidfd.get(); }
  pid_t pid() const noexcept { return process_.pid; }
  void kill_and_wait();
  /// Ends its wait for the test.
  void let_go();
  /// Waits for its end, and returns its wait status.
  int status();

 private:
  ipc::Child process_;
  base::UniqueFd says_, waits_;
};

}  // namespace accelmgr::test
