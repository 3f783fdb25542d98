#include "role_process.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <map>

#include "accelmgr/errors.hpp"
#include "accelmgr/init.hpp"
#include "base/ipc/user_forks.hpp"
#include "engine/support/expectations.hpp"

namespace accelmgr::test {
namespace {

std::map<std::string, RegisteredRole::Play>& roles() {
  static std::map<std::string, RegisteredRole::Play> all;
  return all;
}

}  // namespace

RegisteredRole::RegisteredRole(const char* name, Play play) { roles()[name] = play; }

int run_tests(int argc, char** argv, std::initializer_list<Command> commands) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first == role_argument && argc > 2) return roles().at(argv[2])({argv + 3, argv + argc}, argc, argv);
  init(argc, argv);
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // Orphans become children of this process, where tests see them.
  for (const auto& [argument, run] : commands)
    if (first == argument) return run({argv + 2, argv + argc});
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

void say(const std::string& line) {
  const auto text = line + "\n";
  if (write(role_says, text.data(), text.size()) != static_cast<ssize_t>(text.size())) _exit(3);
}

void wait_for_test() {
  char byte;
  if (read(role_waits, &byte, 1) != 0) _exit(3);
}

std::pair<base::UniqueFd, base::UniqueFd> make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) throw SystemError("pipe2", errno);
  return {base::UniqueFd(ends[0]), base::UniqueFd(ends[1])};
}

RoleProcess::RoleProcess(const std::string& role, const Arguments& arguments) {
  auto [hears, says] = make_pipe();
  auto [waits, held] = make_pipe();
  const std::pair<int, int> inherited[] = {{says.get(), role_says}, {waits.get(), role_waits}};
  Arguments words{role_argument, role};
  words.insert(words.end(), arguments.begin(), arguments.end());
  process_ = ipc::execute_self(words, inherited);
  says_ = std::move(hears);
  waits_ = std::move(held);
  ipc::close_in_forks(waits_.get());  // A fork of the test would keep it waiting.
}

void RoleProcess::let_go() {
  ipc::keep_in_forks(waits_.get());
  waits_.reset();
}

std::string RoleProcess::line() {
  std::string line;
  for (char c = 0; read(says_.get(), &c, 1) == 1 && c != '\n';) line += c;
  return line;
}

void RoleProcess::kill_and_wait() {
  ipc::send_signal(pidfd(), SIGKILL);
  EXPECT_TRUE(ipc::wait_ended(pidfd(), soon()));
}

int RoleProcess::status() {
  EXPECT_TRUE(ipc::wait_ended(pidfd(), soon()));
  int status = -1;
  waitpid(pid(), &status, 0);
  return status;
}

}  // namespace accelmgr::test
